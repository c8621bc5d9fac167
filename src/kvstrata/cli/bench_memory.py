"""`kvstrata bench first` and `bench memory`: what a first resolve costs, and what the core keeps."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvstrata.bench import first, memory
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
