"""Tiers that are only an index: no bytes move, so that what is timed is kvstrata and not the tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvstrata.tiers.base import Executor, TierContext, no_wake
from kvstrata.types import (
    I8,
    Capabilities,
    Flushed,
    JobEnded,
    KeysDone,
    Locality,
    Medium,
    OffloadKey,
    Presence,
    ProbeDone,
    TierEvent,
    TierJob,
    TierUsage,
    Wake,
)

LATE_PROBE_S = 0.001
"""What a probe that is answered late says it costs: every tier of this package that answers late names a round trip."""


class IndexTier:
    """Knows which keys it has and pretends to move them.

    `sync_probe` says whether a probe is answered by its call, as the disk tier does, or by an event of the next poll.
    Jobs end at the next poll, or, while `held`, not before `release`. With an `executor` everything that is not
    answered by the call is done there.
    """

    medium = Medium.CPU
    locality = Locality.LOCAL

    def __init__(self, name: str, *, sync_probe: bool = True, executor: Executor | None = None) -> None:
        self.name = name
        cost_s = 0.0 if sync_probe else LATE_PROBE_S
        self.capabilities = Capabilities(sync_probe=sync_probe, probe_cost_s=cost_s, max_batch=1 << 20)
        self.index: set[OffloadKey] = set()
        self.held = False
        """Jobs are not ended, as by a tier that is slow."""
        self._executor = executor
        self._kept: list[TierJob] = []
        self._events: list[TierEvent] = []
        self._tickets = 0
        self._wake: Wake = no_wake

    def add(self, keys: Iterable[OffloadKey]) -> None:
        """Have these keys."""
        self.index.update(keys)

    def open(self, context: TierContext) -> None:
        """Nothing to acquire."""
        self._wake = context.wake

    def close(self, timeout: float = 5.0) -> None:
        """Nothing to release."""

    def probe(self, keys: Sequence[OffloadKey]) -> I8 | int:
        """Presence of each key, or a ticket."""
        if self.capabilities.sync_probe:
            return self._presence(keys)
        self._tickets += 1
        ticket = self._tickets
        self._do(lambda: self._events.append(ProbeDone(ticket, self._presence(keys))))
        return ticket

    def _presence(self, keys: Sequence[OffloadKey]) -> I8:
        held = np.fromiter(map(self.index.__contains__, keys), np.int8, len(keys))
        held *= Presence.PRESENT
        return held

    def _do(self, work: Callable[[], None]) -> None:
        if self._executor is None:
            work()
        else:
            self._executor.submit(lambda: self._work(work))

    def _work(self, work: Callable[[], None]) -> None:
        work()
        self._wake()

    def submit_load(self, job: TierJob) -> None:
        """End the job, now or when released."""
        if self.held:
            self._kept.append(job)
        else:
            self._do(lambda: self._end(job))

    def submit_store(self, job: TierJob) -> None:
        """Have the job's keys, and end it."""
        self.add(job.keys)
        self.submit_load(job)

    def release(self) -> None:
        """End what was held."""
        self.held = False
        kept, self._kept = self._kept, []
        for job in kept:
            self._do(lambda job=job: self._end(job))  # type: ignore[misc]

    def _end(self, job: TierJob) -> None:
        self._events += (KeysDone(job.job_id, range(len(job.keys))), JobEnded(job.job_id))

    def poll(self) -> list[TierEvent]:
        """What happened since the last call."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    def cancel(self, job_id: int) -> None:
        """Jobs end by themselves."""

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Drop keys."""
        self.index.difference_update(keys)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """There is no order."""

    def purge(self, namespace: bytes) -> int:
        """Drop everything."""
        self.index.clear()
        return self.flush()

    def flush(self) -> int:
        """Nothing is ever durable, nor waited for."""
        self._tickets += 1
        self._events.append(Flushed(self._tickets))
        return self._tickets

    def usage(self) -> TierUsage:
        """Keys only."""
        return TierUsage(0, 0, None, len(self.index))

    def drain(self, timeout: float) -> bool:
        """Wait for the executor."""
        return self._executor is None or self._executor.wait_idle(timeout)

    def self_test(self) -> str | None:
        """An index cannot be wrong."""
        return None
