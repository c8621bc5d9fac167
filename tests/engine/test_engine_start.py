"""What is checked before serving, who finds whose chunks, and damage on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_kit import Engine, EngineError, difference, one, prompt, storage
from engine_models import make

pytestmark = pytest.mark.engine
TOKENS = prompt(700, seed=1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model, and a disk tier that holds TOKENS."""
    folder = tmp_path_factory.mktemp("start")
    with Engine(make(folder, "llama"), storage(folder / "kvstrata")) as engine:
        first = one(engine, TOKENS)
        engine.silence(seconds=1.0)  # nobody asks kvstrata anything, the engine does not step
        assert engine.on_disk() == 5
        engine.reset()
        assert one(engine, TOKENS, salt="tenant")["cached"] == 0
        engine.reset()
        back = one(engine, TOKENS)
        assert back["cached"] == 640
        assert difference(first, back) <= 1e-4
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
        {"dtype": "bfloat16"},
        {"revision": "another"},
    ],
    ids=["rope", "type", "revision"],
)
def test_another_engine_finds_nothing(place: Path, options: dict[str, Any]) -> None:
    with Engine(place / "llama", storage(place / "kvstrata"), **options) as engine:
        assert one(engine, TOKENS)["cached"] == 0
        assert engine.look()["faults"] == {}


def test_the_same_engine_finds_all_and_damage_is_a_miss(place: Path) -> None:
    # One size is enough: the disk tier lies in the user's cache folder.
    with Engine(place / "llama", {"size": "128MiB"}, {"XDG_CACHE_HOME": str(place)}) as engine:
        right = one(engine, TOKENS)
        assert right["cached"] == 640
        engine.reset()
        engine.drop_primary()
        for path in (place / "kvstrata").glob("segment-*"):
            with path.open("r+b") as file:
                data = bytearray(file.read())
                for at in range(8192 + 77, len(data), 100_000):
                    data[at] ^= 1
                file.seek(0)
                file.write(data)
        back = one(engine, TOKENS)
        looked = engine.look()
        assert back["cached"] < 640
        assert back["tokens"] == right["tokens"]
        assert sum(looked["tiers"]["disk"]["failed"].values()) > 0
        assert looked["faults"] == {}


def test_one_wrong_byte_in_a_copy_switches_off(tmp_path: Path, place: Path) -> None:
    with Engine(place / "llama", storage(tmp_path), sabotage="one_wrong_byte") as engine:
        assert "canary" in engine.look()["off"]
        one(engine, TOKENS)
        engine.reset()
        back = one(engine, TOKENS)
        assert (back["cached"], back["reason"]) == (0, "length")


def test_a_tier_that_returns_another_slot_is_not_used(place: Path) -> None:
    tiers = [{"type": "engine_sabotage:SwappingTier", "name": "wrong"}]
    with Engine(place / "llama", {"primary": {"size": "64MiB"}, "tiers": tiers}) as engine:
        assert "gave other bytes" in engine.look()["troubles"]["wrong"]
        assert engine.look()["off"] == ""
        one(engine, TOKENS)
        engine.reset()
        assert one(engine, TOKENS)["cached"] == 640  # from primary
        assert engine.look()["tiers"] == {}


def test_switched_off_it_is_a_no_op(tmp_path: Path, place: Path) -> None:
    with Engine(place / "llama", storage(tmp_path / "d"), {"KVSTRATA_DISABLE": "1"}) as engine:
        one(engine, TOKENS)
        engine.reset()
        assert one(engine, TOKENS)["cached"] == 0
        assert not (tmp_path / "d").exists()


def test_an_unsupported_version_is_refused(tmp_path: Path, place: Path) -> None:
    with pytest.raises(EngineError, match=r"vLLM 0\.29\.3 is not supported.*0\.30\.x, 0\.31\.x, 0\.32\.x"):
        Engine(place / "llama", storage(tmp_path), sabotage="other_version")
