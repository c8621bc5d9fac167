"""What all parts of the fs tier share, beside `common.storing`: the directory, and removal of files.

The tier is cut by subject into a chain of classes, each of which knows only those before it:

    core      state, removal of files (room and the stores of a job: common/storing.py)
    loads     what is there, and reading it
    stores    writing files, and the room of the device
    upkeep    the directory: scan, trim, recency, flush, purge, loss and return
    tier      the `Tier` itself: open, close, poll
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from kvstrata.errors import ConfigError, InternalError
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.common.index import Name, Victim
from kvstrata.tiers.common.record import Identity
from kvstrata.tiers.common.storing import Storing
from kvstrata.tiers.common.tasks import Ticket
from kvstrata.tiers.fs.files import FileSystem, RealFileSystem
from kvstrata.tiers.fs.place import Place
from kvstrata.tiers.fs.scan import Scan
from kvstrata.tiers.fs.tasks import StoreItem, Task, UnlinkTask
from kvstrata.types import OffloadKey

TASK_KEYS = 32
TASK_BYTES = 1 << 20
"""A job is cut into tasks of at most so many keys and about so many bytes, which run beside each other."""


class State(enum.Enum):
    """CLOSED -> (DETACHED <-> SCANNING -> READY -> DETACHED) -> CLOSED."""

    CLOSED = "closed"
    DETACHED = "detached"  # no hold of the directory; tried again
    SCANNING = "scanning"
    READY = "ready"


class Core(Storing[Task, StoreItem]):
    """State of one fs tier."""

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
        super().__init__(name, limit, task_keys=TASK_KEYS, task_bytes=TASK_BYTES)
        self._path = str(path)
        self._min_free = min_free
        self._verify = verify
        self._files = files or RealFileSystem()
        self._touch_interval_s = touch_interval_s
        self._retry_s = retry_s
        self._state = State.CLOSED
        self._retired: list[Place] = []
        self._namespace = b""
        self._reset()

    def _reset(self) -> None:
        """Know nothing of any directory."""
        self._forget_records()
        self._place: Place | None = None
        self._scan: Scan | None = None
        self._unsynced: dict[Name, None] = {}
        self._touching = False
        self._next_touch = 0.0
        self._next_retry = 0.0
        self._free_seen: tuple[float, int] | None = None  # when, bytes

    @staticmethod
    def _identity(context: TierContext) -> Identity:
        if len(context.namespace) != 16:
            raise ConfigError(f"namespace: {len(context.namespace)} bytes, must be 16")
        return Identity(context.namespace, context.layout_tag)

    def _is_open(self) -> bool:
        return self._context is not None and self._state is not State.CLOSED

    def _is_ready(self) -> bool:
        return self._state is State.READY

    @property
    def _held_place(self) -> Place:
        """The directory, where there is work for it."""
        if self._place is None:
            raise InternalError("there is no work where no directory is held")
        return self._place

    def _submit(self, task: Task) -> None:
        self._start(task)

    def _hidden_name(self, key: OffloadKey) -> Name:
        """What a record is called that lies where the key's belongs, but would not be accepted."""
        return self._namespace + key

    def _forget(self, name: Name) -> None:
        self._index.pop(name)
        self._unsynced.pop(name, None)
        self._touched.pop(name, None)

    def _condemn(self, names: Iterable[Name], inode: int | None = None) -> list[Victim]:
        victims = super()._condemn(names, inode)
        for victim in victims:
            self._unsynced.pop(victim.name, None)
        return victims

    def _removal(self, victims: list[Victim], tickets: list[Ticket]) -> UnlinkTask:
        """A task that removes files; durably if a ticket waits for it."""
        return UnlinkTask(self._held_place, victims, tickets)

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

    def _retire_place(self) -> None:
        if self._place is not None:
            self._retired.append(self._place)
            self._place = None

    def _release_places(self) -> None:
        """Close directories that no task works in any more; until then their lock keeps others out."""
        busy = {id(task.place) for task in self._running}
        for place in self._retired:
            if id(place) not in busy:
                place.close()
        self._retired = [place for place in self._retired if id(place) in busy]
