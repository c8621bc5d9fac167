"""`kvstrata bench engine`: time to the first token of a restored long prompt, in a real vLLM on this machine's CPUs.

Two engines live at the same time, each in a process of its own: one with kvstrata, one with vLLM's own tiering under a
stand-in worker. They serve the same prompts in turn, one always idle while the other is timed, so that a machine that
is faster in one minute than in the next is so for both. The prompts are computed, then restored from primary; then
both engines are started anew and the prompts come from disk.

Beside them, in the same run, what a restore cannot do without: torch's copy of as many contiguous bytes, reading them
from the disk, and one engine step that computes what is not restored. That step is the same prompt served again out of
the engine's own prefix cache: it computes the same last tokens behind the same context, and nothing else. A stricter
reading is told beside it: a step of as many tokens without any context.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvstrata.bench.engine import BLOCK_TOKENS, BYTES_PER_TOKEN, MODEL, SHORT_PROMPTS, EngineProcess, pause
from kvstrata.errors import ConfigError
from kvstrata.integrations.vllm.versions import require_supported

SYSTEMS = ("kvstrata", "stock")
BAR = 1.25
"""A restore may take at most this many times the sum of what it cannot do without."""
STORE_PAUSE_S = 3.0
"""How long stores and cascades are given to end."""
GAP_S = 0.05
"""Pause before each timed prompt, in which the other engine's threads fall asleep."""
WARM_ROUNDS = 3
"""How often each prompt is restored from primary."""

Run = dict[str, list[float]]


def engine(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures into this file.")] = None,
    directory: Annotated[Path | None, typer.Option("--dir", help="Folder on the disk to measure.")] = None,
    tokens: Annotated[int, typer.Option(help="Length of the prompts.")] = 4000,
    repeats: Annotated[int, typer.Option(help="How many prompts; medians of them are reported.")] = 5,
) -> None:
    """Time to first token: computed, restored from primary, restored from disk; beside vLLM's own tiering."""
    require_supported()
    if not 2 * BLOCK_TOKENS <= tokens <= 8000 or not 1 <= repeats <= 20:
        raise ConfigError("bench engine: tokens must be from 256 to 8000, repeats from 1 to 20")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"bench engine: {json_file}: there is no folder {json_file.absolute().parent}")
    runs: dict[str, Run] = {}
    with _scratch(directory) as scratch:
        place = Path(scratch)
        (place / "model").mkdir()
        (place / "model" / "config.json").write_text(json.dumps(MODEL))
        for turn in ("first", "restarted"):
            typer.echo(f"{turn} run ...", err=True)
            with EngineProcess(place, SYSTEMS[0]) as ours, EngineProcess(place, SYSTEMS[1]) as stock:
                found = measure([ours, stock], tokens, repeats)
            runs |= {f"{system} {turn}": run for system, run in found.items()}
    figures = summary(runs, tokens)
    for line in report(figures):
        typer.echo(line)
    if json_file is not None:
        json_file.write_text(json.dumps({"figures": figures, "runs": runs}, indent=1) + "\n")


def _scratch(directory: Path | None) -> tempfile.TemporaryDirectory[str]:
    """A folder of its own, in `directory`, which is made if need be."""
    try:
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=directory)
    except OSError as error:
        raise ConfigError(f"bench engine: --dir {directory}: {error.strerror}") from error


def measure(engines: Sequence[EngineProcess], tokens: int, repeats: int) -> dict[str, Run]:
    """Serve all prompts in both engines in turn; seconds by system and kind.

    `cold` is computed in a first run and from disk in a second one, `warm` is from primary, `step` out of the engine's
    own cache, `short` as many tokens as are not restored, without context.
    """
    runs: dict[str, Run] = {engine.system: {} for engine in engines}

    def serve(kind: str, number: int, length: int = tokens) -> None:
        for engine in engines if number % 2 else reversed(engines):
            pause(GAP_S)
            seconds, cached = engine.serve(length, number)
            runs[engine.system].setdefault(kind, []).append(seconds)
            runs[engine.system].setdefault(f"{kind}_cached", []).append(cached)

    for engine in engines:
        engine.serve(2 * BLOCK_TOKENS + 9, SHORT_PROMPTS - 1)  # what is made at first use
    for number in range(repeats):
        serve("cold", number)
    pause(STORE_PAUSE_S)
    for _ in range(WARM_ROUNDS):
        for engine in engines:
            engine.serve(BLOCK_TOKENS // 2, SHORT_PROMPTS - 2)  # a step, in which stores that were put off are made
            engine.tell("reset")
        for number in range(repeats):
            serve("warm", number)
            serve("step", number)
    for number in range(repeats):
        serve("short", SHORT_PROMPTS + number, tokens % BLOCK_TOKENS or 1)
    own = engines[0]
    runs[own.system] |= own.tell("floor", size=tokens * BYTES_PER_TOKEN, repeats=repeats)
    for run in runs.values():
        if set(run["step_cached"]) != set(run["warm_cached"]):
            raise ConfigError(f"not the same tokens: {run['warm_cached']} restored, {run['step_cached']} of its own")
    return runs


def restored(first: Run, again: Run) -> float:
    """The least number of tokens that a restore brought."""
    return float(min(first["warm_cached"] + again["warm_cached"] + again["cold_cached"]))


def summary(runs: dict[str, Run], tokens: int) -> dict[str, float]:
    """Medians in seconds, and the ratios that matter."""
    ours, again = runs["kvstrata first"], runs["kvstrata restarted"]
    stock, stock_again = runs["stock first"], runs["stock restarted"]
    middle: Callable[[list[float]], float] = statistics.median
    found = {
        "recompute_s": middle(ours["cold"]),
        "primary_s": middle(ours["warm"] + again["warm"]),
        "disk_s": middle(again["cold"]),
        "stock_primary_s": middle(stock["warm"] + stock_again["warm"]),
        "stock_disk_s": middle(stock_again["cold"]),
        "copy_s": middle(ours["copy"]),
        "read_s": middle(again["read"]),
        "step_s": middle(ours["step"] + again["step"]),
        "short_prompt_s": middle(ours["short"] + again["short"]),
        "restored_tokens": restored(ours, again),
        "stock_restored_tokens": restored(stock, stock_again),
        "bytes": float(tokens * BYTES_PER_TOKEN),
    }
    found["primary_floor_s"] = found["copy_s"] + found["step_s"]
    found["disk_floor_s"] = found["primary_floor_s"] + found["read_s"]
    lower = found["step_s"] - found["short_prompt_s"]
    for name in ("primary", "disk"):
        found[f"{name}_ratio"] = found[f"{name}_s"] / found[f"{name}_floor_s"]
        found[f"{name}_strict_ratio"] = found[f"{name}_s"] / (found[f"{name}_floor_s"] - lower)
        found[f"{name}_speedup"] = found["recompute_s"] / found[f"{name}_s"]
        found[f"{name}_of_stock"] = found[f"{name}_s"] / found[f"stock_{name}_s"]
    return found


def report(figures: dict[str, float]) -> list[str]:
    """The figures as lines."""
    lines = [f"computed                 {figures['recompute_s']:7.3f} s"]
    for name in ("primary", "disk"):
        good = figures[f"{name}_ratio"] <= BAR and figures[f"{name}_of_stock"] <= 1.0
        strict = figures[f"{name}_strict_ratio"]
        lines.append(
            f"restored from {name:<10} {figures[f'{name}_s']:7.3f} s   {figures[f'{name}_speedup']:6.1f} x faster; "
            f"{figures[f'{name}_ratio']:.2f} of the floor (bar {BAR}); {figures[f'{name}_of_stock']:.3f} of vLLM's own "
            f"tiering ({figures[f'stock_{name}_s']:.3f} s)  {'ok' if good else 'ABOVE THE BAR'}"
        )
        lines.append(
            f"    with a step that has no context in the floor: {strict:.2f} (bar {BAR})"
            f"  {'ok' if strict <= BAR else 'above'}"
        )
    lines.append(
        f"floor: copy {figures['copy_s']:.3f} s, read {figures['read_s']:.3f} s, one step that computes the rest "
        f"{figures['step_s']:.3f} s (as many tokens without a context: {figures['short_prompt_s']:.3f} s); "
        f"{figures['bytes'] / 1e6:.0f} MB, {figures['restored_tokens']:.0f} tokens restored"
    )
    return lines
