"""Three queues and who may take from them: reads before writes, writes only as deep as loads allow.

Stores wait for a segment to be prepared, and callers for a sync: these few go before everything else.

No locks: the only shared things are deques, whose `append` and `popleft` are atomic. A runner needs a token of `_idle`
to exist; a write needs a token of `_first` or `_rest`. While a load waits or runs only the one token of `_first` may be
used, so the write depth falls to 1 as soon as what was already handed to the disk has ended: the tokens of `_rest` go
to `_shut`. After the last load each write that ends gives one back: of loads that come one by one, the next does not
find the disk full of writes.

Each runner does `burst` tasks and submits itself again. With 1, a test which steps the executor steps single tasks; an
executor that nobody else uses is spared most of the hand-overs between threads by more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvstrata.tiers.base import Executor
from kvstrata.tiers.disk.tasks import Done, Load, Prepare, Sync, Task
from kvstrata.tiers.disk.work import UNIT_BYTES
from kvstrata.types import FailCause

MOST_THREADS = 16
"""More would only wait for each other."""


class Lanes:
    """Runs tasks on an executor, at most `width` and `MOST_THREADS` at once, at most `write_depth` of them writes."""

    def __init__(
        self,
        run: Callable[[Task], Done],
        executor: Executor,
        report: Callable[[Done], None],
        *,
        width: int,
        write_depth: int,
        burst: int = 1,
    ) -> None:
        self._run = run
        self._burst = burst
        self._executor = executor
        self._report = report
        self._urgent: deque[Task] = deque()
        self._reads: deque[Task] = deque()
        self._writes: deque[Task] = deque()
        self.width = min(width, MOST_THREADS)
        self._idle: deque[int] = deque(range(self.width))
        self._first: deque[int] = deque([0])
        self._rest: deque[int] = deque(range(1, min(write_depth, self.width)))
        self._shut: deque[int] = deque()
        self._reading: deque[int] = deque()
        self._forgotten: set[int] = set()
        self._running: deque[int] = deque()

    def push(self, task: Task) -> None:
        """Queue a task; `start` must follow."""
        if isinstance(task, Load):
            self._reads.append(task)
            self._shut_writes()
        elif isinstance(task, Prepare | Sync):
            self._urgent.append(task)
        else:
            self._writes.append(task)

    def start(self) -> None:
        """Wake as many runners as have something to do."""
        wanted = len(self._urgent) + len(self._reads) + len(self._writes)
        while wanted > 0 and self._may_run():
            try:
                token = self._idle.popleft()
            except IndexError:
                return
            wanted -= 1
            self._submit(token)

    def forget(self, task_ids: list[int]) -> None:
        """Do not start these any more; each is still reported once, as cancelled."""
        self._forgotten.update(task_ids)

    def abandon(self) -> list[Task]:
        """Take back everything that no runner has begun."""
        taken: list[Task] = []
        for queue in (self._urgent, self._reads, self._writes):
            while True:
                try:
                    taken.append(queue.popleft())
                except IndexError:
                    break
        return taken

    @property
    def reads_waiting(self) -> int:
        """Loads that no runner has begun."""
        return len(self._reads)

    @property
    def busy(self) -> bool:
        """Whether a runner is inside a task."""
        return bool(self._running)

    def _submit(self, token: int) -> None:
        self._executor.submit(lambda: self._step(token))

    def _may_run(self) -> bool:
        if self._urgent or self._reads:
            return True
        return bool(self._writes) and bool(self._first or (self._rest and not self._reading))

    def _step(self, token: int) -> None:
        for _ in range(self._burst):
            task, slots = self._take()
            if task is None:
                break
            self._running.append(token)
            try:
                self._do(task)
            finally:
                if slots is not None:
                    self._write_ended(slots, token)
                elif isinstance(task, Load):
                    self._reading.popleft()
                self._running.popleft()
            self.start()  # what this task held back, or its token, may serve another runner now
        if self._may_run():
            self._submit(token)
        else:
            self._idle.append(token)
        self.start()

    def _take(self) -> tuple[Task | None, deque[int] | None]:
        try:
            return self._urgent.popleft(), None
        except IndexError:
            pass
        self._reading.append(0)  # before the look at the queue, so that a writer beside us sees the load
        try:
            return self._reads.popleft(), None
        except IndexError:
            self._reading.popleft()
        slots = self._write_slots()
        if slots is None:
            return None, None
        try:
            return self._writes.popleft(), slots
        except IndexError:
            slots.append(0)
            return None, None

    def _shut_writes(self) -> None:
        while self._rest:
            try:
                self._shut.append(self._rest.popleft())
            except IndexError:
                return

    def _write_ended(self, slots: deque[int], token: int) -> None:
        loads = bool(self._reads or self._reading)
        (self._shut if loads and slots is self._rest else slots).append(token)
        if not loads:
            try:
                self._rest.append(self._shut.popleft())
            except IndexError:
                return

    def _write_slots(self) -> deque[int] | None:
        for slots in (self._first, self._rest):
            if slots is self._rest and (self._reads or self._reading):
                return None
            try:
                slots.popleft()
            except IndexError:
                continue
            return slots
        return None

    def _do(self, task: Task) -> None:
        if task.task_id in self._forgotten:
            self._forgotten.discard(task.task_id)
            self._report(Done(task.task_id, FailCause.CANCELLED))
            return
        self._report(self._run(task))


class LocalWorkers:
    """The workers of one opened tier in this process: answers go to a deque that `take` empties."""

    load_bytes = UNIT_BYTES

    def __init__(
        self,
        run: Callable[[Task], Done],
        executor: Executor,
        wake: Callable[[], None],
        *,
        width: int,
        write_depth: int,
    ) -> None:
        self._answers: deque[Done] = deque()
        self._wake = wake
        self._executor = executor
        self._lanes = Lanes(run, executor, self._report, width=width, write_depth=write_depth)

    def push(self, task: Task) -> None:
        """Queue one task; `start` hands the queued ones over."""
        self._lanes.push(task)

    def start(self) -> None:
        """Hand over what was pushed."""
        self._lanes.start()

    def forget(self, task_ids: list[int]) -> None:
        """See `Lanes.forget`."""
        self._lanes.forget(task_ids)

    def take(self) -> list[Done]:
        """Answers since the last call."""
        answers = []
        while self._answers:
            answers.append(self._answers.popleft())
        return answers

    def wait(self, timeout: float) -> bool:
        """Give the workers time to answer; whether they all have."""
        return self._executor.wait_idle(timeout)

    def close(self, timeout: float) -> bool:
        """Take back what has not begun, wait for the rest; False if something still runs."""
        for task in self._lanes.abandon():
            self._answers.append(Done(task.task_id, FailCause.CANCELLED, "the tier was closed"))
        self._executor.wait_idle(timeout)
        return not self._lanes.busy

    def advance(self, now: float) -> None:
        """Nothing is ever due."""

    def _report(self, done: Done) -> None:
        self._answers.append(done)
        self._wake()
