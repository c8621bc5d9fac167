"""`kvstrata bench interference`: what the disk tier at full rate costs a busy engine thread."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvstrata.bench.interference import RATE_SHARE, measure
from kvstrata.cli.bench_disk import parse_bytes
from kvstrata.cli.bench_output import note, positive, show, write_json
from kvstrata.errors import ConfigError


def bench_interference(
    place: Annotated[Path, typer.Argument(help="Directory on the disk that is meant.")],
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    chunk: Annotated[str, typer.Option(help="Bytes of one chunk.")] = "256KiB",
    volume: Annotated[str, typer.Option(help="Bytes that are read again and again.")] = "256MiB",
    rounds: Annotated[
        int,
        typer.Option(
            help="Rounds of four phases: full rate, and work without, with, without loads. Threads: a quarter."
        ),
    ] = 240,
    seconds: Annotated[float, typer.Option(help="Length of one phase.")] = 0.1,
    pin: Annotated[bool, typer.Option(help="Give the engine's thread and the I/O process cores of their own.")] = True,
) -> None:
    """Slow-down of a busy pure-Python thread while the disk tier loads, with its I/O in a process and in threads."""
    sizes = parse_bytes(chunk), parse_bytes(volume)
    if seconds <= 0 or sizes[1] < 4 * sizes[0]:
        raise ConfigError("--seconds must be above 0, and --volume hold at least four chunks")
    most = positive("--rounds", str(rounds))
    place.mkdir(parents=True, exist_ok=True)
    rows = [
        measure(
            place,
            volume=sizes[1],
            chunk=sizes[0],
            rounds=most if io_process else -(-most // 4),
            seconds=seconds,
            io_process=io_process,
            pin=pin,
        )
        for io_process in (True, False)
    ]
    table = Table("I/O in", "pinned", "full GB/s", "beside work GB/s", "share", "slow-down", "in calls")
    for row in rows:
        table.add_row(
            row.io,
            "yes" if row.pinned else "no",
            f"{row.full_gbps:.2f}",
            f"{row.gbps:.2f}",
            f"{row.rate_share:.2f}",
            f"{row.slowdown:.1%}",
            f"{row.calls_share:.1%}",
        )
    show(table)
    write_json(json_file, [asdict(row) for row in rows])
    if rows[0].rate_share < RATE_SHARE:
        note(f"with its own process the tier kept {rows[0].rate_share} of its rate, below {RATE_SHARE}: no verdict")
