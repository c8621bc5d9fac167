"""The figures of `kvstrata bench engine` from what its engines measured, and what it refuses before it starts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstrata.cli import bench_engine
from kvstrata.errors import ConfigError


def measured(cold: float, warm: float) -> dict[str, Any]:
    def three(value: float) -> list[float]:
        return [value, value * 1.5, value * 0.5]

    times = {"cold": three(cold), "warm": three(warm), "step": three(0.1), "short": three(0.05)}
    cached = {f"{kind}_cached": [3968.0] * 3 for kind in ("cold", "warm", "step")}
    return {**times, **cached, "copy": three(0.02), "read": three(0.08)}


def runs(**changed: dict[str, Any]) -> dict[str, Any]:
    made = {
        "kvstrata first": measured(9.0, 0.132),
        "kvstrata restarted": measured(0.22, 0.132),
        "stock first": measured(9.0, 0.14),
        "stock restarted": measured(0.25, 0.14),
    }
    return {**made, **changed}


def test_a_restore_is_held_against_copy_read_and_the_step_that_computes_the_rest() -> None:
    found = bench_engine.summary(runs(), 4000)
    assert found["primary_floor_s"] == pytest.approx(0.12)
    assert found["disk_floor_s"] == pytest.approx(0.2)
    assert found["primary_ratio"] == pytest.approx(1.1)
    assert found["disk_ratio"] == pytest.approx(1.1)
    assert found["disk_of_stock"] == pytest.approx(0.88)
    assert found["restored_tokens"] == 3968
    # 0.05 s for as many tokens without a context, instead of 0.1 s behind theirs.
    assert found["primary_strict_ratio"] == pytest.approx(0.132 / 0.07)
    assert found["disk_strict_ratio"] == pytest.approx(0.22 / 0.15)
    assert all("ABOVE" not in line for line in bench_engine.report(found))


@pytest.mark.parametrize("slow", [measured(0.26, 0.13), measured(0.251, 0.13)], ids=["floor", "stock"])
def test_what_is_above_a_bar_is_said(slow: dict[str, Any]) -> None:
    lines = bench_engine.report(bench_engine.summary(runs(**{"kvstrata restarted": slow}), 4000))
    assert [line.startswith("restored from disk") for line in lines if "ABOVE THE BAR" in line] == [True]


class Scripted:
    """An engine whose times are counted up, and who notes what it was told."""

    def __init__(self, system: str, journal: list[str], cached: int = 3968) -> None:
        self.system = system
        self.journal = journal
        self.cached = cached
        self.served: set[int] = set()

    def serve(self, length: int, number: int) -> tuple[float, int]:
        self.journal.append(f"{self.system} {number}")
        known = number in self.served
        self.served.add(number)
        return 0.1, (self.cached if known else 0)

    def tell(self, name: str, **arguments: Any) -> Any:
        self.journal.append(f"{self.system} {name}")
        return {"copy": [0.1], "read": [0.1]} if name == "floor" else None


def test_engines_serve_each_prompt_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engine, "pause", lambda seconds: None)
    journal: list[str] = []
    engines: Any = [Scripted("kvstrata", journal), Scripted("stock", journal)]
    found = bench_engine.measure(engines, 4000, 2)
    assert journal[2:6] == ["stock 0", "kvstrata 0", "kvstrata 1", "stock 1"]
    assert {system: len(run["warm"]) for system, run in found.items()} == {"kvstrata": 6, "stock": 6}
    assert journal.count("kvstrata reset") == journal.count("stock reset") == bench_engine.WARM_ROUNDS
    assert set(found["kvstrata"]) == set(found["stock"]) | {"copy", "read"}


def test_other_tokens_than_the_engines_own_cache_gives_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engine, "pause", lambda seconds: None)
    engine: Any = Scripted("kvstrata", [])
    engine.tell = lambda name, **_: setattr(engine, "cached", engine.cached - (name == "reset")) or {}
    engine.serve = lambda length, number, serve=engine.serve: (0.1, serve(length, number)[1] - len(engine.journal) % 2)
    with pytest.raises(ConfigError, match="not the same tokens"):
        bench_engine.measure([engine], 4000, 2)


def test_bad_folders_are_refused_before_an_engine_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engine, "require_supported", lambda: "0.32.0")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--dir .*file/x: "):
        bench_engine.engine(directory=tmp_path / "file" / "x")
    with pytest.raises(ConfigError, match="there is no folder"):
        bench_engine.engine(json_file=tmp_path / "none" / "x.json")


def test_a_folder_that_is_not_there_is_made(tmp_path: Path) -> None:
    with bench_engine._scratch(tmp_path / "a" / "b") as scratch:
        assert Path(scratch).parent == tmp_path / "a" / "b"
