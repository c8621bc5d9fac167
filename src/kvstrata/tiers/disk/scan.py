"""Following the header blocks of segment files, many at once.

Each header block says where the next one of its file lies. So that blocks need not wait for each other, one thread
follows several files, and in each it reads ahead: the blocks that are next if batches stay as long as the last one.
What was read ahead counts only if the block before it leads there; else it was read in vain. What is found does not
depend on how much is read at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvstrata.tiers.disk.calls import Call
from kvstrata.tiers.disk.format import (
    BLOCK,
    GOOD,
    REJECTS,
    RESYNC_BYTES,
    BatchKind,
    Bytes,
    Heads,
    Realm,
    Reject,
    SegmentHeader,
    find_batches,
    heads_of,
    judge_batches,
    records_of,
)
from kvstrata.tiers.disk.io import Files, aligned_buffer, aligned_memory, read_all
from kvstrata.tiers.disk.trail import BATCH_DTYPE, RAW_RECORD, READ_AHEAD, SegmentScan, Trail
from kvstrata.types import I8, I64, Bool

Handles = dict[int, tuple[int, SegmentHeader, int]]
"""By segment number: open handle, header, file size."""

_QUEUE_HELPERS = 3
"""Helpers where each has many reads at the disk by itself."""
_WINDOW = 1 << 20
_GATHERED = 1 << 14
"""Heads and records that lie about in small pieces before they are put to their segments."""

_CARRIES = np.isin(np.arange(256), [BatchKind.RECORDS, BatchKind.REMOVE])


class Scanner:
    """Follows header blocks in one thread; with `call_queue` all blocks of a round are at the disk at once."""

    def __init__(self, files: Files, call_queue: bool) -> None:
        self._files = files
        self._memory = aligned_memory(READ_AHEAD * BLOCK)
        self._blocks: Bytes = np.frombuffer(self._memory.view, np.uint8).reshape(READ_AHEAD, BLOCK)
        self._realms: list[Realm] = []
        self._realm_numbers: dict[bytes, int] = {}
        self._gathered: list[tuple[I64, npt.NDArray[np.void], npt.NDArray[np.void]]] = []
        self._gathered_rows = 0
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
        trails: list[Trail] = []
        more = True
        while more or trails:
            while more and len(trails) < min(together, READ_AHEAD):
                trail = begin()
                more = trail is not None
                if trail is not None:
                    trail.scan.realms = self._realms
                    trails.append(trail)
            going = [trail for trail in trails if not trail.done]
            if going:
                self._round(going)
            if self._gathered_rows >= _GATHERED or any(trail.done for trail in trails):
                self._sort_out(going)
            for trail in trails:
                if trail.done:
                    done(trail.finish())
            trails = [trail for trail in trails if not trail.done]

    def _round(self, trails: list[Trail]) -> None:
        """Read the next blocks of each, and go on as far as they lead."""
        most = READ_AHEAD // len(trails)
        ahead = [trail.next_places(most) for trail in trails]
        asked = np.array([len(places) for places in ahead])
        starts = np.array([place for places in ahead for place in places])
        owner = np.repeat(np.arange(len(trails)), asked)
        blocks = self._blocks[: len(starts)]
        failed = self._read([trails[number].handle for number in owner.tolist()], starts.tolist())
        lives = np.stack([trail.life for trail in trails])[owner]
        causes = judge_batches(blocks, lives, starts, np.array([trail.scan.size for trail in trails])[owner])
        for row, reject in failed:
            causes[row] = REJECTS.index(reject)
        heads = heads_of(blocks)
        firsts = np.cumsum(asked) - asked
        reached = _reached(heads, causes, starts, firsts, owner)
        self._gather(trails, owner, starts, reached & (causes == GOOD))
        lengths = np.add.reduceat(reached, firsts, dtype=np.int64)
        last = firsts + lengths - 1
        for trail, *facts in zip(
            trails, asked.tolist(), lengths.tolist(), starts[last].tolist(), heads["span"][last].tolist(),
            heads["kind"][last].tolist(), causes[last].tolist(), strict=True,
        ):  # fmt: skip
            self._go_on(trail, *facts)

    def _go_on(self, trail: Trail, asked: int, reached: int, start: int, span: int, kind: int, cause: int) -> None:
        if cause == GOOD:
            trail.go_on(start, span, asked, reached)
            if kind == BatchKind.END:
                trail.scan.ended = trail.done = True
            return
        if reached > 1:
            trail.scan.end = start
        self._step_over(trail, start, REJECTS[cause])

    def _step_over(self, trail: Trail, at: int, reject: Reject) -> None:
        """There is no header block where one should be: go on at the next one of this life, if there is any."""
        scan = trail.scan
        found = _resync(self._files, trail.handle, scan.header, at, scan.size)
        if found is not None or reject not in (Reject.EMPTY, Reject.STALE):
            scan.rejects[reject] += 1
        if found is None:
            trail.done = True
        else:
            trail.move(found, ahead=1)

    # reading

    def _read(self, handles: list[int], places: list[int]) -> list[tuple[int, Reject]]:
        """Read a block at each place, the n-th into the n-th block; those that are not there whole, and why."""
        queue, rows = self._queue, range(len(places))
        alone: Sequence[int] = rows
        if queue is not None and len(places) > 1:
            for row in rows:
                call = Call(handles[row], False, ((self._memory, row * BLOCK, BLOCK),), places[row], BLOCK)
                queue.push(row, call, 0, BLOCK)
            queue.submit()
            ended: list[tuple[int, int]] = []
            while len(ended) < len(places):
                ended += queue.take(len(places) - len(ended))
            # What came short, or not at all, is read once more, as a call that says what the matter is.
            alone = [row for row, result in ended if result != BLOCK]
        told = ((row, self._read_alone(handles[row], places[row], row)) for row in alone)
        return [(row, reject) for row, reject in told if reject is not None]

    def _read_alone(self, handle: int, place: int, row: int) -> Reject | None:
        block = self._memory.view[row * BLOCK : (row + 1) * BLOCK]
        try:
            got = read_all(self._files, handle, [block], place)
        except OSError:
            return Reject.EMPTY  # a bad sector is a hole like any other
        return None if got == BLOCK else Reject.TRUNCATED

    # keeping

    def _gather(self, trails: list[Trail], owner: I64, starts: I64, chosen: Bool) -> None:
        """Copy what the chosen blocks say."""
        rows = chosen.nonzero()[0]
        if not len(rows):
            return
        heads = heads_of(self._blocks)
        kinds, counts = heads["kind"][rows], heads["count"][rows]
        counts = np.where(_CARRIES[kinds], counts, 0)
        batches = np.empty(len(rows), BATCH_DTYPE)
        batches["kind"], batches["count"], batches["start"] = kinds, counts, starts[rows]
        batches["realm"] = self._number_realms(heads["realm"][rows])
        for name in ("span", "wall_us", "seq"):
            batches[name] = heads[name][rows]
        most = int(counts.max())
        raw = records_of(self._blocks).view(RAW_RECORD)[rows, :most]
        records = raw[np.arange(most) < counts[:, None]]
        numbers = np.array([trail.scan.number for trail in trails])[owner[rows]]
        self._gathered.append((numbers, batches, records))
        self._gathered_rows += len(batches) + len(records)

    def _number_realms(self, realms: Bytes) -> list[int] | int:
        if (realms == realms[0]).all():
            return self._number_realm(realms[0].tobytes())
        return [self._number_realm(realm.tobytes()) for realm in realms]

    def _number_realm(self, realm: bytes) -> int:
        number = self._realm_numbers.setdefault(realm, len(self._realms))
        if number == len(self._realms):
            self._realms.append(Realm(realm[:16], int.from_bytes(realm[16:], "little")))
        return number

    def _sort_out(self, trails: list[Trail]) -> None:
        """Put what was gathered to the files that it is from."""
        if not self._gathered:
            return
        numbers, batches, records = (np.concatenate(each) for each in zip(*self._gathered, strict=True))
        self._gathered, self._gathered_rows = [], 0
        for trail in trails:
            mine = numbers == trail.scan.number
            if mine.any():
                trail.batches.add(batches[mine])
                trail.records.add(records[np.repeat(mine, batches["count"])])


def _reached(heads: Heads, causes: I8, starts: I64, firsts: I64, owner: I64) -> Bool:
    """Which blocks are where a header block has to be: the first of each file, and those to which good ones lead."""
    leads = (causes == GOOD) & (heads["kind"] != BatchKind.END)
    joined = np.ones(len(starts), np.bool_)
    joined[1:] = leads[:-1] & (starts[:-1] + heads["span"][:-1].astype(np.int64) == starts[1:])
    joined[firsts] = True
    gaps = np.cumsum(~joined)
    reached: Bool = gaps == gaps[firsts][owner]
    return reached


def _resync(files: Files, handle: int, header: SegmentHeader, at: int, size: int) -> int | None:
    limit = min(size, at + RESYNC_BYTES)
    life = np.frombuffer(header.segment_id, np.uint8)
    place = at + BLOCK
    while place < limit:
        try:
            window = read_block(files, handle, place, min(_WINDOW, limit - place))
        except OSError:
            window = memoryview(b"")
        found = find_batches(window, header.segment_id)
        if found:
            blocks = np.stack([np.frombuffer(window, np.uint8, BLOCK, offset) for offset in found])
            starts = place + np.array(found)
            causes = judge_batches(blocks, life, starts, np.full(len(found), size))
            good = (causes == GOOD).nonzero()[0]
            if len(good):
                return int(starts[good[0]])
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
            many = min(many, _QUEUE_HELPERS if scanner.queued else many, max(len(handles) - 1, 0))
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
