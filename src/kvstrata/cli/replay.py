"""`kvstrata replay`: run the product with a request trace and report what hit, what moved and what it was worth."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvstrata.config import parse_size
from kvstrata.errors import ConfigError
from kvstrata.layout.presets import PRESETS
from kvstrata.sim.replay import DEFAULT_CHUNK_TOKENS, TIER_KINDS, Replay, ReplaySettings, run_replay
from kvstrata.sim.report import print_report, write_json
from kvstrata.sim.traces import Trace, read_mooncake
from kvstrata.sim.workloads import DEFAULT_REQUESTS, builtin_workload


def replay(
    trace: Annotated[
        Path | None,
        typer.Argument(help="A trace in the Mooncake format (JSON lines). Without one: a built-in workload."),
    ] = None,
    model: Annotated[str, typer.Option(help=f"Preset: {', '.join(PRESETS)}.")] = "plain",
    requests: Annotated[
        int | None, typer.Option(help=f"Replay the first N requests. [built-in workload: {DEFAULT_REQUESTS}]")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests in the engine at a time.")] = 1,
    primary: Annotated[str, typer.Option(help="Host memory: 256MB, 2GiB or unlimited.")] = "256MB",
    disk: Annotated[str, typer.Option(help="Limit of the persistent tier: 256MB, 2GiB or unlimited.")] = "2GB",
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Directory of the persistent tier, kept for the next run. [a temporary one]"),
    ] = None,
    tier: Annotated[str, typer.Option(help=f"The persistent tier: {', '.join(TIER_KINDS)}.")] = "disk",
    chunk_tokens: Annotated[int, typer.Option(help="Tokens per chunk.")] = DEFAULT_CHUNK_TOKENS,
    payload_scale: Annotated[
        str, typer.Option(help="Shrinks the bytes of a chunk, never below 64, never the number of chunks.")
    ] = "1/1024",
    seed: Annotated[int, typer.Option(help="Draws the workload, the order of completions and the damage.")] = 0,
    damage: Annotated[float, typer.Option(help="Share of stored chunks to alter behind the tier's back.")] = 0.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report as JSON to this file.")] = None,
) -> None:
    """Replay a request trace against real tiers under a simulated engine; every chunk's bytes are checked."""
    settings = ReplaySettings(
        model=model,
        concurrency=concurrency,
        primary_bytes=parse_size(primary, "--primary"),
        disk_bytes=parse_size(disk, "--disk"),
        tier=tier,
        directory=directory,
        chunk_tokens=chunk_tokens,
        payload_scale=parse_scale(payload_scale),
        seed=seed,
        damage=damage,
    )
    work = load_trace(trace, requests, seed)
    _check_json(json_file)
    outcome = _run(settings, work)
    for line in outcome.notices:
        typer.echo(f"kvstrata: {line}", err=True)
    print_report(outcome.report, Console())
    if json_file is not None:
        write_json(outcome.report, json_file)


def load_trace(path: Path | None, requests: int | None, seed: int) -> Trace:
    """The trace to replay: the file, or the built-in workload; at most `requests` requests."""
    if requests is not None and requests < 1:
        raise ConfigError(f"--requests: {requests} must be at least 1")
    if path is None:
        return builtin_workload(DEFAULT_REQUESTS if requests is None else requests, seed)
    return read_mooncake(path, requests)


def parse_scale(text: str) -> float:
    """A payload scale: "1/1024" or "0.001"."""
    try:
        scale = float(Fraction(text.replace(" ", "")))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise ConfigError(f"--payload-scale: {text!r} is no number; write for example 1/1024 or 0.001") from None
    if not math.isfinite(scale) or not 0.0 < scale <= 1.0:
        raise ConfigError(f"--payload-scale: {text} must be above 0 and at most 1")
    return scale


def _check_json(path: Path | None) -> None:
    """Find out before the work that the report could not be written."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(f"--json: {path} cannot be written: no such directory, or it is one")


def _run(settings: ReplaySettings, work: Trace) -> Replay:
    """Replay with a progress bar, if somebody watches."""
    console = Console(stderr=True)
    columns = (TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("replay", total=len(work.requests))
        return run_replay(settings, work, lambda done: bar.update(task, completed=done))
