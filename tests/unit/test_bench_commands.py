"""`kvstrata bench resolve` and `bench step`: small runs, their JSON, and what makes a run fail."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from kvstrata.bench.peer import scaled_figures
from kvstrata.bench.resolve import Prepared, Side, best, measure, measure_with_threads
from kvstrata.bench.rows import Budget, complaints
from kvstrata.bench.workloads import LAYOUTS, PRESENCES, Workload, table
from kvstrata.cli.app import build_app, run
from kvstrata.errors import StateError

SIDE = ("submit_s", "step_s", "promoted", "consumed", "probed", "cpu_s")


def rows_of(path: Path) -> list[dict[str, object]]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def test_the_table_has_a_row_for_every_combination() -> None:
    rows = table()
    assert len(rows) == len({row.name for row in rows}) == 5 * 5 * 3 * 3
    assert {(row.requests, row.tokens) for row in rows} == {
        (r, t) for r in (1, 20, 200) for t in (8_192, 32_768, 131_072)
    }


def test_rows_are_chosen_by_parts_of_their_names() -> None:
    assert [row.name for row in table("plain/all/20/32768")] == ["plain/all/20/32768"]
    assert {row.layout_name for row in table("sliding,recurrent/none")} == {"sliding", "recurrent"}
    assert len(table("*/none/1/8192")) == len(LAYOUTS)
    assert table("plain/some") == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("presence", PRESENCES)
def test_promoted_is_consumed_whatever_is_present(layout: str, presence: str) -> None:
    prepared = Prepared(Workload(layout, presence, 2, 2048))
    at_once, late = measure(prepared, sync_probe=True), measure(prepared, sync_probe=False)
    assert at_once.promoted == at_once.consumed == late.promoted == late.consumed
    assert (at_once.promoted == 0) == (presence == "none" or (layout == "sliding" and presence == "window-holes")
                                       or (layout == "five-to-one" and presence == "window-holes"))  # fmt: skip
    assert max(late.probed, at_once.probed) <= prepared.workload.requests * prepared.workload.keys_per_request


def test_threads_give_the_same_counts() -> None:
    prepared = Prepared(Workload("sliding", "all", 2, 2048))
    told = measure_with_threads(prepared)
    assert told["promoted"] == told["consumed"] == measure(prepared, sync_probe=True).promoted


def test_what_was_measured_on_fewer_requests_is_told_for_all_of_them() -> None:
    told = {"ready_s": 0.5, "cpu_s": 0.25, "steps": 7, "promoted": 30, "consumed": 20}
    assert scaled_figures(told, 10.0) == {"ready_s": 5.0, "cpu_s": 2.5, "steps": 7, "promoted": 300, "consumed": 200}


def test_resolve_writes_and_keeps_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    first = ["bench", "resolve", "--rows", "recurrent/all/1/8192", "--repeat", "1", "--json", str(file)]
    assert run(build_app(), first) == 0
    (row,) = rows_of(file)
    assert {"layout", "presence", "requests", "tokens", "keys", "scaled", "kvstrata", "executors"} <= set(row)
    assert set(SIDE) <= set(row["kvstrata"])  # type: ignore[call-overload]
    assert row["keys"] == 4 * (8192 // 528)
    again = ["bench", "resolve", "--rows", "recurrent/none/1/8192", "--repeat", "1", "--no-threads", "--append"]
    assert run(build_app(), [*again, "--json", str(file)]) == 0
    assert [row["presence"] for row in rows_of(file)] == ["all", "none"]
    assert "recurrent/none/1/8192" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "nothing"], "no row"),
        (["--vs", "lmcache"], "vllm is all there is"),
        (["--repeat", "0"], "--repeat"),
        (["--budget", "0"], "--budget"),
    ],
)
def test_bad_options_are_told(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(build_app(), ["bench", "resolve", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_row_is_complained_about() -> None:
    side = {"promoted": 3, "consumed": 3, "cpu_s": 1.0}
    row = {"layout": "plain", "presence": "all", "requests": 1, "tokens": 8, "kvstrata": side, "vllm": {"cpu_s": 2.0}}
    assert complaints(row) == []
    assert complaints({**row, "error": "ValueError: no"}) == ["plain/all/1/8: ValueError: no"]
    assert "promoted 4" in complaints({**row, "kvstrata": side | {"promoted": 4}})[0]
    assert "CPU" in complaints({**row, "vllm": {"cpu_s": 0.5}})[0]
    assert "stand-alone" in complaints({**row, "baseline": {"submit_ratio": 1.3}})[0]


def test_runs_that_count_differently_are_an_error() -> None:
    one = Side(1.0, 1.0, 5, 5, 5, 1.0, 1.0, 1.0, 1.0)
    assert best([one, Side(2.0, 0.5, 5, 5, 5, 1.0, 1.0, 1.0, 1.0)]).step_s == 0.5
    with pytest.raises(StateError):
        best([one, Side(1.0, 1.0, 6, 5, 5, 1.0, 1.0, 1.0, 1.0)])


def test_a_budget_measures_fewer_requests() -> None:
    work = Workload("five-to-one", "all", 200, 131_072)
    assert 1 <= Budget(vllm_s=60.0).requests(work) < 200
    assert Budget(vllm_s=0.001).requests(work) == 1
    assert Budget().requests(Workload("recurrent", "all", 200, 8192)) == 200


def test_step_writes_its_row(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    small = ["--slots", "1000", "--batches", "5", "--batch", "16"]
    assert run(build_app(), ["bench", "step", *small, "--json", str(file)]) == 0
    (row,) = rows_of(file)
    assert (row["slots"], row["tiers"], row["batch"]) == (1000, 2, 16)


def test_first_and_memory_write_their_rows(tmp_path: Path) -> None:
    first, memory = tmp_path / "first.json", tmp_path / "memory.json"
    assert run(build_app(), ["bench", "first", "--slots", "2048", "--tier-keys", "20000", "--json", str(first)]) == 0
    assert {(row["order"], row["hit_tokens"] > 0) for row in rows_of(first)} == {  # type: ignore[operator]
        ("chain", True), ("random", True), ("none", False)
    }  # fmt: skip
    assert run(build_app(), ["bench", "memory", "--slots", "1024", "--json", str(memory)]) == 0
    kinds = [row["what"] for row in rows_of(memory)]
    assert kinds == [
        "resident chunk, lru", "resident chunk, s3fifo", "waiting key, probed", "waiting key, on its way"
    ]  # fmt: skip


def test_waiting_writes_a_row_for_each_number_of_requests(tmp_path: Path) -> None:
    file = tmp_path / "waiting.json"
    assert run(build_app(), ["bench", "waiting", "--requests", "2,10", "--json", str(file)]) == 0
    assert [row["requests"] for row in rows_of(file)] == [2, 10]
    assert all(row["us_per_request"] > 0 for row in rows_of(file))  # type: ignore[operator]


def test_interference_measures_a_process_and_threads(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    small = ["--volume", "2MiB", "--chunk", "64KiB", "--rounds", "1", "--seconds", "0.05", "--no-pin"]
    assert run(build_app(), ["bench", "interference", str(tmp_path / "disk"), *small, "--json", str(file)]) == 0
    assert [row["io"] for row in rows_of(file)] == ["process", "threads"]
    assert all(row["full_gbps"] > 0 for row in rows_of(file))  # type: ignore[operator]


def test_the_machine_is_described_without_its_name(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    assert run(build_app(), ["bench", "machine", "--json", str(file)]) == 0
    described = json.loads(file.read_text())
    assert {"cpu", "cores", "memory_kib", "system", "python", "versions", "load_average"} <= set(described)
    assert platform.node() not in file.read_text() or len(platform.node()) < 3
