"""What a replay found out: plain values, the JSON of `--json`, and the table on the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvstrata.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TierReport:
    """One place that held chunks. Bytes of accelerator memory are real ones; those of the others are what is really
    held, after the payload scale."""

    bytes_held: int
    bytes_limit: int | None
    """None: unlimited."""
    bytes_peak: int
    chunks_held: int
    evicted: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class TtftReport:
    """Simulated time to first token, in seconds, over all requests."""

    mean_s: float
    median_s: float
    p95_s: float

    @classmethod
    def of(cls, values: Sequence[float]) -> TtftReport:
        """Summary of one time per request."""
        ordered = sorted(values)
        if not ordered:
            return cls(0.0, 0.0, 0.0)
        rank = max(0, math.ceil(0.95 * len(ordered)) - 1)
        return cls(sum(ordered) / len(ordered), ordered[(len(ordered) - 1) // 2], ordered[rank])


@dataclass(frozen=True, slots=True)
class SettingsReport:
    """What the replay ran with."""

    trace: str
    model: str
    tier: str
    chunk_tokens: tuple[int, ...]
    chunk_bytes: tuple[int, ...]
    """Per group, before the payload scale."""
    payload_bytes: tuple[int, ...]
    """Per group, as stored."""
    payload_scale: float
    concurrency: int
    seed: int
    damage: float
    accelerator_bytes: int


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The outcome of one replay; the fields are the top level of the JSON."""

    requests: int
    prompt_tokens: int
    hit_tokens: int
    chunks_probed: int
    chunks_promoted: int
    chunks_consumed: int
    chunks_not_taken: int
    chunks_cancelled: int
    chunks_expired: int
    chunks_failed: int
    bytes_promoted: int
    bytes_consumed: int
    wrong_chunks: int
    """Chunks that were delivered as good with other bytes than their key's."""
    corrupt_chunks: int
    """Chunks that a tier found altered and refused."""
    tiers: dict[str, TierReport]
    chunks_stored: int
    chunks_loaded: int
    chunks_verified: int
    """Deliveries that were compared byte for byte."""
    chunks_damaged: int
    damaged_chunks_asked: int
    cascades_dropped: int
    failed_loads: int
    """Keys that a tier could not bring, whatever the cause."""
    ttft_with: TtftReport
    ttft_without: TtftReport
    simulated_s: float
    settings: SettingsReport

    def to_json(self) -> bytes:
        """The JSON text."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)

    def as_dict(self) -> dict[str, Any]:
        """The JSON as builtins."""
        return dict(msgspec.json.decode(self.to_json(), type=dict[str, Any]))


def write_json(report: ReplayReport, path: Path) -> None:
    """Write the report; a path that cannot be written is a `ConfigError`."""
    try:
        path.write_bytes(report.to_json() + b"\n")
    except OSError as error:
        raise ConfigError(f"--json: {path} cannot be written: {error.strerror or error}") from None


def print_report(report: ReplayReport, console: Console) -> None:
    """Settings, totals, the table by tier and the verdict."""
    console.print(_settings_lines(report.settings), highlight=False, soft_wrap=True)
    console.print(_totals(report))
    console.print(_tiers(report))
    console.print(_verdict(report), highlight=False, soft_wrap=True)


def _settings_lines(settings: SettingsReport) -> str:
    chunks = ", ".join(
        f"{tokens} tokens = {show_bytes(real)} (stored as {show_bytes(small)})"
        for tokens, real, small in zip(settings.chunk_tokens, settings.chunk_bytes, settings.payload_bytes, strict=True)
    )
    return (
        f"{settings.trace}: model {settings.model}, tier {settings.tier}, concurrency {settings.concurrency}, "
        f"seed {settings.seed}\nchunk per group: {chunks}; payload scale {show_scale(settings.payload_scale)}"
    )


def _totals(report: ReplayReport) -> Table:
    table = Table(title="Replay", title_justify="left", show_header=False, box=SIMPLE_HEAD)
    table.add_column("what", no_wrap=True)
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("note")
    share = 100.0 * report.hit_tokens / report.prompt_tokens if report.prompt_tokens else 0.0
    unused = report.chunks_not_taken + report.chunks_cancelled + report.chunks_expired + report.chunks_failed
    with_, without = report.ttft_with, report.ttft_without
    rows = [
        ("requests", f"{report.requests:,}", f"{report.simulated_s:,.0f} s of simulated time"),
        ("prompt tokens", f"{report.prompt_tokens:,}", ""),
        ("hit tokens", f"{report.hit_tokens:,}", f"{share:.2f} % of the prompt tokens"),
        ("chunks stored", f"{report.chunks_stored:,}", f"{report.cascades_dropped:,} not passed down (tier busy)"),
        ("chunks probed", f"{report.chunks_probed:,}", ""),
        ("chunks promoted", f"{report.chunks_promoted:,}", show_bytes(report.bytes_promoted)),
        ("  consumed", f"{report.chunks_consumed:,}", show_bytes(report.bytes_consumed)),
        (
            "  not consumed",
            f"{unused:,}",
            f"{report.chunks_not_taken:,} not taken, {report.chunks_cancelled:,} cancelled, "
            f"{report.chunks_expired:,} expired, {report.chunks_failed:,} failed",
        ),
        ("time to first token, with", f"{with_.mean_s:.3f} s", f"median {with_.median_s:.3f}, p95 {with_.p95_s:.3f}"),
        (
            "time to first token, without",
            f"{without.mean_s:.3f} s",
            f"median {without.median_s:.3f}, p95 {without.p95_s:.3f}",
        ),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _tiers(report: ReplayReport) -> Table:
    table = Table(title="By tier", title_justify="left", box=SIMPLE_HEAD)
    for name in ("tier", "hit tokens", "held", "limit", "peak", "chunks", "evicted"):
        table.add_column(name, justify="left" if name == "tier" else "right", no_wrap=True)
    for name, tier in report.tiers.items():
        table.add_row(
            name,
            f"{tier.hit_tokens:,}",
            show_bytes(tier.bytes_held),
            "unlimited" if tier.bytes_limit is None else show_bytes(tier.bytes_limit),
            show_bytes(tier.bytes_peak),
            f"{tier.chunks_held:,}",
            f"{tier.evicted:,}",
        )
    return table


def _verdict(report: ReplayReport) -> str:
    line = (
        f"{report.chunks_verified:,} deliveries compared byte for byte: "
        f"{report.wrong_chunks:,} wrong chunks, {report.corrupt_chunks:,} corrupt chunks refused"
    )
    if report.settings.damage:
        line += f" ({report.chunks_damaged:,} damaged on purpose, {report.damaged_chunks_asked:,} of them asked for)"
    return line


def show_bytes(size: int) -> str:
    """A size in decimal units, as the options take it."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000.0:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000.0
    return f"{value:.1f} TB"


def show_scale(scale: float) -> str:
    """A payload scale as a fraction where it is one."""
    inverse = 1.0 / scale
    return f"1/{round(inverse)}" if scale < 1.0 and abs(inverse - round(inverse)) < 1e-9 * inverse else f"{scale:g}"
