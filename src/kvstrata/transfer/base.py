"""The contract of a copier: what the worker side of an engine integration asks of it.

A copier moves bytes between the engine's blocks and primary. `load` and `store` accept a job; each accepted job comes
back from `finished` exactly once, also when it failed. Nothing that goes wrong in a copy raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvstrata.transfer.pieces import Done, Piece


class Copier(Protocol):
    """Moves blocks; used by one thread at a time."""

    def load(self, job_id: int, pieces: Sequence[Piece]) -> None:
        """Copy from primary into blocks. The blocks belong to this job until it has ended."""
        ...

    def store(self, job_id: int, pieces: Sequence[Piece]) -> None:
        """Copy blocks into primary, after all that the engine has queued for them, before anything it queues later
        than `wait` for this job."""
        ...

    def finished(self) -> list[Done]:
        """Jobs that have ended since the last call. Never blocks."""
        ...

    def wait(self, job_ids: Iterable[int]) -> None:
        """Return when these jobs no longer touch their blocks, or, on a device, have been ordered before all later
        work of the engine. Ids that are not under way are ignored."""
        ...

    def close(self) -> None:
        """Let all jobs end and give everything back. Idempotent."""
        ...
