"""The copier for KV tensors on an accelerator: side streams, events, pinned host memory.

The order that it keeps, and that tests check with doubles of stream and event:

- a *store* reads blocks after all that the engine had queued when it was handed over (the side stream waits for an
  event of the engine's stream), and `wait` makes the engine's stream wait for the copy before what it queues next;
- a *load* writes blocks after all that the engine had queued when it was handed over, and is reported only when its
  event has happened;
- one launch moves all blocks of one group of one job;
- a job whose launch fails is reported, as failed, only behind what of it had been queued: until then those copies may
  still touch its blocks;
- no copy crosses a border of the pieces in which primary was page-locked: the driver refuses such a one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvstrata.transfer.pieces import Done, Piece
from kvstrata.types import I64


class Event(Protocol):
    """A mark in a stream."""

    def happened(self) -> bool:
        """Whether all that was queued before the mark has been done. Never blocks."""
        ...

    def synchronize(self) -> None:
        """Wait until it has happened."""
        ...


class Stream(Protocol):
    """A queue of work on the accelerator."""

    def record(self) -> Event:
        """A mark behind all that is queued."""
        ...

    def wait(self, event: Event) -> None:
        """What is queued from now on comes after the event."""
        ...


class Device(Protocol):
    """The accelerator, as far as copies need it. `torch_cuda.py` has the real one."""

    def engine_stream(self) -> Stream:
        """The stream that the engine computes on at this moment."""
        ...

    def side_stream(self) -> Stream:
        """A new stream of our own."""
        ...

    def launch(self, stream: Stream, sources: I64, targets: I64, sizes: I64) -> None:
        """Queue copies of `sizes` bytes between addresses, as one operation."""
        ...


PIN_BYTES = 1 << 30
"""How much of primary is page-locked with one call."""


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """Where a layer's blocks are: address of block 0, distance of blocks, bytes of a page."""

    address: int
    step: int
    page: int
    blocks: int


@dataclass(slots=True)
class _Job:
    job_id: int
    begun: float
    size: int
    ended: Event
    ok: bool


class DeviceCopier:
    """`groups[g]` are the layers of group g; primary begins at `primary` and has `size` bytes.

    `border`: primary was page-locked in pieces of so many bytes.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[DeviceLayer]],
        primary: int,
        size: int,
        device: Device,
        clock: Callable[[], float],
        border: int = PIN_BYTES,
    ) -> None:
        self._border = border
        self._groups = groups
        self._primary = primary
        self._size = size
        self._device = device
        self._clock = clock
        self._loads = device.side_stream()
        self._stores = device.side_stream()
        self._jobs: dict[int, _Job] = {}
        self._order: deque[_Job] = deque()
        self._failed: list[Done] = []
        self.last_error: Exception | None = None
        """What the last failed launch raised."""

    def load(self, job_id: int, pieces: Sequence[Piece]) -> None:
        """Queue copies from primary into blocks."""
        self._submit(job_id, pieces, self._loads, load=True)

    def store(self, job_id: int, pieces: Sequence[Piece]) -> None:
        """Queue copies from blocks into primary."""
        self._submit(job_id, pieces, self._stores, load=False)

    def _submit(self, job_id: int, pieces: Sequence[Piece], stream: Stream, *, load: bool) -> None:
        begun = self._clock()
        try:
            lists = [self._addresses(piece) for piece in pieces]  # before anything is queued: they may be refused
        except IndexError:
            self._failed.append(Done(job_id, ok=False))
            return
        stream.wait(self._device.engine_stream().record())
        size, ok = 0, True
        try:
            for blocks, places, sizes in lists:
                if load:
                    self._device.launch(stream, places, blocks, sizes)
                else:
                    self._device.launch(stream, blocks, places, sizes)
                size += int(sizes.sum())
        except Exception as error:
            self.last_error, ok = error, False
        job = _Job(job_id, begun, size, stream.record(), ok)
        self._jobs[job_id] = job
        self._order.append(job)

    def _addresses(self, piece: Piece) -> tuple[I64, I64, I64]:
        """Addresses of pages in the blocks, in primary, and their sizes; neighbours in both are one copy."""
        blocks, places, sizes, at = [], [], [], 0
        for layer in self._groups[piece.group]:
            if len(piece.blocks) and not 0 <= int(piece.blocks.min()) <= int(piece.blocks.max()) < layer.blocks:
                raise IndexError("a block is not in the cache")
            blocks.append(layer.address + piece.blocks * layer.step)
            places.append(self._primary + piece.places + at)
            sizes.append(np.full(len(piece.blocks), layer.page, dtype=np.int64))
            at += layer.page
        if len(piece.places) and not 0 <= int(piece.places.min()) <= int(piece.places.max()) <= self._size - at:
            raise IndexError("a place is not in primary")
        whole = merge(np.concatenate(blocks), np.concatenate(places), np.concatenate(sizes))
        return cut(*whole, self._primary, self._border)

    def finished(self) -> list[Done]:
        """Jobs whose copies have been done since the last call."""
        done, self._failed = self._failed, []
        waiting: deque[_Job] = deque()
        while self._order:
            job = self._order.popleft()
            if job.ended.happened():
                del self._jobs[job.job_id]
                done.append(Done(job.job_id, ok=job.ok, size=job.size, seconds=self._clock() - job.begun))
            else:
                waiting.append(job)
        self._order = waiting
        return done

    def wait(self, job_ids: Iterable[int]) -> None:
        """What the engine queues from now on comes after these jobs' copies."""
        stream = self._device.engine_stream()
        for job_id in job_ids:
            job = self._jobs.get(job_id)
            if job is not None:
                stream.wait(job.ended)

    def close(self) -> None:
        """Wait for all copies."""
        for job in self._order:
            job.ended.synchronize()


def merge(blocks: I64, places: I64, sizes: I64) -> tuple[I64, I64, I64]:
    """The same copies with those joined that go on where the one before them ends, on both sides."""
    if len(blocks) < 2:
        return blocks, places, sizes
    order = np.argsort(places, kind="stable")
    blocks, places, sizes = blocks[order], places[order], sizes[order]
    joined = (blocks[1:] == blocks[:-1] + sizes[:-1]) & (places[1:] == places[:-1] + sizes[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    return blocks[first], places[first], np.add.reduceat(sizes, first)


def cut(blocks: I64, places: I64, sizes: I64, first: int, border: int) -> tuple[I64, I64, I64]:
    """The same copies with those divided that cross a multiple of `border` bytes behind `first`."""
    while True:
        room = border - (places - first) % border
        crossing = np.flatnonzero(sizes > room)
        if not len(crossing):
            return blocks, places, sizes
        head = room[crossing]
        blocks = np.concatenate([blocks, blocks[crossing] + head])
        places = np.concatenate([places, places[crossing] + head])
        rest = sizes[crossing] - head
        sizes = sizes.copy()
        sizes[crossing] = head
        sizes = np.concatenate([sizes, rest])
