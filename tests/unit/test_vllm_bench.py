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
    return {**times, "copy": three(0.02), "read": three(0.08), "restored": [3968] * 3}


def runs(**changed: dict[str, Any]) -> dict[str, Any]:
    made = {
        "kvstrata first": measured(9.0, 0.132),
        "kvstrata restarted": measured(0.22, 0.13),
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
    assert all("ABOVE" not in line for line in bench_engine.report(found))


@pytest.mark.parametrize("slow", [measured(0.26, 0.13), measured(0.251, 0.13)], ids=["floor", "stock"])
def test_what_is_above_a_bar_is_said(slow: dict[str, Any]) -> None:
    lines = bench_engine.report(bench_engine.summary(runs(**{"kvstrata restarted": slow}), 4000))
    assert [line.startswith("restored from disk") for line in lines if "ABOVE THE BAR" in line] == [True]


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
