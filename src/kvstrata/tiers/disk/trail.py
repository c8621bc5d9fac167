"""What is known of one segment file while its header blocks are followed, and what came of it."""

from __future__ import annotations

import mmap
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstrata.tiers.disk.format import (
    BLOCK,
    RECORD_BYTES,
    RECORD_DTYPE,
    Batch,
    BatchKind,
    Realm,
    Records,
    Reject,
    SegmentHeader,
)

READ_AHEAD = 64
"""Most blocks that are read at once."""
BATCH_DTYPE = np.dtype(
    [("start", "<i8"), ("span", "<i8"), ("wall_us", "<i8"), ("seq", "<i8"), ("first", "<i8"), ("realm", "<i4"),
     ("count", "<u2"), ("kind", "u1")],
)  # fmt: skip
"""One row per batch: its head, and which of the segment's records are its own (`count` of them, from `first` on)."""
_OWN_BYTES = 1 << 16
RAW_RECORD = f"V{RECORD_BYTES}"
"""A record that is copied as it is, and not field by field."""


@dataclass(slots=True)
class SegmentScan:
    """What one segment file says: a table of its batches, and one of all their records."""

    number: int
    header: SegmentHeader
    size: int
    end: int = BLOCK
    ended: bool = False
    """The segment was sealed: an end block was found."""
    rejects: Counter[Reject] = field(default_factory=Counter)
    batches: npt.NDArray[np.void] = field(default_factory=lambda: np.empty(0, BATCH_DTYPE))
    records: Records = field(default_factory=lambda: np.empty(0, RECORD_DTYPE))
    realms: list[Realm] = field(default_factory=list)
    """What the numbers in `batches` stand for."""

    def batch(self, row: int) -> Batch:
        """One batch, its records as a view."""
        head = self.batches[row]
        first, count = int(head["first"]), int(head["count"])
        return Batch(
            BatchKind(int(head["kind"])),
            self.realms[int(head["realm"])],
            self.header.segment_id,
            int(head["seq"]),
            int(head["start"]),
            int(head["span"]),
            int(head["wall_us"]),
            self.records[first : first + count],
        )


class _Table:
    """Rows that become more, in one piece, in memory of its own from a certain size on.

    That is backed only where it is used, and goes back to the system at once: what threads free of the allocator's
    memory stays with the process, up to 64 MiB for each thread.
    """

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._rows: npt.NDArray[np.void] = np.empty(0, dtype)
        self._used = 0

    @property
    def rows(self) -> npt.NDArray[np.void]:
        return self._rows[: self._used]

    def add(self, rows: npt.NDArray[np.void]) -> None:
        end = self._used + len(rows)
        if end > len(self._rows):
            larger = _room(max(end, 2 * len(self._rows)), self._rows.dtype)
            larger[: self._used] = self.rows
            self._rows = larger
        self._rows[self._used : end] = rows
        self._used = end


def _room(count: int, dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
    size = count * dtype.itemsize
    if size < _OWN_BYTES:
        return np.empty(count, dtype)
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype, count)


class Trail:
    """One file that is being followed: the next header block is at `at`."""

    def __init__(self, scan: SegmentScan, handle: int) -> None:
        self.scan = scan
        self.handle = handle
        self.at = scan.end
        self.done = self.at + BLOCK > scan.size
        self.batches = _Table(BATCH_DTYPE)
        self.records = _Table(RAW_RECORD)
        self.life = np.frombuffer(scan.header.segment_id, np.uint8)
        self._span = BLOCK  # of the last batch
        self._ahead = 1  # blocks to read now

    def next_places(self, most: int) -> range:
        """Where the next header block is, and where those behind it would be."""
        room = (self.scan.size - BLOCK - self.at) // self._span + 1
        return range(self.at, self.scan.size, self._span)[: min(self._ahead, most, room)]

    def go_on(self, start: int, span: int, asked: int, reached: int) -> None:
        """The last of `reached` blocks, of `asked` that were read, was that of a batch at `start`."""
        # Twice as many whenever all were right, so no more are read in vain than were right before.
        ahead = min(2 * asked, READ_AHEAD) if reached == asked and span == self._span else 1
        self._span = span
        self.move(start + span, ahead)
        self.scan.end = self.at

    def move(self, at: int, ahead: int) -> None:
        """The next header block is at `at`; read so many blocks from there on."""
        self.at, self._ahead = at, ahead
        self.done = at + BLOCK > self.scan.size

    def finish(self) -> SegmentScan:
        """The scan with everything that was found."""
        scan = self.scan
        scan.batches, scan.records = self.batches.rows, self.records.rows.view(RECORD_DTYPE)
        counts = scan.batches["count"].astype(np.int64)
        scan.batches["first"] = np.cumsum(counts) - counts
        return scan
