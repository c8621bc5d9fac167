"""Finding out what a directory holds: the checkpoint, the header blocks written since, and their order.

Records, removals and purges are facts with a place; the place (life of the segment, offset) is also their order in
time, and for each key the last fact counts. A hole (a batch that a crash tore or lost) is stepped over by looking for
the next header block of this life of the segment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstrata.tiers.disk.format import (
    BLOCK,
    RECORD_DTYPE,
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
    parse_batch,
    parse_checkpoint,
    parse_segment,
    payload_digest,
)
from kvstrata.tiers.disk.index import U64, Index, hashes_of, keys_of
from kvstrata.tiers.disk.io import Files, aligned_buffer, read_all
from kvstrata.tiers.disk.scan import Handles, read_block, scan_all
from kvstrata.tiers.disk.trail import RAW_RECORD, SegmentScan
from kvstrata.types import I64, Bool, OffloadKey

CHECKPOINT_NAME = "checkpoint.kvs"
CHECKPOINT_TEMPORARY = "checkpoint.tmp"
VERIFY_TAIL_BYTES = 192 << 20
"""How much of what was written last is read and verified: more than can have been in flight."""


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

    def add_batches(self, first: Batch, number: int, records: Records) -> None:
        """The records, or the removals, of header blocks like the first of one segment; a removal has segment -1."""
        removal = first.kind is BatchKind.REMOVE
        self.removes |= removal
        count = len(records)
        self.keys.append(records["key"])
        self.digests.append(records["digest"])
        self.segments.append(np.full(count, -1 if removal else number, np.int32))
        self.offsets.append(records["offset"])
        self.lengths.append(records["length"])
        self.stamps.append(np.zeros(count, np.uint32))
        # Of a removal too the offset is its place.
        self.orders.append(np.uint64(first.seq << 32) | records["offset"].astype(np.uint64))

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
    handles: Handles,
    checkpoint: Checkpoint | None,
    *,
    verify_tail: int = VERIFY_TAIL_BYTES,
    call_queue: bool = False,
    helpers: Callable[[Callable[[], None]], None] | None = None,
    many: int = 0,
) -> Recovered:
    """Rebuild the indexes. `call_queue`, `helpers`, `many`: see `scan_all`."""
    starts = _scan_starts(handles, checkpoint)
    scans = scan_all(files, handles, starts, call_queue=call_queue, helpers=helpers, many=many)
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


def _collect(scans: list[SegmentScan], keeps: dict[int, Bool]) -> tuple[dict[Realm, _Facts], dict[bytes, int]]:
    """Facts by realm, and by namespace the order of its last purge."""
    facts: dict[Realm, _Facts] = {}
    purges: dict[bytes, int] = {}
    for scan in scans:
        batches = scan.batches
        for row in np.flatnonzero(batches["kind"] == BatchKind.PURGE).tolist():
            purge = scan.batch(row)
            namespace = purge.realm.namespace
            purges[namespace] = max(purges.get(namespace, 0), purge.seq << 32 | purge.start)
        alike = batches["realm"].astype(np.int64) << 8 | batches["kind"]
        alike[batches["count"] == 0] = -1
        groups, firsts = np.unique(alike, return_index=True)
        for row in sorted(firsts[groups >= 0].tolist()):
            first = scan.batch(row)
            chosen = np.repeat(alike == alike[row], batches["count"])
            if scan.number in keeps:
                chosen &= keeps[scan.number]
            records = scan.records if chosen.all() else _chosen(scan.records, chosen)
            facts.setdefault(first.realm, _Facts()).add_batches(first, scan.number, records)
    return facts, purges


def _chosen(records: Records, chosen: Bool) -> Records:
    return records.view(RAW_RECORD)[chosen].view(RECORD_DTYPE)


def _scan_starts(handles: Handles, checkpoint: Checkpoint | None) -> dict[int, int]:
    starts = dict.fromkeys(handles, BLOCK)
    if checkpoint is not None:
        for row in checkpoint.segments:
            number = int(row["number"])
            if number in handles and handles[number][1].segment_id == row["id"].tobytes():
                at = align_up(max(int(row["scan_from"]), BLOCK), BLOCK)
                starts[number] = at if at <= handles[number][2] else BLOCK  # beyond the file: damage, look at all of it
    return starts


def _verify_tail(
    files: Files, handles: Handles, scans: list[SegmentScan], budget: int
) -> tuple[dict[int, Bool], list[tuple[Realm, OffloadKey]]]:
    """By segment number which of its records are good, where some are not; and the keys of those."""
    keeps: dict[int, Bool] = {}
    bad: list[tuple[Realm, OffloadKey]] = []
    for scan in reversed(scans):
        for row in np.flatnonzero(scan.batches["kind"] == BatchKind.RECORDS)[::-1].tolist():
            if budget <= 0:
                return keeps, bad
            batch = scan.batch(row)
            budget -= batch.span
            good = verify_batch(files, handles[scan.number][0], batch)
            if not good.all():
                first = int(scan.batches["first"][row])
                keep = keeps.setdefault(scan.number, np.ones(len(scan.records), np.bool_))
                keep[first : first + len(good)] = good
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


def _add_checkpoint(facts: dict[Realm, _Facts], handles: Handles, checkpoint: Checkpoint) -> int:
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
