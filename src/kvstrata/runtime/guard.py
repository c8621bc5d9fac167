"""The wall between a tier and the rest: whatever a tier raises or answers, the caller gets a legal answer.

Two kinds of misbehaviour are recorded: an *exception* (a method raised; its refusing answer is given instead) and a
*violation* (an answer that breaks the tier contract; it is dropped or replaced). Neither reaches the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from kvstrata.tiers.base import Tier, TierContext, no_wake
from kvstrata.types import (
    I8,
    Capabilities,
    FailCause,
    Flushed,
    JobEnded,
    KeysDone,
    KeysRemoved,
    Locality,
    Medium,
    OffloadKey,
    Presence,
    ProbeDone,
    TierEvent,
    TierJob,
    TierUsage,
)

T = TypeVar("T")

MAX_FAULTS = 32
"""Most faults that are kept with their text; all are counted."""

_NO_USAGE = TierUsage(bytes_held=0, bytes_reserved=0, bytes_limit=None, keys=0)


@dataclass(frozen=True, slots=True)
class Fault:
    """One misbehaviour of a tier: the method it happened in, and what happened."""

    method: str
    text: str
    violation: bool = False
    """True: an answer broke the contract. False: the method raised."""


@dataclass(frozen=True, slots=True)
class GuardStatistics:
    """What a guard has kept from the caller so far."""

    exceptions: int
    violations: int
    jobs_open: int
    probes_open: int
    faults: tuple[Fault, ...] = ()


class GuardedTier:
    """A tier, seen through a wall that no exception and no illegal answer passes.

    Tickets are given out by the guard, so that a tier that repeats one confuses nobody. Calls come from one thread at
    a time, as for every tier.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.name: str = tier.name
        self.medium: Medium = tier.medium
        self.locality: Locality = tier.locality
        self.capabilities: Capabilities = tier.capabilities
        self.open_error: Exception | None = None
        """What `open` raised; the tier refuses everything until an `open` works."""
        self.namespace = b""
        """The namespace that the tier was opened with."""
        self._opened = False
        self._wake: Callable[[], None] = no_wake
        self._jobs: dict[int, bytearray] = {}  # accepted and not ended: a byte per key, 1 once it was reported
        self._probes: dict[int, tuple[int, int]] = {}  # the tier's ticket -> ours, number of keys
        self._flushes: dict[int, int] = {}  # the tier's ticket -> ours
        self._tickets = 0
        self._own: list[TierEvent] = []  # events that the guard makes in the tier's stead
        self._usage = _NO_USAGE
        self._faults: deque[Fault] = deque(maxlen=MAX_FAULTS)
        self._exceptions = 0
        self._violations = 0

    # life cycle

    def open(self, context: TierContext) -> None:
        """Open the tier; a failure is kept in `open_error` and leaves a tier that refuses everything."""
        self._wake = context.wake
        self.namespace = context.namespace
        self.open_error = None
        try:
            self.tier.open(context)
        except Exception as error:
            self.open_error = error
            self._note_exception("open", error)
        self._opened = self.open_error is None

    def close(self, timeout: float = 5.0) -> None:
        """Close the tier. Jobs that it left unfinished stay open: their slots are never used again."""
        self._call("close", None, lambda: self.tier.close(timeout))

    def drain(self, timeout: float) -> bool:
        """Wait until no job is unfinished; False after `timeout` seconds, or if the tier failed."""
        return bool(self._call("drain", False, lambda: self.tier.drain(timeout)))

    def self_test(self) -> str | None:
        """None if the tier reads back what it writes, else one line."""
        if self.open_error is not None:
            return f"{self.name} did not open: {self.open_error}"
        try:
            return self.tier.self_test()
        except Exception as error:
            self._note_exception("self_test", error)
            return f"{self.name} failed its self-test: {_text(error)}"

    # asking

    def probe(self, keys: Sequence[OffloadKey]) -> I8 | int:
        """Presence of each key, or a ticket. A tier that fails gets a ticket too, answered with its error."""
        if not self._opened:
            return np.zeros(len(keys), dtype=np.int8)
        try:
            answer = self.tier.probe(keys)
        except Exception as error:
            self._note_exception("probe", error)
            return self._failed_probe(len(keys))
        if isinstance(answer, int | np.integer):
            return self._outside_probe(int(answer), len(keys))
        if not _legal_answers(answer, len(keys)):
            self._note_violation("probe", f"illegal answers for {len(keys)} keys")
            return self._failed_probe(len(keys))
        return answer

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Mark as recently used."""
        self._call("touch", None, lambda: self.tier.touch(keys))

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Drop keys, best effort."""
        self._call("remove", None, lambda: self.tier.remove(keys))

    def usage(self) -> TierUsage:
        """What the tier holds; its last true answer when it fails to say."""
        usage = self._call("usage", self._usage, self.tier.usage)
        if isinstance(usage, TierUsage):
            self._usage = usage
        else:
            self._note_violation("usage", f"answered a {type(usage).__name__}")
        return self._usage

    # jobs

    def submit_load(self, job: TierJob) -> None:
        """Hand over a read. If the tier raises, it has not accepted the job, which fails as REFUSED."""
        self._submit("submit_load", job, self.tier.submit_load)

    def submit_store(self, job: TierJob) -> None:
        """Hand over a write. If the tier raises, it has not accepted the job, which fails as REFUSED."""
        self._submit("submit_store", job, self.tier.submit_store)

    def cancel(self, job_id: int) -> None:
        """Ask for the end of a job; it still ends by its `JobEnded`."""
        if job_id in self._jobs:
            self._call("cancel", None, lambda: self.tier.cancel(job_id))

    def purge(self, namespace: bytes) -> int:
        """Drop a namespace; the ticket is answered by `Flushed`, not ok if the tier failed."""
        return self._flush_ticket("purge", lambda: self.tier.purge(namespace))

    def flush(self) -> int:
        """Make what was stored durable; the ticket is answered by `Flushed`, not ok if the tier failed."""
        return self._flush_ticket("flush", self.tier.flush)

    def poll(self) -> list[TierEvent]:
        """Everything legal that happened since the last call, in order."""
        try:
            reported = self.tier.poll()
        except Exception as error:
            self._note_exception("poll", error)
            reported = []
        events = self._accept_all(reported) if reported else []
        # After the tier's own: a tier may have reported some keys of a job before it refused the rest.
        if self._own:
            events += self._own
            self._own = []
        return events

    @property
    def busy(self) -> bool:
        """Whether the tier owes an answer: a job, a probe or a flush is unfinished."""
        return bool(self._jobs or self._probes or self._flushes or self._own)

    def has_job(self, job_id: int) -> bool:
        """Whether the tier has this job, and has not ended it."""
        return job_id in self._jobs

    def statistics(self) -> GuardStatistics:
        """A snapshot of the counters, with the last faults."""
        return GuardStatistics(
            exceptions=self._exceptions,
            violations=self._violations,
            jobs_open=len(self._jobs),
            probes_open=len(self._probes),
            faults=tuple(self._faults),
        )

    # refusing answers

    def _call(self, method: str, otherwise: T, call: Callable[[], T]) -> T:
        """The result of `call`, or `otherwise` if it raises."""
        try:
            return call()
        except Exception as error:
            self._note_exception(method, error)
            return otherwise

    def _submit(self, method: str, job: TierJob, submit: Callable[[TierJob], None]) -> None:
        self._jobs[job.job_id] = bytearray(len(job.keys))
        if self._opened:
            try:
                submit(job)
                return
            except Exception as error:
                self._note_exception(method, error)
        del self._jobs[job.job_id]
        failed = tuple((index, FailCause.REFUSED) for index in range(len(job.keys)))
        self._emit(KeysDone(job.job_id, failed=failed), JobEnded(job.job_id, FailCause.REFUSED))

    def _failed_probe(self, count: int) -> int:
        ticket = self._next_ticket()
        self._emit(ProbeDone(ticket, np.zeros(count, dtype=np.int8), FailCause.IO_ERROR))
        return ticket

    def _outside_probe(self, theirs: int, count: int) -> int:
        if theirs in self._probes:
            self._note_violation("probe", f"ticket {theirs} is still unanswered")
            return self._failed_probe(count)
        ours = self._next_ticket()
        self._probes[theirs] = (ours, count)
        return ours

    def _flush_ticket(self, method: str, call: Callable[[], int]) -> int:
        ours = self._next_ticket()
        theirs = self._call(method, None, call) if self._opened else None
        if isinstance(theirs, int | np.integer) and int(theirs) not in self._flushes:
            self._flushes[int(theirs)] = ours
        else:
            if theirs is not None:
                self._note_violation(method, f"ticket {theirs!r} is no number or still unanswered")
            self._emit(Flushed(ours, ok=False))
        return ours

    def _next_ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def _emit(self, *events: TierEvent) -> None:
        self._own += events
        self._wake()

    # the contract of events

    def _accept_all(self, reported: Iterable[TierEvent]) -> list[TierEvent]:
        events: list[TierEvent] = []
        if not isinstance(reported, list | tuple):
            self._note_violation("poll", f"answered a {type(reported).__name__}")
            return events
        for event in reported:
            try:
                accepted = self._accept(event)
            except Exception as error:  # fields that are not what their type says
                self._note_violation("poll", f"malformed event: {_text(error)}")
                continue
            if accepted is not None:
                events.append(accepted)
        return events

    def _accept(self, event: TierEvent) -> TierEvent | None:
        """The event as the caller may see it, or None."""
        match event:
            case KeysDone():
                return self._accept_keys(event)
            case JobEnded():
                if self._jobs.pop(event.job_id, None) is not None:
                    return event
                self._note_violation("poll", f"job {event.job_id} ended, but is not open")
            case ProbeDone():
                return self._accept_probe(event)
            case Flushed():
                ours = self._flushes.pop(event.ticket, None)
                if ours is not None:
                    return Flushed(ours, event.ok)
                self._note_violation("poll", f"unknown flush {event.ticket}")
            case KeysRemoved():
                return event
            case _:
                self._note_violation("poll", f"a {type(event).__name__} is no event")
        return None

    def _accept_keys(self, event: KeysDone) -> TierEvent | None:
        reported = self._jobs.get(event.job_id)
        if reported is None:
            self._note_violation("poll", f"keys of job {event.job_id}, which is not open")
            return None
        if isinstance(event.done, range) and not event.failed and _all_first(reported, event.done):
            return event
        done = [index for index in event.done if _first_report(reported, index)]
        failed = [(index, FailCause(cause)) for index, cause in event.failed if _first_report(reported, index)]
        dropped = len(event.done) + len(event.failed) - len(done) - len(failed)
        if not dropped:
            return event
        self._note_violation("poll", f"job {event.job_id}: {dropped} key reports repeated or out of range")
        return KeysDone(event.job_id, done, failed) if done or failed else None

    def _accept_probe(self, event: ProbeDone) -> TierEvent | None:
        known = self._probes.pop(event.ticket, None)
        if known is None:
            self._note_violation("poll", f"unknown probe {event.ticket}")
            return None
        ours, count = known
        if _legal_answers(event.answers, count):
            return ProbeDone(ours, event.answers, event.error)
        self._note_violation("poll", f"illegal answers for {count} keys")
        return ProbeDone(ours, np.zeros(count, dtype=np.int8), FailCause.IO_ERROR)

    # records

    def _note_exception(self, method: str, error: Exception) -> None:
        self._exceptions += 1
        self._faults.append(Fault(method, _text(error)))

    def _note_violation(self, method: str, text: str) -> None:
        self._violations += 1
        self._faults.append(Fault(method, text, violation=True))


def _text(error: Exception) -> str:
    """One line for an exception."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


_ANSWERS = bytes((Presence.ABSENT, Presence.UNKNOWN, Presence.PRESENT))
"""What a tier may say of a key."""


def _legal_answers(answers: object, count: int) -> bool:
    """Whether `answers` is an int8 array of `count` presence values."""
    if not isinstance(answers, np.ndarray) or answers.dtype != np.int8 or answers.shape != (count,):
        return False
    return not answers.tobytes().translate(None, _ANSWERS)  # nothing is left over


def _all_first(reported: bytearray, index: range) -> bool:
    """Whether all keys of a job are reported at once, none of which was before; marks them."""
    if index != range(len(reported)) or reported.count(0) != len(reported):
        return False
    reported[:] = b"\1" * len(reported)
    return True


def _first_report(reported: bytearray, index: object) -> bool:
    """Whether `index` is a key of the job that was not reported before; marks it."""
    if not isinstance(index, int | np.integer) or not 0 <= index < len(reported) or reported[index]:
        return False
    reported[index] = 1
    return True
