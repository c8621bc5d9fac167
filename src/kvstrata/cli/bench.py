"""`kvstrata bench`: what kvstrata costs on the engine's thread, measured on this machine.

Figures are wall time of one thread, best of several runs (resolve) or means and percentiles over many batches (step).
Tiers answer at once and without a thread, so that only the core is timed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer
import xxhash
from rich.console import Console
from rich.table import Table

from kvstrata.cli.bench_disk import disk
from kvstrata.cli.bench_engine import engine
from kvstrata.core.manager import TieringOffloadingManager
from kvstrata.core.messages import CancelJob, PurgeTier, SubmitLoad, SubmitStore
from kvstrata.core.settings import CoreConfig
from kvstrata.errors import ConfigError
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds import FullAttention, RecurrentState, SlidingWindow
from kvstrata.runtime.clock import SystemClock
from kvstrata.types import (
    I8,
    Capabilities,
    JobEnded,
    KeysDone,
    Locality,
    Medium,
    OffloadKey,
    Presence,
    TierJob,
    make_key,
)

app = typer.Typer(help="Measure kvstrata on this machine.", no_args_is_help=True)
app.command("engine")(engine)
app.command("disk")(disk)

CHUNK_BYTES = 64
LAYOUTS: dict[str, Layout] = {
    "plain": Layout((Group(FullAttention(), 16, chunk_bytes=CHUNK_BYTES),)),
    "sliding": Layout(
        (
            Group(FullAttention(), 16, chunk_bytes=CHUNK_BYTES),
            Group(SlidingWindow(1024), 16, chunk_bytes=CHUNK_BYTES),
        )
    ),
    "five-to-one": Layout(
        (
            Group(FullAttention(), 16, chunk_bytes=CHUNK_BYTES),
            *(Group(SlidingWindow(1024), 16, chunk_bytes=CHUNK_BYTES) for _ in range(5)),
        )
    ),
    "recurrent": Layout(
        (
            Group(FullAttention(), 16, chunk_bytes=CHUNK_BYTES),
            *(Group(RecurrentState(), 256, chunk_bytes=CHUNK_BYTES) for _ in range(3)),
        )
    ),
}
"""Layouts with small payloads: the core's cost does not depend on the bytes of a chunk."""


class IndexTier:
    """A tier that is only an index: it answers probes at once and ends every job at once."""

    medium = Medium.CPU
    locality = Locality.LOCAL
    capabilities = Capabilities(sync_probe=True, max_batch=1 << 20)

    def __init__(self, name: str) -> None:
        self.name = name
        self.held: dict[OffloadKey, bool] = {}

    def probe(self, keys: Sequence[OffloadKey]) -> I8:
        """Presence of each key."""
        held = np.fromiter(map(self.held.__contains__, keys), np.int8, len(keys))
        held *= Presence.PRESENT
        return held


@dataclass(frozen=True, slots=True)
class ResolveRow:
    """One workload of `bench resolve`; seconds."""

    layout: str
    presence: str
    requests: int
    tokens: int
    keys: int
    submit_s: float
    submit_us_per_key: float
    step_s: float
    step_us_per_request: float
    probed: int
    promoted: int


def bench_key(prompt: int, end: int, group: int) -> OffloadKey:
    """The key of the chunk of `group` that ends at token `end` of a numbered prompt."""
    digest = xxhash.xxh3_128_digest(prompt.to_bytes(8, "big") + end.to_bytes(8, "big"))
    return make_key(digest + digest[::-1], group)


def prompt_keys(layout: Layout, prompt: int, tokens: int) -> list[list[OffloadKey]]:
    """Keys of the whole chunks of a numbered prompt, per group."""
    return [
        [bench_key(prompt, end, group) for end in range(tpc, tokens + 1, tpc)]
        for group, tpc in enumerate(layout.tokens_per_chunk)
    ]


PRESENCES: dict[str, Callable[[int, int], bool]] = {
    "all": lambda i, n: True,
    "none": lambda i, n: False,
    "three_quarters": lambda i, n: i < n * 3 // 4,
}


def measure_resolve(layout_name: str, presence: str, requests: int, tokens: int) -> ResolveRow:
    """First step (resolve, grant, submit) and one later step of `requests` waiting requests."""
    layout, clock = LAYOUTS[layout_name], SystemClock()
    tier = IndexTier("index")
    prompts = [prompt_keys(layout, prompt, tokens) for prompt in range(requests)]
    here = PRESENCES[presence]
    for keys in prompts:
        for group in keys:
            tier.held.update((key, True) for i, key in enumerate(group) if here(i, len(group)))
    keys_per_prompt = sum(map(len, prompts[0]))
    capacity = (requests * keys_per_prompt + 64) * CHUNK_BYTES
    config = CoreConfig(capacity_bytes=capacity, promotion_share=1.0, store_reserve=0.0, inflight_share=1.0)
    core = TieringOffloadingManager(layout, config, [tier])
    core.advance(0.0)
    for prompt, keys in enumerate(prompts):
        core.add_request(str(prompt), keys)
    names = [str(prompt) for prompt in range(requests)]
    gc.collect()
    began = clock.monotonic()
    for name in names:
        core.poll(name, 0, tokens)
    core.advance(0.001)
    core.take_commands()
    submit_s = clock.monotonic() - began
    steps = 50
    began = clock.monotonic()
    for step in range(steps):
        core.advance(0.002 + step * 1e-6)
        for name in names:
            core.poll(name, 0, tokens)
        core.take_commands()
    step_s = (clock.monotonic() - began) / steps
    counted = core.statistics()
    total = requests * keys_per_prompt
    return ResolveRow(
        layout_name,
        presence,
        requests,
        tokens,
        total,
        submit_s,
        submit_s / total * 1e6,
        step_s,
        step_s / requests * 1e6,
        counted.tiers["index"].probed,
        counted.counters.promoted,
    )


@app.command("resolve")
def bench_resolve(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 32_768,
    requests: Annotated[str, typer.Option(help="Numbers of waiting requests, with commas.")] = "1,20,200",
    repeat: Annotated[int, typer.Option(help="Runs of each row; the best counts.")] = 3,
) -> None:
    """Time per key of a first resolve, and per waiting request of a later step."""
    counts = [_positive("--requests", part) for part in requests.split(",")]
    rows = []
    for layout in LAYOUTS:
        for presence in PRESENCES:
            for count in counts:
                runs = [measure_resolve(layout, presence, count, tokens) for _ in range(max(repeat, 1))]
                rows.append(min(runs, key=lambda run: run.submit_s))
    table = Table(
        "layout", "presence", "requests", "keys", "first step ms", "us/key", "later step us/request", "promoted"
    )
    for row in rows:
        table.add_row(
            row.layout,
            row.presence,
            str(row.requests),
            str(row.keys),
            f"{row.submit_s * 1e3:.2f}",
            f"{row.submit_us_per_key:.3f}",
            f"{row.step_us_per_request:.3f}",
            str(row.promoted),
        )
    _finish(table, [asdict(row) for row in rows], json_file)


@dataclass(frozen=True, slots=True)
class StepRow:
    """`bench step`: a steady mix at a full primary; microseconds per chunk on the engine's thread."""

    slots: int
    tiers: int
    batch: int
    batches: int
    store_us: float
    store_p99_batch_ms: float
    load_us: float
    load_p99_batch_ms: float


class SteadyMix:
    """Admissions, stores, cascades, completions, evictions and loads in batches, at a full primary."""

    def __init__(self, slots: int, tiers: int, batch: int, policy: str) -> None:
        self.layout = LAYOUTS["plain"]
        self.batch = batch
        self.tiers = [IndexTier(f"index{i}") for i in range(tiers)]
        config = CoreConfig(capacity_bytes=slots * CHUNK_BYTES, policy=policy, cascade_queue=1 << 20)
        self.core = TieringOffloadingManager(self.layout, config, self.tiers)
        self.now = 0.0
        self.prompts = 0

    def carry(self) -> None:
        """Do what the core asks of the tiers, all at once."""
        while commands := self.core.take_commands():
            for command in commands:
                if isinstance(command, SubmitLoad | SubmitStore):
                    self._end(command.tier, command.job)
                elif isinstance(command, CancelJob | PurgeTier):
                    raise AssertionError(f"a steady mix never cancels or purges: {command}")

    def _end(self, tier: int, job: TierJob) -> None:
        self.tiers[tier].held.update(dict.fromkeys(job.keys, True))
        self.core.on_event(tier, KeysDone(job.job_id, range(len(job.keys))))
        self.core.on_event(tier, JobEnded(job.job_id))

    def store_batch(self, keys: list[OffloadKey]) -> str:
        """One request that stores a batch of new chunks; returns its id."""
        name = f"s{self.prompts}"
        self.core.advance(self.now)
        self.core.add_request(name, [keys])
        plan = self.core.prepare_store(name, [(0, i) for i in range(len(keys))])
        if plan is None or len(plan.slots) != len(keys):
            raise AssertionError("a full primary of evictable chunks takes every batch")
        self.core.complete_store(plan.job_id)
        self.carry()
        self.core.finish(name)
        return name

    def load_batch(self, keys: list[OffloadKey]) -> None:
        """One request whose batch is all in primary: poll, take, load, finish."""
        name = f"l{self.prompts}"
        tokens = len(keys) * self.layout.tokens_per_chunk[0]
        self.core.advance(self.now)
        self.core.add_request(name, [keys])
        answer = self.core.poll(name, 0, tokens)
        plan = self.core.take(name, answer.hit or 0)
        if plan is None or len(plan.slots) != len(keys):
            raise AssertionError("what was just stored is a hit")
        self.core.complete_load(plan.job_id)
        self.carry()
        self.core.finish(name)

    def run(self, batches: int) -> StepRow:
        """Fill primary, then time `batches` stores, each followed by the load of an earlier batch."""
        clock = SystemClock()
        tokens = self.batch * self.layout.tokens_per_chunk[0]
        slots = self.core.residency.capacity_bytes // CHUNK_BYTES
        recent: list[list[OffloadKey]] = []
        for _ in range(-(-slots // self.batch)):
            recent.append(self._next(tokens))
            self.store_batch(recent[-1])
        recent = recent[-64:]
        stores, loads = [], []
        for i in range(batches):
            keys = self._next(tokens)
            began = clock.monotonic()
            self.store_batch(keys)
            stores.append(clock.monotonic() - began)
            recent[i % len(recent)] = keys
            again = recent[(i * 7 + 1) % len(recent)]
            began = clock.monotonic()
            self.load_batch(again)
            loads.append(clock.monotonic() - began)
        return StepRow(
            slots,
            len(self.tiers),
            self.batch,
            batches,
            float(np.mean(stores)) / self.batch * 1e6,
            float(np.percentile(stores, 99)) * 1e3,
            float(np.mean(loads)) / self.batch * 1e6,
            float(np.percentile(loads, 99)) * 1e3,
        )

    def _next(self, tokens: int) -> list[OffloadKey]:
        self.prompts += 1
        self.now += 1e-3
        return prompt_keys(self.layout, self.prompts, tokens)[0]


@app.command("step")
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
        _positive(name, str(value))
    if tiers < 0 or batch * 4 > slots:
        raise ConfigError("--tiers must not be negative, and --slots must hold at least four batches")
    row = SteadyMix(slots, tiers, batch, policy).run(batches)
    table = Table("slots", "tiers", "batch", "store us/chunk", "p99 batch ms", "load us/chunk", "p99 batch ms")
    table.add_row(
        str(row.slots),
        str(row.tiers),
        str(row.batch),
        f"{row.store_us:.2f}",
        f"{row.store_p99_batch_ms:.2f}",
        f"{row.load_us:.2f}",
        f"{row.load_p99_batch_ms:.2f}",
    )
    _finish(table, [asdict(row)], json_file)


def _positive(option: str, text: str) -> int:
    """A whole number above 0, or a clear error."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value <= 0:
        raise ConfigError(f"{option}: expected a whole number above 0, got {text!r}")
    return value


def _finish(table: Table, rows: list[dict[str, object]], json_file: Path | None) -> None:
    Console().print(table)
    if json_file is not None:
        try:
            json_file.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
        except OSError as error:
            raise ConfigError(f"--json {json_file}: {error.strerror}") from None
