"""`kvstrata bench`: what kvstrata costs, measured on this machine. Each measurement lives in its own module."""

from __future__ import annotations

import typer

from kvstrata.cli.bench_disk import disk
from kvstrata.cli.bench_engine import engine
from kvstrata.cli.bench_interference import bench_interference
from kvstrata.cli.bench_machine import bench_machine
from kvstrata.cli.bench_memory import bench_first, bench_memory, bench_waiting
from kvstrata.cli.bench_resolve import bench_resolve
from kvstrata.cli.bench_step import bench_step
from kvstrata.cli.bench_tier import bench_tier

app = typer.Typer(help="Measure kvstrata on this machine.", no_args_is_help=True)
app.command("resolve")(bench_resolve)
app.command("first")(bench_first)
app.command("step")(bench_step)
app.command("memory")(bench_memory)
app.command("waiting")(bench_waiting)
app.command("interference")(bench_interference)
app.command("machine")(bench_machine)
app.command("engine")(engine)
app.command("disk")(disk)
app.command("tier")(bench_tier)
