"""The copier without torch: blocks are NumPy arrays. The twin that tests compare the others with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvstrata.transfer.pieces import Done, Piece, runs

U8 = npt.NDArray[np.uint8]


class NumpyCopier:
    """Copies at once, in the caller's thread. `groups[g][l]` is layer l of group g: (blocks, page bytes) as uint8."""

    def __init__(self, groups: Sequence[Sequence[U8]], primary: U8, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._groups = groups
        self._primary = primary
        self._clock = clock
        self._done: list[Done] = []

    def load(self, job_id: int, pieces: Sequence[Piece]) -> None:
        """Copy from primary into blocks."""
        self._move(job_id, pieces, load=True)

    def store(self, job_id: int, pieces: Sequence[Piece]) -> None:
        """Copy blocks into primary."""
        self._move(job_id, pieces, load=False)

    def _move(self, job_id: int, pieces: Sequence[Piece], *, load: bool) -> None:
        begun = self._clock()
        try:
            size = sum(self._copy(piece, load=load) for piece in pieces)
        except Exception:
            self._done.append(Done(job_id, ok=False))
        else:
            self._done.append(Done(job_id, ok=True, size=size, seconds=self._clock() - begun))

    def _copy(self, piece: Piece, *, load: bool) -> int:
        size = 0
        for run in runs(piece):
            at = run.place
            for layer in self._groups[piece.group]:
                page = layer.shape[1]
                blocks = layer[run.block : run.block + run.count * run.block_step : run.block_step]
                if len(blocks) != run.count:
                    raise IndexError(f"block {run.block} and {run.count - 1} after it are not all in the cache")
                end = at + (run.count - 1) * run.place_step + page
                if at < 0 or end > len(self._primary):
                    raise IndexError(f"bytes {at} to {end} are not in primary")
                view: U8 = np.ndarray((run.count, page), np.uint8, self._primary, at, (run.place_step, 1))
                if load:
                    blocks[:] = view
                else:
                    view[:] = blocks
                at += page
                size += run.count * page
        return size

    def finished(self) -> list[Done]:
        """Jobs that have ended since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Iterable[int]) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nothing to give back."""
