"""`kvstrata bench step`: microseconds per chunk stored and loaded at a full primary."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvstrata.bench.steady import SteadyMix
from kvstrata.cli.bench_output import positive, show, write_json
from kvstrata.errors import ConfigError


def bench_step(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the row to this file.")] = None,
    slots: Annotated[int, typer.Option(help="Slots of primary.")] = 100_000,
    tiers: Annotated[int, typer.Option(help="Secondary tiers below it.")] = 2,
    batch: Annotated[int, typer.Option(help="Chunks of one request.")] = 64,
    batches: Annotated[int, typer.Option(help="Timed batches of each direction.")] = 1000,
    policy: Annotated[str, typer.Option(help="Eviction policy of primary.")] = "lru",
) -> None:
    """Microseconds per chunk stored and per chunk loaded at a full primary, everything included."""
    for name, value in (("--slots", slots), ("--batch", batch), ("--batches", batches)):
        positive(name, str(value))
    if tiers < 0 or batch * 4 > slots:
        raise ConfigError("--tiers must not be negative, and --slots must hold at least four batches")
    row = SteadyMix(slots, tiers, batch, policy).run(batches)
    table = Table("slots", "tiers", "batch", "store us/chunk", "CPU", "p99 ms", "load us/chunk", "CPU", "p99 ms")
    table.add_row(
        str(row.slots),
        str(row.tiers),
        str(row.batch),
        f"{row.store_us:.2f}",
        f"{row.store_cpu_us:.2f}",
        f"{row.store_p99_batch_ms:.2f}",
        f"{row.load_us:.2f}",
        f"{row.load_cpu_us:.2f}",
        f"{row.load_p99_batch_ms:.2f}",
    )
    show(table)
    write_json(json_file, [asdict(row)])
