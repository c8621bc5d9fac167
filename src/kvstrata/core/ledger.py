"""The one ledger of jobs in flight: stores, loads, promotions and cascades share one id space and one life cycle.

Each accepted job ends exactly once. A job carries the generation it was made in, so that what completes after a reset
is dropped by rule and not by luck.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstrata.core.arrays import all_are, index_array, where
from kvstrata.core.messages import ALL_TIERS, TierFilter
from kvstrata.errors import InternalError
from kvstrata.types import I64, Bool, JobKind, OffloadKey

_NO_MARKS: Bool = np.zeros(0, np.bool_)
_ALL_OPEN: Bool = np.ones(256, np.bool_)
"""The marks of a new job are a copy of this, which costs a third of making them."""


@dataclass(slots=True, eq=False)
class Job:
    """One transfer in flight. `open` marks the keys that have not been reported yet; jobs of tiers only."""

    job_id: int
    kind: JobKind
    generation: int
    slots: I64
    keys: Sequence[OffloadKey]
    request_id: str
    tier: int = -1
    started: float = 0.0
    progressed: float = 0.0
    open: Bool = field(default_factory=lambda: _NO_MARKS)
    reports_left: int = 1
    ok: bool = True
    handed: bool = False
    """Its tier has been told of it: until then its bounds do not run."""
    overdue: bool = False
    cancelled: bool = False
    store_tiers: TierFilter = ALL_TIERS
    """Stores: where the chunks may go after they are published."""
    claims: list[tuple[OffloadKey, TierFilter]] = field(default_factory=list)
    """Stores: keys that other requests were going to store too, and where those may go."""
    unpinned: Bool = field(default_factory=lambda: _NO_MARKS)
    """Cascades: marks the keys whose slots are not pinned by the job any more."""
    quarantined: list[int] = field(default_factory=list)
    """Slots that this job may still touch and that are returned when it has really ended."""

    def report(self, index: Iterable[int]) -> I64:
        """These keys are reported; returns the indices of those that had not been. Others are passed over."""
        if index == range(len(self.open)) and all_are(self.open, 1):  # all of them at once
            self.open.fill(False)
            return np.arange(len(self.open))
        named = index_array(index)
        if len(named) != len(self.open) or not isinstance(index, range):
            named = named[(named >= 0) & (named < len(self.open))]
        fresh = named[self.open[named]]
        self.open[fresh] = False
        return fresh

    def still_open(self) -> I64:
        """Indices of the keys that have not been reported."""
        return where(self.open)

    def is_open(self, index: int) -> bool:
        """Whether this key has not been reported."""
        return 0 <= index < len(self.open) and bool(self.open[index])

    def keys_at(self, index: I64) -> Sequence[OffloadKey]:
        """The keys with these indices, in that order; all of them for as many indices as there are keys."""
        return self.keys if len(index) == len(self.keys) else [self.keys[i] for i in index.tolist()]

    def slots_at(self, index: I64) -> I64:
        """Their slots."""
        return self.slots if len(index) == len(self.slots) else self.slots[index]


class Ledger:
    """All unfinished jobs by id, and the deadlines of those that a tier holds."""

    __slots__ = ("_deadlines", "_idle_s", "_jobs", "_next_id", "_total_s")

    def __init__(self, idle_s: float, total_s: float) -> None:
        self._jobs: dict[int, Job] = {}
        self._next_id = 1
        self._idle_s = idle_s
        self._total_s = total_s
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def get(self, job_id: int) -> Job | None:
        """The unfinished job, or None if it has ended or never was."""
        return self._jobs.get(job_id)

    def accept(
        self,
        kind: JobKind,
        generation: int,
        slots: I64,
        keys: Sequence[OffloadKey],
        request_id: str,
        now: float,
        *,
        tier: int = -1,
        reports: int = 1,
    ) -> Job:
        """Enter a new job. Jobs of tiers get deadlines; copies to and from the accelerator do not."""
        job = Job(self._next_id, kind, generation, slots, keys, request_id, tier, now, now, reports_left=reports)
        self._next_id += 1
        self._jobs[job.job_id] = job
        if tier >= 0:
            job.open = _ALL_OPEN[: len(keys)].copy() if len(keys) <= len(_ALL_OPEN) else np.ones(len(keys), np.bool_)
            if kind is JobKind.CASCADE:
                job.unpinned = np.zeros(len(keys), np.bool_)
            heapq.heappush(self._deadlines, (self._due(job), job.job_id))
        return job

    def hand_over(self, job_id: int, now: float) -> None:
        """A tier gets the job: from now on its bounds run."""
        job = self._jobs.get(job_id)
        if job is not None:
            job.handed, job.started, job.progressed = True, now, now

    def end(self, job: Job) -> None:
        """Strike out a job; ending it twice is a bug."""
        if self._jobs.pop(job.job_id, None) is None:
            raise InternalError(f"job {job.job_id} ended twice")

    def deadline(self) -> float | None:
        """When the next unfinished job may become overdue (a lower bound), or None."""
        while self._deadlines:
            job = self._jobs.get(self._deadlines[0][1])
            if job is not None and not job.overdue:
                return self._deadlines[0][0]
            heapq.heappop(self._deadlines)
        return None

    def overdue(self, now: float) -> list[Job]:
        """Jobs that passed a bound since the last call; each is returned once and marked."""
        late: list[Job] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, job_id = heapq.heappop(self._deadlines)
            job = self._jobs.get(job_id)
            if job is None or job.overdue:
                continue
            due = self._due(job) if job.handed else now + min(self._idle_s, self._total_s)
            if due <= now:
                job.overdue = True
                late.append(job)
            else:
                heapq.heappush(self._deadlines, (due, job_id))
        return late

    def oldest(self, now: float) -> float:
        """Age in seconds of the oldest unfinished job; 0 without one."""
        first = next(iter(self._jobs.values()), None)  # time does not go back, so it was accepted first
        return 0.0 if first is None else now - first.started

    def _due(self, job: Job) -> float:
        return min(job.progressed + self._idle_s, job.started + self._total_s)
