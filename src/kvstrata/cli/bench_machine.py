"""`kvstrata bench machine`: what to write beside figures, so that others can judge them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvstrata.bench.machine import describe
from kvstrata.cli.bench_output import show, write_json


def bench_machine(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the description to this file.")] = None,
) -> None:
    """Processor, memory, versions and load of this machine."""
    described = describe()
    table = Table("what", "value")
    for name, value in described.items():
        table.add_row(name, str(value))
    show(table)
    write_json(json_file, described)
