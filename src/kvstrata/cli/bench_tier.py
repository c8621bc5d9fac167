"""`kvstrata bench tier`: store and load throughput of a tier beside the bare client library, in one run.

Both do the same transfers in the same process, one after the other, several times; the bare library by its batch calls
with the best of 1, 4 and 16 in flight (and the best number of chunks per call), the tier on four threads as in an
engine. A store counts when its job has ended, a load when its bytes were verified and lie in primary. A ratio is the
median of the pairs.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvstrata.cli.bench_clients import WIDTHS, Bare, bare_client
from kvstrata.cli.bench_disk import parse_bytes
from kvstrata.config import MAX_SIZE, TierConfig, load_config, parse_size
from kvstrata.core.pages import affordable_tail_room, slot_bytes
from kvstrata.errors import ConfigError
from kvstrata.integrations.vllm.stack import TIER_THREADS, YIELDING_THREADS, tier_options
from kvstrata.primary.region import SharedRegion
from kvstrata.runtime.clock import SystemClock
from kvstrata.runtime.executor import Signal, ThreadExecutor
from kvstrata.tiers.base import Tier, TierContext
from kvstrata.tiers.registry import make_tier
from kvstrata.types import JobEnded, KeysDone, OffloadKey, TierJob, TierUsage, make_key

JOB_CHUNKS = 64
SLOT_ALIGNMENT = 4096
STUCK_S = 120.0
HEARTBEAT_S = 0.25
TRIES = 6
"""The machine may be slow or fast for a moment, and a way of the bare library must not be chosen, or passed over, for
that: the median of its tries counts, but for the first one, which meets a cold store."""


def bench_tier(
    name: Annotated[str, typer.Argument(help="Which tier: its name in the configuration, or a type such as redis.")],
    config: Annotated[Path | None, typer.Option(help="Configuration that has the tier (.json, .toml, .yaml).")] = None,
    url: Annotated[str, typer.Option(help="Where the store is, without a configuration.")] = "",
    sizes: Annotated[str, typer.Option(help="Sizes of chunks, separated by commas.")] = "256KiB,1MiB,4MiB",
    volume: Annotated[str, typer.Option(help="Bytes per pass.")] = "128MiB",
    pairs: Annotated[int, typer.Option(min=1, help="Passes of each; the median counts.")] = 9,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Measure a tier's stores and loads beside those of the client library that it is built on."""
    entry = find_tier(name, config, url)
    amount = parse_size(volume, "--volume") or 0
    rows = []
    for size in (parse_bytes(text) for text in sizes.split(",")):
        row = measure(entry, size, max(amount // size, 1), pairs)
        rows.append(row)
        typer.echo(describe(row))
    if as_json is not None:
        told = {"tier": entry.name, "type": entry.type, "volume": amount, "pairs": pairs, "rows": rows}
        as_json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def find_tier(name: str, config: Path | None, url: str) -> TierConfig:
    """The entry of a configuration, or a tier of this type at `url`."""
    if config is not None:
        found = [tier for tier in load_config(config).tiers if tier.name == name]
        if not found:
            raise ConfigError(f"{config}: there is no tier {name!r}")
        return found[0]
    return TierConfig(type=name, name=name, options={"url": url} if url else {})


def describe(row: dict[str, Any]) -> str:
    """One line for people."""
    parts = [f"{row['chunk_bytes']:>9} B"]
    for op in ("store", "load"):
        mine = f"{op} {row[op]['tier_gbps']:.3f} GB/s"
        beside = row[op].get("ratio")
        bare = row[op].get("bare_gbps")
        wide = f"{row[op].get('in_flight')} in flight, {row[op].get('chunks_per_call')} a call"
        parts.append(mine if beside is None else f"{mine}, bare {bare:.3f} ({wide}): {beside:.2f}")
    return "  ".join(parts)


def measure(entry: TierConfig, size: int, count: int, pairs: int) -> dict[str, Any]:
    """All passes with chunks of one size."""
    tier: Tier = make_tier(entry.type, name=entry.name, **tier_options(entry.options, entry.name))
    room = affordable_tail_room(tier.capabilities.tail_room, MAX_SIZE, [size], SLOT_ALIGNMENT)
    stride = slot_bytes(size, SLOT_ALIGNMENT, room)
    with SharedRegion(stride * count) as region:
        bench = Bench(tier, region, size, [at * stride for at in range(count)], room)
        try:
            return {"chunk_bytes": size, "chunks": count, **bench.run(pairs)}
        finally:
            bench.close()


@dataclass(slots=True)
class Best:
    """How many calls of the bare library in flight, and chunks per call, were fastest, per direction."""

    store: tuple[int, int] = (0, 0)
    load: tuple[int, int] = (0, 0)


class Bench:
    """One tier, which it opens, and the bare library beside it; chunks of `size` bytes lie at `offsets` of a region."""

    def __init__(self, tier: Tier, region: SharedRegion, size: int, offsets: Sequence[int], tail_room: int) -> None:
        self.size, self.count, self._offsets = size, len(offsets), offsets
        self._view = np.frombuffer(region.view, np.uint8)
        self._chunks = [region.view[at : at + size] for at in offsets]
        self._clock, self._signal = SystemClock(), Signal()
        self._executor = ThreadExecutor("bench-tier", TIER_THREADS)
        self._yielding = ThreadExecutor("bench-tier-yielding", YIELDING_THREADS, yielding=True)
        self._jobs = 0
        self._rng = np.random.default_rng(11)
        self.tier = tier
        self.tier.open(
            TierContext(
                region.view,
                b"bench-namespace!",
                1,
                self._clock,
                self._executor,
                self._signal.set,
                region.fileno(),
                tail_room,
                self._yielding,
            )
        )
        trouble = self.tier.self_test()
        if trouble is not None:
            self.close()
            raise ConfigError(trouble)
        self.bare: Bare | None = bare_client(self.tier)
        self._best = Best()

    def close(self) -> None:
        """Close both."""
        bare = getattr(self, "bare", None)
        if bare is not None:
            bare.close()
        self.tier.close(10.0)
        self._executor.close(1.0)
        self._yielding.close(1.0)
        self._chunks.clear()
        del self._view

    def run(self, pairs: int) -> dict[str, Any]:
        """Warm up, then the pairs; figures by direction."""
        stores: list[tuple[float, float]] = []
        loads: list[tuple[float, float]] = []
        for number in range(pairs + 1):
            mine, bare = self._pass(number)
            if number:  # the first one only warms both up
                stores.append((mine[0], bare[0]))
                loads.append((mine[1], bare[1]))
        found: dict[str, Any] = {}
        for op, figures, (width, batch) in (("store", stores, self._best.store), ("load", loads, self._best.load)):
            found[op] = {"tier_gbps": statistics.median(mine for mine, _ in figures)}
            if self.bare is not None:
                found[op] |= {
                    "bare_gbps": statistics.median(bare for _, bare in figures),
                    "ratio": statistics.median(mine / bare for mine, bare in figures),
                    "in_flight": width,
                    "chunks_per_call": batch,
                }
        return found

    def _pass(self, number: int) -> tuple[tuple[float, float], tuple[float, float]]:
        """GB/s of a store and a load, of the tier and of the bare library; which goes first alternates."""
        self._view[:] = self._rng.integers(0, 256, size=len(self._view), dtype=np.uint8)
        if number % 2:
            bare = self._bare_pass(number)
            return self._tier_pass(number), bare
        mine = self._tier_pass(number)
        return mine, self._bare_pass(number)

    def _tier_pass(self, number: int) -> tuple[float, float]:
        keys = [make_key(self._rng.bytes(32), 0) for _ in range(self.count)]
        stored = self._rate(lambda: self._jobs_of(keys, self.tier.submit_store))
        loaded = self._rate(lambda: self._jobs_of(keys, self.tier.submit_load))
        self.tier.remove(keys)
        self._wait_for(lambda: self._polled().bytes_held + self.tier.usage().bytes_reserved == 0)
        return stored, loaded

    def _polled(self) -> TierUsage:
        self.tier.poll()
        return self.tier.usage()

    def _jobs_of(self, keys: Sequence[OffloadKey], submit: Callable[[TierJob], None]) -> None:
        """Hand over all chunks in jobs and wait for the last end. Raises if one failed."""
        open_jobs: set[int] = set()
        for at in range(0, len(keys), JOB_CHUNKS):
            part = keys[at : at + JOB_CHUNKS]
            self._jobs += 1
            open_jobs.add(self._jobs)
            submit(TierJob(self._jobs, part, self._offsets[at : at + len(part)], [self.size] * len(part)))
        done = 0

        def ended() -> bool:
            nonlocal done
            for event in self.tier.poll():
                if isinstance(event, KeysDone):
                    done += len(event.done)
                elif isinstance(event, JobEnded):
                    open_jobs.discard(event.job_id)
            return not open_jobs

        self._wait_for(ended)
        if done != len(keys):
            raise ConfigError(f"{self.tier.name}: only {done} of {len(keys)} chunks worked; raise limit or timeout_s")

    def _wait_for(self, met: Callable[[], bool]) -> None:
        end = self._clock.monotonic() + STUCK_S
        while True:
            self._signal.clear()
            if met():
                return
            if self._clock.monotonic() > end:
                raise ConfigError(f"{self.tier.name}: nothing moved for {STUCK_S:.0f} s")
            self._signal.wait(HEARTBEAT_S)

    def _bare_pass(self, number: int) -> tuple[float, float]:
        """The first pass tries every number of calls in flight."""
        bare = self.bare
        if bare is None:
            return 0.0, 0.0
        names = [f"{number}-{index}" for index in range(self.count)]
        remove = functools.partial(bare.remove, names)
        if not self._best.store[0]:
            self._best.store = self._fastest(bare, functools.partial(bare.store, names, self._chunks), remove)
        stored = self._rate(functools.partial(bare.store, names, self._chunks, *self._best.store))
        if not self._best.load[0]:
            self._best.load = self._fastest(bare, functools.partial(self._bare_load, bare, names))
        loaded = self._rate(functools.partial(self._bare_load, bare, names, *self._best.load))
        remove()
        return stored, loaded

    def _fastest(
        self, bare: Bare, work: Callable[[int, int], None], undo: Callable[[], None] = lambda: None
    ) -> tuple[int, int]:
        """Calls in flight, and chunks per call, with the highest median rate in `TRIES` tries of each, in turn."""
        rates: dict[tuple[int, int], list[float]] = {}
        for way in TRIES * [(width, batch) for width in WIDTHS for batch in bare.batches]:
            rates.setdefault(way, []).append(self._rate(functools.partial(work, *way)))
            undo()
        return max(rates, key=lambda way: statistics.median(rates[way][1:]))

    def _bare_load(self, bare: Bare, names: Sequence[str], width: int, batch: int) -> None:
        if bare.load(names, width, batch) != self.size * self.count:
            raise ConfigError("the bare client did not give back what it was given")

    def _rate(self, work: Callable[[], None]) -> float:
        begun = self._clock.monotonic()
        work()
        return self.size * self.count / max(self._clock.monotonic() - begun, 1e-9) / 1e9
