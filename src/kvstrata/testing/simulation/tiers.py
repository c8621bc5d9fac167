"""A tier of the simulation: takes virtual time for everything, and goes wrong in every way that its contract allows.

What it stores lies in a volatile part until it is flushed; a crash loses that part. Everything that is due happens in
`work`, in the order of its time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from kvstrata.testing.choices import Choices
from kvstrata.testing.clock import ManualClock
from kvstrata.testing.scripted import PendingJob, PendingProbe, ScriptedTier
from kvstrata.testing.simulation.content import Content
from kvstrata.testing.simulation.faults import Faults, weighted
from kvstrata.types import (
    Capabilities,
    FailCause,
    Flushed,
    KeysRemoved,
    Locality,
    Medium,
    OffloadKey,
    Presence,
    TierEvent,
    TierJob,
)

LOAD_FAULTS = weighted(
    {
        "late": 3, "lost": 2, "partial": 2, "failed": 2, "stall": 2, "cancelled": 2, "duplicate": 2,
        "corrupt": 6, "vanished": 7, "scribble": 8,
    }
)  # fmt: skip
"""The last three can strike nothing but loads, and loads are fewer than stores and probes."""
STORE_FAULTS = weighted(
    dict.fromkeys(("late", "lost", "partial", "full", "failed", "stall", "cancelled", "duplicate"), 1)
)
PROBE_FAULTS = weighted({"late": 1, "probe error": 2, "probe lost": 1, "probe unknown": 1, "stall": 1})
_PASSING = (FailCause.IO_ERROR, FailCause.TIMEOUT, FailCause.REFUSED)
_LATE_S = (3.0, 0.4, 12.0, 70.0, 6.0)


class SimTier(ScriptedTier):
    """See the module."""

    def __init__(
        self, name: str, choices: Choices, faults: Faults, content: Content, clock: ManualClock, *, steady: bool
    ) -> None:
        super().__init__(
            name=name,
            medium=choices.pick((Medium.NVME, Medium.CPU)),
            locality=choices.pick((Locality.LOCAL, Locality.SHARED)),
            capabilities=Capabilities(
                choices.below(2) == 0, max_batch=choices.pick((1024, 8, 3, 1)), shared=choices.below(4) == 3
            ),
            limit=None if steady else choices.pick((None, 20_000, 6_000)),
        )  # fmt: skip
        self.choices = choices
        self.faults = faults
        self.content = content
        self.clock = clock
        self.latency_s = choices.pick((0.002, 0.0, 0.02, 0.2)) if not steady else 0.001
        self.spread = choices.pick((1, 4, 16))
        self.obeys_cancel = choices.below(2) == 1
        self.durable: dict[OffloadKey, bytes] = {}
        self.stalled_until = 0.0
        self.epoch_of: Callable[[int], int] = lambda job_id: content.epoch
        """The epoch in which a job was decided."""
        self.epochs: dict[int, int] = {}
        """The same for each unfinished store."""
        self._hung: list[PendingJob] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.on_probe, self.on_load, self.on_store = self._take_probe, self._take_load, self._take_store

    def _note(self, method: str, keys: Sequence[OffloadKey] = (), job_id: int | None = None) -> None:
        """Nobody asks what was called: the trace has it."""

    # -- time

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Let something happen after a while."""
        self._count += 1
        heapq.heappush(self._due, (self.clock.monotonic() + seconds, self._count, what))

    def next_time(self) -> float | None:
        """When something is due."""
        return max(self._due[0][0], self.stalled_until) if self._due else None

    def work(self) -> int:
        """Everything that is due; how much it was."""
        now, done = self.clock.monotonic(), 0
        while self._due and self._due[0][0] <= now and self.stalled_until <= now:
            heapq.heappop(self._due)[2]()
            done += 1
        return done

    def _wait(self) -> float:
        return self.latency_s * (1 + self.choices.below(self.spread))

    def _strike(self, kind: str) -> None:
        self.faults.strike(kind)
        if kind == "stall":
            self.stalled_until = self.clock.monotonic() + self.choices.pick((0.5, 4.0, 11.0, 65.0))

    # -- probes

    def _take_probe(self, probe: PendingProbe) -> None:
        kind = self.faults.meets(self.choices, PROBE_FAULTS)
        if kind:
            self._strike(kind)
        match kind:
            case "probe lost":
                self.later(1e6, probe.finish)
            case "probe error":
                wait = self._wait() * self.choices.pick((1, 10))
                self.later(wait, lambda: probe.finish(error=FailCause.IO_ERROR))
            case "probe unknown":
                said = dict.fromkeys(self.choices.some(probe.keys), Presence.UNKNOWN)
                self.later(self._wait(), lambda: probe.finish(said))
            case "late":
                self.later(self.choices.pick(_LATE_S), probe.finish)
            case _:
                self.later(self._wait(), probe.finish)

    # -- jobs

    def _take_load(self, job: PendingJob) -> None:
        self._plan(job, self.faults.meets(self.choices, LOAD_FAULTS, times=4))

    def _take_store(self, job: PendingJob) -> None:
        self.epochs[job.job.job_id] = self.epoch_of(job.job.job_id)
        self._plan(job, self.faults.meets(self.choices, STORE_FAULTS))

    def _plan(self, job: PendingJob, kind: str) -> None:
        choices = self.choices
        if kind:
            self._strike(kind)
        wait, indices = self._wait(), list(range(len(job.job.keys)))
        bad = choices.some(indices) or indices if kind in ("partial", "corrupt", "full", "failed", "vanished") else []
        causes: dict[int, FailCause] = {}
        match kind:
            case "lost":
                wait = 1e6
            case "late":
                wait = choices.pick(_LATE_S)
                causes = {i: choices.pick(_PASSING) for i in (indices if choices.below(3) == 2 else ())}
            case "partial" | "failed":
                causes = {i: choices.pick(_PASSING) for i in bad}
            case "corrupt":
                causes = {i: choices.pick((FailCause.CORRUPT, FailCause.WRONG_SIZE, FailCause.FOREIGN)) for i in bad}
            case "full":
                causes = dict.fromkeys(bad, FailCause.NO_SPACE)
            case "vanished":
                self.later(0.0, lambda: self._vanish([job.job.keys[i] for i in bad]))
        if kind == "scribble" and job.is_load:
            self.later(0.0, lambda: self._scribble(job))
        end = FailCause.CANCELLED if kind == "cancelled" else FailCause.IO_ERROR
        if kind == "cancelled":
            self.later(wait, lambda: self._end(job, end))
            return
        if choices.below(2) and len(indices) > 1:  # word of a part of it comes first
            part = [i for i in choices.some(indices) if i not in causes]
            self.later(wait * 0.5, lambda: self._progress(job, part))
        self.later(wait, lambda: self._finish(job, causes, twice=kind == "duplicate"))

    def _open(self, job: PendingJob) -> bool:
        return job in (self.loads if job.is_load else self.stores)

    def _progress(self, job: PendingJob, part: Sequence[int]) -> None:
        if self._open(job):
            part = [i for i in part if not job.is_load or job.job.keys[i] in self.held]
            if part:
                job.progress(part)
                self._moved(job, part)

    def _finish(self, job: PendingJob, causes: dict[int, FailCause], *, twice: bool) -> None:
        if not self._open(job):
            return
        causes = {i: cause for i, cause in causes.items() if i not in job.reported}
        for i, cause in causes.items():
            if cause.is_content:
                self._spoil(job, i)
        before = set(job.done)
        job.finish(failed=causes)
        self._moved(job, [i for i in job.done if i not in before])
        if twice and self._events:
            self.emit(self._events[-1])
            self.emit(self._events[max(len(self._events) - 3, 0)])
        self.epochs.pop(job.job.job_id, None)

    def _end(self, job: PendingJob, cause: FailCause) -> None:
        if self._open(job):
            job.fail(cause)
            self.epochs.pop(job.job.job_id, None)

    def _moved(self, job: PendingJob, part: Iterable[int]) -> None:
        """Bytes were moved: stored ones must be what primary promised when the job was handed over."""
        if job.is_load:
            return
        epoch = self.epochs.get(job.job.job_id, self.content.epoch)
        for i in part:
            key = job.job.keys[i]
            fault = self.content.chunk_fault(key, self.held[key], epoch)
            if fault:
                raise AssertionError(f"{self.name}: a store read {fault} (job {job.job.job_id})")
        self._trim()

    def _spoil(self, job: PendingJob, i: int) -> None:
        """What a job that fails on its content leaves in its slot."""
        if self.region is not None:
            at, size = job.job.offsets[i], job.job.lengths[i]
            self.region[at : at + size] = b"\xee" * size

    def _scribble(self, job: PendingJob) -> None:
        """An unfinished load writes rubbish, where it may."""
        if self._open(job):
            for i in range(len(job.job.keys)):
                if i not in job.reported:
                    self._spoil(job, i)

    # -- what it holds

    def put_chunk(self, key: OffloadKey) -> None:
        """Somebody else has stored this chunk."""
        if key not in self.held:
            self.held[key] = self.content.chunk(key)
            self._trim()

    def _trim(self) -> None:
        """The limit is hard: the oldest go."""
        limit = self._limit
        if limit is not None and (held := self.usage().bytes_held) > limit:
            gone = []
            for key in list(self.held):
                if held <= limit:
                    break
                held -= len(self.held.pop(key))
                gone.append(key)
            self.emit(KeysRemoved(gone))

    def change_limit(self, limit: int | None) -> None:
        """The operator gives it more or less."""
        self._limit = limit
        self._trim()

    def _vanish(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            self.held.pop(key, None)

    def remove_some(self) -> int:
        """Keys are evicted, and that is told, or deleted behind its back."""
        gone = self.choices.some(self.held)
        if self.choices.below(2):
            self.lose_keys(gone)
        else:
            self._vanish(gone)
        return len(gone)

    def flush(self) -> int:
        """What is held becomes durable."""
        self.durable = dict(self.held)
        return super().flush()

    def purge(self, namespace: bytes) -> int:
        """Drop everything; durable after a while."""
        self._note("purge")
        self.held.clear()
        self.durable.clear()
        self._tickets += 1
        ticket = self._tickets
        ok = not self.faults.rate or self.choices.below(3) != 2
        self.later(self._wait(), lambda: self.emit(Flushed(ticket, ok)))
        return ticket

    def crash(self, *, silent: bool) -> None:
        """It dies and comes back at once: what was not durable is gone, and every job. `silent`: nobody is told."""
        lost = [key for key in self.held if key not in self.durable]
        self.held = dict(self.durable)
        for job in [*self.loads, *self.stores]:
            if silent and self.choices.below(2):
                job.lose()
                self._hung.append(job)
            else:
                self._end(job, FailCause.IO_ERROR)
        for probe in list(self.probes):
            probe.finish(error=FailCause.IO_ERROR)
        if not silent:
            self.emit(KeysRemoved(lost))

    def forget_process(self) -> None:
        """The process that used it is gone: nobody hears of its jobs, and a new one will open it."""
        self.loads.clear()
        self.stores.clear()
        self.probes.clear()
        self._due.clear()
        self._events.clear()
        self._hung.clear()
        self.epochs.clear()
        self.stalled_until = 0.0

    def heal(self) -> None:
        """From now on nothing goes wrong; what hangs ends."""
        self.faults = Faults(0, frozenset())
        self.stalled_until = 0.0
        for job in self._hung:
            job.fail()
        self._hung.clear()
        self._due = [(min(at, self.clock.monotonic() + 0.01), n, what) for at, n, what in self._due]
        heapq.heapify(self._due)


def submitted(job: TierJob) -> int:
    """Bytes that a job moves."""
    return sum(job.lengths)


def names_of(events: Iterable[TierEvent]) -> list[str]:
    """Types of events, for the trace."""
    return [type(event).__name__ for event in events]
