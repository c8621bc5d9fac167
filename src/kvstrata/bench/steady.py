"""A steady mix at a full primary: what one chunk stored and one chunk loaded costs the engine's thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstrata.bench.machine import cpu_s, settle
from kvstrata.bench.tiers import IndexTier
from kvstrata.bench.workloads import CHUNK_BYTES, LAYOUTS, keys_of, prompt_hashes
from kvstrata.core.manager import TieringOffloadingManager
from kvstrata.core.messages import SubmitLoad, SubmitStore, TouchKeys
from kvstrata.core.settings import CoreConfig
from kvstrata.errors import StateError
from kvstrata.runtime.clock import SystemClock
from kvstrata.types import JobEnded, KeysDone, OffloadKey, TierJob


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
    store_cpu_us: float
    """The process's CPU time per chunk stored: what is left of `store_us` when nothing else runs on the machine."""
    load_cpu_us: float


class SteadyMix:
    """Admissions, stores, cascades, completions, evictions and loads in batches, at a full primary."""

    def __init__(self, slots: int, tiers: int, batch: int, policy: str, below: Sequence[IndexTier] = ()) -> None:
        self.layout = LAYOUTS["plain"]
        self.batch = batch
        self.tiers = [IndexTier(f"index{i}") for i in range(tiers)] + list(below)
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
                elif isinstance(command, TouchKeys):
                    self.tiers[command.tier].touch(command.keys)
                else:
                    raise StateError(f"a steady mix never asks for {command}")

    def _end(self, tier: int, job: TierJob) -> None:
        self.tiers[tier].add(job.keys)
        self.core.on_event(tier, KeysDone(job.job_id, range(len(job.keys))))
        self.core.on_event(tier, JobEnded(job.job_id))

    def store_batch(self, keys: list[OffloadKey]) -> str:
        """One request that stores a batch of new chunks; returns its id."""
        name = f"s{self.prompts}"
        self.core.advance(self.now)
        self.core.add_request(name, [keys])
        plan = self.core.prepare_store(name, [(0, i) for i in range(len(keys))])
        if plan is None or len(plan.slots) != len(keys):
            raise StateError("a full primary of evictable chunks takes every batch")
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
            raise StateError("what was just stored is a hit")
        self.core.complete_load(plan.job_id)
        self.carry()
        self.core.finish(name)

    def run(self, batches: int) -> StepRow:
        """Fill primary, then time `batches` stores, each followed by the load of an earlier batch."""
        clock = SystemClock()
        slots = self.core.residency.capacity_bytes // CHUNK_BYTES
        recent: list[list[OffloadKey]] = []
        for _ in range(-(-slots // self.batch)):
            recent.append(self.next_keys())
            self.store_batch(recent[-1])
        recent = recent[-min(64, len(recent) // 2) :]
        settle()
        stores, loads = [], []
        store_cpu = load_cpu = 0.0
        for i in range(batches):
            keys = self.next_keys()
            cpu, began = cpu_s(), clock.monotonic()
            self.store_batch(keys)
            stores.append(clock.monotonic() - began)
            store_cpu += cpu_s() - cpu
            recent[i % len(recent)] = keys
            again = recent[(i * 7 + 1) % len(recent)]
            cpu, began = cpu_s(), clock.monotonic()
            self.load_batch(again)
            loads.append(clock.monotonic() - began)
            load_cpu += cpu_s() - cpu
        return StepRow(
            slots,
            len(self.tiers),
            self.batch,
            batches,
            float(np.mean(stores)) / self.batch * 1e6,
            float(np.percentile(stores, 99)) * 1e3,
            float(np.mean(loads)) / self.batch * 1e6,
            float(np.percentile(loads, 99)) * 1e3,
            store_cpu / batches / self.batch * 1e6,
            load_cpu / batches / self.batch * 1e6,
        )

    def next_keys(self) -> list[OffloadKey]:
        """The keys of a prompt that nobody has seen, one batch of chunks."""
        self.prompts += 1
        self.now += 1e-3
        return keys_of(self.layout, prompt_hashes.__wrapped__(self.prompts, self.batch))[0]
