"""Jobs that a tier has accepted, and the events that it owes for them, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstrata.tiers.common.tasks import Cancellable
from kvstrata.types import FailCause, JobEnded, KeysDone, KeysRemoved, OffloadKey, TierEvent


@dataclass(slots=True, eq=False)
class Job(Cancellable):
    """One accepted job: how many keys it still waits for, and what is to be reported of it."""

    job_id: int = 0
    remaining: int = 0
    done: list[int] = field(default_factory=list)
    failed: list[tuple[int, FailCause]] = field(default_factory=list)
    stored: dict[int, OffloadKey] = field(default_factory=dict)
    """Keys that this job wrote, by their index in it."""

    def chain(self) -> list[OffloadKey]:
        """What the job wrote, in token order."""
        return [self.stored[index] for index in sorted(self.stored)]


class Jobs:
    """The open jobs, and the queue of events.

    Events keep the order of what happened: keys of a job before its end, a key's arrival before its loss.
    """

    def __init__(self) -> None:
        self.open: dict[int, Job] = {}
        self.events: list[TierEvent] = []
        self.ended: list[Job] = []
        """Jobs that have ended and that the tier has not looked at."""
        self.quiet: dict[int, list[FailCause | None]] = {}
        """Results of jobs that nobody outside asked for, by (negative) job id."""
        self._changed: dict[int, Job] = {}

    def add(self, job_id: int, count: int) -> Job:
        """Accept a job of `count` keys; one without keys ends with the next `publish`."""
        job = Job(job_id=job_id, remaining=count)
        self.open[job_id] = job
        self._changed[job_id] = job
        return job

    def settle(self, job_id: int, index: int, cause: FailCause | None) -> None:
        """One key of a job has worked (None) or failed."""
        job = self.open[job_id]
        job.remaining -= 1
        if cause is None:
            job.done.append(index)
        else:
            job.failed.append((index, cause))
        self._changed[job_id] = job

    def publish(self) -> None:
        """Turn what has been settled into events; jobs with nothing left end."""
        changed = self._changed
        self._changed = {}
        for job in changed.values():
            if job.job_id < 0:
                self._note_quiet(job)
            elif job.done or job.failed:
                self.events.append(KeysDone(job.job_id, job.done, job.failed))
            job.done, job.failed = [], []
            if job.remaining == 0 and self.open.pop(job.job_id, None) is not None:
                self.ended.append(job)
                if job.job_id >= 0:
                    cause = FailCause.CANCELLED if job.cancelled else FailCause.IO_ERROR
                    self.events.append(JobEnded(job.job_id, cause))

    def _note_quiet(self, job: Job) -> None:
        results = self.quiet.setdefault(job.job_id, [])
        results += [None] * len(job.done) + [cause for _, cause in job.failed]

    def refuse(self, job_id: int) -> None:
        """A job that is not accepted ends at once."""
        if job_id < 0:
            self.quiet[job_id] = [FailCause.REFUSED]
        else:
            self.events.append(JobEnded(job_id, FailCause.REFUSED))

    def removed(self, keys: Sequence[OffloadKey]) -> None:
        """Keys are there no more."""
        if keys:
            self.publish()
            self.events.append(KeysRemoved(list(keys)))

    def take(self) -> list[TierEvent]:
        """The events so far."""
        events = self.events
        self.events = []
        return events
