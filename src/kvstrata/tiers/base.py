"""The tier contract: what a secondary tier is to the core, the driver and an outside author.

A tier sees keys and byte ranges of primary, nothing else. `docs/tiers.md` has the table of methods, threads and
blocking; `kvstrata.testing.tier_contract` is the suite that every tier passes.

Duties of every tier:
- All methods are called from one thread at a time (the driver serialises them) and return at once; work happens on
  the tier's own executor. `open`, `close`, `drain` and `self_test` may block, within their time-outs.
- A key becomes visible to `probe` only when its bytes are there and verified or verifiable.
- Nothing that a file, device or peer does raises: it becomes a `FailCause` in an event.
- Each accepted job ends with exactly one `JobEnded`, also after `cancel` and `close`.
- A store of a key that is already there is a success. Duplicate keys in a batch are fine.
- The byte limit is hard and is checked before the write; eviction is inside the tier, coldest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from kvstrata.types import (
    I8,
    Capabilities,
    Locality,
    Medium,
    OffloadKey,
    TierEvent,
    TierJob,
    TierUsage,
    Wake,
)


class Executor(Protocol):
    """Runs a tier's blocking work somewhere else. Tests inject one whose tasks they step by hand."""

    def submit(self, task: Callable[[], None]) -> None:
        """Queue `task`; never blocks. A task must not raise."""
        ...

    def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing is queued or running; False after `timeout` seconds. Tests run the queue here."""
        ...

    def close(self, timeout: float) -> bool:
        """Finish what is queued; False if it was abandoned after `timeout` seconds. Idempotent."""
        ...


class Clock(Protocol):
    """Source of time, injected."""

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, for what outlives the process."""
        ...


def no_wake() -> None:
    """The wake callback of a tier whose user polls anyway."""


@dataclass(frozen=True, slots=True)
class TierContext:
    """What a tier is given when it is opened."""

    region: memoryview
    """All of primary, writable, format 'B'. Valid until `close` has returned and every job has ended."""
    namespace: bytes
    """16-byte engine digest (DESIGN section 8); a record of another namespace is foreign."""
    layout_tag: int
    """Unsigned 64-bit digest of how chunk bytes are laid out; part of what a load verifies."""
    clock: Clock
    executor: Executor
    wake: Wake = field(default=no_wake)
    """To be called, from any thread, after an event became available to `poll`."""
    region_fd: int | None = None
    """A descriptor of the file behind `region`, from its first byte on, if another process can map it."""
    tail_room: int = 0
    """So many bytes of `region` behind each range of a job are this tier's, and no other's, to write until the job has
    ended. 0: there are none."""
    yielding: Executor | None = None
    """Runs work on threads that let all others go first: for calls that keep a processor busy while they only wait."""


@runtime_checkable
class Tier(Protocol):
    """One secondary tier. Constructors only store settings; `open` acquires, `close` releases (idempotent)."""

    name: str
    medium: Medium
    locality: Locality
    capabilities: Capabilities

    def open(self, context: TierContext) -> None:
        """Acquire files, connections, threads. Raises `ConfigError` or `CapacityError` if it cannot."""
        ...

    def close(self, timeout: float = 5.0) -> None:
        """Drain, then abandon. Afterwards every method answers as an empty, refusing tier."""
        ...

    def probe(self, keys: Sequence[OffloadKey]) -> I8 | int:
        """Presence of each key now (`sync_probe`), or a ticket that a `ProbeDone` will answer."""
        ...

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Mark as recently used; unknown keys are ignored."""
        ...

    def submit_load(self, job: TierJob) -> None:
        """Read each key into its range of primary and verify it there."""
        ...

    def submit_store(self, job: TierJob) -> None:
        """Write each key from its range of primary."""
        ...

    def cancel(self, job_id: int) -> None:
        """Best effort: what has not started may be skipped, as CANCELLED. The job still ends once."""
        ...

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Drop keys; idempotent, best effort, accounting stays true. A later probe does not see them."""
        ...

    def purge(self, namespace: bytes) -> int:
        """Drop everything of a namespace; returns a ticket that `Flushed` answers when it is durable."""
        ...

    def flush(self) -> int:
        """Returns a ticket; `Flushed` answers it when all stores that ended before are durable."""
        ...

    def poll(self) -> list[TierEvent]:
        """Everything that happened since the last call, in order. Never blocks."""
        ...

    def usage(self) -> TierUsage:
        """What is held at this instant; true at every instant."""
        ...

    def drain(self, timeout: float) -> bool:
        """Wait until no job is unfinished; False after `timeout` seconds."""
        ...

    def self_test(self) -> str | None:
        """Write, drop what is above, read back, compare. None if all is well, else one line that says what failed."""
        ...
