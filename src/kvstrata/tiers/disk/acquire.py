"""Taking possession of a directory: lock, leftovers, trim to the limit, recovery.

Everything here may block, so it runs in `open`, or on the executor when a tier tries again later.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstrata.tiers.disk.format import BLOCK, SECTOR, Checkpoint, Realm, Reject, SegmentHeader
from kvstrata.tiers.disk.index import Index
from kvstrata.tiers.disk.io import Files, aligned_buffer, read_all, write_all
from kvstrata.tiers.disk.recover import (
    CHECKPOINT_NAME,
    CHECKPOINT_TEMPORARY,
    Recovered,
    read_checkpoint,
    read_segment_header,
    recover,
)
from kvstrata.tiers.disk.scan import Handles
from kvstrata.tiers.disk.segment import SEGMENT_SLACK, Segment, SegmentState, Sizes, Space, padded
from kvstrata.tiers.disk.work import SCRATCH_NAME, segment_name
from kvstrata.types import OffloadKey

LOCK_NAME = "lock"
_SEGMENT_FILE = re.compile(r"segment-([0-9a-f]{8})\.kvs")


def segment_number(name: str) -> int | None:
    """The number in the name of a segment file."""
    match = _SEGMENT_FILE.fullmatch(name)
    return int(match.group(1), 16) if match else None


@dataclass(slots=True)
class Acquired:
    """An owned directory and what it holds."""

    directory: int
    lock: int
    identity: tuple[int, int]
    direct: bool
    space: Space
    indexes: dict[Realm, Index]
    bad: list[tuple[Realm, OffloadKey]]
    epoch: int
    rejects: Counter[Reject]
    stamp: int
    notes: list[str] = field(default_factory=list)


class InUseError(Exception):
    """Another process owns the directory. Never leaves the disk tier."""


def acquire(
    files: Files,
    path: str,
    sizes_for: Callable[[int | None], Sizes],
    helpers: Callable[[Callable[[], None]], None] | None = None,
    many: int = 0,
    call_queue: bool = True,
) -> Acquired:
    """Own the directory at `path`. Raises `InUseError` or `OSError`; then nothing is left open.

    `sizes_for` divides the limit; it is given the segment size that the directory already has, or None. For the others
    see `scan_all`; a queue is used for direct calls only.
    """
    directory = files.open_directory(path, create=True)
    lock = -1
    try:
        lock = files.open(directory, LOCK_NAME, write=True, create=True)
        if not files.lock(lock):
            raise InUseError(path)
        taken = _take(files, directory, lock, sizes_for, helpers, many, call_queue)
        give_back_memory()
        return taken
    except BaseException:
        if lock >= 0:
            files.close(lock)
        files.close(directory)
        raise


def give_back_memory() -> None:
    """Have the allocator return what recovery used: by itself it keeps about 40 bytes per record."""
    with contextlib.suppress(OSError, AttributeError):  # not every C library can
        ctypes.CDLL(None).malloc_trim(0)


def _take(
    files: Files,
    directory: int,
    lock: int,
    sizes_for: Callable[[int | None], Sizes],
    helpers: Callable[[Callable[[], None]], None] | None,
    many: int,
    call_queue: bool,
) -> Acquired:
    for leftover in (CHECKPOINT_TEMPORARY, SCRATCH_NAME):
        files.unlink(directory, leftover)
    direct = _probe_direct(files, directory)
    rejects: Counter[Reject] = Counter()
    handles: Handles = {}
    try:
        _open_segments(files, directory, direct, rejects, handles)
        sizes = sizes_for(_common_size(handles))
        notes = _trim(files, directory, handles, sizes)
        checkpoint, checkpoint_size = _checkpoint(files, directory, sizes, rejects)
        found = recover(files, handles, checkpoint, call_queue=direct and call_queue, helpers=helpers, many=many)
    finally:
        for handle, _, _ in handles.values():
            with contextlib.suppress(OSError):
                files.close(handle)
    space = _space(sizes, found)
    space.checkpoint_size = checkpoint_size
    epoch = max((scan.header.epoch for scan in found.scans), default=0) + 1
    identity = files.handle_identity(directory)
    rejects.update(found.rejects)
    return Acquired(
        directory, lock, identity, direct, space, found.indexes, found.bad, epoch, rejects, found.largest_stamp, notes
    )


def _probe_direct(files: Files, directory: int) -> bool:
    """Whether calls past the page cache work here in units of 512 bytes."""
    block = aligned_buffer(BLOCK)
    try:
        handle = files.open(directory, SCRATCH_NAME, write=True, create=True, direct=True)
    except OSError:
        handle = -1
    try:
        if handle < 0:
            return False
        write_all(files, handle, [block], 0)
        return read_all(files, handle, [block[:SECTOR]], SECTOR) == SECTOR
    except OSError:
        return False
    finally:
        if handle >= 0:
            files.close(handle)
        files.unlink(directory, SCRATCH_NAME)


def _open_segments(files: Files, directory: int, direct: bool, rejects: Counter[Reject], handles: Handles) -> None:
    """Open every segment that can be used into `handles`, which the caller closes, also after an error."""
    for name in sorted(files.names(directory)):
        number = segment_number(name)
        if number is None:
            continue
        handle = files.open(directory, name, write=False, direct=direct)
        try:
            header = read_segment_header(files, handle)
        except OSError:
            header = Reject.EMPTY
        try:
            found = files.stat(directory, name)
        except OSError:
            files.close(handle)
            raise
        if isinstance(header, Reject) or found is None or found.size < 2 * BLOCK:
            # Died while it was created, or of another version: its room is wanted, and nothing in it can be used.
            files.close(handle)
            files.unlink(directory, name)
            if isinstance(header, Reject) and header is not Reject.EMPTY:
                rejects[header] += 1
            continue
        handles[number] = (handle, header, found.size)


def _common_size(handles: Handles) -> int | None:
    sizes = Counter(header.size for _, header, _ in handles.values() if header.size)
    return sizes.most_common(1)[0][0] if sizes else None


def _trim(files: Files, directory: int, handles: Handles, sizes: Sizes) -> list[str]:
    """Unlink the oldest segments until the rest is under the limit, and those of another size first."""
    order = sorted(handles, key=lambda n: (_fits(handles[n], sizes), handles[n][1].seq))
    total = sum(size + SEGMENT_SLACK for _, _, size in handles.values()) + sizes.overhead
    dropped = 0
    for number in order:
        handle, _, size = handles[number]
        if (sizes.limit is None or total <= sizes.limit) and _fits(handles[number], sizes):
            break
        files.close(handle)
        files.unlink(directory, segment_name(number))
        del handles[number]
        total -= size + SEGMENT_SLACK
        dropped += 1
    if dropped:
        files.sync_directory(directory)
        return [f"{dropped} segments were dropped to fit the limit of {sizes.limit} bytes"]
    return []


def _fits(entry: tuple[int, SegmentHeader, int], sizes: Sizes) -> bool:
    # A file that was cut short keeps its place: what is left of it can be read.
    _, header, size = entry
    return (header.size or size) == sizes.segment_bytes and size <= sizes.segment_bytes


def _checkpoint(files: Files, directory: int, sizes: Sizes, rejects: Counter[Reject]) -> tuple[Checkpoint | None, int]:
    try:
        found, size = read_checkpoint(files, directory)
    except OSError:
        found, size = Reject.EMPTY, 0
    if isinstance(found, Reject):
        rejects[found] += 1
        found = None
    if size > sizes.checkpoint_bytes or (found is None and size):
        files.unlink(directory, CHECKPOINT_NAME)
        size = 0
    return found, size


def _space(sizes: Sizes, found: Recovered) -> Space:
    space = Space(sizes)
    for scan in found.scans:
        segment = Segment(scan.number, sizes.segment_bytes, scan.header.segment_id, scan.header.seq)
        segment.wall_us = scan.header.wall_us
        segment.cursor = segment.written_end = scan.end
        segment.state = SegmentState.SEALED
        # What a killed process wrote behind its last checkpoint may be in nothing but the system's memory.
        segment.dirty = len(scan.batches) > 0
        space.segments[scan.number] = segment
        space.next_seq = max(space.next_seq, scan.header.seq + 1)
    _find_open(space, {scan.number for scan in found.scans if not scan.ended and scan.size == sizes.segment_bytes})
    _count_live(space, found)
    return space


def _find_open(space: Space, open_ended: set[int]) -> None:
    """The newest lives are often without a batch: they are spares, and the one before them may still be active."""
    order = sorted(space.segments.values(), key=lambda segment: segment.seq)
    while order and order[-1].number in open_ended:
        newest = order.pop()
        if newest.cursor > BLOCK:
            newest.state = SegmentState.ACTIVE
            space.active = newest
            return
        newest.state = SegmentState.SPARE
        space.spares.appendleft(newest)


def _count_live(space: Space, found: Recovered) -> None:
    for index in found.indexes.values():
        rows = index.live_rows()
        numbers = index.segment[rows]
        for number in space.segments:
            mine = rows[numbers == number]
            if len(mine):
                space.held(number, len(mine), int(padded(index.length[mine]).sum()))
