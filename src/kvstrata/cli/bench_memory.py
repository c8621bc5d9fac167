"""`kvstrata bench first`, `memory` and `waiting`: a first resolve, what the core keeps, and later waiting steps."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvstrata.bench import first, memory, waiting
from kvstrata.cli.bench_output import positive, show, write_json

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")]
Slots = Annotated[int, typer.Option(help="Slots of primary.")]


def bench_first(
    json_file: JsonFile = None,
    slots: Slots = 100_000,
    tier_keys: Annotated[int, typer.Option(help="Keys that the tier below holds.")] = 1_000_000,
) -> None:
    """Time of a first resolve (gathering and planning) against a full primary and a large tier."""
    rows = first.measure(positive("--slots", str(slots)), positive("--tier-keys", str(tier_keys)))
    table = Table("order", "keys", "ms", "us/key", "hit tokens")
    for row in rows:
        table.add_row(row.order, str(row.keys), f"{row.ms:.2f}", f"{row.us_per_key:.3f}", str(row.hit_tokens))
    show(table)
    write_json(json_file, [asdict(row) for row in rows])


def bench_memory(json_file: JsonFile = None, slots: Slots = 100_000) -> None:
    """Bytes that the core keeps per resident chunk and per waiting key."""
    rows = memory.measure(positive("--slots", str(slots)))
    table = Table("what", "count", "bytes each")
    for row in rows:
        table.add_row(row.what, str(row.count), f"{row.bytes_each:.1f}")
    show(table)
    write_json(json_file, [asdict(row) for row in rows])


def bench_waiting(
    json_file: JsonFile = None,
    requests: Annotated[str, typer.Option(help="Numbers of waiting requests, commas between.")] = "20,200,2000",
) -> None:
    """Time of a later step while requests wait, in all and per request."""
    counts = [positive("--requests", part) for part in requests.split(",")]
    rows = list(waiting.rows(counts))
    table = Table("waiting requests", "step us", "us per request")
    for row in rows:
        table.add_row(str(row.requests), f"{row.step_us:.1f}", f"{row.us_per_request:.3f}")
    show(table)
    write_json(json_file, [asdict(row) for row in rows])
