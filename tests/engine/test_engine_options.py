"""Chunks of several blocks, chunked prefill, storing answers, per-request options, metrics, events."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_kit import TOLERANCE, Engine, difference, one, prompt, storage
from engine_models import make

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = tmp_path_factory.mktemp("options")
    extra = storage(folder / "disk", blocks_per_chunk=2, store="all")
    with Engine(
        make(folder, "gemma3"),
        extra,
        {"VLLM_LOGGING_LEVEL": "INFO"},
        max_num_batched_tokens=256,
        max_model_len=1536,
        num_gpu_blocks_override=60,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},  # glossary: allow
    ) as started:
        yield started


def test_at_start_it_says_what_one_restore_can_bring_and_how_fast(engine: Engine) -> None:
    said = engine.tail(100_000)
    assert re.search(r"kvstrata: one restore can bring 15\d\d of 1536 tokens", said)
    assert re.search(r"kvstrata: that takes \d+\.\d\d s from disk \(\d+ MB/s measured\)", said)


def test_chunks_of_two_blocks_and_a_prefill_in_pieces(engine: Engine) -> None:
    tokens = prompt(1100, seed=1)
    cold = one(engine, tokens)
    engine.reset()
    planned = engine.planned(prompt=tokens)
    back = one(engine, tokens)
    assert back["cached"] == planned == 1024
    assert difference(cold, back) <= TOLERANCE["float32"]


def test_lengths_around_chunk_borders(engine: Engine) -> None:
    """Chunks are two blocks long; borders of blocks are where `test_engine_restore` looks."""
    for number, length in enumerate(border + by for border in (256, 512, 768) for by in (-1, 0, 1)):
        tokens = prompt(length, seed=550 + number)
        cold = one(engine, tokens, tokens=2)
        engine.run_out()
        engine.reset()
        planned = engine.planned(prompt=tokens)
        back = one(engine, tokens, tokens=2)
        assert back["cached"] == planned, length
        assert planned > 0 or length <= 257, length
        assert difference(cold, back) <= TOLERANCE["float32"], length
        engine.reset()


def test_answers_are_stored_too(engine: Engine) -> None:
    tokens = prompt(500, seed=3)
    first = one(engine, tokens, tokens=100)
    engine.run_out()
    engine.reset()
    following = tokens + first["tokens"] + prompt(20, seed=30)
    planned = engine.planned(prompt=following)
    back = one(engine, following)
    # A window of one block gives the first half of a chunk back before its second half is generated.
    assert back["cached"] == planned >= 256
    assert engine.look()["faults"] == {}


def test_what_a_client_may_narrow(engine: Engine) -> None:
    tokens = prompt(900, seed=4)
    one(engine, tokens)
    engine.settle()
    engine.reset()
    assert one(engine, tokens, params={"kvstrata": "off"})["cached"] == 0
    engine.reset()
    assert 0 < one(engine, tokens, params={"kvstrata": {"max_load_tokens": 800}})["cached"] <= 800
    engine.reset()
    engine.drop_primary()
    assert one(engine, tokens, params={"kvstrata": {"load_tiers": []}})["cached"] == 0
    engine.reset()
    assert one(engine, tokens, params={"kvstrata": {"load_tiers": ["disk"]}})["cached"] > 0
    engine.reset()
    engine.drop_primary()
    engine.call(module="engine_scenes", function="stall", arguments={})  # what came in time would be taken
    assert one(engine, tokens, params={"kvstrata": {"wait_s": 1e-6}})["cached"] == 0
    assert engine.stories()[0]["cause"] == "clock"
    engine.heal()
    engine.reset()
    assert one(engine, tokens, params={"kvstrata": {"nonsense": 1}})["cached"] > 0
    assert "nonsense" in engine.stories()[0]["note"]
    other = prompt(900, seed=5)
    one(engine, other, params={"kvstrata": {"store": "none"}})
    engine.reset()
    assert one(engine, other)["cached"] == 0


def test_counters_reach_the_engines_own_metrics(engine: Engine) -> None:
    found = engine.metrics()
    looked = engine.look()
    assert found["vllm:kvstrata_stored_chunks"] == looked["stored"] > 0
    assert found["vllm:kvstrata_loaded_chunks"] == looked["loaded"] > 0
    assert found["vllm:kvstrata_hit_tokens"] > 0


def test_hits_are_counted_by_the_tier_that_they_came_from(engine: Engine) -> None:
    tokens = prompt(900, seed=6)
    one(engine, tokens)
    engine.settle()
    for source in ("host", "disk"):
        engine.reset()
        if source == "disk":
            engine.drop_primary()
        before = engine.sources()
        back = one(engine, tokens)
        after = engine.sources()
        gained = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
        assert gained == {source: back["cached"]}
        assert back["cached"] > 0


def test_cache_events_go_the_engines_own_way(engine: Engine) -> None:
    engine.reset(connector=True)
    engine.listen()
    one(engine, prompt(900, seed=7))
    engine.settle()
    one(engine, prompt(20, seed=8))  # a step, in which what happened between steps is told
    stored: dict[str, set[tuple[int, int]]] = {}
    for kind, medium, group, hashes in engine.heard():
        if kind == "BlockStored":
            stored.setdefault(medium, set()).update((group, hashed) for hashed in hashes)
    assert set(stored) == {"GPU", "CPU", "DISK"}
    assert len(stored["CPU"]) > 4
    assert stored["DISK"] == stored["CPU"]
    # Of a window's group the engine itself names fewer blocks than are kept; but each hash is one that it published.
    assert {hashed for _, hashed in stored["CPU"]} <= {hashed for _, hashed in stored["GPU"]}
    engine.reset(connector=True)
    removed: set[str] = set()
    for turn in range(50):  # the disk says so when its purge is durable
        one(engine, prompt(20, seed=9 + turn))
        removed |= {medium for kind, medium, _, _ in engine.heard() if kind == "BlockRemoved"}
        if {"CPU", "DISK"} <= removed:
            break
    assert {"CPU", "DISK"} <= removed
