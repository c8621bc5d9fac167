"""What all parts of the fs tier share: its state, its tasks under way, and how facts become events.

The tier is cut by subject into a chain of classes, each of which knows only those before it:

    core      state, tasks, tickets, removal of files
    loads     what is there, and reading it
    stores    room for new files, and writing them
    upkeep    the directory: scan, trim, recency, flush, purge, loss and return
    tier      the `Tier` itself: open, close, poll
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable

from kvstrata.errors import ConfigError, StateError
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.common.index import Index, Name, Victim
from kvstrata.tiers.common.jobs import Jobs
from kvstrata.tiers.common.record import Identity
from kvstrata.tiers.common.tasks import Ticket
from kvstrata.tiers.fs.files import FileSystem, RealFileSystem
from kvstrata.tiers.fs.place import Place
from kvstrata.tiers.fs.scan import Scan
from kvstrata.tiers.fs.tasks import StoreItem, Task, UnlinkTask
from kvstrata.types import Flushed, OffloadKey

UNLINKS_PER_TASK = 256


class State(enum.Enum):
    """CLOSED -> (DETACHED <-> SCANNING -> READY -> DETACHED) -> CLOSED."""

    CLOSED = "closed"
    DETACHED = "detached"  # no hold of the directory; tried again
    SCANNING = "scanning"
    READY = "ready"


class Core:
    """State of one fs tier. All of it belongs to the caller's thread; workers only append to `_outbox`."""

    def __init__(
        self,
        path: str,
        *,
        name: str = "fs",
        limit: int | None = None,
        min_free: int = 0,
        verify: bool = True,
        files: FileSystem | None = None,
        touch_interval_s: float = 10.0,
        retry_s: float = 1.0,
    ) -> None:
        self.name = name
        self.notices: list[str] = []
        self._path = str(path)
        self._limit = limit
        self._min_free = min_free
        self._verify = verify
        self._files = files or RealFileSystem()
        self._touch_interval_s = touch_interval_s
        self._retry_s = retry_s
        self._state = State.CLOSED
        self._context: TierContext | None = None
        self._outbox: deque[Task] = deque()
        self._outstanding: dict[Task, None] = {}
        self._retired: list[Place] = []
        self._jobs = Jobs()
        self._buffers: dict[int, memoryview] = {}  # ranges of the self-test's jobs, which are not in primary
        self._tickets: dict[int, Ticket] = {}
        self._next_ticket = 0
        self._quiet_jobs = 0
        self._last_stamp = 0
        self._namespace = b""
        self._reset()

    def _reset(self) -> None:
        """Know nothing of any directory."""
        self._place: Place | None = None
        self._index = Index(self._limit)
        self._scan: Scan | None = None
        self._pending: dict[OffloadKey, StoreItem] = {}
        self._waiting: deque[StoreItem] = deque()
        self._unsynced: dict[Name, None] = {}
        self._touched: dict[Name, None] = {}
        self._touching = False
        self._next_touch = 0.0
        self._next_retry = 0.0
        self._free_seen: tuple[float, int] | None = None  # when, bytes

    @staticmethod
    def _identity(context: TierContext) -> Identity:
        if len(context.namespace) != 16:
            raise ConfigError(f"namespace: {len(context.namespace)} bytes, must be 16")
        return Identity(context.namespace, context.layout_tag)

    def _submit(self, task: Task) -> None:
        task.report = self._report
        self._outstanding[task] = None
        context = self._context
        try:
            if context is None:
                raise StateError("not open")
            context.executor.submit(task)
        except Exception as error:  # an executor that takes nothing more
            task.abandoned = True
            task.crash = str(error)
            self._outbox.append(task)

    def _report(self, task: Task) -> None:
        """Called by the worker, as the last thing it does with a task."""
        self._outbox.append(task)
        self._wake()

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

    def _stamps(self, count: int) -> int:
        """The last of `count` new time stamps (ns), each later than all before, whatever the wall clock does."""
        wall = 0 if self._context is None else int(self._context.clock.wall() * 1e9)
        self._last_stamp = max(self._last_stamp + 1, wall) + count - 1
        return self._last_stamp

    def _hidden_name(self, key: OffloadKey) -> Name:
        """What a record is called that lies where the key's belongs, but would not be accepted."""
        return self._namespace + key

    def _forget(self, name: Name) -> None:
        self._index.pop(name)
        self._unsynced.pop(name, None)
        self._touched.pop(name, None)

    def _condemn(self, names: Iterable[Name], inode: int | None = None) -> list[Victim]:
        """Take names out of the index; the caller sees to it that their files go."""
        victims = self._index.condemn(names, inode)
        for victim in victims:
            self._unsynced.pop(victim.name, None)
            self._touched.pop(victim.name, None)
        return victims

    def _unlink(self, victims: list[Victim], ticket: Ticket | None = None) -> None:
        """Have files removed; durably if a ticket waits for it."""
        place = self._place
        if place is None:
            return
        for start in range(0, len(victims), UNLINKS_PER_TASK):
            task = UnlinkTask(place, victims[start : start + UNLINKS_PER_TASK], [ticket] if ticket else [])
            if ticket is not None:
                ticket.parts += 1
            self._index.reserved += task.reserved
            self._submit(task)
        self._index.note_peak()

    def _on_unlinked(self, task: UnlinkTask) -> None:
        done = task.crash is None and not task.abandoned
        if task.place is self._place:
            self._index.reserved -= task.reserved
            self._bury(task.victims, task.kept, done=done)
        for ticket in task.tickets:
            self._part_done(ticket, ok=done and task.synced and not task.kept)

    def _bury(self, victims: list[Victim], kept: dict[Name, int], *, done: bool) -> None:
        """Removals have ended. What could not be removed counts again and is tried again when it is the coldest."""
        for victim in victims:
            self._index.bury(victim.name, kept.get(victim.name) if done else victim.allocated)

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

    def _retire_place(self) -> None:
        if self._place is not None:
            self._retired.append(self._place)
            self._place = None

    def _release_places(self) -> None:
        """Close directories that no task works in any more; until then their lock keeps others out."""
        busy = {id(task.place) for task in self._outstanding}
        for place in self._retired:
            if id(place) not in busy:
                place.close()
        self._retired = [place for place in self._retired if id(place) in busy]
