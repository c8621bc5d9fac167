"""Finding out what a directory holds: the checkpoint, the header blocks written since, and their order.

Records, removals and purges are facts with a place; the place (life of the segment, offset) is also their order in
time, and for each key the last fact counts. A hole (a batch that a crash tore or lost) is stepped over by looking for
the next header block of this life of the segment.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstrata.tiers.disk.format import (
    BLOCK,
    RECORD_BYTES,
    RECORD_DTYPE,
    RESYNC_BYTES,
    SECTOR,
    Batch,
    BatchKind,
    Checkpoint,
    Realm,
    Records,
    Reject,
    SegmentHeader,
    Words,
    align_up,
    find_batches,
    parse_batch,
    parse_checkpoint,
    parse_segment,
    payload_digest,
)
from kvstrata.tiers.disk.index import U64, Index, hashes_of, keys_of
from kvstrata.tiers.disk.io import Files, aligned_buffer, read_all
from kvstrata.types import I64, Bool, OffloadKey

CHECKPOINT_NAME = "checkpoint.kvs"
CHECKPOINT_TEMPORARY = "checkpoint.tmp"
VERIFY_TAIL_BYTES = 64 << 20
"""How much of what was written last is read and verified: more than can have been in flight."""
_WINDOW = 1 << 20


@dataclass(slots=True)
class SegmentScan:
    """What one segment file says."""

    number: int
    header: SegmentHeader
    size: int
    batches: list[Batch] = field(default_factory=list)
    end: int = BLOCK
    ended: bool = False
    """The segment was sealed: an end block was found."""
    rejects: Counter[Reject] = field(default_factory=Counter)
    table: Records | None = None
    """The records of all batches in one piece, if they lie in one."""


class _Reader:
    """Reads header blocks of one file; record tables are kept together in large pieces, which are given back whole."""

    _PIECE = 600_000  # so large that the allocator gives it back to the system; only what is used is backed

    def __init__(self, files: Files, handle: int) -> None:
        self._files = files
        self._handle = handle
        self._block = aligned_buffer(BLOCK)
        self._piece: Records = np.empty(0, RECORD_DTYPE)
        self._used = 0
        self._pieces = 0

    def batch_at(self, header: SegmentHeader, at: int, size: int) -> Batch | Reject:
        """The batch whose header block is at `at`, or why there is none."""
        try:
            got = read_all(self._files, self._handle, [self._block], at)
        except OSError:
            return Reject.EMPTY  # a bad sector is a hole like any other
        return parse_batch(self._block[:got], header.segment_id, at, size, self._keep)

    def whole(self) -> Records | None:
        """Everything that was kept, if one piece was enough for it."""
        return self._piece[: self._used] if self._pieces == 1 else None

    def _keep(self, records: Records) -> Records:
        count = len(records)
        if self._used + count > len(self._piece):
            self._piece, self._used = np.empty(self._PIECE, RECORD_DTYPE), 0
            self._pieces += 1
        kept = self._piece[self._used : self._used + count]
        kept[:] = records
        self._used += count
        return kept


def read_block(files: Files, handle: int, offset: int, size: int = BLOCK) -> memoryview:
    """Up to `size` bytes at `offset`; fewer at the end of the file."""
    buffer = aligned_buffer(size)
    return buffer[: read_all(files, handle, [buffer], offset)]


def read_segment_header(files: Files, handle: int) -> SegmentHeader | Reject:
    """The header of a segment; if its page is lost, what the first batch repeats of it."""
    blocks = read_block(files, handle, 0, 2 * BLOCK)
    header = parse_segment(blocks[:BLOCK])
    if not isinstance(header, Reject) or header is Reject.VERSION:
        return header
    first = blocks[BLOCK:]
    if len(first) == BLOCK:
        # Safe even if the page was torn while a new life began: removals of what is found here are in younger segments.
        batch = parse_batch(first, bytes(first[40:56]), BLOCK, 1 << 32)
        if not isinstance(batch, Reject):
            return SegmentHeader(batch.segment_id, batch.seq, 0, 0, batch.wall_us)
    return header


def scan_segment(files: Files, handle: int, number: int, header: SegmentHeader, size: int, start: int) -> SegmentScan:
    """Follow the header blocks of one segment from `start`. Raises `OSError` if the file cannot be read at all."""
    scan = SegmentScan(number, header, size, end=start)
    reader = _Reader(files, handle)
    _follow(files, handle, reader, scan, start)
    scan.table = reader.whole()
    return scan


def _follow(files: Files, handle: int, reader: _Reader, scan: SegmentScan, start: int) -> None:
    header, size = scan.header, scan.size
    at = start
    while at + BLOCK <= size:
        batch = reader.batch_at(header, at, size)
        if isinstance(batch, Reject):
            found = _resync(files, handle, header, at, size)
            if found is None:
                if batch not in (Reject.EMPTY, Reject.STALE):
                    scan.rejects[batch] += 1
                return
            scan.rejects[batch] += 1
            at = found
            continue
        scan.batches.append(batch)
        at = scan.end = batch.start + batch.span
        if batch.kind is BatchKind.END:
            scan.ended = True
            return


def _resync(files: Files, handle: int, header: SegmentHeader, at: int, size: int) -> int | None:
    limit = min(size, at + RESYNC_BYTES)
    place = at + BLOCK
    while place < limit:
        try:
            window = read_block(files, handle, place, min(_WINDOW, limit - place))
        except OSError:
            window = memoryview(b"")
        for offset in find_batches(window, header.segment_id):
            batch = parse_batch(window[offset : offset + BLOCK], header.segment_id, place + offset, size)
            if not isinstance(batch, Reject):
                return place + offset
        place += _WINDOW
    return None


def read_checkpoint(files: Files, directory: int) -> tuple[Checkpoint | Reject | None, int]:
    """The checkpoint of a directory (None: there is none) and the bytes that its file takes."""
    found = files.stat(directory, CHECKPOINT_NAME)
    if found is None:
        return None, 0
    handle = files.open(directory, CHECKPOINT_NAME, write=False)
    try:
        buffer = aligned_buffer(found.size)
        got = read_all(files, handle, [buffer], 0)
    finally:
        files.close(handle)
    return parse_checkpoint(buffer[:got]), align_up(found.size, BLOCK)


# merging


@dataclass(slots=True)
class _Facts:
    """Columns of one realm's facts, in pieces."""

    keys: list[npt.NDArray[np.uint32]] = field(default_factory=list)
    digests: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    segments: list[npt.NDArray[np.int32]] = field(default_factory=list)
    offsets: list[npt.NDArray[np.uint32]] = field(default_factory=list)
    lengths: list[npt.NDArray[np.uint32]] = field(default_factory=list)
    stamps: list[npt.NDArray[np.uint32]] = field(default_factory=list)
    orders: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    removes: bool = False

    def add_batches(self, batches: list[Batch], number: int, records: Records) -> None:
        """The records, or the removals, of some header blocks of one segment; a removal has segment -1."""
        removal = batches[0].kind is BatchKind.REMOVE
        self.removes |= removal
        count = len(records)
        self.keys.append(records["key"])
        self.digests.append(records["digest"])
        self.segments.append(np.full(count, -1 if removal else number, np.int32))
        self.offsets.append(records["offset"])
        self.lengths.append(records["length"])
        self.stamps.append(np.zeros(count, np.uint32))
        # Of a removal too the offset is its place.
        self.orders.append(np.uint64(batches[0].seq << 32) | records["offset"].astype(np.uint64))

    def add_checkpoint(self, rows: npt.NDArray[np.void], numbers: npt.NDArray[np.int32], seqs: Any) -> None:
        """Rows of a checkpoint, with segment numbers and lives looked up."""
        self.keys.append(rows["key"])
        self.digests.append(rows["digest"])
        self.segments.append(numbers)
        self.offsets.append(rows["offset"])
        self.lengths.append(rows["length"])
        self.stamps.append(rows["stamp"])
        self.orders.append((seqs.astype(np.uint64) << np.uint64(32)) | rows["offset"].astype(np.uint64))

    def build(self, after: int) -> Index:
        """The index that these facts, without those up to the order `after`, come to."""
        hashes = [hashes_of(keys) for keys in self.keys]
        count = sum(map(len, hashes))
        if not after and not self.removes and not _any_twice(hashes):
            # The usual case: piece by piece, so that no second copy of everything is made.
            index = Index(max(count, 1024))
            for number, keys in enumerate(self.keys):
                digests, segments, offsets = self.digests[number], self.segments[number], self.offsets[number]
                rows = index.insert(keys, digests, segments, offsets, self.lengths[number], hashes[number])
                index.stamp[rows] = self.stamps[number]
            return index
        return self._build_chosen(np.concatenate(hashes), after) if count else Index()

    def _build_chosen(self, hashes: U64, after: int) -> Index:
        keys, segments = np.concatenate(self.keys), np.concatenate(self.segments)
        chosen = _last_facts(keys, hashes, np.concatenate(self.orders), after)
        chosen = chosen[segments[chosen] >= 0]
        index = Index(max(len(chosen), 1024))
        digests, offsets = np.concatenate(self.digests), np.concatenate(self.offsets)
        rows = index.insert(
            keys[chosen],
            digests[chosen],
            segments[chosen],
            offsets[chosen],
            np.concatenate(self.lengths)[chosen],
            hashes[chosen],
        )
        index.stamp[rows] = np.concatenate(self.stamps)[chosen]
        return index


def _any_twice(hashes: list[U64]) -> bool:
    """Whether two facts may be about one key."""
    if not hashes:
        return False
    ordered = np.concatenate(hashes)
    ordered.sort()
    return bool((ordered[1:] == ordered[:-1]).any())


def _last_facts(keys: Words, hashes: U64, orders: U64, after: int) -> I64:
    """Positions of the last fact of each key, of those behind the order `after`."""
    young = np.flatnonzero(orders > np.uint64(after)) if after else np.arange(len(keys))
    by = young[np.lexsort((orders[young], hashes[young]))]
    same = hashes[by[1:]] == hashes[by[:-1]]
    last = np.append(~same, True) if len(by) else np.zeros(0, np.bool_)
    unlike = same & (keys[by[1:]] != keys[by[:-1]]).any(axis=1)
    if unlike.any():  # two keys with one 64-bit mix: settle all of this realm the slow way
        by = by[np.argsort(orders[by], kind="stable")]
        latest = dict(zip(keys_of(keys[by]), by.tolist(), strict=True))
        return np.sort(np.fromiter(latest.values(), np.int64, len(latest)))
    return np.sort(by[last])


@dataclass(slots=True)
class Recovered:
    """What a directory holds."""

    indexes: dict[Realm, Index]
    scans: list[SegmentScan]
    bad: list[tuple[Realm, OffloadKey]]
    """Records whose payload turned out torn; a removal should be written for them."""
    rejects: Counter[Reject]
    scanned_batches: int = 0
    from_checkpoint: int = 0
    largest_stamp: int = 0


def recover(
    files: Files,
    handles: dict[int, tuple[int, SegmentHeader, int]],
    checkpoint: Checkpoint | None,
    *,
    verify_tail: int = VERIFY_TAIL_BYTES,
    helpers: Callable[[Callable[[], None]], None] | None = None,
    many: int = 0,
) -> Recovered:
    """Rebuild the indexes. `handles`: segment number -> (open handle, header, file size).

    `helpers` may run the scan of several segments at once; this call does what they have not begun and waits only for
    what they have.
    """
    starts = _scan_starts(handles, checkpoint)
    scans = _scan_all(files, handles, starts, helpers, many)
    rejects: Counter[Reject] = Counter()
    for scan in scans:
        rejects.update(scan.rejects)
    keeps, bad = _verify_tail(files, handles, scans, verify_tail)
    rejects[Reject.DIGEST] += len(bad)
    facts, purges = _collect(scans, keeps)
    used = _add_checkpoint(facts, handles, checkpoint) if checkpoint is not None else 0
    indexes = {realm: each.build(purges.get(realm.namespace, 0)) for realm, each in facts.items()}
    stamps = [int(index.stamp[index.live_rows()].max()) for index in indexes.values() if index.count]
    return Recovered(
        {realm: index for realm, index in indexes.items() if index.count},
        scans,
        bad,
        rejects,
        sum(len(scan.batches) for scan in scans),
        used,
        max(stamps, default=0),
    )


def _collect(
    scans: list[SegmentScan], keeps: dict[tuple[int, int], Bool]
) -> tuple[dict[Realm, _Facts], dict[bytes, int]]:
    """Facts by realm, and by namespace the order of its last purge."""
    facts: dict[Realm, _Facts] = {}
    purges: dict[bytes, int] = {}
    for scan in scans:
        alike: dict[tuple[Realm, BatchKind], list[Batch]] = {}
        for batch in scan.batches:
            if batch.kind is BatchKind.PURGE:
                order = batch.seq << 32 | batch.start
                purges[batch.realm.namespace] = max(purges.get(batch.realm.namespace, 0), order)
            elif len(batch.records):
                alike.setdefault((batch.realm, batch.kind), []).append(batch)
        whole = scan.table if len(alike) == 1 and not any(number == scan.number for number, _ in keeps) else None
        for (realm, _), batches in alike.items():
            records = _joined(batches, scan.number, keeps) if whole is None else whole
            facts.setdefault(realm, _Facts()).add_batches(batches, scan.number, records)
    return facts, purges


def _joined(batches: list[Batch], number: int, keeps: dict[tuple[int, int], Bool]) -> Records:
    """The records of some batches that are good, in one table."""
    tables = [b.records[keeps[number, b.start]] if (number, b.start) in keeps else b.records for b in batches]
    rows = [np.ascontiguousarray(table).view(np.uint8).reshape(-1, RECORD_BYTES) for table in tables]
    joined: Records = np.concatenate(rows).view(RECORD_DTYPE).ravel()
    return joined


def _scan_starts(handles: dict[int, tuple[int, SegmentHeader, int]], checkpoint: Checkpoint | None) -> dict[int, int]:
    starts = dict.fromkeys(handles, BLOCK)
    if checkpoint is not None:
        for row in checkpoint.segments:
            number = int(row["number"])
            if number in handles and handles[number][1].segment_id == row["id"].tobytes():
                at = align_up(max(int(row["scan_from"]), BLOCK), BLOCK)
                starts[number] = at if at <= handles[number][2] else BLOCK  # beyond the file: damage, look at all of it
    return starts


def _scan_all(
    files: Files,
    handles: dict[int, tuple[int, SegmentHeader, int]],
    starts: dict[int, int],
    helpers: Callable[[Callable[[], None]], None] | None,
    many: int,
) -> list[SegmentScan]:
    todo = deque(handles)
    done: deque[SegmentScan] = deque()

    def work() -> None:
        while True:
            try:
                number = todo.popleft()
            except IndexError:
                return
            handle, header, size = handles[number]
            try:
                done.append(scan_segment(files, handle, number, header, size, starts[number]))
            except OSError:
                done.append(SegmentScan(number, header, size, end=starts[number]))

    if helpers is not None:
        for _ in range(min(many, len(handles) - 1)):
            helpers(work)
    work()
    while len(done) < len(handles):
        files.pause()
    return sorted(done, key=lambda scan: scan.header.seq)


def _verify_tail(
    files: Files, handles: dict[int, tuple[int, SegmentHeader, int]], scans: list[SegmentScan], budget: int
) -> tuple[dict[tuple[int, int], Bool], list[tuple[Realm, OffloadKey]]]:
    keeps: dict[tuple[int, int], Bool] = {}
    bad: list[tuple[Realm, OffloadKey]] = []
    for scan in reversed(scans):
        for batch in reversed(scan.batches):
            if batch.kind is not BatchKind.RECORDS:
                continue
            if budget <= 0:
                return keeps, bad
            budget -= batch.span
            good = verify_batch(files, handles[scan.number][0], batch)
            if not good.all():
                keeps[scan.number, batch.start] = good
                bad += [(batch.realm, key) for key in keys_of(batch.records["key"][~good])]
    return keeps, bad


def verify_batch(files: Files, handle: int, batch: Batch) -> Bool:
    """Which records of a batch have the payload that their digest names."""
    good = np.zeros(len(batch.records), np.bool_)
    try:
        payload = read_block(files, handle, batch.start, batch.span)
    except OSError:
        payload = memoryview(b"")
    for index, record in enumerate(batch.records):
        begin = int(record["offset"]) - batch.start
        end = begin + int(record["length"])
        if end <= len(payload):
            good[index] = payload_digest(payload[begin:end]) == record["digest"].tobytes()
        elif not len(payload):
            offset, length = int(record["offset"]), int(record["length"])
            good[index] = verify_place(files, handle, offset, length, record["digest"].tobytes())
    return good


def verify_place(files: Files, handle: int, offset: int, length: int, digest: bytes) -> bool:
    """Whether the payload at a place has the digest."""
    start = offset // SECTOR * SECTOR
    try:
        payload = read_block(files, handle, start, align_up(offset + length, SECTOR) - start)
    except OSError:
        return False
    piece = payload[offset - start : offset - start + length]
    return len(piece) == length and payload_digest(piece) == digest


def _add_checkpoint(
    facts: dict[Realm, _Facts], handles: dict[int, tuple[int, SegmentHeader, int]], checkpoint: Checkpoint
) -> int:
    table = checkpoint.segments
    rows = checkpoint.records
    if not len(rows) or not len(table):
        return 0
    numbers = np.full(len(table), -1, np.int32)
    ends = np.zeros(len(table), np.int64)
    for position, row in enumerate(table):
        number = int(row["number"])
        if number in handles and handles[number][1].segment_id == row["id"].tobytes():
            numbers[position], ends[position] = number, handles[number][1].size or handles[number][2]
    ok = (rows["segment"] < len(table)) & (rows["realm"] < len(checkpoint.realms))
    homes = np.minimum(rows["segment"], len(table) - 1)
    # A record that is said to lie beyond its segment is damage: nothing may be read, or moved, at such a size.
    ok &= (numbers[homes] >= 0) & (rows["offset"].astype(np.int64) + rows["length"] <= ends[homes])
    rows = rows if ok.all() else rows[ok]
    for position, realm in enumerate(checkpoint.realms):
        mine = rows["realm"] == position
        part = rows if mine.all() else rows[mine]
        if len(part):
            facts.setdefault(realm, _Facts()).add_checkpoint(
                part, numbers[part["segment"]], table["seq"][part["segment"]]
            )
    return len(rows)
