"""What the core keeps per resident chunk and per waiting key, counted by `tracemalloc`."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

from kvstrata.bench.resolve import Prepared, waiting_config
from kvstrata.bench.steady import SteadyMix
from kvstrata.bench.tiers import IndexTier
from kvstrata.bench.workloads import Workload
from kvstrata.core.manager import TieringOffloadingManager
from kvstrata.core.messages import Command
from kvstrata.errors import StateError

BATCH = 64


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes per chunk or key; `what` says of which kind, `count` how many were there."""

    what: str
    count: int
    bytes_each: float


def _grown(work: Callable[[], object]) -> int:
    """Bytes that are still held after `work`, more than before."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = work()
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
        del kept
    finally:
        tracemalloc.stop()
    return held


def resident(policy: str, slots: int) -> MemoryRow:
    """A primary that is full and has evicted as much again, its keys included; no tier below it."""

    def fill() -> SteadyMix:
        mix = SteadyMix(slots, 0, BATCH, policy)
        for _ in range(2 * slots // BATCH):
            mix.store_batch(mix.next_keys())
        return mix

    return MemoryRow(f"resident chunk, {policy}", slots, _grown(fill) / slots)


def waiting(requests: int, tokens: int, *, sync_probe: bool) -> MemoryRow:
    """Requests that wait: for chunks that are on their way, or, where probes are not answered at once, for these.

    The key objects are the engine's. What slots and their index take counts with the resident chunks.
    """
    prepared = Prepared(Workload("plain", "all", requests, tokens))
    tier = IndexTier("index", sync_probe=sync_probe)
    tier.index = prepared.present
    count = requests * prepared.workload.keys_per_request
    core = TieringOffloadingManager(prepared.workload.layout, waiting_config(count), [tier])

    def wait() -> list[Command]:
        for number, keys in enumerate(prepared.keys):
            core.add_request(str(number), keys)
            core.poll(str(number), 0, tokens)
        return core.take_commands()

    grown = _grown(wait) - _of_primary(core)
    if core.statistics().waiting != requests:
        raise StateError("a request that was to wait does not")
    return MemoryRow("waiting key, on its way" if sync_probe else "waiting key, probed", count, grown / count)


def _of_primary(core: TieringOffloadingManager) -> int:
    """Bytes of the slots' columns and of the index of keys, as far as there are slots."""
    residency = core.residency
    columns = sum(column.nbytes for column in residency.table.columns())
    numbers = sum(map(sys.getsizeof, residency.index.slots.values()))
    return columns + sys.getsizeof(residency.index.slots) + sys.getsizeof(residency.index.keys) + numbers


def measure(slots: int) -> list[MemoryRow]:
    """All rows."""
    return [
        resident("lru", slots),
        resident("s3fifo", slots),
        waiting(20, 32_768, sync_probe=False),
        waiting(20, 32_768, sync_probe=True),
    ]
