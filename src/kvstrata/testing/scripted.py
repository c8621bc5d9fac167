"""A tier whose every answer the test decides: when each probe, load and store ends, and how.

    tier = ScriptedTier()
    tier.put(keys, length=64)              # what it holds
    ...                                    # the code under test asks
    tier.loads[0].finish(failed={2: FailCause.CORRUPT})

Nothing ends by itself unless `auto()` was called or a handler (`on_probe`, `on_load`, `on_store`) was set. What is
not finished hangs; what is `lost` never ends; `finish` after a cancel, a reset or a close is a late completion.
Illegal behaviour (ending twice, raising, reporting an index twice) is on offer too, for tests of whoever guards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstrata.testing.tier_harness import payload_of
from kvstrata.tiers.base import TierContext
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


@dataclass(frozen=True, slots=True)
class Call:
    """One call that the tier got: the method, and the keys it named."""

    method: str
    keys: tuple[OffloadKey, ...] = ()
    job_id: int | None = None


@dataclass(slots=True, eq=False)
class PendingProbe:
    """An asynchronous probe that the test has to answer."""

    tier: ScriptedTier
    ticket: int
    keys: tuple[OffloadKey, ...]

    def finish(self, presence: Mapping[OffloadKey, Presence] | None = None, error: FailCause | None = None) -> None:
        """Answer with what the tier holds, save where `presence` says otherwise; with `error`, as a failed probe."""
        if error is not None:
            answers = np.zeros(len(self.keys), dtype=np.int8)
        else:
            answers = self.tier.presence_of(self.keys, presence or {})
        self.tier.emit(ProbeDone(self.ticket, answers, error))
        self.lose()

    def lose(self) -> None:
        """Never answer."""
        if self in self.tier.probes:
            self.tier.probes.remove(self)


@dataclass(slots=True, eq=False)
class PendingJob:
    """A load or store that the test has to end."""

    tier: ScriptedTier
    job: TierJob
    is_load: bool
    cancelled: bool = False
    reported: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    """The part of `reported` that was moved."""

    def progress(self, done: Iterable[int] = (), failed: Mapping[int, FailCause] | None = None) -> None:
        """Report some keys; the job goes on. Loaded bytes land in primary now, stored ones are held from now."""
        indices = list(done)
        for index in indices:
            self._move(index)
        causes = dict(failed or {})
        self.reported |= {*indices, *causes}
        self.done |= {*indices}
        self.tier.emit(KeysDone(self.job.job_id, indices, list(causes.items())))

    def finish(
        self,
        done: Iterable[int] | None = None,
        failed: Mapping[int, FailCause] | None = None,
        cause: FailCause = FailCause.IO_ERROR,
    ) -> None:
        """Report keys and end the job.

        `done` None: all that are neither reported nor in `failed`; keys that a load asks for and the tier lacks fail
        as GONE. Keys left out of both fail with `cause`, unreported.
        """
        causes = dict(failed or {})
        if done is None:
            open_ = [i for i in range(len(self.job.keys)) if i not in self.reported and i not in causes]
            if self.is_load:
                causes |= {i: FailCause.GONE for i in open_ if self.job.keys[i] not in self.tier.held}
            done = [i for i in open_ if i not in causes]
        self.progress(done, causes)
        self.end(cause)

    def fail(self, cause: FailCause = FailCause.IO_ERROR) -> None:
        """End the job without a word about its keys: they all fail with `cause`."""
        self.end(cause)

    def end(self, cause: FailCause = FailCause.IO_ERROR) -> None:
        """Report the end. Calling it twice is illegal behaviour, on purpose."""
        self.tier.emit(JobEnded(self.job.job_id, cause))
        self.lose()

    def lose(self) -> None:
        """Lose the completion: the job never ends, unless a test calls `finish` later."""
        for pending in (self.tier.loads, self.tier.stores):
            if self in pending:
                pending.remove(self)

    def _move(self, index: int) -> None:
        key, offset, length = self.job.keys[index], self.job.offsets[index], self.job.lengths[index]
        region = self.tier.region
        if self.is_load:
            if region is not None:
                region[offset : offset + length] = self.tier.held.get(key, b"")[:length].ljust(length, b"\0")
        else:
            self.tier.held[key] = bytes(region[offset : offset + length]) if region is not None else b""


class ScriptedTier:
    """See the module. `held` maps the keys that the tier has to their payloads; tests may change it at any time."""

    def __init__(
        self,
        *,
        name: str = "scripted",
        medium: Medium = Medium.CPU,
        locality: Locality = Locality.LOCAL,
        capabilities: Capabilities | None = None,
        limit: int | None = None,
    ) -> None:
        self.name = name
        self.medium = medium
        self.locality = locality
        self.capabilities = capabilities or Capabilities(sync_probe=True)
        self.held: dict[OffloadKey, bytes] = {}
        self.writing: set[OffloadKey] = set()
        """Keys that a probe answers as UNKNOWN: the tier is itself still writing them."""
        self.calls: list[Call] = []
        self.keys_touched: Counter[str] = Counter()
        """Per method, how many keys it was given so far."""
        self.probes: list[PendingProbe] = []
        self.loads: list[PendingJob] = []
        self.stores: list[PendingJob] = []
        self.obeys_cancel = False
        """Whether `cancel` ends an unfinished job at once, as CANCELLED."""
        self.raise_in: set[str] = set()
        """Methods that raise `RuntimeError` when called: illegal behaviour, on purpose."""
        self.open_error: Exception | None = None
        self.self_test_answer: str | None = None
        self.on_probe: Callable[[PendingProbe], None] | None = None
        self.on_load: Callable[[PendingJob], None] | None = None
        self.on_store: Callable[[PendingJob], None] | None = None
        self.region: memoryview | None = None
        self.context: TierContext | None = None
        self._limit = limit
        self._events: list[TierEvent] = []
        self._tickets = 0

    # the script

    def put(self, keys: Iterable[OffloadKey], length: int = 64, variant: int = 0) -> None:
        """Make the tier hold keys, with the payloads of `payload_of`."""
        self.held.update({key: payload_of(key, length, variant) for key in keys})

    def auto(self) -> ScriptedTier:
        """From now on everything is answered at once, as a healthy tier would; returns itself."""
        self.on_probe = PendingProbe.finish
        self.on_load = self.on_store = PendingJob.finish
        return self

    def lose_keys(self, keys: Iterable[OffloadKey]) -> None:
        """Evict keys, and tell."""
        gone = [key for key in keys if self.held.pop(key, None) is not None]
        self.emit(KeysRemoved(gone))

    def emit(self, event: TierEvent) -> None:
        """Let the next poll report `event`, legal or not."""
        self._events.append(event)
        if self.context is not None:
            self.context.wake()

    def calls_of(self, method: str) -> list[Call]:
        """The calls of one method, in order."""
        return [call for call in self.calls if call.method == method]

    @property
    def total_keys_touched(self) -> int:
        """Keys given to any method so far."""
        return sum(self.keys_touched.values())

    def presence_of(self, keys: Sequence[OffloadKey], override: Mapping[OffloadKey, Presence] | None = None) -> I8:
        """What a probe answers now."""
        said = override or {}
        answers = [
            said.get(key, Presence.UNKNOWN if key in self.writing else Presence.PRESENT * (key in self.held))
            for key in keys
        ]
        return np.array(answers, dtype=np.int8)

    def _note(self, method: str, keys: Sequence[OffloadKey] = (), job_id: int | None = None) -> None:
        self.calls.append(Call(method, tuple(keys), job_id))
        self.keys_touched[method] += len(keys)
        if method in self.raise_in:
            raise RuntimeError(f"scripted failure of {method}")

    # the tier

    def open(self, context: TierContext) -> None:
        """Open, or raise `open_error`."""
        self._note("open")
        if self.open_error is not None:
            raise self.open_error
        self.context = context
        self.region = context.region

    def close(self, timeout: float = 5.0) -> None:
        """Note the call; what is unfinished stays so until the test finishes it."""
        self._note("close")

    def probe(self, keys: Sequence[OffloadKey]) -> I8 | int:
        """Presence at once, or a ticket and an entry in `probes`."""
        self._note("probe", keys)
        if self.capabilities.sync_probe:
            return self.presence_of(keys)
        self._tickets += 1
        probe = PendingProbe(self, self._tickets, tuple(keys))
        self.probes.append(probe)
        if self.on_probe is not None:
            self.on_probe(probe)
        return probe.ticket

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Note the call."""
        self._note("touch", keys)

    def submit_load(self, job: TierJob) -> None:
        """Add an entry to `loads`."""
        self._note("submit_load", job.keys, job.job_id)
        self._submit(PendingJob(self, job, is_load=True), self.loads, self.on_load)

    def submit_store(self, job: TierJob) -> None:
        """Add an entry to `stores`."""
        self._note("submit_store", job.keys, job.job_id)
        self._submit(PendingJob(self, job, is_load=False), self.stores, self.on_store)

    def _submit(
        self, pending: PendingJob, queue: list[PendingJob], handler: Callable[[PendingJob], None] | None
    ) -> None:
        queue.append(pending)
        if handler is not None:
            handler(pending)

    def cancel(self, job_id: int) -> None:
        """Mark the job; end it if the tier obeys."""
        self._note("cancel", job_id=job_id)
        for pending in [*self.loads, *self.stores]:
            if pending.job.job_id == job_id:
                pending.cancelled = True
                if self.obeys_cancel:
                    pending.end(FailCause.CANCELLED)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Drop keys."""
        self._note("remove", keys)
        for key in keys:
            self.held.pop(key, None)

    def purge(self, namespace: bytes) -> int:
        """Drop everything, durable at once."""
        self._note("purge")
        self.held.clear()
        return self._ticket()

    def flush(self) -> int:
        """Durable at once."""
        self._note("flush")
        return self._ticket()

    def _ticket(self) -> int:
        self._tickets += 1
        self.emit(Flushed(self._tickets))
        return self._tickets

    def poll(self) -> list[TierEvent]:
        """What the script reported since the last call."""
        if "poll" in self.raise_in:
            raise RuntimeError("scripted failure of poll")
        events = self._events
        self._events = []
        return events

    def usage(self) -> TierUsage:
        """What is held."""
        held = sum(map(len, self.held.values()))
        return TierUsage(held, 0, self._limit, len(self.held), held)

    def drain(self, timeout: float) -> bool:
        """Whether nothing is unfinished."""
        return not (self.loads or self.stores)

    def self_test(self) -> str | None:
        """What the script says."""
        return self.self_test_answer
