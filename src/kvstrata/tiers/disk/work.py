"""Runs tasks: the vectored calls, the bounce buffers, the digests and the verification. No state but open files.

A `Workshop` may be used by several threads at once; the only thing they share is the table of open files.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Generator
from typing import TypeAlias

import xxhash

from kvstrata.tiers.disk.calls import Call, Memory
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
from kvstrata.tiers.disk.io import (
    Files,
    aligned_buffer,
    aligned_memory,
    cause_of,
    memory_of,
    perform,
    read_all,
    write_all,
)
from kvstrata.tiers.disk.tasks import Done, MoveBatch, Prepare, ReadEven, ReadUnit, SelfTest, Sync, Task, WriteBatch
from kvstrata.types import DIGEST_BYTES, FailCause

UNIT_BYTES = 1 << 20
"""Most payload bytes of one file call."""
BATCH_BYTES = 2 << 20
"""Most payload bytes of one batch unless a single chunk is larger: 64 chunks of 32 KiB."""
SCRATCH_NAME = "selftest.tmp"


NOT_THERE = "not_there"
"""Said of a segment that could not be created: no file of it is left."""

_PIECE_BYTES = 1 << 18
"""So many bytes of a store are hashed between two moments in which others may go first."""

Steps: TypeAlias = Generator[Call | None, int, Done]
"""A task under way: yields its calls, is answered with the bytes of each, returns its answer. Where it yields None, it
has worked for some time, and others may go first."""

Failures: TypeAlias = list[tuple[int, str]]
_Read: TypeAlias = Callable[[ReadUnit, int, int], Generator[Call, int, Failures]]


def segment_name(number: int) -> str:
    """The file of a segment."""
    return f"segment-{number:08x}.kvs"


class Workshop:
    """Runs tasks against one directory and one primary.

    `steps` says what a task does between its calls, and whoever drives it carries the calls out: `run` on the spot,
    `loop.IoLoop` many at once.
    """

    def __init__(self, files: Files, directory: int, region: memoryview, *, direct: bool, alone: bool = False) -> None:
        """`alone`: no other thread waits for the interpreter while this one hashes."""
        self._digest: Callable[[memoryview], bytes] = xxhash.xxh3_128_digest if alone else payload_digest
        self._files = files
        self._directory = directory
        self._region = region
        self._memory = memory_of(region)
        self._direct = direct
        self._handles: dict[int, int] = {}
        self._retired: list[int] = []

    def run(self, task: Task) -> Done:
        """Do it; whatever goes wrong is in the answer."""
        return self.finish(task, self.steps(task), None, UNIT_BYTES + BLOCK)

    def finish(self, task: Task, steps: Steps, call: Call | None, piece: int) -> Done:
        """Do the rest of a task in calls of at most `piece` bytes. `call`: what it yielded last; None before that."""
        try:
            while True:
                try:
                    got = 0 if call is None else perform(self._files, call, piece)
                except OSError as error:
                    call = steps.throw(error)
                else:
                    call = next(steps) if call is None else steps.send(got)
        except StopIteration as end:
            done: Done = end.value
            return done
        except Exception as error:  # of the call itself
            return _failed(task, error)

    def steps(self, task: Task) -> Steps:
        """The calls of a task, one after the other; each is answered with its bytes, or with its `OSError` thrown."""
        try:
            match task:
                case ReadUnit():
                    return (yield from self._read(task))
                case ReadEven():
                    return (yield from self._read_even(task))
                case WriteBatch():
                    return (yield from self._write(task))
                case MoveBatch():
                    return (yield from self._move(task))
                case Prepare():
                    return self._prepare(task)
                case Sync():
                    return self._sync(task)
                case SelfTest():
                    return self._self_test(task)
        except Exception as error:  # a worker survives any error
            return _failed(task, error)

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

    def _write(self, task: WriteBatch) -> Steps:
        digests = task.digests
        places, lengths = task.layout()
        memory = task.slots(lengths)
        if not digests and task.kind == BatchKind.RECORDS:
            digests = yield from self._digests_in_pieces(memory, lengths)
        header = _header_block(task, digests, places, lengths)
        if task.kind == BatchKind.RECORDS and not task.straight:
            parts, size = [(self._assemble(task, header), 0, task.span)], task.span
        else:
            block = aligned_memory(BLOCK)
            block.view[:] = header
            parts, size = [(block, 0, BLOCK)], BLOCK
            if task.kind == BatchKind.RECORDS:
                parts += [(self._memory, at, length) for at, length in runs(memory, lengths)]
                size += sum(lengths)
        yield Call(self._handle(task.segment), True, parts, task.start, size)
        return Done(task.task_id, digests=b"" if task.digests else digests)

    def _digests(self, memory: list[int], lengths: list[int]) -> bytes:
        region, digest = self._region, self._digest
        return b"".join([digest(region[at : at + size]) for at, size in zip(memory, lengths, strict=True)])

    def _digests_in_pieces(self, memory: list[int], lengths: list[int]) -> Generator[None, int, bytes]:
        count = max(_PIECE_BYTES // max(lengths, default=1), 1)
        made = self._digests(memory[:count], lengths[:count])
        for at in range(count, max(len(memory), len(lengths)), count):
            yield None
            made += self._digests(memory[at : at + count], lengths[at : at + count])
        return made

    def _assemble(self, task: WriteBatch, header: bytes) -> Memory:
        memory = aligned_memory(task.span)
        bounce = memory.view
        bounce[:BLOCK] = header
        for place, at, length in zip(task.places, task.memory, task.lengths, strict=True):
            bounce[place - task.start : place - task.start + length] = self._region[at : at + length]
        return memory

    # loads

    def _read(self, task: ReadUnit) -> Steps:
        count = len(task.places)
        read = self._read_straight if task.straight else self._read_bounced
        try:
            failed = yield from read(task, 0, count)
        except OSError as error:
            failed = [(index, str(cause_of(error))) for index in range(count)]
            if count > 1 and cause_of(error) is FailCause.IO_ERROR:
                # One bad sector fails the whole call: find out which records it really concerns.
                failed = yield from self._read_each(task, read)
        return Done(task.task_id, failed=failed) if failed else Done(task.task_id)

    def _read_even(self, task: ReadEven) -> Steps:
        failed: Failures = []
        for unit in task.units(UNIT_BYTES):
            done = yield from self._read(unit)
            failed += [(unit.first + index, cause) for index, cause in done.failed]
        return Done(task.task_id, failed=failed)

    def plain(self, task: ReadUnit) -> Call | None:
        """The one call of a load that needs no place but its slots; None if it is of another kind, or cannot begin.

        If all of it came and `is_right` says so the task has ended well; else `steps` begins with the same call.
        """
        if not task.straight or not task.memory:
            return None
        handle = self._handles.get(task.segment)
        if handle is None:
            return None
        start, memory, lengths = task.places[0], task.memory, task.lengths
        if len(memory) == 1:
            return Call(handle, False, ((self._memory, memory[0], lengths[0]),), start, lengths[0])
        parts = [(self._memory, at, size) for at, size in runs(memory, lengths)]
        return Call(handle, False, parts, start, task.places[-1] + lengths[-1] - start)

    def is_right(self, task: ReadUnit) -> bool:
        """Whether what lies in the slots is what was asked for."""
        return not task.verify or self._digests(task.memory, task.lengths) == task.digests

    def _read_each(self, task: ReadUnit, read: _Read) -> Generator[Call, int, Failures]:
        failed: Failures = []
        for index in range(len(task.places)):
            try:
                failed += yield from read(task, index, index + 1)
            except OSError as error:
                failed.append((index, str(cause_of(error))))
        return failed

    def _read_straight(self, task: ReadUnit, begin: int, end: int) -> Generator[Call, int, Failures]:
        places, memory, lengths = task.places, task.memory, task.lengths
        start, region = places[begin], self._region
        parts = [(self._memory, at, size) for at, size in runs(memory[begin:end], lengths[begin:end])]
        end_place = places[end - 1] + lengths[end - 1]
        limit = start + (yield Call(self._handle(task.segment), False, parts, start, end_place - start))
        if limit >= end_place and task.verify:
            wanted = (
                task.digests if end - begin == len(places) else task.digests[begin * DIGEST_BYTES : end * DIGEST_BYTES]
            )
            if self._digests(memory[begin:end], lengths[begin:end]) == wanted:
                return []
        failed: Failures = []
        for index in range(begin, end):
            at, length = memory[index], lengths[index]
            if places[index] + length > limit:
                failed.append((index, str(FailCause.WRONG_SIZE)))
            elif task.verify and payload_digest(region[at : at + length]) != _digest(task, index):
                failed.append((index, str(FailCause.CORRUPT)))
        return failed

    def _read_bounced(self, task: ReadUnit, begin: int, end: int) -> Generator[Call, int, Failures]:
        places, lengths = task.places, task.lengths
        start = places[begin] // SECTOR * SECTOR
        size = align_up(max(places[i] + lengths[i] for i in range(begin, end)), SECTOR) - start
        memory = aligned_memory(size)
        got = yield Call(self._handle(task.segment), False, [(memory, 0, size)], start, size)
        failed: Failures = []
        for index in range(begin, end):
            at, length, first = task.memory[index], lengths[index], places[index] - start
            piece = memory.view[first : first + length]
            if first + length > got:
                failed.append((index, str(FailCause.WRONG_SIZE)))
            elif task.verify and payload_digest(piece) != _digest(task, index):
                failed.append((index, str(FailCause.CORRUPT)))
            else:
                self._region[at : at + length] = piece
        return failed

    # space

    def _move(self, task: MoveBatch) -> Steps:
        batch = task.batch
        places, lengths = batch.layout()
        moved = aligned_memory(batch.span)
        handle = self._handle(task.source)
        bad: Failures = []
        for index, (source, place, length) in enumerate(zip(task.source_places, places, lengths, strict=True)):
            start = source // SECTOR * SECTOR
            size = align_up(source + length, SECTOR) - start
            raw = aligned_memory(size)
            got = yield Call(handle, False, [(raw, 0, size)], start, size)
            piece = raw.view[source - start : source - start + length]
            if got >= source - start + length and payload_digest(piece) == _digest(batch, index):
                moved.view[place - batch.start : place - batch.start + length] = piece
            else:  # a record that is bad at its old place stays bad at the new one: its digest does not fit
                bad.append((index, str(FailCause.CORRUPT)))
        moved.view[:BLOCK] = _header_block(batch, batch.digests, places, lengths)
        yield Call(self._handle(batch.segment), True, [(moved, 0, batch.span)], batch.start, batch.span)
        return Done(task.task_id, failed=bad)

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


def _failed(task: Task, error: Exception) -> Done:
    if isinstance(error, OSError):
        return Done(task.task_id, cause_of(error), f"{type(task).__name__}: {error}")
    return Done(task.task_id, FailCause.IO_ERROR, f"{type(task).__name__}: {type(error).__name__}: {error}")


def _digest(task: ReadUnit | WriteBatch, index: int) -> bytes:
    return task.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]


def _header_block(task: WriteBatch, digests: bytes, places: list[int], lengths: list[int]) -> bytes:
    records = make_records(task.keys, digests, places, lengths) if task.keys else None
    realm = Realm(task.namespace, task.layout_tag)
    kind = BatchKind(task.kind)
    return pack_batch(kind, realm, task.segment_id, task.seq, task.start, task.span, task.wall_us, records)


def runs(memory: list[int], lengths: list[int]) -> list[tuple[int, int]]:
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
