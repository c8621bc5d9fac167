"""Looking at a directory of segments without owning it: what `fsck` verifies and repairs, and what `inspect` shows."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from kvstrata.errors import ConfigError
from kvstrata.tiers.disk.acquire import LOCK_NAME, InUseError, acquire, segment_number
from kvstrata.tiers.disk.format import BLOCK, BatchKind, Realm, Reject, pack_batch
from kvstrata.tiers.disk.index import Index, keys_of
from kvstrata.tiers.disk.io import Files, aligned_buffer, write_all
from kvstrata.tiers.disk.recover import (
    CHECKPOINT_NAME,
    CHECKPOINT_TEMPORARY,
    read_checkpoint,
    read_segment_header,
    recover,
    verify_batch,
    verify_place,
)
from kvstrata.tiers.disk.scan import Handles
from kvstrata.tiers.disk.segment import Space, divide, padded_sum
from kvstrata.tiers.disk.snapshot import Snapshot
from kvstrata.tiers.disk.trail import SegmentScan
from kvstrata.tiers.disk.work import SCRATCH_NAME, segment_name
from kvstrata.types import I64, key_group

LEFTOVERS = (CHECKPOINT_TEMPORARY, SCRATCH_NAME)
OURS = (LOCK_NAME, CHECKPOINT_NAME, *LEFTOVERS)


@dataclass(slots=True)
class SegmentReport:
    """One segment file."""

    number: int
    size: int
    seq: int
    wall_us: int
    records: int = 0
    live: int = 0
    live_bytes: int = 0
    end: int = BLOCK


@dataclass(slots=True)
class HeldReport:
    """What is held of one group of one namespace. Ages are wall times in microseconds, of the store."""

    namespace: str
    layout_tag: int
    group: int
    records: int
    payload_bytes: int
    smallest: int
    largest: int
    oldest_us: int
    newest_us: int


@dataclass(slots=True)
class Survey:
    """What a directory holds, and what of it cannot be used, by cause."""

    path: str
    in_use: bool
    segments: list[SegmentReport]
    held: list[HeldReport]
    records: int
    superseded: int
    rejected: Counter[Reject]
    checkpoint: str
    """"ok", "none", or why it is not used."""
    foreign_files: list[str]
    leftovers: list[str]
    allocated: int
    verified: int = 0
    bad: dict[Reject, int] = field(default_factory=dict)
    repaired: int = 0


@dataclass(slots=True)
class _Look:
    """An opened directory, and what was found in it."""

    directory: int
    handles: Handles
    rejected: Counter[Reject]
    names: list[str]


def survey(files: Files, path: str, *, verify: bool = False) -> Survey:
    """Look at a directory. With `verify` every record that is held is read and compared with its digest.

    Raises `ConfigError` if the path is no directory that can be read.
    """
    try:
        look = _open(files, path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    try:
        return _survey(files, path, look, verify=verify)
    finally:
        for handle, _, _ in look.handles.values():
            files.close(handle)
        files.close(look.directory)


def _open(files: Files, path: str) -> _Look:
    directory = files.open_directory(path, create=False)
    look = _Look(directory, {}, Counter(), sorted(files.names(directory)))
    for name in look.names:
        number = segment_number(name)
        if number is None:
            continue
        handle = files.open(directory, name, write=False)
        header = read_segment_header(files, handle)
        found = files.stat(directory, name)
        if isinstance(header, Reject) or found is None:
            look.rejected[header if isinstance(header, Reject) else Reject.TRUNCATED] += 1
            files.close(handle)
        else:
            look.handles[number] = (handle, header, found.size)
    return look


def _survey(files: Files, path: str, look: _Look, *, verify: bool) -> Survey:
    checkpoint, _ = read_checkpoint(files, look.directory)
    usable = None if isinstance(checkpoint, Reject) else checkpoint
    whole = recover(files, look.handles, None, verify_tail=0)
    found = recover(files, look.handles, usable, verify_tail=0) if usable is not None else whole
    scans = {scan.number: scan for scan in whole.scans}
    segments = {n: _segment_report(scan) for n, scan in scans.items()}
    rows = {realm: index.live_rows() for realm, index in found.indexes.items()}
    for realm, index in found.indexes.items():
        _count_live(index, rows[realm], segments)
    records = sum(len(each) for each in rows.values())
    rejected = look.rejected + whole.rejects
    told = "none" if checkpoint is None else str(checkpoint) if isinstance(checkpoint, Reject) else "ok"
    allocated = sum(stat.allocated for name in look.names if (stat := files.stat(look.directory, name)) is not None)
    result = Survey(
        path,
        _in_use(files, look),
        sorted(segments.values(), key=lambda report: report.seq),
        [report for realm, index in found.indexes.items() for report in _held(realm, index, rows[realm], scans)],
        records,
        max(sum(report.records for report in segments.values()) - records, 0),
        +rejected,
        told,
        [name for name in look.names if segment_number(name) is None and name not in OURS],
        [name for name in look.names if name in LEFTOVERS],
        allocated,
    )
    if verify:
        for index, some in ((found.indexes[realm], rows[realm]) for realm in found.indexes):
            causes = _verify(files, look, index, some)
            result.verified += len(some) - len(causes)
            for cause in causes.values():
                result.bad[cause] = result.bad.get(cause, 0) + 1
    return result


def _in_use(files: Files, look: _Look) -> bool:
    if LOCK_NAME not in look.names:
        return False
    handle = files.open(look.directory, LOCK_NAME, write=False)
    try:
        return not files.lock(handle)
    finally:
        files.close(handle)


def _segment_report(scan: SegmentScan) -> SegmentReport:
    report = SegmentReport(scan.number, scan.size, scan.header.seq, scan.header.wall_us, end=scan.end)
    report.records = int(scan.batches["count"][scan.batches["kind"] == BatchKind.RECORDS].sum())
    return report


def _count_live(index: Index, rows: I64, segments: dict[int, SegmentReport]) -> None:
    numbers = index.segment[rows]
    for number, report in segments.items():
        mine = rows[numbers == number]
        report.live += len(mine)
        report.live_bytes += padded_sum(index.length[mine])


def _held(realm: Realm, index: Index, rows: I64, scans: dict[int, SegmentScan]) -> list[HeldReport]:
    groups = np.array([key_group(key) for key in keys_of(index.key[rows])], np.int64)
    walls = _walls(index, rows, scans)
    reports = []
    for group in np.unique(groups).tolist():
        mine = groups == group
        lengths = index.length[rows[mine]]
        reports.append(
            HeldReport(
                realm.namespace.hex(),
                realm.layout_tag,
                group,
                len(lengths),
                int(lengths.sum(dtype=np.int64)),
                int(lengths.min()),
                int(lengths.max()),
                int(walls[mine].min()),
                int(walls[mine].max()),
            )
        )
    return reports


def _walls(index: Index, rows: I64, scans: dict[int, SegmentScan]) -> I64:
    """When each record was stored: the time in the head of its batch."""
    walls = np.zeros(len(rows), np.int64)
    numbers, offsets = index.segment[rows], index.offset[rows].astype(np.int64)
    for number, scan in scans.items():
        mine = np.flatnonzero(numbers == number)
        starts, times = scan.batches["start"], scan.batches["wall_us"]
        if not len(times):
            walls[mine] = scan.header.wall_us
            continue
        walls[mine] = times[np.maximum(np.searchsorted(starts, offsets[mine], side="right") - 1, 0)]
    return walls


def _verify(files: Files, look: _Look, index: Index, rows: I64) -> dict[int, Reject]:
    """Why records cannot be served, by row."""
    causes: dict[int, Reject] = {}
    for row in rows[np.lexsort((index.offset[rows], index.segment[rows]))].tolist():
        handle, _, size = look.handles[int(index.segment[row])]
        offset, length = int(index.offset[row]), int(index.length[row])
        if offset + length > size:
            causes[row] = Reject.TRUNCATED
        elif not verify_place(files, handle, offset, length, index.digest[row].tobytes()):
            causes[row] = Reject.DIGEST
    return causes


def repair(files: Files, path: str) -> int:
    """Drop what cannot be used; returns how many records were dropped.

    Raises `ConfigError` if somebody is using the directory, or it cannot be written.
    """
    try:
        owned = acquire(files, path, lambda found: divide(None, found, 1))
    except InUseError as error:
        raise ConfigError(f"{path}: in use by another process; stop it before a repair") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    try:
        return _repair(files, owned.directory, owned.space, owned.indexes) + len(owned.bad)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    finally:
        files.close(owned.lock)
        files.close(owned.directory)


def _repair(files: Files, directory: int, space: Space, indexes: dict[Realm, Index]) -> int:
    look = _Look(directory, {}, Counter(), [])
    dropped = 0
    try:
        for number in space.segments:
            handle = files.open(directory, segment_name(number), write=True)
            header = read_segment_header(files, handle)
            found = files.stat(directory, segment_name(number))
            if isinstance(header, Reject) or found is None:
                files.close(handle)
                continue
            look.handles[number] = (handle, header, found.size)
        for index in indexes.values():
            bad = _verify(files, look, index, index.live_rows())
            dropped += len(bad)
            index.delete(np.array(sorted(bad), np.int64))
        for scan in recover(files, look.handles, None, verify_tail=0).scans:
            _drop_from_headers(files, look.handles[scan.number][0], scan)
        snapshot = Snapshot(indexes, space, 0)
        snapshot.ready = True
        while not snapshot.step():
            pass
        snapshot.write(files, directory)
    finally:
        for handle, _, _ in look.handles.values():
            with contextlib.suppress(OSError):
                files.close(handle)
    return dropped


def _drop_from_headers(files: Files, handle: int, scan: SegmentScan) -> None:
    """Write header blocks again without the records whose payload is bad."""
    changed = False
    for row in np.flatnonzero(scan.batches["kind"] == BatchKind.RECORDS).tolist():
        batch = scan.batch(row)
        good = verify_batch(files, handle, batch)
        if good.all():
            continue
        block = aligned_buffer(BLOCK)
        block[:] = pack_batch(
            batch.kind, batch.realm, batch.segment_id, batch.seq, batch.start, batch.span, batch.wall_us,
            batch.records[good],
        )  # fmt: skip
        write_all(files, handle, [block], batch.start)
        changed = True
    if changed:
        files.sync(handle)
