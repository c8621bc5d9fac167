"""The frame of a tier whose blocking work is done by tasks: what it holds, what it tells, and whom it owes an answer.

All of it belongs to the caller's thread; workers only append to `_outbox`. So there is no lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from kvstrata.errors import StateError
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.common.index import Index, Name, Victim, is_served
from kvstrata.tiers.common.jobs import Jobs
from kvstrata.tiers.common.tasks import Task, Ticket
from kvstrata.types import FailCause, Flushed, OffloadKey, TierJob, TierUsage

REMOVES_PER_TASK = 256
SELF_TEST_S = 5.0

AnyTask = TypeVar("AnyTask", bound=Task)


class TaskTier(Generic[AnyTask]):
    """The state of one tier, and how facts become events. `limit`: bytes, None for none."""

    def __init__(self, name: str, limit: int | None) -> None:
        self.name = name
        self.notices: list[str] = []
        self._limit = limit
        self._context: TierContext | None = None
        self._running: dict[AnyTask, None] = {}
        """Tasks that the executor has and that were not applied."""
        self._outbox: deque[AnyTask] = deque()
        self._jobs = Jobs()
        self._buffers: dict[int, memoryview] = {}  # ranges of the self-test's jobs, which are not in primary
        self._tickets: dict[int, Ticket] = {}
        self._next_ticket = 0
        self._quiet_jobs = 0
        self._last_stamp = 0
        self._forget_records()

    def _forget_records(self) -> None:
        """Know nothing of what the tier has."""
        self._index = Index(self._limit)
        self._touched: dict[Name, None] = {}

    def _now(self) -> float:
        return 0.0 if self._context is None else self._context.clock.monotonic()

    # what each tier has its own way for

    def _is_open(self) -> bool:
        raise NotImplementedError

    def _submit(self, task: AnyTask) -> None:
        """Have a task done, now or when its turn comes."""
        raise NotImplementedError

    def _collect(self) -> None:
        """Apply everything that workers have finished."""
        raise NotImplementedError

    def _apply(self, task: AnyTask) -> None:
        """Take in what a task has done, or that it was abandoned."""
        raise NotImplementedError

    def _removal(self, victims: list[Victim], tickets: list[Ticket]) -> AnyTask:
        """A task that removes victims, and answers with `kept` what would not go."""
        raise NotImplementedError

    def submit_load(self, job: TierJob) -> None:
        """See `Tier`."""
        raise NotImplementedError

    def submit_store(self, job: TierJob) -> None:
        """See `Tier`."""
        raise NotImplementedError

    # tasks

    def _start(self, task: AnyTask) -> None:
        """Hand a task to the executor."""
        task.report = self._report
        self._running[task] = None
        try:
            if self._context is None:
                raise StateError("not open")
            self._context.executor.submit(task)
        except Exception as error:  # an executor that takes nothing more
            task.abandoned = True
            task.crash = str(error)
            self._outbox.append(task)

    def _report(self, task: AnyTask) -> None:
        """Called by the worker, as the last thing it does with a task."""
        self._outbox.append(task)
        self._wake()

    def _abandon_running(self) -> None:
        """End what never started; what hangs ends when it comes back."""
        for task in list(self._running):
            task.abandoned = True
            if not task.started:
                del self._running[task]
                self._apply(task)

    def drain(self, timeout: float) -> bool:
        """Wait until no job is unfinished; False after `timeout` seconds, or when nothing moves any more."""
        context = self._context
        if context is None or not self._is_open():
            return True
        deadline = context.clock.monotonic() + timeout
        while True:
            self._collect()
            if not self._jobs.open:
                return True
            idle = context.executor.wait_idle(max(deadline - context.clock.monotonic(), 0.0))
            if not idle or not self._outbox:
                self._collect()
                return not self._jobs.open

    # telling

    def _publish(self) -> None:
        """Tell what has been settled; what ended jobs have stored may be evicted from now on."""
        self._jobs.publish()
        for job in self._jobs.ended:
            self._index.settle(job.chain())
        self._jobs.ended.clear()
        if self._jobs.events:
            self._wake()

    def _wake(self) -> None:
        if self._context is not None:
            self._context.wake()

    def _notice(self, text: str) -> None:
        """Say something once."""
        line = f"tier {self.name}: {text}"
        if not self.notices or self.notices[-1] != line:
            self.notices.append(line)

    def _refuse(self, job_id: int) -> None:
        self._jobs.refuse(job_id)
        self._wake()

    def _tell_removed(self, victims: Iterable[Victim]) -> None:
        """Say that keys are there no more."""
        self._tell_gone([victim.name for victim in victims if is_served(victim.name)])

    def _tell_gone(self, keys: list[OffloadKey]) -> None:
        self._jobs.removed(keys)

    def _tell_lost(self) -> None:
        """Say that nothing is there any more."""
        self._jobs.removed([name for name in (*self._index.entries, *self._index.fresh) if is_served(name)])

    # tickets

    def _ticket(self) -> Ticket:
        self._next_ticket += 1
        ticket = Ticket(self._next_ticket, parts=1)
        self._tickets[ticket.number] = ticket
        return ticket

    def _part_done(self, ticket: Ticket, *, ok: bool) -> None:
        ticket.ok = ticket.ok and ok
        ticket.parts -= 1
        if ticket.parts == 0:
            self._answer(ticket, ok=ticket.ok)

    def _answer(self, ticket: Ticket, *, ok: bool) -> None:
        if self._tickets.pop(ticket.number, None) is not None:
            self._publish()
            self._jobs.events.append(Flushed(ticket.number, ok))
            self._wake()

    def _abandon_tickets(self) -> None:
        for ticket in list(self._tickets.values()):
            self._answer(ticket, ok=False)

    # recency

    def _stamps(self, count: int) -> int:
        """The last of `count` new time stamps (ns), each later than all before, whatever the wall clock does."""
        wall = 0 if self._context is None else int(self._context.clock.wall() * 1e9)
        self._last_stamp = max(self._last_stamp + 1, wall) + count - 1
        return self._last_stamp

    def _stamped(self, names: Sequence[Name]) -> list[tuple[Name, int]]:
        """Names with new time stamps, the last name's the latest."""
        first = self._stamps(len(names)) - len(names) + 1
        return [(name, first + index) for index, name in enumerate(names)]

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Mark as recently used; of one chain the head becomes the warmest. Written down later, in batches."""
        self._index.touch(keys)
        entries, touched = self._index.entries, self._touched
        for key in reversed(keys):
            if key in entries:
                touched.pop(key, None)
                touched[key] = None

    # records

    def usage(self) -> TierUsage:
        """What this tier holds at this instant; `bytes_reserved` are records being written or removed."""
        index = self._index
        return TierUsage(
            bytes_held=index.held,
            bytes_reserved=index.reserved,
            bytes_limit=self._limit,
            keys=len(index),
            bytes_peak=index.peak,
            evicted=index.evicted,
        )

    def _range(self, job_id: int, offset: int, length: int) -> memoryview:
        """The part of primary (or of the self-test's own buffer) that a job may touch."""
        own = self._buffers.get(job_id)
        region = self._context.region if own is None and self._context is not None else own
        return memoryview(b"") if region is None else region[offset : offset + length]

    def _condemn(self, names: Iterable[Name], inode: int | None = None) -> list[Victim]:
        """Take names out of the index; the caller sees to it that their records go."""
        victims = self._index.condemn(names, inode)
        for victim in victims:
            self._touched.pop(victim.name, None)
        return victims

    def _evict(self, amount: int) -> list[Victim]:
        """Condemn the coldest that free at least `amount` bytes together, or all if that is not enough."""
        victims = self._condemn(self._index.victims(amount))
        self._index.evicted += len(victims)
        return victims

    def _delete(self, victims: list[Victim], ticket: Ticket | None = None) -> None:
        """Have victims removed; a ticket waits for that."""
        for start in range(0, len(victims), REMOVES_PER_TASK):
            part = victims[start : start + REMOVES_PER_TASK]
            if ticket is not None:
                ticket.parts += 1
            self._submit_removal(part, [ticket] if ticket is not None else [])
        self._index.note_peak()

    def _submit_removal(self, victims: list[Victim], tickets: list[Ticket]) -> None:
        """Have victims removed by one task; what they take stays reserved until it has ended."""
        self._index.reserved += sum(victim.allocated for victim in victims)
        self._submit(self._removal(victims, tickets))

    def _trim(self) -> None:
        """Evict the coldest until the limit holds."""
        victims = self._evict(self._index.excess)
        self._tell_removed(victims)
        self._delete(victims)

    # the self-test

    def run_quietly(self, key: OffloadKey, buffer: memoryview, *, load: bool) -> list[FailCause | None] | None:
        """Run a job of one key on a buffer outside primary; None if it does not end in time. Self-test only."""
        self._quiet_jobs -= 1  # negative: events of such jobs are kept from the caller
        job = TierJob(self._quiet_jobs, [key], [0], [len(buffer)])
        self._buffers[job.job_id] = buffer
        (self.submit_load if load else self.submit_store)(job)
        self.drain(SELF_TEST_S)
        result = None if job.job_id in self._jobs.open else self._jobs.quiet.pop(job.job_id, [])
        if result is not None:
            del self._buffers[job.job_id]
        return result
