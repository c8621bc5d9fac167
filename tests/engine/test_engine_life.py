"""Aborts in every state, preemptions, failing loads, exceptions inside: the engine lives and leaks nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_kit import Engine, one, prompt, storage
from engine_models import make

pytestmark = pytest.mark.engine

STATES = ("resolving", "fetching", "ready", "allocated", "loading", "loaded")


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("life")
    with Engine(make(folder, request.param), storage(folder / "disk")) as started:
        started.model = request.param
        yield started


def settled(engine: Engine) -> dict[str, object]:
    """Counters after everything has ended."""
    engine.run_out()
    assert engine.settle()
    return dict(engine.look())


def clean(looked: dict[str, object]) -> None:
    """Nothing is pinned, reserved or left behind."""
    left = {name: looked[name] for name in ("pinned", "reserved", "quarantined", "requests", "jobs")}
    assert left == dict.fromkeys(left, 0)
    assert not looked["pending"]


@pytest.mark.parametrize("state", STATES)
def test_abort_in_each_state(engine: Engine, state: str) -> None:
    engine.reset(connector=True)
    tokens = prompt(900, seed=10)
    right = one(engine, tokens)
    engine.settle()
    engine.reset()
    engine.drop_primary()
    start = settled(engine)["free_blocks"]
    reached = engine.call(module="engine_scenes", function="abort_in", arguments={"state": state, "prompt": tokens})
    assert reached == state
    looked = settled(engine)
    clean(looked)
    assert looked["free_blocks"] == start
    assert looked["faults"] == {}
    assert one(engine, tokens)["tokens"] == right["tokens"]


OUTCOMES = {
    "nothing_was_stored": ("nothing_stored", 0),
    "too_short": ("nothing_stored", 0),
    "from_primary": ("hit", 384),
    "from_disk": ("hit", 384),
    "from_both": ("hit", 384),
    "client_says_off": ("off", 0),
    "must_not_read_caches": ("not_allowed", 0),
    "capped": ("hit", 256),
    "not_from_that_tier": ("nothing_stored", 0),
    "impatient": ("clock", 0),
    "tier_stalls": ("clock", 0),
    "damaged_on_the_tier": ("nothing_stored", 0),
    "gone_from_the_tier": ("nothing_stored", 0),
    "copy_fails": ("load_failed", 0),
    "never_asked": ("not_asked", 0),
    "aborted_resolving": ("aborted_waiting", 0),
    "aborted_fetching": ("aborted_waiting", 0),
    "aborted_ready": ("aborted_ready", 0),
    "aborted_allocated": ("aborted_loading", 384),
    "aborted_loading": ("aborted_loading", 384),
    "aborted_loaded": ("hit", 384),
    "switched_off": ("switched_off", 0),
    "inner_error": ("internal", 0),
    "reset_meanwhile": ("nothing_stored", 0),
}
"""What the last record of a scene of `engine_outcomes` says: the cause, and the tokens that the engine took."""
CAPPED_WITH_WINDOWS = ("nothing_stored", 0)
"""A cap below the first kept boundary of a model with windows leaves nothing to load."""


def test_the_last_record_names_the_cause(engine: Engine) -> None:
    engine.reset(connector=True)
    arguments = {"prompt": prompt(400, seed=14)}
    found = engine.call(module="engine_outcomes", function="outcomes", arguments=arguments)
    assert len(found) >= 20
    expected = OUTCOMES | ({"capped": CAPPED_WITH_WINDOWS} if engine.model == "gemma3" else {})
    assert {name: (story["cause"], story["taken"]) for name, story in found.items()} == expected
    for name in ("damaged_on_the_tier", "gone_from_the_tier"):
        assert "could not be brought" in found[name]["note"]
    assert {source for source, _ in found["from_both"]["sources"]} == {"primary", "disk"}
    assert found["tier_stalls"]["waited_s"] >= 0.2
    clean(settled(engine))


def test_a_thousand_random_aborts(engine: Engine) -> None:
    engine.reset()
    before = settled(engine)
    counts = engine.call(
        module="engine_scenes", function="random_aborts", arguments={"seed": 5, "count": 1000, "lengths": [200, 700]}
    )
    looked = settled(engine)
    clean(looked)
    engine.reset()
    assert engine.look()["free_blocks"] == before["free_blocks"]
    assert looked["faults"] == before["faults"]
    assert counts["aborted"] >= 1000
    assert one(engine, prompt(300, seed=77))["reason"] == "length"


def test_an_exception_at_every_dependency(engine: Engine) -> None:
    """Every method of every object outside the plug-in that it calls raises for ever: found by looking, not by list."""
    engine.reset(connector=True)
    tokens = prompt(700, seed=12)
    right = one(engine, tokens)
    engine.settle()
    start = settled(engine)["free_blocks"]
    places = engine.call(module="engine_scenes", function="dependencies", arguments={"prompt": tokens})
    assert {place.split(".")[0] for place in places} == {"manager", "driver", "clock", "guard", "tier", "copier"}
    assert len(places) > 30
    for number, place in enumerate(places):
        scene = {"place": place, "prompt": tokens, "number": number}
        raised = engine.call(module="engine_scenes", function="with_fault", arguments=scene)
        assert raised["struck"] > 0, place
        assert all(tokens == right["tokens"] for tokens in raised["tokens"]), (place, raised)
        assert set(raised["reasons"]) == {"length"}, place
        assert not any(raised["left"].values()), (place, raised["left"])
    engine.reset(connector=True)
    assert one(engine, tokens)["tokens"] == right["tokens"]
    engine.reset()
    assert one(engine, tokens)["cached"] > 0
    engine.reset()
    assert settled(engine)["free_blocks"] == start
