"""What is in progress: jobs, and the operations on disk that they, reclaim, flush and purge have come to.

What is made for every job or batch is a `Struct`: it is made in a tenth of the time of a dataclass. An empty list or
set as a default is a new one for each. They are in no circle, so the garbage collector need not know of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from kvstrata.tiers.disk.format import BLOCK, BatchKind, Realm, Words
from kvstrata.tiers.disk.index import Index
from kvstrata.tiers.disk.planning import BatchPlan
from kvstrata.tiers.disk.segment import Segment
from kvstrata.types import I64, KEY_BYTES, FailCause, JobEnded, KeysDone, OffloadKey, TierEvent, TierJob


class Job(msgspec.Struct, eq=False, gc=False):
    """One accepted job; `left` keys are not yet reported."""

    job: TierJob
    left: int
    tasks: list[int] = []
    """All that it has come to, also those that have ended."""
    cancelled: bool = False


class Jobs:
    """The unfinished jobs; turns results into events, and the last result of a job into its end."""

    def __init__(self, events: list[TierEvent]) -> None:
        self._events = events
        self.open: dict[int, Job] = {}

    def begin(self, job: TierJob) -> Job:
        """Accept a job."""
        entry = Job(job, len(job.keys))
        self.open[job.job_id] = entry
        if not entry.left:
            self._end(entry)
        return entry

    def report(self, job: Job, done: Sequence[int] = (), failed: Sequence[tuple[int, FailCause]] = ()) -> None:
        """Some keys of the job worked, or did not."""
        count = len(done) + len(failed)
        if not count:
            return
        self._events.append(KeysDone(job.job.job_id, done, failed))
        job.left -= count
        if not job.left:
            self._end(job)

    def _end(self, job: Job) -> None:
        del self.open[job.job.job_id]
        self._events.append(JobEnded(job.job.job_id))


class WriteOp(msgspec.Struct, eq=False, gc=False):
    """One batch on its way: chunks of a job, or a log entry (then `job` is None)."""

    kind: BatchKind
    realm: Realm
    packed: bytes = b""
    """The keys, concatenated."""
    job: Job | None = None
    plan: BatchPlan | None = None
    rows: I64 | None = None
    """The rows that are reserved for its records."""
    lengths: list[int] = []
    """A single one if all are equal."""
    memory: list[int] = []
    """A single one if the slots follow each other."""
    digests: bytes = b""
    tickets: Sequence[int] = ()
    dead: frozenset[OffloadKey] = frozenset()
    """Keys that were removed or purged while the batch was on its way; their rows are gone."""
    span: int = BLOCK
    """Bytes from this header block to the next."""
    segment: Segment | None = None
    start: int = 0

    @property
    def keys(self) -> list[OffloadKey]:
        """Of its records."""
        return [self.packed[at : at + KEY_BYTES] for at in range(0, len(self.packed), KEY_BYTES)]


class ReadOp(msgspec.Struct, eq=False, gc=False):
    """One unit of a load; `places` tell which version of each key was read."""

    job: Job
    picks: Sequence[int]
    segment: Segment
    places: Sequence[int]


@dataclass(slots=True, eq=False)
class MoveOp:
    """Hot records on their way out of a segment that is reclaimed."""

    index: Index
    words: Words
    source: Segment
    old: I64
    target: Segment
    start: int
    new: I64


@dataclass(slots=True, eq=False)
class PrepareOp:
    """A segment that begins a new life."""

    segment: Segment
    created: bool


@dataclass(slots=True, eq=False)
class SyncOp:
    """Segments that become durable, and who waits for that."""

    segments: list[Segment]
    tickets: list[int] = field(default_factory=list)
    then_checkpoint: bool = False


@dataclass(slots=True, eq=False)
class TestOp:
    """A self test; `outcome` is None while it runs, and empty if all is well."""

    outcome: str | None = None


Operation: TypeAlias = WriteOp | ReadOp | MoveOp | PrepareOp | SyncOp | TestOp
