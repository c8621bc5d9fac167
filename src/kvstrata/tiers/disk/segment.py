"""Segments and the space under the limit: which file may take the next batch, and what counts against the limit.

    (none) -> PREPARING -> SPARE -> ACTIVE -> SEALED -> RECLAIMING -> PREPARING -> ...

Batches are appended to the one ACTIVE segment; one SPARE waits to follow it, and more while files are still created.
Lives of segments are ordered by `seq`, and the oldest is reclaimed first, always: a removal is written later than what
it removes, so it goes later too.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstrata.errors import ConfigError, InternalError
from kvstrata.tiers.disk.format import BLOCK, MAX_SEGMENT_BYTES, RESYNC_BYTES, SECTOR, align_up, checkpoint_bytes
from kvstrata.types import I64

SEGMENT_SLACK = 2 * BLOCK
"""Per segment: blocks that a file system needs to list the extents of a file count as allocated to it."""
FIXED_BYTES = 4 * BLOCK
"""The lock file and the scratch file of the self test."""
RECORD_SHARE = BLOCK // 64
"""What one record counts for its part of a header block."""
SMALLEST_SEGMENT = 3 * BLOCK
_LARGEST_AUTO = 1 << 30
_AUTO_SEGMENTS = 32
_UNLIMITED_SEGMENT = 64 << 20
_UNLIMITED_CHECKPOINT = 1 << 30


def padded(lengths: npt.NDArray[Any]) -> I64:
    """What payloads of these lengths take up: large ones whole sectors, small ones (packed) multiples of 8 bytes."""
    long = lengths.astype(np.int64)
    return np.where(long >= BLOCK, -(-long // SECTOR) * SECTOR, -(-long // 8) * 8)


def padded_sum(lengths: npt.NDArray[Any]) -> int:
    """What payloads of these lengths take up together."""
    return int(padded(lengths).sum())


class SegmentState(enum.Enum):
    """Where a segment is in its life."""

    PREPARING = "preparing"  # its header is being written
    SPARE = "spare"  # empty, the next to be active
    ACTIVE = "active"  # takes batches
    SEALED = "sealed"  # full
    RECLAIMING = "reclaiming"  # hot chunks are being moved, readers are leaving


_MOVES = {
    SegmentState.PREPARING: {SegmentState.SPARE},
    SegmentState.SPARE: {SegmentState.ACTIVE},
    SegmentState.ACTIVE: {SegmentState.SEALED},
    SegmentState.SEALED: {SegmentState.RECLAIMING},
    SegmentState.RECLAIMING: {SegmentState.PREPARING},
}


@dataclass(slots=True)
class Segment:
    """One segment file. Offsets are bytes from its start."""

    number: int
    size: int
    segment_id: bytes = b""
    seq: int = 0
    wall_us: int = 0
    state: SegmentState = SegmentState.PREPARING
    cursor: int = BLOCK  # where the next batch goes
    written_end: int = BLOCK  # end of the last batch that was written well
    readers: int = 0
    unfinished: dict[int, int] = field(default_factory=dict)  # start -> span of batches in flight
    live_bytes: int = 0
    live_records: int = 0
    dirty: bool = False
    fresh: bool = False  # in the first life of its file

    def move(self, state: SegmentState) -> None:
        """Enter another state. Raises `InternalError` if that is no legal move."""
        if state not in _MOVES[self.state]:
            raise InternalError(f"segment {self.number}: {self.state.value} cannot become {state.value}")
        self.state = state

    @property
    def scan_from(self) -> int:
        """Everything below is finished: where a scan after the next checkpoint has to begin."""
        return min(self.unfinished, default=self.cursor)

    def has_room(self, span: int) -> bool:
        """Whether a batch of `span` bytes fits behind the last one."""
        return self.cursor + span <= self.size

    def in_window(self, span: int) -> bool:
        """Whether that batch would lie close enough to the oldest unfinished one for a scan to find it."""
        # Batches are placed in the order of their starts, so the first one is the lowest.
        return not self.unfinished or self.cursor + span - next(iter(self.unfinished)) <= RESYNC_BYTES

    def place(self, span: int) -> int:
        """Take the next `span` bytes; returns where they start."""
        start = self.cursor
        self.cursor += span
        self.unfinished[start] = span
        return start

    def finish(self, start: int, ok: bool) -> None:
        """A batch was written, or not. A hole that grows too long for a scan to step over ends the segment.

        The room of a failed batch is not used again in this life: part of it may have been written.
        """
        span = self.unfinished.pop(start)
        if ok:
            self.written_end = max(self.written_end, start + span)
            self.dirty = True
        elif not self.unfinished and self.cursor - self.written_end > RESYNC_BYTES // 2:
            self.cursor = self.size


@dataclass(frozen=True, slots=True)
class Sizes:
    """How a limit is divided."""

    limit: int | None
    segment_bytes: int
    checkpoint_bytes: int
    """Largest checkpoint file; two of them are reserved."""

    @property
    def overhead(self) -> int:
        """What is not segments."""
        return 2 * self.checkpoint_bytes + FIXED_BYTES


def divide(limit: int | None, segment_bytes: int | None, largest_chunk: int) -> Sizes:
    """Divide a byte limit (None: no limit). Raises `ConfigError` with the numbers if two segments do not fit."""
    least = align_up(2 * largest_chunk, BLOCK) + 2 * BLOCK
    if limit is None:
        return Sizes(None, segment_bytes or max(_UNLIMITED_SEGMENT, least), _UNLIMITED_CHECKPOINT)
    checkpoint = max(4 * BLOCK, limit // 128 // BLOCK * BLOCK)
    room = limit - 2 * checkpoint - FIXED_BYTES
    if segment_bytes is None:
        wanted = min(max(room // _AUTO_SEGMENTS, min(least, room // 4), SMALLEST_SEGMENT), _LARGEST_AUTO)
        count = max(room // (wanted + SEGMENT_SLACK), 1)
        segment_bytes = (room // count - SEGMENT_SLACK) // BLOCK * BLOCK
    segment_bytes = min(segment_bytes, MAX_SEGMENT_BYTES) // BLOCK * BLOCK
    if segment_bytes < SMALLEST_SEGMENT or room < 2 * (segment_bytes + SEGMENT_SLACK):
        raise ConfigError(
            f"limit: {limit} leaves {max(room, 0)} bytes for segments of {max(segment_bytes, 0)} bytes; at least two "
            f"of {SMALLEST_SEGMENT} bytes or more are needed, each with {SEGMENT_SLACK} beside it"
        )
    return Sizes(limit, segment_bytes, checkpoint)


class Space:
    """All segments of an opened directory."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.segments: dict[int, Segment] = {}
        self.active: Segment | None = None
        self.spares: deque[Segment] = deque()
        self.changing: Segment | None = None
        """The one segment that is being prepared or reclaimed."""
        self.next_seq = 1
        self.checkpoint_size = 0
        self.sealed_since_checkpoint = 0

    @property
    def allocated(self) -> int:
        """Bytes on the device that count as ours, those of a file that is being created included."""
        files = len(self.segments) * (self.sizes.segment_bytes + SEGMENT_SLACK)
        return files + (self.sizes.overhead if self.sizes.limit is not None else FIXED_BYTES)

    @property
    def live_bytes(self) -> int:
        """Bytes of records that are held."""
        return sum(segment.live_bytes for segment in self.segments.values())

    def may_create(self) -> bool:
        """Whether one more segment stays under the limit."""
        limit = self.sizes.limit
        return limit is None or self.allocated + self.sizes.segment_bytes + SEGMENT_SLACK <= limit

    def create(self, is_taken: Callable[[int], bool]) -> Segment:
        """A new segment, counted from now on, to be prepared. `is_taken`: whether a name belongs to somebody else."""
        number = next(n for n in itertools.count() if n not in self.segments and not is_taken(n))
        segment = Segment(number, self.sizes.segment_bytes)
        self.segments[number] = segment
        self.changing = segment
        return segment

    def begin_life(self, segment: Segment, segment_id: bytes, wall_us: int) -> None:
        """Give a segment that is being prepared its new name and order, and empty it."""
        segment.segment_id = segment_id
        segment.seq = self.next_seq
        self.next_seq += 1
        segment.wall_us = wall_us
        segment.cursor = segment.written_end = BLOCK
        segment.live_bytes = segment.live_records = 0
        segment.dirty = False

    def forget(self, segment: Segment) -> None:
        """The segment's file does not exist."""
        del self.segments[segment.number]
        if self.changing is segment:
            self.changing = None

    def prepared(self, segment: Segment) -> None:
        """Its header is durable."""
        segment.move(SegmentState.SPARE)
        self.changing = None
        self.spares.append(segment)

    def seal(self) -> None:
        """The active segment takes no more."""
        if self.active is not None:
            self.active.move(SegmentState.SEALED)
            self.active = None
            self.sealed_since_checkpoint += 1

    def promote(self) -> Segment | None:
        """Make the first spare the active segment."""
        if not self.spares:
            return None
        if self.active is not None:
            self.seal()
        self.active = self.spares.popleft()
        self.active.move(SegmentState.ACTIVE)
        return self.active

    def oldest(self) -> Segment | None:
        """The sealed segment that is reclaimed next."""
        sealed = [s for s in self.segments.values() if s.state is SegmentState.SEALED]
        return min(sealed, key=lambda s: s.seq, default=None)

    def dirty(self) -> list[Segment]:
        """Segments with bytes that are not durable."""
        return [segment for segment in self.segments.values() if segment.dirty]

    def checkpoint_fits(self, realms: int, records: int) -> bool:
        """Whether a checkpoint of that many records stays within its part of the limit."""
        return align_up(checkpoint_bytes(realms, len(self.segments), records), BLOCK) <= self.sizes.checkpoint_bytes

    def held(self, segment: int, count: int, payload: int) -> None:
        """`count` records with `payload` bytes, padding included, were added (or, negative, dropped)."""
        entry = self.segments[segment]
        entry.live_records += count
        entry.live_bytes += payload + count * RECORD_SHARE
