"""Copies between accelerator and primary as things in flight: each block moves at a moment of its own.

A copier promises only what its contract says, and uses all of its freedom: a store may read its blocks as late as the
`wait` that names it, a load may fill its blocks in any order. What is read must then still be what the job was for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstrata.testing.choices import Choices
from kvstrata.testing.simulation.memory import Memory
from kvstrata.transfer.numpy_copy import NumpyCopier
from kvstrata.transfer.pieces import Done, Piece


@dataclass(slots=True)
class _Move:
    """Blocks of a job that move together, with what their sources held when the job was handed over."""

    piece: Piece
    before: bytes


@dataclass(slots=True, eq=False)
class _Job:
    job_id: int
    load: bool
    left: list[_Move] = field(default_factory=list)
    fails: bool = False


class SimCopier:
    """The copier of one rank. `fail_percent` of the jobs end as failed after moving only a part."""

    def __init__(self, memory: Memory, rank: int, primary: memoryview) -> None:
        self._memory = memory
        self._rank = rank
        self._primary = np.frombuffer(primary, np.uint8)
        self._real = NumpyCopier(memory.views(rank), self._primary)
        self._jobs: dict[int, _Job] = {}
        self._done: list[Done] = []
        self.choices: Choices = Choices()
        self.fail_percent = 0
        self.events = 0
        """Groups of blocks that were moved."""
        self.on_failure: Callable[[], None] = lambda: None

    def load(self, job_id: int, pieces: Sequence[Piece]) -> None:
        """See `Copier`."""
        self._accept(job_id, pieces, load=True)

    def store(self, job_id: int, pieces: Sequence[Piece]) -> None:
        """See `Copier`."""
        self._accept(job_id, pieces, load=False)

    def _accept(self, job_id: int, pieces: Sequence[Piece], *, load: bool) -> None:
        job = _Job(job_id, load)
        whole = self.choices.below(2)
        for piece in pieces:
            step = len(piece.blocks) if whole else 1
            for i in range(0, len(piece.blocks), step):
                one = Piece(piece.group, piece.blocks[i : i + step], piece.places[i : i + step])
                job.left.append(_Move(one, self._source(one, load)))
        if self.fail_percent and self.choices.chance(self.fail_percent):
            job.fails = True
            self.on_failure()
            del job.left[self.choices.below(len(job.left) + 1) :]
        self._jobs[job_id] = job

    def fail_one(self) -> None:
        """One of the stores under way fails, if there is one."""
        stores = [job for job in self._jobs.values() if not job.load and not job.fails]
        if stores:
            job = self.choices.pick(stores)
            job.fails = True
            self.on_failure()
            del job.left[self.choices.below(len(job.left) + 1) :]

    def _source(self, piece: Piece, load: bool) -> bytes:
        g, group = piece.group, self._memory.shape.groups[piece.group]
        if load:
            return b"".join(self._primary[at : at + group.block_bytes].tobytes() for at in piece.places.tolist())
        layers = range(len(group.layers))
        return b"".join(self._memory.page(self._rank, g, i, block) for block in piece.blocks.tolist() for i in layers)

    def _move(self, job: _Job, move: _Move) -> None:
        if self._source(move.piece, job.load) != move.before:
            what = "a load's slot" if job.load else "a store's source block"
            raise AssertionError(f"{what} was written before its copy was taken (job {job.job_id}, rank {self._rank})")
        self.events += 1
        call = self._real.load if job.load else self._real.store
        call(job.job_id, [move.piece])
        for done in self._real.finished():
            if not done.ok:
                raise AssertionError(f"job {job.job_id}: a copy outside of the cache or of primary")

    def progress(self, percent: int) -> int:
        """Let some blocks move; jobs that are through are reported as done. Returns how many jobs ended."""
        ended = 0
        for job in list(self._jobs.values()):
            if job.left and not self.choices.chance(percent):
                continue
            keep = self.choices.below(len(job.left) + 1) if job.left else 0
            while len(job.left) > keep:
                self._move(job, job.left.pop(self.choices.below(len(job.left))))
            if not job.left:
                self._end(job)
                ended += 1
        return ended

    def _end(self, job: _Job) -> None:
        del self._jobs[job.job_id]
        self._done.append(Done(job.job_id, not job.fails))

    def finished(self) -> list[Done]:
        """See `Copier`."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Iterable[int]) -> None:
        """See `Copier`: these are ordered before whatever the engine does next."""
        for job_id in job_ids:
            job = self._jobs.get(job_id)
            while job is not None and job.left:
                self._move(job, job.left.pop())

    def epoch_changed(self) -> None:
        """The cache was reset. What is under way goes on as it is."""

    def close(self) -> None:
        """See `Copier`."""
        self.wait(list(self._jobs))

    @property
    def busy(self) -> int:
        """Jobs that have not ended."""
        return len(self._jobs)
