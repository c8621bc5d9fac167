"""The copier for KV tensors in host memory: copies at once, in the engine's own thread.

The engine computes in the same thread, so whatever it wrote before is there, and what it writes later comes later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvstrata.transfer.pieces import Done, Piece, runs
from kvstrata.transfer.torch_views import Sheet


class CpuCopier:
    """`groups[g]` are the sheets of group g; `primary` is all of primary as a uint8 tensor."""

    def __init__(self, groups: Sequence[Sequence[Sheet]], primary: Any, clock: Callable[[], float]) -> None:
        self._groups = groups
        self._primary = primary
        self._clock = clock
        self._done: list[Done] = []
        self.last_error: Exception | None = None
        """What the last failed copy raised."""

    def load(self, job_id: int, pieces: Sequence[Piece]) -> None:
        """Copy from primary into blocks, at once."""
        self._move(job_id, pieces, load=True)

    def store(self, job_id: int, pieces: Sequence[Piece]) -> None:
        """Copy blocks into primary, at once."""
        self._move(job_id, pieces, load=False)

    def _move(self, job_id: int, pieces: Sequence[Piece], *, load: bool) -> None:
        begun = self._clock()
        try:
            size = sum(self.copy(piece, load=load) for piece in pieces)
        except Exception as error:
            self.last_error = error
            self._done.append(Done(job_id, ok=False))
        else:
            self._done.append(Done(job_id, ok=True, size=size, seconds=self._clock() - begun))

    def copy(self, piece: Piece, *, load: bool) -> int:
        """Copy one piece; returns its bytes."""
        size = 0
        for run in runs(piece):
            for sheet in self._groups[piece.group]:
                blocks, places = sheet.blocks(run), sheet.places(self._primary, run)
                if blocks.shape != places.shape:
                    raise IndexError(f"block {run.block} and {run.count - 1} after it are not all in the cache")
                if load:
                    blocks.copy_(places)
                else:
                    places.copy_(blocks)
                size += run.count * sheet.layers * sheet.page
        return size

    def finished(self) -> list[Done]:
        """Jobs that have ended since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Iterable[int]) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nothing to give back."""
