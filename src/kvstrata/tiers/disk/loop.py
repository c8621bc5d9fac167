"""One thread that keeps many calls at the disk: tasks begin, calls end, and what a task does between runs here.

Loads go before stores. While a load waits or is at the disk, one store call may be there too, and a short one, so that
a load never waits for more than that; then, with every `_GROW_BYTES` that are stored with no load about, twice as many
up to the write depth. So of loads that come one by one the next does not find the disk full of writes. After
`_CALM_BYTES` calls are long, and at the disk is at most what it writes in a short time (`store_room`).

What waits for the device goes aside: segments are prepared and made durable there, and batches written for the first
time, for which the file system has to mark their blocks as written. They count for the write depth as others do.

Digests for stores are made here, those of batches that go aside included: whoever makes them keeps the interpreter for
as long, and this thread looks in between for loads that have come.
"""

from __future__ import annotations

import errno
import functools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvstrata.tiers.base import Clock
from kvstrata.tiers.disk.calls import Call, CallQueue
from kvstrata.tiers.disk.format import BLOCK, SECTOR
from kvstrata.tiers.disk.store_room import StoreRoom
from kvstrata.tiers.disk.tasks import Done, Load, Prepare, ReadEven, ReadUnit, SelfTest, Sync, Task, WriteBatch
from kvstrata.tiers.disk.work import UNIT_BYTES, Steps, Workshop
from kvstrata.types import FailCause

_LONG_BYTES = UNIT_BYTES + BLOCK
"""Most bytes of one call, of a store while no load is about; longer ones keep less of a disk busy."""
_SMALL_BYTES = 1 << 18
"""Most bytes of one store call while loads are about."""
_FRESH_BYTES = 1 << 19
"""The same where the file is new: each call waits for the file system."""
_FEW_BYTES = 1 << 16
"""Of loads up to this size twice as many may be at the disk: their calls end in bursts."""
_GROW_BYTES = 4 << 20
_CALM_BYTES = 48 << 20
_WORK_BYTES = 1 << 19
"""So many bytes are checked between two looks at what has ended and what has come."""
_READY_BYTES = 16 << 20
"""Stores are made ready ahead of their turn up to this much, or as much as may be at the disk if that is more: it never
waits for their digests."""
_TAIL_BYTES = 8 << 20
"""Above this at most as much is read at once as waits behind it. A disk may report all that it has at once: what is
verified after the last call is little then, not all that the disk can have."""
_TOGETHER = 8
_TOGETHER_BYTES = 1 << 20
"""Calls, and bytes, that are handed over at once, unless the disk has nothing to do: then the first goes alone. The
kernel makes one call of neighbours among them, longer than is good."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A task under way. `begun`: bytes of its call that were handed over; `got`: bytes of it that are there.

    `steps` is None for a load of the plain kind until something about it is not as it should be.
    """

    task: Task
    steps: Steps | None
    lane: _Lane
    call: Call
    begun: int = 0
    got: int = 0
    out: int = 0
    error: OSError | None = None


@dataclass(slots=True, eq=False)
class _Cut:
    """A load that was cut into units: how many have not ended, and what the others had to say."""

    left: int
    failed: list[tuple[int, str]] = field(default_factory=list)
    bad: Done | None = None

    def note(self, first: int, done: Done) -> Done | None:
        """A unit has ended; the answer of the whole if it was the last one."""
        self.left -= 1
        self.failed += [(first + index, cause) for index, cause in done.failed]
        if done.cause:
            self.bad = done
        if self.left:
            return None
        return self.bad or Done(done.task_id, failed=self.failed)


@dataclass(slots=True, eq=False)
class _Making:
    """A task that works for its first call, or has it."""

    task: Task
    steps: Steps
    call: Call | None = None


@dataclass(slots=True, eq=False)
class _Lane:
    """Loads, or stores: tasks that have not begun, the one that is beginning, calls that are not handed over, their
    bytes, calls at the disk and their bytes.
    """

    waiting: deque[Task] = field(default_factory=deque)
    making: _Making | None = None
    open: deque[_Flight] = field(default_factory=deque)
    ready: int = 0
    out: int = 0
    out_bytes: int = 0


class IoLoop:
    """Runs tasks over a queue of calls. `report` is given each answer and whether it is that of a load; `aside` gets
    tasks that wait for the device, each with what runs it, to be called elsewhere.

    At most `width` loads (small ones: twice as many) and `write_depth` stores are at the disk at once. One thread calls
    everything.
    """

    def __init__(
        self,
        workshop: Workshop,
        queue: CallQueue,
        report: Callable[[Done, bool], None],
        aside: Callable[[Task, Callable[[], Done]], None],
        *,
        width: int,
        write_depth: int,
        clock: Clock,
    ) -> None:
        self._workshop = workshop
        self._queue = queue
        self._report = report
        self._aside = aside
        self._width = width
        self._write_depth = write_depth
        self._reads = _Lane()
        self._writes = _Lane()
        self._clock = clock
        self._room = StoreRoom(write_depth * _LONG_BYTES)
        self._written = 0  # bytes that were stored since a look at the clock
        self._stored = _CALM_BYTES  # bytes since a load was about
        self._pieces: dict[int, tuple[_Flight, int, int]] = {}
        self._next_tag = 0
        self._forgotten: set[int] = set()
        self._due: deque[_Flight] = deque()  # whose call has ended
        self._cuts: dict[int, _Cut] = {}
        self._beside: dict[int, int] = {}  # bytes of the batches that are written aside, by task

    @property
    def busy(self) -> bool:
        """Whether a task is under way or waits for its turn."""
        return self.follow(load=True) or self.follow(load=False)

    @property
    def due(self) -> bool:
        """Whether calls have ended whose tasks have not gone on: more answers come in a moment."""
        return bool(self._due)

    def follow(self, *, load: bool) -> bool:
        """Whether loads, or stores, are still under way, so that more answers of that kind follow soon."""
        lane = self._reads if load else self._writes
        return bool(lane.out or lane.waiting or lane.open or lane.making) or any(
            flight.lane is lane for flight in self._due
        )

    def push(self, task: Task) -> None:
        """Queue a task; `turn` must follow."""
        if isinstance(task, Load):
            self._push_load(task)
            self._stored = 0
        elif isinstance(task, Prepare | Sync | SelfTest):
            self._aside(task, functools.partial(self._workshop.run, task))
        else:
            self._writes.waiting.append(task)

    def _push_load(self, task: Load) -> None:
        if isinstance(task, ReadEven):
            units = task.units(UNIT_BYTES)
            if len(units) > 1:
                self._cuts[task.task_id] = _Cut(len(units))
            self._reads.waiting += units
        else:
            self._reads.waiting.append(task)

    def forget(self, task_ids: Iterable[int]) -> None:
        """Do not start these any more; each is still reported once, as cancelled."""
        self._forgotten.update(task_ids)

    def turn(self) -> bool:
        """Keep the disk busy, then let some tasks go on; whether there is more to do at once. Does not wait."""
        self._take()
        if not self._due:
            return self._begin(self._reads) or self._begin(self._writes)
        work = 0
        while self._due and work < _WORK_BYTES:
            flight = self._due.popleft()
            work += flight.call.size
            self._go_on(flight)
        return True

    # calls that end

    def _take(self) -> None:
        """Look at the calls that have ended, and hand over others in their place.

        Calls may end all at once: the disk gets one before the second is looked at, and goes on to get more meanwhile.
        """
        ended, at, step = self._queue.take(), 0, 1
        while at < len(ended):
            for tag, result in ended[at : at + step]:
                self._note(tag, result)
            at, step = at + step, min(2 * step, _TOGETHER)
            self._hand_over()
        if not ended:
            self._hand_over()
        if self._written:
            self._measure()

    def _measure(self) -> None:
        now = self._clock.monotonic()
        if self._careful:
            self._room.restart(now)
        else:
            self._room.ended(self._written, now)
        self._written = 0

    def _note(self, tag: int, result: int) -> None:
        flight, begin, size = self._pieces.pop(tag)
        flight.out -= 1
        flight.lane.out -= 1
        flight.lane.out_bytes -= size
        if result == size:
            flight.got += size
            if flight.call.write:
                self._grow(size)
                self._written += size
        else:
            self._ended_short(flight, begin, size, result)
        if not flight.out and (flight.begun >= flight.call.size or flight.error is not None):
            self._due.append(flight)

    def _ended_short(self, flight: _Flight, begin: int, size: int, result: int) -> None:
        write = flight.call.write
        if result < 0:
            flight.error = OSError(-result, "")
        elif not write and (not result or result % SECTOR):
            flight.got += result  # the file ends here
        elif not result:
            flight.error = OSError(errno.ENOSPC, "a write was not taken")
        else:  # it came back short: the rest is another call
            flight.got += result
            self._push(flight, begin + result, size - result)
            self._queue.submit()
        if write:
            self._grow(size)

    def _grow(self, size: int) -> None:
        if self._stored < _CALM_BYTES and not self.follow(load=True):
            self._stored += size

    def ended_aside(self, done: Done) -> bool:
        """A task that went aside has ended; whether it was a store, as opposed to what others wait for."""
        size = self._beside.pop(done.task_id, 0)
        if size:
            self._writes.out -= 1
            self._grow(size)
        self._report(done, False)
        return bool(size)

    def _go_on(self, flight: _Flight) -> None:
        """All of a call has ended: the task goes on."""
        if flight.begun < flight.call.size:  # it failed before all of it was handed over
            flight.lane.open.remove(flight)
            flight.lane.ready -= flight.call.size - flight.begun
        error, flight.error = flight.error, None
        steps = flight.steps
        if steps is None:
            task = flight.task
            if isinstance(task, ReadUnit) and self._is_right(flight, task, error):
                self._ended(task, Done(task.task_id))
                return
            steps = flight.steps = self._workshop.steps(task)
            next(steps)  # the call that was made
        try:
            call = steps.send(flight.got) if error is None else steps.throw(error)
            while call is None:
                call = next(steps)
        except StopIteration as end:
            self._ended(flight.task, end.value)
            return
        flight.call, flight.begun, flight.got = call, 0, 0
        self._open(flight)

    def _is_right(self, flight: _Flight, task: ReadUnit, error: OSError | None) -> bool:
        return error is None and flight.got == flight.call.size and self._workshop.is_right(task)

    def _ended(self, task: Task, done: Done) -> None:
        if isinstance(task, ReadUnit) and (cut := self._cuts.get(task.task_id)) is not None:
            whole = cut.note(task.first, done)
            if whole is None:
                return
            del self._cuts[task.task_id]
            done = whole
        self._forgotten.discard(done.task_id)
        self._report(done, isinstance(task, ReadUnit))

    # calls that begin

    @property
    def _depth(self) -> int:
        """How many stores may be at the disk now."""
        return 1 if self.follow(load=True) else min(self._write_depth, 1 << self._stored // _GROW_BYTES)

    def _hand_over(self) -> None:
        """Fill the disk up with what may go."""
        moved = self._submit(self._reads, self._width, _LONG_BYTES)
        moved |= self._submit(self._writes, self._depth, _SMALL_BYTES if self._careful else _LONG_BYTES)
        if moved:
            self._queue.submit()

    def _submit(self, lane: _Lane, depth: int, piece: int) -> bool:
        moved, held, together, idle = False, 0, 0, not self._pieces
        load = lane is self._reads
        while lane.open or (load and self._begin(lane)):
            if not lane.open:  # it ended before it made a call
                continue
            flight = lane.open[0]
            size = flight.call.size
            if lane.out >= (2 * depth if load and size <= _FEW_BYTES else depth):
                break
            size = min(piece, size - flight.begun)
            if lane.out and lane.out_bytes + size > (self._tail(flight) if load else self._room.bytes):
                break
            self._push(flight, flight.begun, size)
            flight.begun += size
            lane.ready -= size
            if flight.begun >= flight.call.size:
                lane.open.popleft()
            moved, held, together = True, held + 1, together + size
            if idle or held >= _TOGETHER or together >= _TOGETHER_BYTES:
                self._queue.submit()
                held, together, idle = 0, 0, False
        return moved

    def _tail(self, flight: _Flight) -> int:
        """Bytes of loads that may be at the disk, as far as those that wait are like this one."""
        return max(_TAIL_BYTES, self._reads.ready + len(self._reads.waiting) * flight.call.size)

    def _push(self, flight: _Flight, begin: int, size: int) -> None:
        self._next_tag += 1
        self._pieces[self._next_tag] = (flight, begin, size)
        flight.out += 1
        if not flight.lane.out and flight.call.write:
            self._room.restart(self._clock.monotonic())
        flight.lane.out += 1
        flight.lane.out_bytes += size
        self._queue.push(self._next_tag, flight.call, begin, size)

    def _begin(self, lane: _Lane) -> bool:
        """Begin a task, or go on with one that is beginning; whether there was something to do."""
        if lane.making is not None:
            return self._make(lane, lane.making)
        if not lane.waiting or lane.ready >= max(_READY_BYTES, self._room.bytes):
            return False
        task = lane.waiting[0]
        if _is_fresh(task) and (lane.open or lane.out >= self._depth):
            return False
        lane.waiting.popleft()
        if task.task_id in self._forgotten:
            self._ended(task, Done(task.task_id, FailCause.CANCELLED))
            return True
        call = self._workshop.plain(task) if isinstance(task, ReadUnit) else None
        if call is not None:
            self._open(_Flight(task, None, lane, call))
            return True
        lane.making = _Making(task, self._workshop.steps(task))
        return self._make(lane, lane.making)

    def _make(self, lane: _Lane, making: _Making) -> bool:
        task = making.task
        try:
            while making.call is None:
                making.call = next(making.steps)
                if making.call is None and self._careful:
                    return True  # a load may have come
        except StopIteration as end:
            lane.making = None
            self._ended(task, end.value)
            return True
        if not _is_fresh(task):
            lane.making = None
            self._open(_Flight(task, making.steps, lane, making.call))
            return True
        if lane.out >= self._depth:
            return False
        lane.making = None
        lane.out += 1
        self._beside[task.task_id] = making.call.size
        piece = _FRESH_BYTES if self._careful else _LONG_BYTES
        self._aside(task, functools.partial(self._workshop.finish, task, making.steps, making.call, piece))
        return True

    @property
    def _careful(self) -> bool:
        """Whether loads are about, or were a moment ago."""
        return self._stored < _CALM_BYTES or self.follow(load=True)

    def _open(self, flight: _Flight) -> None:
        flight.lane.open.append(flight)
        flight.lane.ready += flight.call.size


def _is_fresh(task: Task) -> bool:
    return isinstance(task, WriteBatch) and task.fresh
