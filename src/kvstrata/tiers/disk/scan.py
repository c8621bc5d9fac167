"""Following the header blocks of segment files, many at once.

Each header block says where the next one of its file lies. So that blocks need not wait for each other, one thread
follows many files, each at its own pace: what has come of a file is looked at, and the next blocks of that file are
asked for, while those of others are at the disk. In each file it reads ahead: the blocks that are next if batches stay
as long as the last one. What was read ahead counts only if the block before it leads there; else it was read in vain.
What is found does not depend on how much is read at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from kvstrata.tiers.disk.calls import Call, CallQueue
from kvstrata.tiers.disk.format import (
    BLOCK,
    CARRYING,
    RESYNC_BYTES,
    BatchKind,
    Reject,
    SegmentHeader,
    find_batches,
    judge_batch,
)
from kvstrata.tiers.disk.io import Files, aligned_buffer, aligned_memory, read_all
from kvstrata.tiers.disk.trail import READ_AHEAD, Kept, SegmentScan, Trail

Handles = dict[int, tuple[int, SegmentHeader, int]]
"""By segment number: open handle, header, file size."""

_WINDOW = 1 << 20
_HAND_OVER = 8
"""Blocks that are asked for in one system call: the disk works on them while the next answers are looked at."""
_CARRIES = frozenset(map(int, CARRYING))
_END = int(BatchKind.END)


class Scanner:
    """Follows header blocks in one thread; with `call_queue` blocks of all its files are at the disk at once."""

    def __init__(self, files: Files, call_queue: bool) -> None:
        self._files = files
        memory = aligned_memory(READ_AHEAD * BLOCK)
        self._blocks = [memory.view[row * BLOCK : (row + 1) * BLOCK] for row in range(READ_AHEAD)]
        self._calls = [Call(-1, False, ((memory, row * BLOCK, BLOCK),), 0, BLOCK) for row in range(READ_AHEAD)]
        self._free = list(range(READ_AHEAD))  # rows of both
        self._owners: dict[int, Trail] = {}  # by row of a block that is being read
        self._pushed = 0  # blocks that are not handed over yet
        self._kept = Kept()
        self._queue = files.call_queue(READ_AHEAD) if call_queue else None

    @property
    def queued(self) -> bool:
        """Whether its reads are at the disk at the same time."""
        return self._queue is not None

    def close(self) -> None:
        """Wait until nothing reads into its memory any more."""
        if self._queue is not None:
            self._queue.close()
            self._queue = None

    def follow(self, begin: Callable[[], Trail | None], together: int, done: Callable[[SegmentScan], None]) -> None:
        """Follow the files that `begin` gives until it gives None, up to `together` at once."""
        ready = list(islice(iter(begin, None), min(together, READ_AHEAD)))
        count = len(ready)  # never more than before, so that there is memory for what each may read ahead
        while ready or self._owners:
            asked = []
            for trail in ready:
                if trail.rows:
                    self._go_on(trail)
                following: Trail | None = trail
                while following is not None and following.done:
                    self._kept.sort_out()
                    done(following.finish(self._kept.realms))
                    following = begin()
                if following is None:
                    count -= 1
                else:
                    self._ask(following, READ_AHEAD // count)
                    asked.append(following)
            ready = asked if self._queue is None else self._answered(self._queue)

    # reading

    def _ask(self, trail: Trail, most: int) -> None:
        """Have the next blocks of a file read. Without a queue they are read one by one when they are needed."""
        places = trail.next_places(most)
        trail.rows = rows = [self._free.pop() for _ in places]
        if self._queue is None:
            trail.missing.update(rows)
            return
        for row, place in zip(rows, places, strict=True):
            call = self._calls[row]
            call.handle, call.offset = trail.handle, place
            self._owners[row] = trail
            self._queue.push(row, call, 0, BLOCK)
        self._pushed += len(rows)
        if self._pushed >= _HAND_OVER:
            self._queue.submit()
            self._pushed = 0

    def _answered(self, queue: CallQueue) -> list[Trail]:
        """Wait for files whose blocks have all been read."""
        queue.submit()
        self._pushed = 0
        ready: list[Trail] = []
        while self._owners and not ready:
            for row, result in queue.take(1):
                trail = self._owners.pop(row)
                trail.came += 1
                if result != BLOCK:
                    trail.missing.add(row)
                if trail.came == len(trail.rows):
                    ready.append(trail)
        return ready

    # following

    def _go_on(self, trail: Trail) -> None:
        """Go on in a file as far as the blocks that were read lead."""
        scan, at, reached = trail.scan, trail.at, 0
        span, kind, reject = 0, 0, None
        for row, place in zip(trail.rows, trail.places, strict=True):
            if place != at:
                break
            found = self._judge(trail, row)
            if isinstance(found, Reject):
                reject = found
                break
            kind, count, span = found
            self._kept.add(trail, self._blocks[row], count if kind in _CARRIES else 0)
            reached += 1
            trail.at = at = at + span
            if kind == _END:
                break
        self._free += trail.rows
        trail.forget_read()
        if reached:
            scan.end = at
        if reject is not None:
            self._step_over(trail, at, reject)
        elif kind == _END:
            scan.ended = trail.done = True
        else:
            trail.go_on(span, reached)

    def _judge(self, trail: Trail, row: int) -> tuple[int, int, int] | Reject:
        block, scan = self._blocks[row], trail.scan
        if row in trail.missing:
            # What came short, or not at all, is read once more, by a call that says what the matter is.
            try:
                if read_all(self._files, trail.handle, [block], trail.at) < BLOCK:
                    return Reject.TRUNCATED
            except OSError:
                return Reject.EMPTY  # a bad sector is a hole like any other
        return judge_batch(block, scan.header.segment_id, trail.at, scan.size)

    def _step_over(self, trail: Trail, at: int, reject: Reject) -> None:
        """There is no header block where one should be: go on at the next one of this life, if there is any."""
        scan = trail.scan
        found = _resync(self._files, trail.handle, scan.header, at, scan.size)
        if found is not None or reject not in (Reject.EMPTY, Reject.STALE):
            scan.rejects[reject] += 1
        if found is None:
            trail.done = True
        else:
            trail.move(found, alike=0)


def _resync(files: Files, handle: int, header: SegmentHeader, at: int, size: int) -> int | None:
    limit = min(size, at + RESYNC_BYTES)
    place = at + BLOCK
    while place < limit:
        try:
            window = read_block(files, handle, place, min(_WINDOW, limit - place))
        except OSError:
            window = memoryview(b"")
        found = find_batches(window, header.segment_id)
        for offset in found:
            block = window[offset : offset + BLOCK]
            if not isinstance(judge_batch(block, header.segment_id, place + offset, size), Reject):
                return place + offset
        place += _WINDOW
    return None


def read_block(files: Files, handle: int, offset: int, size: int = BLOCK) -> memoryview:
    """Up to `size` bytes at `offset`; fewer at the end of the file."""
    buffer = aligned_buffer(size)
    return buffer[: read_all(files, handle, [buffer], offset)]


def scan_all(
    files: Files,
    handles: Handles,
    starts: dict[int, int],
    *,
    call_queue: bool = False,
    helpers: Callable[[Callable[[], None]], None] | None = None,
    many: int = 0,
) -> list[SegmentScan]:
    """Follow every segment from its start, in the order of their lives.

    `call_queue`: through a queue of calls, if there is one; for handles that bypass the page cache.
    `helpers` may run parts of it, up to `many` at once; this call does what they have not begun, and waits only for
    what they have.
    """
    work = _Work(files, handles, starts, call_queue)
    scanner = Scanner(files, call_queue)
    try:
        if helpers is not None:
            # With a queue one thread keeps the disk busy, and others would take turns with it at the interpreter.
            many = 0 if scanner.queued else min(many, max(len(handles) - 1, 0))
            work.together = max(-(-len(handles) // (many + 1)), 1)
            for _ in range(many):
                helpers(work.help_out)
        work.do(scanner)
    finally:
        scanner.close()
        work.wait()
    return work.take()


class _Work:
    """Segments to be followed, shared by threads."""

    def __init__(self, files: Files, handles: Handles, starts: dict[int, int], call_queue: bool) -> None:
        self.together = READ_AHEAD
        """Files that one thread follows at once."""
        self._files = files
        self._handles = handles
        self._starts = starts
        self._call_queue = call_queue
        self._todo = deque(handles)
        self._done: deque[SegmentScan] = deque()
        self._begun: deque[None] = deque()
        self._ended: deque[BaseException | None] = deque()

    def begin(self) -> Trail | None:
        """The next file, if there is one left."""
        try:
            number = self._todo.popleft()
        except IndexError:
            return None
        handle, header, size = self._handles[number]
        return Trail(SegmentScan(number, header, size, end=self._starts[number]), handle)

    def do(self, scanner: Scanner) -> None:
        """Follow until no file is left."""
        scanner.follow(self.begin, self.together, self._done.append)

    def take(self) -> list[SegmentScan]:
        """What was found, in the order of lives. A thread that helped may hold on to this object, but not to that."""
        scans = sorted(self._done, key=lambda scan: (scan.header.seq, scan.number))
        self._done.clear()
        return scans

    def help_out(self) -> None:
        """The same in a thread of helpers. What is raised here is raised where they are waited for."""
        self._begun.append(None)
        error = None
        try:
            if self._todo:
                scanner = Scanner(self._files, self._call_queue)
                try:
                    self.do(scanner)
                finally:
                    scanner.close()
        except BaseException as raised:
            error = raised
        self._ended.append(error)

    def wait(self) -> None:
        """Have nothing more begun, and wait for those that have begun."""
        self._todo.clear()
        while len(self._ended) < len(self._begun):
            self._files.pause()
        for error in self._ended:
            if error is not None:
                raise error
