"""A real tier whose work is done at once but reported when simulated time says so.

`TimedTier` stands between the driver and a tier of the product. Every call goes through; what the tier reports of a
job is held back until the job would have ended on a device of the given rates. It also watches: which chunks were
asked for, which came, and which were damaged behind the tier's back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvstrata.sim.cost import Channel
from kvstrata.tiers.base import Clock, Tier, TierContext
from kvstrata.types import (
    I8,
    Capabilities,
    FailCause,
    JobEnded,
    KeysDone,
    KeysRemoved,
    Locality,
    Medium,
    OffloadKey,
    TierEvent,
    TierJob,
    TierUsage,
)

_PIECES = 4
"""The keys of a load are reported in at most this many pieces; those of a store, which nobody waits for, at its end."""


class Damageable(Protocol):
    """A tier that can spoil its own bytes, for the replay's proof that damage is seen."""

    def damage(self, key: OffloadKey) -> bool:
        """Alter payload bytes of `key` in place; False if it is not there."""
        ...


@dataclass(slots=True)
class Damage:
    """Which chunks were altered behind a tier's back, and what became of them. A rate of 0 alters nothing."""

    rate: float
    rng: np.random.Generator
    keys: set[OffloadKey] = field(default_factory=set)
    done: int = 0
    asked: int = 0
    """Reads of an altered chunk, each counted once."""

    def maybe(self, tier: Damageable, keys: Sequence[OffloadKey]) -> None:
        """Alter each of these newly stored chunks with the given probability."""
        if not self.rate or not keys:
            return
        for place in np.flatnonzero(self.rng.random(len(keys)) < self.rate).tolist():
            if keys[place] not in self.keys and tier.damage(keys[place]):
                self.keys.add(keys[place])
                self.done += 1


@dataclass(slots=True)
class _Job:
    """One job under way in simulated time."""

    job: TierJob
    load: bool
    due: list[float]
    """When each piece of the keys is through; the last one is the end of the job."""
    bounds: list[int]
    """Piece p is keys [bounds[p], bounds[p+1])."""
    done: set[int] = field(default_factory=set)
    failed: dict[int, FailCause] = field(default_factory=dict)
    ended: JobEnded | None = None
    told: int = 0


class TimedTier:
    """The proxy; satisfies `tiers.base.Tier`.

    `real_bytes` is the size of a key's chunk before the payload scale. `jitter` (0 to 1) stretches or shortens each
    job by up to that share, drawn from `rng`: another seed is another order of completions.
    """

    def __init__(
        self,
        tier: Tier,
        channel: Channel,
        clock: Clock,
        rng: np.random.Generator,
        damage: Damage,
        real_bytes: Callable[[OffloadKey], int],
        jitter: float = 0.0,
    ) -> None:
        self.tier = tier
        self.name: str = tier.name
        self.medium: Medium = tier.medium
        self.locality: Locality = tier.locality
        self.capabilities: Capabilities = tier.capabilities
        self.damage = damage
        self.corrupt = 0
        self.foreign = 0
        self.failed_loads = 0
        self.arrived: dict[OffloadKey, str] = {}
        """Chunks that came from this tier and were not used yet, with its name."""
        self.unused: list[OffloadKey] = []
        """Chunks that came, were not used, and came or were stored again."""
        self._channel = channel
        self._clock = clock
        self._rng = rng
        self._real_bytes = real_bytes
        self._jitter = jitter
        self._jobs: dict[int, _Job] = {}
        self._free = {True: [0.0] * channel.lanes, False: [0.0] * channel.lanes}
        self._other: list[TierEvent] = []
        self._just_left: set[OffloadKey] = set()  # altered chunks that the tier dropped: it may say why afterwards

    # time

    def next_due(self) -> float | None:
        """When the next piece of a job is through."""
        return min((job.due[job.told] for job in self._jobs.values() if job.told < len(job.due)), default=None)

    # what came

    def replaced(self, key: OffloadKey) -> None:
        """A new copy of `key` is in primary; if the last one from here was never used, note that."""
        if self.arrived.pop(key, None) is not None:
            self.unused.append(key)

    # Tier

    def open(self, context: TierContext) -> None:
        """Open the tier."""
        self.tier.open(context)

    def close(self, timeout: float = 5.0) -> None:
        """Close the tier; what it still reports is passed on at once."""
        self.tier.close(timeout)
        for job in self._jobs.values():
            job.due = [0.0] * len(job.due)

    def probe(self, keys: Sequence[OffloadKey]) -> I8 | int:
        """Presence, from the tier itself."""
        return self.tier.probe(keys)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Passed on."""
        self.tier.touch(keys)

    def submit_load(self, job: TierJob) -> None:
        """Passed on; the answer takes the time of a read."""
        self._schedule(job, load=True)
        self.tier.submit_load(job)

    def submit_store(self, job: TierJob) -> None:
        """Passed on; the answer takes the time of a write."""
        self._schedule(job, load=False)
        self.tier.submit_store(job)

    def cancel(self, job_id: int) -> None:
        """Passed on; what is left of the job is reported at once."""
        self.tier.cancel(job_id)
        job = self._jobs.get(job_id)
        if job is not None:
            now = self._clock.monotonic()
            job.due = [min(due, now) for due in job.due]

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Passed on."""
        self.damage.keys.difference_update(keys)
        self.tier.remove(keys)

    def purge(self, namespace: bytes) -> int:
        """Passed on."""
        return self.tier.purge(namespace)

    def flush(self) -> int:
        """Passed on."""
        return self.tier.flush()

    def usage(self) -> TierUsage:
        """What the tier holds."""
        return self.tier.usage()

    def drain(self, timeout: float) -> bool:
        """Passed on."""
        return self.tier.drain(timeout)

    def self_test(self) -> str | None:
        """Passed on."""
        return self.tier.self_test()

    def poll(self) -> list[TierEvent]:
        """What the tier reported and simulated time has reached."""
        self._just_left.clear()
        for event in self.tier.poll():
            self._take_in(event)
        out, self._other = self._other, []
        now = self._clock.monotonic()
        for job_id in list(self._jobs):
            self._tell(self._jobs[job_id], now, out)
        return out

    # inside

    def _schedule(self, job: TierJob, *, load: bool) -> None:
        """Give the job a lane and say when each piece of it is through."""
        channel = self._channel
        rate = (channel.read_bytes_per_s if load else channel.write_bytes_per_s) / channel.lanes
        lanes = self._free[load]
        lane = lanes.index(min(lanes))
        sizes = np.fromiter(map(self._real_bytes, job.keys), dtype=np.float64, count=len(job.keys))
        stretch = 1.0 + self._jitter * (2.0 * float(self._rng.random()) - 1.0)
        start = max(lanes[lane], self._clock.monotonic()) + channel.latency_s * stretch
        ends = start + np.cumsum(sizes) / rate * stretch
        count = len(job.keys)
        pieces = min(_PIECES if load else 1, count) or 1
        bounds = [count * piece // pieces for piece in range(pieces + 1)]
        due = [float(ends[bound - 1]) if bound else start for bound in bounds[1:]]
        lanes[lane] = due[-1]
        self._jobs[job.job_id] = _Job(job, load, due, bounds)

    def _take_in(self, event: TierEvent) -> None:
        """Note what the tier says of a job; everything else is passed on at once."""
        if isinstance(event, KeysRemoved):
            self._just_left |= self.damage.keys.intersection(event.keys)
            self.damage.keys.difference_update(event.keys)
        if not isinstance(event, KeysDone | JobEnded) or event.job_id not in self._jobs:
            self._other.append(event)
            return
        job = self._jobs[event.job_id]
        if isinstance(event, JobEnded):
            job.ended = event
            return
        job.done.update(event.done)
        job.failed.update(event.failed)
        if job.load:
            self._watch_load(job, event)
        else:
            self.damage.maybe(self.tier, [job.job.keys[index] for index in event.done])  # type: ignore[arg-type]

    def _watch_load(self, job: _Job, event: KeysDone) -> None:
        """Count what was read of altered chunks, and why reads failed."""
        altered = self.damage.keys
        for index, cause in event.failed:
            key = job.job.keys[index]
            self.failed_loads += 1
            self.corrupt += cause is FailCause.CORRUPT
            self.foreign += cause is FailCause.FOREIGN
            if cause is FailCause.CORRUPT and (key in altered or key in self._just_left):
                self.damage.asked += 1
                altered.discard(key)
                self._just_left.discard(key)
        if altered:
            for index in event.done:
                if job.job.keys[index] in altered:
                    self.damage.asked += 1

    def _tell(self, job: _Job, now: float, out: list[TierEvent]) -> None:
        """Append what is due of one job, and its end."""
        while job.told < len(job.due) and job.due[job.told] <= now:
            indices = range(job.bounds[job.told], job.bounds[job.told + 1])
            if job.ended is None and not all(index in job.done or index in job.failed for index in indices):
                return  # the tier itself is not that far
            done = [index for index in indices if index in job.done]
            failed = [(index, job.failed[index]) for index in indices if index in job.failed]
            if job.load:
                for key in (job.job.keys[index] for index in done):
                    self.replaced(key)
                    self.arrived[key] = self.name
            if done or failed:
                out.append(KeysDone(job.job.job_id, done, failed))
            job.told += 1
        if job.told >= len(job.due) and job.ended is not None:
            out.append(job.ended)
            del self._jobs[job.job.job_id]
