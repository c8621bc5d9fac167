"""`kvstrata bench resolve`: waiting requests through the two-phase door and, beside it, through vLLM's classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvstrata.bench.machine import settle
from kvstrata.bench.peer import Peer, StandAlone, why_not
from kvstrata.bench.resolve import Prepared
from kvstrata.bench.rows import Budget, Row, Sides, complaints, measure_row
from kvstrata.bench.workloads import Workload, table
from kvstrata.cli.bench_output import note, positive, read_rows, show, write_json
from kvstrata.errors import ConfigError
from kvstrata.runtime.clock import SystemClock


def bench_resolve(
    vs: Annotated[str, typer.Option("--vs", help="Whom to measure beside kvstrata: vllm.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    append: Annotated[bool, typer.Option("--append", help="Keep the file's rows that are not measured again.")] = False,
    rows: Annotated[
        str, typer.Option(help="Only rows like LAYOUT/PRESENCE/REQUESTS/TOKENS; * matches all, commas part several.")
    ] = "",
    budget: Annotated[float, typer.Option(help="Seconds of vLLM's runs per row, above which it is scaled.")] = 60.0,
    repeat: Annotated[int, typer.Option(help="Runs of each row; the best counts.")] = 5,
    threads: Annotated[bool, typer.Option(help="Measure once with tiers that answer on a thread, too.")] = True,
    baseline: Annotated[bool, typer.Option(help="Check vLLM's figures against the stand-alone script.")] = True,
) -> None:
    """Engine-thread time until every fetch is submitted, of a later waiting step, and what was promoted."""
    if vs not in ("", "vllm"):
        raise ConfigError(f"--vs {vs}: vllm is all there is to compare with")
    if budget <= 0:
        raise ConfigError("--budget: must be above 0")
    wanted = table(rows)
    if not wanted:
        raise ConfigError(f"--rows {rows}: no row is called like that")
    limits = Budget(vllm_s=budget, scaled_s=budget / 10, own_s=budget / 15, runs=positive("--repeat", str(repeat)))
    clock = SystemClock()
    began = clock.monotonic()
    with _sides(vs, threads, baseline) as sides:
        settle()
        kept = read_rows(json_file) if append and json_file is not None else []
        measured: list[Row] = []
        for row in _measure(wanted, sides, limits):
            note(f"{clock.monotonic() - began:7.1f} s  {_name(row)}")
            measured.append(row)
            kept = [other for other in kept if _name(other) != _name(row)]
            write_json(json_file, kept + measured)  # a run that is cut short leaves its rows
    show(_table(measured))
    found = [line for row in measured for line in complaints(row)]
    note(f"{len(measured)} rows in {clock.monotonic() - began:.0f} s")
    for line in found:
        note(f"not as it must be: {line}")
    if found:
        raise typer.Exit(1)


@contextmanager
def _sides(vs: str, threads: bool, baseline: bool) -> Iterator[Sides]:
    """vLLM and its check, if they are wanted and there."""
    lacking = why_not() if vs else None
    if lacking is not None:
        note(f"{lacking}: kvstrata is measured alone")
    if not vs or lacking is not None:
        yield Sides(threads=threads)
        return
    alone = StandAlone() if baseline else None
    try:
        yield Sides(Peer(), alone, threads)
    finally:
        if alone is not None:
            alone.close()


def _measure(workloads: Iterable[Workload], sides: Sides, budget: Budget) -> Iterator[Row]:
    """The rows, one after the other; keys are dropped before others are made, and kept for another presence."""
    prepared: Prepared | None = None
    for workload in workloads:
        if prepared is not None and prepared.workload.prompts != workload.prompts:
            prepared = None
        prepared = Prepared(workload, prepared)
        yield measure_row(prepared, sides, budget)


def _name(row: Row) -> str:
    return f"{row['layout']}/{row['presence']}/{row['requests']}/{row['tokens']}"


def _table(rows: Iterable[Row]) -> Table:
    view = Table(
        "row", "keys", "submit ms", "step us", "promoted/consumed", "vLLM ms", "us", "promoted/consumed", "x", "x"
    )
    for row in rows:
        if "error" in row:
            view.add_row(_name(row), str(row["keys"]), row["error"])
            continue
        own, theirs = row["kvstrata"], row.get("vllm")
        cells = [
            _name(row) + (" (scaled)" if row["scaled"] else ""),
            str(row["keys"]),
            f"{own['submit_s'] * 1e3:.2f}",
            f"{own['step_s'] * 1e6:.1f}",
            f"{own['promoted']}/{own['consumed']}",
        ]
        if theirs is not None:
            cells += [
                f"{theirs['submit_s'] * 1e3:.1f}",
                f"{theirs['step_s'] * 1e6:.0f}",
                f"{theirs['promoted']}/{theirs['consumed']}",
                f"{row['submit_ratio']:.1f}",
                f"{row['step_ratio']:.0f}",
            ]
        view.add_row(*cells)
    return view
