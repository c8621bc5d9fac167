"""`kvstrata inspect`: what a disk tier's directory holds, by namespace and group, and how full its segments are."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvstrata.runtime.clock import SystemClock
from kvstrata.tiers.disk.format import BLOCK
from kvstrata.tiers.disk.io import SystemFiles
from kvstrata.tiers.disk.survey import Survey, survey


def inspect(
    directory: Annotated[Path, typer.Argument(help="The directory of a disk tier.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a disk tier's directory holds."""
    found = survey(SystemFiles(), str(directory))
    if as_json:
        typer.echo(json.dumps({**asdict(found), "fill": fill(found)}))
        return
    now_us = int(SystemClock().wall() * 1e6)
    console = Console()
    console.print(
        f"{found.path}: {found.records} records, {found.superseded} superseded, {found.allocated} bytes allocated, "
        f"fill {fill(found):.0%}, checkpoint {found.checkpoint}" + (", in use" if found.in_use else ""),
        soft_wrap=True,
    )
    console.print(_held_table(found, now_us))
    console.print(_segment_table(found, now_us))


def fill(found: Survey) -> float:
    """Which part of the segments holds records."""
    size = sum(segment.size for segment in found.segments)
    return sum(segment.live_bytes for segment in found.segments) / size if size else 0.0


def _age(now_us: int, then_us: int) -> str:
    seconds = max(now_us - then_us, 0) // 1_000_000
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def _held_table(found: Survey, now_us: int) -> Table:
    table = Table("namespace", "layout", "group", "records", "bytes", "smallest", "largest", "newest", "oldest")
    for held in found.held:
        table.add_row(
            held.namespace, f"{held.layout_tag:016x}", str(held.group), str(held.records), str(held.payload_bytes),
            str(held.smallest), str(held.largest), _age(now_us, held.newest_us), _age(now_us, held.oldest_us),
        )  # fmt: skip
    return table


def _segment_table(found: Survey, now_us: int) -> Table:
    table = Table("segment", "life", "bytes", "used", "records", "held", "fill", "age")
    for each in found.segments:
        share = each.live_bytes / max(each.size - BLOCK, 1)
        table.add_row(
            str(each.number), str(each.seq), str(each.size), f"{each.end / max(each.size, 1):.0%}", str(each.records),
            str(each.live), f"{share:.0%}", _age(now_us, each.wall_us),
        )  # fmt: skip
    return table
