"""Runs tasks: the vectored calls, the bounce buffers, the digests and the verification. No state but open files.

A `Workshop` may be used by several threads at once; the only thing they share is the table of open files.
"""

from __future__ import annotations

import contextlib
import errno

import xxhash

from kvstrata.tiers.disk.format import (
    BLOCK,
    SECTOR,
    BatchKind,
    Realm,
    align_up,
    make_records,
    pack_batch,
    payload_digest,
)
from kvstrata.tiers.disk.io import Files, address_of, aligned_buffer, cause_of, read_all, write_all
from kvstrata.tiers.disk.tasks import Done, MoveBatch, Prepare, ReadUnit, SelfTest, Sync, Task, WriteBatch
from kvstrata.types import DIGEST_BYTES, FailCause

UNIT_BYTES = 1 << 20
"""Most payload bytes of one file call."""
BATCH_BYTES = 2 << 20
"""Most payload bytes of one batch unless a single chunk is larger: 64 chunks of 32 KiB."""
SCRATCH_NAME = "selftest.tmp"


NOT_THERE = "not_there"
"""Said of a segment that could not be created: no file of it is left."""


def segment_name(number: int) -> str:
    """The file of a segment."""
    return f"segment-{number:08x}.kvs"


class Workshop:
    """Runs tasks against one directory and one primary."""

    def __init__(self, files: Files, directory: int, region: memoryview, *, direct: bool) -> None:
        self._files = files
        self._directory = directory
        self._region = region
        self._address = address_of(region)
        self._direct = direct
        self._handles: dict[int, int] = {}
        self._retired: list[int] = []

    def run(self, task: Task) -> Done:
        """Do it; whatever goes wrong is in the answer."""
        try:
            match task:
                case ReadUnit():
                    return self._read(task)
                case WriteBatch():
                    return self._write(task)
                case MoveBatch():
                    return self._move(task)
                case Prepare():
                    return self._prepare(task)
                case Sync():
                    return self._sync(task)
                case SelfTest():
                    return self._self_test(task)
        except OSError as error:
            return Done(task.task_id, cause_of(error), f"{type(task).__name__}: {error}")
        except Exception as error:  # a worker survives any error
            return Done(task.task_id, FailCause.IO_ERROR, f"{type(task).__name__}: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Release the files."""
        for handle in [*self._handles.values(), *self._retired]:
            with contextlib.suppress(OSError):
                self._files.close(handle)
        self._handles.clear()
        self._retired.clear()

    def _handle(self, segment: int, *, create: bool = False) -> int:
        handle = self._handles.get(segment)
        if handle is None:
            name = segment_name(segment)
            handle = self._files.open(self._directory, name, write=True, create=create, direct=self._direct)
            kept = self._handles.setdefault(segment, handle)
            if kept != handle:  # another thread was faster
                self._files.close(handle)
                handle = kept
        return handle

    # stores

    def _write(self, task: WriteBatch) -> Done:
        digests = task.digests
        region = self._region
        if not digests and task.kind == BatchKind.RECORDS:
            digests = b"".join(
                [payload_digest(region[at : at + length]) for at, length in zip(task.memory, task.lengths, strict=True)]
            )
        header = aligned_buffer(BLOCK)
        header[:] = _header_block(task, digests)
        parts = [header]
        if task.kind != BatchKind.RECORDS:
            pass
        elif task.straight:
            for at, size in _runs(task.memory, task.lengths):
                parts.append(region[at : at + size])
        else:
            parts = [self._assemble(task, header)]
        self._write_parts(self._handle(task.segment), parts, task.start)
        return Done(task.task_id, digests=b"" if task.digests else digests)

    def _assemble(self, task: WriteBatch, header: memoryview) -> memoryview:
        bounce = aligned_buffer(task.span)
        bounce[:BLOCK] = header
        for place, at, length in zip(task.places, task.memory, task.lengths, strict=True):
            bounce[place - task.start : place - task.start + length] = self._region[at : at + length]
        return bounce

    def _write_parts(self, handle: int, parts: list[memoryview], start: int) -> None:
        for group, size in _units(parts):
            write_all(self._files, handle, group, start)
            start += size

    # loads

    def _read(self, task: ReadUnit) -> Done:
        if len(task.places) == 1 and task.straight and task.lengths[0] <= UNIT_BYTES:
            return self._read_one(task)
        failed = self._read_unit(task, range(len(task.places)))
        if failed and len(task.places) > 1 and all(cause == FailCause.IO_ERROR for _, cause in failed):
            # One bad sector fails the whole call: find out which records it really concerns.
            failed = [
                each for index in range(len(task.places)) for each in self._read_unit(task, range(index, index + 1))
            ]
        return Done(task.task_id, failed=[(index, str(cause)) for index, cause in failed])

    def _read_one(self, task: ReadUnit) -> Done:
        at, length = task.memory[0], task.lengths[0]
        piece = self._region[at : at + length]
        try:
            got = read_all(self._files, self._handle(task.segment), [piece], task.places[0])
        except OSError as error:
            return Done(task.task_id, failed=[(0, str(cause_of(error)))])
        if got < length:
            return Done(task.task_id, failed=[(0, str(FailCause.WRONG_SIZE))])
        if task.verify and payload_digest(piece) != task.digests:
            return Done(task.task_id, failed=[(0, str(FailCause.CORRUPT))])
        return Done(task.task_id)

    def _read_unit(self, task: ReadUnit, which: range) -> list[tuple[int, FailCause]]:
        try:
            if task.straight:
                return self._read_straight(task, which)
            return self._read_bounced(task, which)
        except OSError as error:
            return [(index, cause_of(error)) for index in which]

    def _read_straight(self, task: ReadUnit, which: range) -> list[tuple[int, FailCause]]:
        handle = self._handle(task.segment)
        start, region = task.places[which[0]], self._region
        if len(which) == 1 and task.lengths[which[0]] > UNIT_BYTES:
            return self._read_large(task, which[0], handle)
        memory, lengths = task.memory[which.start : which.stop], task.lengths[which.start : which.stop]
        parts = [region[at : at + size] for at, size in _runs(memory, lengths)]
        got = read_all(self._files, handle, parts, start)
        failed = []
        for index in which:
            at, length = task.memory[index], task.lengths[index]
            if task.places[index] + length > start + got:
                failed.append((index, FailCause.WRONG_SIZE))
            elif task.verify and payload_digest(region[at : at + length]) != _digest(task, index):
                failed.append((index, FailCause.CORRUPT))
        return failed

    def _read_large(self, task: ReadUnit, index: int, handle: int) -> list[tuple[int, FailCause]]:
        # Hash each piece while it is still in the cache.
        at, length, place = task.memory[index], task.lengths[index], task.places[index]
        state = xxhash.xxh3_128()
        for done in range(0, length, UNIT_BYTES):
            piece = self._region[at + done : at + min(done + UNIT_BYTES, length)]
            if read_all(self._files, handle, [piece], place + done) < len(piece):
                return [(index, FailCause.WRONG_SIZE)]
            if task.verify:
                state.update(piece)
        if task.verify and state.digest() != _digest(task, index):
            return [(index, FailCause.CORRUPT)]
        return []

    def _read_bounced(self, task: ReadUnit, which: range) -> list[tuple[int, FailCause]]:
        places, lengths = task.places, task.lengths
        start = places[which[0]] // SECTOR * SECTOR
        end = align_up(max(places[i] + lengths[i] for i in which), SECTOR)
        bounce = aligned_buffer(end - start)
        got = read_all(self._files, self._handle(task.segment), [bounce], start)
        failed = []
        for index in which:
            at, length, begin = task.memory[index], lengths[index], places[index] - start
            piece = bounce[begin : begin + length]
            if begin + length > got:
                failed.append((index, FailCause.WRONG_SIZE))
            elif task.verify and payload_digest(piece) != _digest(task, index):
                failed.append((index, FailCause.CORRUPT))
            else:
                self._region[at : at + length] = piece
        return failed

    # space

    def _move(self, task: MoveBatch) -> Done:
        batch = task.batch
        bounce = aligned_buffer(batch.span)
        handle = self._handle(task.source)
        kept = []
        for index, (source, place, length) in enumerate(
            zip(task.source_places, batch.places, batch.lengths, strict=True)
        ):
            start = source // SECTOR * SECTOR
            raw = aligned_buffer(align_up(source + length, SECTOR) - start)
            got = read_all(self._files, handle, [raw], start)
            piece = raw[source - start : source - start + length]
            good = got >= source - start + length and payload_digest(piece) == _digest(batch, index)
            kept.append(good)
            if good:
                bounce[place - batch.start : place - batch.start + length] = piece
        # A record that is bad already at its old place stays bad at the new one: its digest does not fit.
        bounce[:BLOCK] = _header_block(batch, batch.digests)
        self._write_parts(self._handle(batch.segment), [bounce], batch.start)
        return Done(task.task_id, failed=[(i, str(FailCause.CORRUPT)) for i, good in enumerate(kept) if not good])

    def _prepare(self, task: Prepare) -> Done:
        try:
            self._begin_life(task)
        except OSError as error:
            gone = task.create and self._discard(task.segment)
            return Done(task.task_id, cause_of(error), f"Prepare: {error}", [(0, NOT_THERE)] if gone else [])
        return Done(task.task_id)

    def _begin_life(self, task: Prepare) -> None:
        files = self._files
        for segment in task.sync_first:
            files.sync(self._handle(segment))
        found = None if task.create else files.stat(self._directory, segment_name(task.segment))
        whole = found is not None and found.size >= task.size
        if not whole:
            if files.free_bytes(self._directory) - task.size < task.min_free:
                raise OSError(errno.ENOSPC, f"less than {task.min_free} bytes would stay free on the device")
            files.allocate(self._handle(task.segment, create=True), task.size)
        handle = self._handle(task.segment)
        block = aligned_buffer(BLOCK)
        block[:] = task.header
        write_all(files, handle, [block], 0)
        files.sync(handle)
        if not whole:
            files.sync_directory(self._directory)

    def _discard(self, segment: int) -> bool:
        """Take back a file that could not be prepared: it must not count against the limit. Whether it is gone."""
        handle = self._handles.pop(segment, None)
        try:
            if handle is not None:
                self._retired.append(handle)  # closed later: closing may hang where a call just failed
                self._files.truncate(handle, 0)
            self._files.unlink(self._directory, segment_name(segment))
        except OSError:
            return False
        return True

    def _sync(self, task: Sync) -> Done:
        for segment in task.segments:
            self._files.sync(self._handle(segment))
        return Done(task.task_id)

    def _self_test(self, task: SelfTest) -> Done:
        files, size = self._files, align_up(len(task.payload), SECTOR)
        handle = files.open(self._directory, SCRATCH_NAME, write=True, create=True, direct=self._direct)
        try:
            out, back = aligned_buffer(size), aligned_buffer(size)
            out[: len(task.payload)] = task.payload
            write_all(files, handle, [out], 0)
            files.sync(handle)
            got = read_all(files, handle, [back], 0)
            if got != size or back[: len(task.payload)] != task.payload:
                return Done(task.task_id, FailCause.CORRUPT, "what was read back is not what was written")
        finally:
            files.close(handle)
            files.unlink(self._directory, SCRATCH_NAME)
        return Done(task.task_id)


def _digest(task: ReadUnit | WriteBatch, index: int) -> bytes:
    return task.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]


def _header_block(task: WriteBatch, digests: bytes) -> bytes:
    records = make_records(task.keys, digests, task.places, task.lengths) if task.keys else None
    realm = Realm(task.namespace, task.layout_tag)
    kind = BatchKind(task.kind)
    return pack_batch(kind, realm, task.segment_id, task.seq, task.start, task.span, task.wall_us, records)


def _runs(memory: list[int], lengths: list[int]) -> list[tuple[int, int]]:
    """Ranges of primary, neighbours joined."""
    runs: list[tuple[int, int]] = []
    start, end = memory[0], memory[0]
    for at, length in zip(memory, lengths, strict=True):
        if at != end:
            runs.append((start, end - start))
            start = at
        end = at + length
    runs.append((start, end - start))
    return runs


def _units(parts: list[memoryview]) -> list[tuple[list[memoryview], int]]:
    """The parts, cut and grouped into calls of about `UNIT_BYTES`."""
    total = sum(map(len, parts))
    if total <= UNIT_BYTES + BLOCK:
        return [(parts, total)]
    units: list[tuple[list[memoryview], int]] = []
    group: list[memoryview] = []
    size = 0
    for part in parts:
        rest = part
        while len(rest):
            take = min(len(rest), UNIT_BYTES + BLOCK - size)
            group.append(rest[:take])
            size += take
            rest = rest[take:]
            if size == UNIT_BYTES + BLOCK:
                units.append((group, size))
                group, size = [], 0
    if group:
        units.append((group, size))
    return units
