"""`kvstrata bench disk` end to end on a tiny volume: its rows, and how it ends when fio says something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstrata.cli import bench_disk
from kvstrata.cli.app import build_app
from kvstrata.cli.app import run as run_app

ORDERS = ["first_fill", "stored", "random"]
FIGURES = ["store_gbps", "load_gbps", "raw_store_gbps", "raw_load_gbps", "store_ratio", "load_ratio"]


def run(tmp_path: Path, *more: str) -> tuple[int, list[dict[str, Any]]]:
    file = tmp_path / "rows.json"
    arguments = ["bench", "disk", str(tmp_path / "place"), "--sizes", "32KiB", "--volume", "4MiB", "--pairs", "1"]
    code = run_app(build_app(), [*arguments, "--json", str(file), *more])
    return code, json.loads(file.read_text())


def test_without_fio_the_rows_are_those_that_the_documents_name_and_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_disk, "fio_is_there", lambda: False)
    code, rows = run(tmp_path)
    assert code == 0
    assert "fio is not installed" in capsys.readouterr().err
    assert [(row["size"], row["order"]) for row in rows] == [(32_768, order) for order in ORDERS]
    for row in rows:
        assert set(FIGURES) <= set(row)
    stored = rows[1]
    assert all(stored[name] > 0 for name in FIGURES)
    assert rows[0]["store_ratio"] > 0
    assert rows[2]["load_ratio"] > 0
    assert not any(name.startswith("vllm_") for name in stored)
    assert list((tmp_path / "place").iterdir()) == []


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.2, 1), (0.8, 1)])
def test_it_ends_with_1_if_fio_is_more_than_a_tenth_away(
    factor: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_disk, "fio_is_there", lambda: True)
    monkeypatch.setattr(bench_disk, "fio_gbps", lambda *_: 2.0)

    def told(raw: Any, fio: Any) -> dict[str, Any]:
        assert raw() > 0
        return real(lambda: fio() * factor, fio)

    real = bench_disk.fio_check
    monkeypatch.setattr(bench_disk, "fio_check", told)
    assert run(tmp_path)[0] == code
    assert ("differ from fio's" in capsys.readouterr().err) == bool(code)
