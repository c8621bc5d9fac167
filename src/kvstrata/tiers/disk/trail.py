"""What is known of a segment file while its header blocks are followed, and what came of it."""

from __future__ import annotations

import mmap
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstrata.tiers.disk.format import (
    BLOCK,
    CARRYING,
    HEAD_BYTES,
    RECORD_BYTES,
    RECORD_DTYPE,
    Batch,
    BatchKind,
    Bytes,
    Realm,
    Records,
    Reject,
    SegmentHeader,
    heads_of,
)

READ_AHEAD = 256
"""Most blocks that are read at once."""
_HEADS = 1 << 12
_RECORDS = 1 << 14
"""How many of each are kept before they are put to their segments."""
BATCH_DTYPE = np.dtype(
    [("start", "<i8"), ("span", "<i8"), ("wall_us", "<i8"), ("seq", "<i8"), ("first", "<i8"), ("realm", "<i4"),
     ("count", "<u2"), ("kind", "u1")],
)  # fmt: skip
"""One row per batch: its head, and which of the segment's records are its own (`count` of them, from `first` on)."""
_CARRIES = np.isin(np.arange(256), CARRYING)
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
        self.places = range(0)
        """Where the blocks lie that are read now."""
        self.rows: list[int] = []
        """Whose memory they are read into."""
        self.missing: set[int] = set()
        """Those of `rows` that were not read, or not whole."""
        self.came = 0
        """How many calls have ended."""
        self.batches = _Table(BATCH_DTYPE)
        self.records = _Table(RAW_RECORD)
        self._span = BLOCK  # of the last batch
        self._alike = 0

    def next_places(self, most: int) -> range:
        """Where the next header block is, and where those behind it would be: to be read now."""
        # As many as were right before, so no more are read in vain than there are batches.
        ahead = min(self._alike, most)
        if ahead <= 1:
            self.places = range(self.at, self.at + 1)
        else:
            room = (self.scan.size - BLOCK - self.at) // self._span + 1
            self.places = range(self.at, self.scan.size, self._span)[: min(ahead, room)]
        return self.places

    def forget_read(self) -> None:
        """What was read has been looked at."""
        self.rows = []
        self.missing.clear()
        self.came = 0

    def go_on(self, span: int, reached: int) -> None:
        """Of the blocks that were read, the first `reached` were right; the last of them has a span of `span`."""
        alike = span == self._span
        self._span = span
        self.move(self.at, alike=self._alike + reached if alike else 0)

    def move(self, at: int, *, alike: int) -> None:
        """The next header block is at `at`; so many batches in a row were as long as the one before them."""
        self.at, self._alike = at, alike
        self.done = at + BLOCK > self.scan.size

    def finish(self, realms: list[Realm]) -> SegmentScan:
        """The scan with everything that was found; `realms` are those that its batches name by number."""
        scan = self.scan
        scan.realms = realms
        scan.batches, scan.records = self.batches.rows, self.records.rows.view(RECORD_DTYPE)
        counts = scan.batches["count"].astype(np.int64)
        scan.batches["first"] = np.cumsum(counts) - counts
        return scan


class Kept:
    """What header blocks say, of many files, in the order in which they were found; sorted out whenever it is full."""

    def __init__(self) -> None:
        self.realms: list[Realm] = []
        """What the numbers in batches stand for."""
        self._numbers: dict[bytes, int] = {}
        self._heads = memoryview(bytearray(_HEADS * HEAD_BYTES))
        self._records = memoryview(bytearray(_RECORDS * RECORD_BYTES))
        self._used = 0  # of `_records`
        self._trails: list[Trail] = []  # whose the heads are

    def add(self, trail: Trail, block: memoryview, count: int) -> None:
        """Copy a header block with `count` records."""
        size = count * RECORD_BYTES
        if len(self._trails) == _HEADS or self._used + size > len(self._records):
            self.sort_out()
        at = len(self._trails) * HEAD_BYTES
        self._heads[at : at + HEAD_BYTES] = block[:HEAD_BYTES]
        self._trails.append(trail)
        if size:
            self._records[self._used : self._used + size] = block[HEAD_BYTES : HEAD_BYTES + size]
            self._used += size

    def sort_out(self) -> None:
        """Put everything to the files that it is from."""
        owners, self._trails = self._trails, []
        used, self._used = self._used, 0
        if not owners:
            return
        heads = heads_of(np.frombuffer(self._heads, np.uint8, len(owners) * HEAD_BYTES).reshape(-1, HEAD_BYTES))
        kinds = heads["kind"]
        batches = np.empty(len(heads), BATCH_DTYPE)
        batches["count"] = np.where(_CARRIES[kinds], heads["count"], 0)
        batches["realm"] = self._number_realms(heads["realm"])
        for name in ("kind", "start", "span", "wall_us", "seq"):
            batches[name] = heads[name]
        records = np.frombuffer(self._records, RAW_RECORD, used // RECORD_BYTES)
        whose = np.array([trail.scan.number for trail in owners])
        for trail in set(owners):
            mine = whose == trail.scan.number
            trail.batches.add(batches[mine])
            trail.records.add(records[np.repeat(mine, batches["count"])])

    def _number_realms(self, realms: Bytes) -> list[int] | int:
        if (realms == realms[0]).all():
            return self._number_realm(realms[0].tobytes())
        return [self._number_realm(realm.tobytes()) for realm in realms]

    def _number_realm(self, realm: bytes) -> int:
        number = self._numbers.setdefault(realm, len(self.realms))
        if number == len(self.realms):
            self.realms.append(Realm(realm[:16], int.from_bytes(realm[16:], "little")))
        return number
