"""Two ranks on one host: the same tokens from primary and after a restart; one bad rank is a miss for both."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_kit import Engine, difference, one, prompt, storage
from engine_models import make

pytestmark = pytest.mark.engine
PAIR = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
TOKENS = prompt(700, seed=1)


def test_two_ranks(tmp_path: Path) -> None:
    model, disk = make(tmp_path, "llama"), storage(tmp_path / "disk")
    lost = tmp_path / "lost"
    with Engine(model, disk, {**PAIR, "ENGINE_TEST_LOST_STORES": str(lost)}, tensor_parallel_size=2) as engine:
        cold = one(engine, TOKENS)
        own = one(engine, TOKENS)
        engine.reset()
        back = one(engine, TOKENS)
        assert back["cached"] == 640
        assert difference(own, back) == 0.0
        assert difference(cold, back) <= 1e-4
        assert engine.settle()
        assert engine.look()["stored"] == 5
        assert engine.groups()[0]["bytes"] * 2 == engine.tell("chunk_bytes")[0]
        lost.touch()
        half = prompt(700, seed=2)  # rank 1's part of every chunk is missing
        first = one(engine, half)
        engine.reset()
        again = one(engine, half)
        assert (again["cached"], again["tokens"]) == (0, first["tokens"])
        assert engine.look()["stored"] == 5
        assert engine.look()["reserved"] == 0
    with Engine(model, disk, {**PAIR, "ENGINE_TEST_BAD_RANK": "1"}, tensor_parallel_size=2) as again:
        back = one(again, TOKENS)  # promoted from disk; rank 1 fails to copy it
        looked = again.look()
        assert (back["cached"], back["reason"]) == (0, "length")
        assert back["tokens"] == own["tokens"]
        assert looked["load_failures"] == 1
        assert looked["pinned"] == 0
        assert again.stories()[0]["cause"] == "load_failed"


def test_what_both_ranks_have_alike_is_stored_once(tmp_path: Path) -> None:
    """A model with one head of keys and values, whose group vLLM is made to call the same on all ranks."""
    model, disk = make(tmp_path, "single"), storage(tmp_path / "disk")
    with Engine(model, disk, {**PAIR, "ENGINE_TEST_REPLICATED": "1"}, tensor_parallel_size=2) as engine:
        own = one(engine, TOKENS)
        engine.reset()
        back = one(engine, TOKENS)
        assert back["cached"] == 640
        assert difference(own, back) <= 1e-4
        assert engine.look()["stored"] == 5
        assert engine.groups()[0]["bytes"] == engine.tell("chunk_bytes")[0]
        assert engine.look()["off"] == ""  # the canary of each rank lives
