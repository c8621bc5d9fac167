"""A prompt that was served, evicted, and comes back from primary, from disk, after a restart: the same answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_kit import TOLERANCE, Engine, EngineError, data_type, difference, one, prompt, storage
from engine_models import NAMES, make

from kvstrata.integrations.vllm.versions import installed_version, series

pytestmark = pytest.mark.engine
LONG = 1100
NO_LFM2 = "causal_conv1d_weight_pack: support only width of 4"
SMALL = {"llama": 24, "gemma3": 60, "lfm2": 40, "qwen3next": 22}
"""Blocks of each model's engine: room for one long prompt and little more."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=NAMES)
def engine(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("disk")
    if request.param == "lfm2" and series(installed_version() or "") in ("0.30", "0.31"):
        with pytest.raises(EngineError, match=NO_LFM2) as refused:
            Engine(make(models, request.param), None)
        said = next(line for line in str(refused.value).splitlines() if NO_LFM2 in line)
        pytest.skip(f"this vLLM itself does not start LFM2, whose convolutions have width 3: {said.strip()}")
    options = {"num_gpu_blocks_override": SMALL[request.param], "max_model_len": 1536}
    with Engine(make(models, request.param), storage(folder), **options) as started:
        started.model, started.folder, started.models = request.param, folder, models
        yield started


def test_the_comparison_can_see_a_wrong_restore(engine: Engine) -> None:
    tolerance = TOLERANCE[data_type(engine.model)]
    tokens = prompt(LONG, seed=90)
    right = one(engine, tokens)
    damages = [("zero", None), ("shift", None)] + [("zero", g) for g in range(len(engine.groups()))]
    for how, group in damages:
        engine.reset(connector=True)
        one(engine, tokens)
        engine.reset()
        assert engine.damage(how=how, group=group) > 0
        wrong = one(engine, tokens)
        assert wrong["cached"] > 0
        assert difference(right, wrong) > tolerance, (how, group)
    engine.reset(connector=True)


def test_from_primary_bit_for_bit(engine: Engine) -> None:
    tokens = prompt(LONG, seed=1)
    cold = one(engine, tokens)
    assert cold["cached"] == 0
    own = one(engine, tokens)  # by the engine's own prefix cache
    assert own["cached"] > 0
    engine.reset()
    before = engine.look()
    back = one(engine, tokens)
    after = engine.look()
    assert back["cached"] == engine.planned(prompt=tokens) == own["cached"]
    assert difference(own, back) == 0.0
    assert difference(cold, back) <= TOLERANCE[data_type(engine.model)]
    assert after["loads"] == before["loads"] + 1
    assert after["pinned"] == 0
    assert after["faults"] == {}


def test_from_disk_what_is_promoted_is_consumed(engine: Engine) -> None:
    tokens = prompt(LONG, seed=2)
    cold = one(engine, tokens)
    own = one(engine, tokens)
    assert engine.settle()
    engine.reset()
    assert engine.drop_primary() > 0
    before = engine.look()
    planned = engine.planned(prompt=tokens)
    back = one(engine, tokens)
    after = engine.look()
    assert back["cached"] == planned == own["cached"]
    assert difference(own, back) == 0.0
    assert difference(cold, back) <= TOLERANCE[data_type(engine.model)]
    assert after["promoted"] - before["promoted"] == after["consumed"] - before["consumed"] > 0
    assert engine.stories()[0]["cause"] == "hit"
    assert sum(tokens for _, tokens in engine.stories()[0]["sources"]) == back["cached"]


@pytest.mark.parametrize("place", ["primary", "disk"])
def test_evicted_by_pressure(engine: Engine, place: str) -> None:
    """Other prompts drive it out of the engine's own cache, which is never reset here."""
    tokens = prompt(LONG, seed=5)
    cold = one(engine, tokens)
    own = one(engine, tokens)
    for seed in range(50, 53):
        one(engine, prompt(1400, seed=seed), tokens=1)
    if place == "disk":
        assert engine.settle()
        assert engine.drop_primary() > 0
    planned = engine.planned(prompt=tokens)
    back = one(engine, tokens)
    (story,) = engine.stories()
    assert story["computed"] == 0  # nothing was left in the engine's own cache
    assert back["cached"] == story["taken"] == planned == own["cached"] > 0
    assert {source for source, _ in story["sources"]} == {place}
    assert difference(own, back) == 0.0
    assert difference(cold, back) <= TOLERANCE[data_type(engine.model)]
    assert engine.look()["faults"] == {}
    engine.reset(connector=True)


def test_the_next_turns_of_a_chat(engine: Engine) -> None:
    """Compared with the engine's own prefix cache over the same turns: some kernels give other low bits in one go."""
    tokens, asked = prompt(600, seed=3), []
    for turn in range(3):
        asked.append(tokens)
        engine.reset()
        planned = engine.planned(prompt=tokens)
        warm = one(engine, tokens)
        assert warm["cached"] == planned
        assert planned > 0 or not turn
        engine.reset()
        for earlier in asked:
            own = one(engine, earlier, params={"kvstrata": "off"})
        assert warm["cached"] == own["cached"]
        assert difference(own, warm) == 0.0
        tokens = tokens + warm["tokens"] + prompt(300, seed=40 + turn)


def test_lengths_around_every_border(engine: Engine) -> None:
    block = max(group["tokens"] for group in engine.groups())
    for seed, length in enumerate(
        border + by for border in range(block, 4 * block + 1, block // 2) for by in (-1, 0, 1)
    ):
        tokens = prompt(length, seed=500 + seed)
        cold = one(engine, tokens, tokens=4)
        engine.reset()
        planned = engine.planned(prompt=tokens)
        back = one(engine, tokens, tokens=4)
        story = engine.stories()[0]
        assert story["hit"] == story["taken"] == planned, length
        assert back["cached"] == planned, length
        assert difference(cold, back) <= TOLERANCE[data_type(engine.model)], length
        engine.reset()


def test_a_failed_load_is_computed(engine: Engine) -> None:
    """The policy for failed loads that vLLM has by default would end the request with an error."""
    engine.reset(connector=True)
    tokens = prompt(900, seed=11)
    right = one(engine, tokens)
    engine.reset()
    before = engine.look()
    engine.load_faults(share=1.0, seed=1)
    back = one(engine, tokens)
    engine.heal()
    engine.run_out()
    after = engine.look()
    assert engine.started["policy"] is True
    assert back["reason"] == "length"
    assert back["tokens"] == right["tokens"]
    assert after["load_failures"] == before["load_failures"] + 1
    assert engine.stories()[0]["cause"] == "load_failed"
    assert (after["pinned"], after["reserved"]) == (0, 0)


def test_after_a_kill_from_disk(engine: Engine) -> None:
    """Last in this file: it ends the engine."""
    tokens = prompt(LONG, seed=4)
    one(engine, tokens)
    own = one(engine, tokens)
    engine.silence(seconds=1.0)
    engine.kill()
    with Engine(engine.models / engine.model, storage(engine.folder)) as again:
        planned = again.planned(prompt=tokens)
        back = one(again, tokens)
        assert back["cached"] == planned == own["cached"]
        assert difference(own, back) == 0.0
        looked = again.look()
        assert looked["promoted"] == looked["consumed"] > 0
        assert looked["faults"] == {}
