"""Drives one tier by hand, and checks on the way what every tier owes its caller at every instant.

The harness owns a small primary: each job gets its own ranges, poisoned before a load and after the job has ended, so
that a tier which touches primary outside its ranges, or after `JobEnded`, is found out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from kvstrata.testing.clock import ManualClock
from kvstrata.testing.executor import ManualExecutor
from kvstrata.tiers.base import Tier, TierContext
from kvstrata.types import (
    KEY_BYTES,
    FailCause,
    Flushed,
    JobEnded,
    KeysDone,
    KeysRemoved,
    OffloadKey,
    Presence,
    ProbeDone,
    TierEvent,
    TierJob,
)

POISON = 0xA5
NAMESPACE = b"contract-suite-a"
OTHER_NAMESPACE = b"contract-suite-b"
LAYOUT_TAG = 0x1122334455667788


def chunk_key(number: int, group: int = 0) -> OffloadKey:
    """A key of full length, scattered like a hash, the same for the same number."""
    scattered = xxhash.xxh3_128_digest(number.to_bytes(8, "big"))
    return (scattered + scattered[::-1])[: KEY_BYTES - 4] + group.to_bytes(4, "big")


def chunk_keys(count: int, start: int = 0) -> list[OffloadKey]:
    """`count` different keys, numbered from `start`."""
    return [chunk_key(number) for number in range(start, start + count)]


def payload_of(key: OffloadKey, length: int, variant: int = 0) -> bytes:
    """The bytes that belong to a key; another variant gives other bytes."""
    block = xxhash.xxh3_128_digest(key, seed=variant) + xxhash.xxh3_128_digest(key, seed=variant + 1_000_003)
    return (block * (length // len(block) + 1))[:length]


@dataclass(slots=True)
class JobRecord:
    """What the harness saw of one job."""

    job: TierJob
    is_load: bool
    done: set[int] = field(default_factory=set)
    failed: dict[int, FailCause] = field(default_factory=dict)
    ended: FailCause | None = None
    payloads: dict[int, bytes] = field(default_factory=dict)
    """What a load brought, by index, copied at the moment the key was reported done."""

    @property
    def causes(self) -> list[FailCause | None]:
        """Per key: None if it worked, else why not. Keys never reported take the cause of the end."""
        return [None if i in self.done else self.failed.get(i, self.ended) for i in range(len(self.job.keys))]

    @property
    def ok(self) -> bool:
        """The job has ended and every key worked."""
        return self.ended is not None and len(self.done) == len(self.job.keys)


def _region(size: int) -> memoryview:
    """Memory whose address is always the same within its page: what a tier does with a slot may depend on it."""
    whole = np.full(size + 4096, POISON, np.uint8)
    start = (16 - whole.ctypes.data) % 4096
    return whole.data[start : start + size]


class TierHarness:
    """One tier with a primary, a manual clock and a manual executor.

    `checks` are run after every step (task or poll); they raise what the test should see.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        chunk_bytes: int,
        slots: int = 256,
        namespace: bytes = NAMESPACE,
        layout_tag: int = LAYOUT_TAG,
        clock: ManualClock | None = None,
        seed: int | None = None,
        tail_room: int = 0,
    ) -> None:
        self.tier = tier
        self.chunk_bytes = chunk_bytes
        self.tail_room = tail_room
        self.clock = clock or ManualClock()
        self.executor = ManualExecutor(seed)
        self.wakes = 0
        self.jobs: dict[int, JobRecord] = {}
        self.removed: list[OffloadKey] = []
        self.flushed: dict[int, bool] = {}
        self.probed: dict[int, ProbeDone] = {}
        self.events: list[TierEvent] = []
        self.checks: list[Callable[[], None]] = [self.check_limit]
        self._view = _region(slots * self._stride)
        self._free = list(range(slots))[::-1]
        self._slots: dict[int, list[int]] = {}
        self._next_job = 0
        self._namespace = namespace
        self._layout_tag = layout_tag

    @property
    def _stride(self) -> int:
        # behind the chunk and its tail room, the upper part of each slot is a guard zone
        return 2 * self.chunk_bytes + self.tail_room + 64

    @property
    def free_slots(self) -> int:
        """Chunks that jobs may still name before one has to end."""
        return len(self._free)

    # life cycle

    def open(self) -> TierHarness:
        """Open the tier and run what it queued to find its old data."""
        self.tier.open(self.context())
        self.settle()
        return self

    def context(self) -> TierContext:
        """What the tier is opened with."""
        return TierContext(
            region=self._view,
            namespace=self._namespace,
            layout_tag=self._layout_tag,
            clock=self.clock,
            executor=self.executor,
            wake=self._woken,
            tail_room=self.tail_room,
        )

    def close(self, timeout: float = 5.0) -> None:
        """Close the tier and take its last events."""
        self.tier.close(timeout)
        self.poll()

    def _woken(self) -> None:
        self.wakes += 1

    # jobs

    def submit_store(
        self,
        keys: Sequence[OffloadKey],
        *,
        variant: int = 0,
        length: int | None = None,
        digests: Sequence[bytes] | None = None,
    ) -> int:
        """Hand over a store of the keys' payloads; returns the job id."""
        job = self._make_job(keys, length, digests)
        for key, offset, size in zip(job.keys, job.offsets, job.lengths, strict=True):
            self._view[offset : offset + size] = payload_of(key, size, variant)
        self.jobs[job.job_id] = JobRecord(job, is_load=False)
        self.tier.submit_store(job)
        return job.job_id

    def submit_load(
        self, keys: Sequence[OffloadKey], *, length: int | None = None, digests: Sequence[bytes] | None = None
    ) -> int:
        """Hand over a load of the keys into poisoned ranges; returns the job id."""
        job = self._make_job(keys, length, digests)
        self.jobs[job.job_id] = JobRecord(job, is_load=True)
        self.tier.submit_load(job)
        return job.job_id

    def _make_job(self, keys: Sequence[OffloadKey], length: int | None, digests: Sequence[bytes] | None) -> TierJob:
        size = self.chunk_bytes if length is None else length
        taken = [self._free.pop() for _ in keys]
        self._next_job += 1
        self._slots[self._next_job] = taken
        offsets = [slot * self._stride for slot in taken]
        for offset in offsets:
            self._poison(offset)
        return TierJob(self._next_job, list(keys), offsets, [size] * len(taken), digests)

    def _poison(self, offset: int) -> None:
        self._view[offset : offset + self._stride] = bytes([POISON]) * self._stride

    # steps

    def poll(self) -> list[TierEvent]:
        """Take and apply what the tier reports; checks that each report is legal."""
        events = self.tier.poll()
        for event in events:
            self._apply(event)
        self.events += events
        return events

    def step(self) -> bool:
        """Run one task of the tier and poll; whether anything moved."""
        ran = self.executor.run_next()
        moved = bool(self.poll()) or ran
        for check in self.checks:
            check()
        return moved

    def settle(self, limit: int = 100_000) -> None:
        """Step until nothing moves. Raises `AssertionError` if that takes more than `limit` steps."""
        for check in self.checks:
            check()
        for _ in range(limit):
            if not self.step() and not self.executor.pending:
                return
        raise AssertionError(f"the tier did not settle in {limit} steps")

    def _apply(self, event: TierEvent) -> None:
        match event:
            case KeysDone():
                self._apply_keys(event)
            case JobEnded():
                self._apply_end(event)
            case KeysRemoved():
                self.removed += event.keys
            case Flushed():
                assert event.ticket not in self.flushed, f"flush {event.ticket} was answered twice"
                self.flushed[event.ticket] = event.ok
            case ProbeDone():
                assert event.ticket not in self.probed, f"probe {event.ticket} was answered twice"
                self.probed[event.ticket] = event

    def _apply_keys(self, event: KeysDone) -> None:
        record = self.jobs[event.job_id]
        assert record.ended is None, f"job {event.job_id} reported keys after it had ended"
        for index in [*event.done, *(index for index, _ in event.failed)]:
            assert 0 <= index < len(record.job.keys), f"job {event.job_id} reported an unknown index {index}"
            seen = index in record.done or index in record.failed
            assert not seen, f"job {event.job_id} reported index {index} twice"
            if index in event.done:
                record.done.add(index)
        record.failed.update(dict(event.failed))
        if record.is_load:
            for index in event.done:
                offset, size = record.job.offsets[index], record.job.lengths[index]
                record.payloads[index] = bytes(self._view[offset : offset + size])

    def _apply_end(self, event: JobEnded) -> None:
        record = self.jobs[event.job_id]
        assert record.ended is None, f"job {event.job_id} ended twice"
        record.ended = event.cause
        for index, (offset, size) in enumerate(zip(record.job.offsets, record.job.lengths, strict=True)):
            guard = bytes(self._view[offset + size + self.tail_room : offset + self._stride])
            assert guard == bytes([POISON]) * len(guard), f"job {event.job_id} wrote outside the range of key {index}"
            self._poison(offset)
        self._free += self._slots.pop(event.job_id)

    # whole operations

    def store(self, keys: Sequence[OffloadKey], **how: object) -> JobRecord:
        """Store and settle."""
        return self._finish(self.submit_store(keys, **how))  # type: ignore[arg-type]

    def load(self, keys: Sequence[OffloadKey], **how: object) -> JobRecord:
        """Load and settle."""
        return self._finish(self.submit_load(keys, **how))  # type: ignore[arg-type]

    def _finish(self, job_id: int) -> JobRecord:
        self.settle()
        record = self.jobs[job_id]
        assert record.ended is not None, f"job {job_id} never ended"
        return record

    def probe(self, keys: Sequence[OffloadKey], *, settle: bool = True) -> list[Presence]:
        """Presence of the keys; an asynchronous probe is run to its end."""
        answer = self.tier.probe(keys)
        if isinstance(answer, int):
            assert not self.tier.capabilities.sync_probe, "a tier with synchronous probe answered with a ticket"
            if settle:
                self.settle()
            answer = self.probed[answer].answers
        assert answer.dtype == np.int8, f"presence is {answer.dtype}, not int8"
        assert answer.shape == (len(keys),), f"presence of {len(keys)} keys has shape {answer.shape}"
        return [Presence(int(value)) for value in answer]

    def present(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Those of the keys that the tier says it has."""
        found = self.probe(keys)
        return [key for key, presence in zip(keys, found, strict=True) if presence is Presence.PRESENT]

    def flush(self) -> bool:
        """Flush and settle; whether it became durable."""
        ticket = self.tier.flush()
        self.settle()
        assert ticket in self.flushed, "a flush was not answered"
        return self.flushed[ticket]

    def purge(self, namespace: bytes) -> bool:
        """Purge and settle; whether it became durable."""
        ticket = self.tier.purge(namespace)
        self.settle()
        assert ticket in self.flushed, "a purge was not answered"
        return self.flushed[ticket]

    # checks

    def check_limit(self) -> None:
        """What is held and reserved together never exceeds the limit, and is never negative."""
        usage = self.tier.usage()
        assert usage.bytes_held >= 0, usage
        assert usage.bytes_reserved >= 0, usage
        assert usage.keys >= 0, usage
        if usage.bytes_limit is not None and not self.over_limit_at_open:
            assert usage.bytes_held + usage.bytes_reserved <= usage.bytes_limit, usage

    over_limit_at_open: bool = False
    """A test that opens a place which holds more than the limit sets this until the trim is done."""

    def check_loaded(self, record: JobRecord, variant: int = 0) -> None:
        """Every key that a load reported done brought exactly its own bytes."""
        for index, payload in record.payloads.items():
            key = record.job.keys[index]
            assert payload == payload_of(key, len(payload), variant), f"wrong bytes under key {key.hex()}"
