"""State of one server tier: its lanes of work, and the part it writes in."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypedDict

from kvstrata.errors import ConfigError
from kvstrata.tiers.common.claims import Claim, Owner, Refusal, check_part, default_part, this_process
from kvstrata.tiers.common.index import Name, Victim, is_served
from kvstrata.tiers.common.record import Identity
from kvstrata.tiers.common.storing import Storing
from kvstrata.tiers.common.tasks import Ticket
from kvstrata.tiers.server.client import ClientSetup, StoreClient, scope_of
from kvstrata.tiers.server.tasks import (
    AttachTask,
    HoldTask,
    Lane,
    LoadItem,
    ProbeTask,
    RemoveTask,
    ScanTask,
    StoreItem,
    Task,
)
from kvstrata.types import FailCause, OffloadKey

PROBES_PER_TIMEOUT = 256
"""So many keys of one probe may take as long as one request."""
NAMESPACE_BYTES = 16


class CommonOptions(TypedDict, total=False):
    """Options that mean the same in every tier over a server: see `ServerSettings`, which has their defaults too."""

    shared_limit: int | None
    verify: bool
    secret: str
    timeout_s: float
    retry_s: float


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What every server tier can be told. Bytes and seconds."""

    name: str
    limit: int | None = None
    """Most that this writer's part may take, headers included. None: no limit."""
    shared_limit: int | None = None
    """Most that the parts of all writers may claim together. None: nobody counts."""
    part: str = ""
    """Name of the part; must stay the same over restarts and differ between engines. Empty: the host's name."""
    verify: bool = True
    secret: str = ""
    """Reference to a secret that all writers have: records carry a tag made with it, and others are foreign."""
    timeout_s: float = 5.0
    """Longest time of one request. A read or probe that was handed over is given up after twice as long, and one that
    waits is when nothing has come to an end for as long."""
    retry_s: float = 1.0
    """How often a store that cannot be reached, or a part that is taken, is tried again."""
    hold_check_s: float = 5.0
    """How often the tier makes sure that the part is still its own."""
    width: int = 4
    """Most tasks at the executor at once; stores get one less."""
    task_keys: int = 32
    task_bytes: int = 32 << 20
    """A job is cut into tasks of at most so many keys and about so many bytes."""
    max_queue: int = 4096
    """Most chunks that wait to be stored; above it stores are refused."""

    def check(self) -> None:
        """Raise `ConfigError` for a value that makes no sense."""
        for option, value, least in (
            ("limit", self.limit, 1),
            ("shared_limit", self.shared_limit, 1),
            ("width", self.width, 1),
            ("task_keys", self.task_keys, 1),
            ("task_bytes", self.task_bytes, 1),
            ("max_queue", self.max_queue, 1),
        ):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ConfigError(f"tier {self.name}: {option}: {value!r} must be a whole number, at least {least}")
        for option, seconds in (
            ("timeout_s", self.timeout_s),
            ("retry_s", self.retry_s),
            ("hold_check_s", self.hold_check_s),
        ):
            if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds < 1e6:
                raise ConfigError(f"tier {self.name}: {option}: {seconds!r} must be a number of seconds above 0")
        if self.shared_limit is not None and self.limit is None:
            raise ConfigError(f"tier {self.name}: limit: is needed where there is a shared_limit")
        if self.part:
            check_part(self.part, f"tier {self.name}: part")


class State(enum.Enum):
    """CLOSED -> (DETACHED -> READING -> SCANNING -> READY; back to READING when the part is lost) -> CLOSED."""

    CLOSED = "closed"
    DETACHED = "detached"  # the store does not answer; tried again
    READING = "reading"  # the part is somebody else's; tried again
    SCANNING = "scanning"  # the part is ours; what lies in it is not known yet
    READY = "ready"


class Core(Storing[Task, StoreItem]):
    """State of one server tier."""

    def __init__(self, client: StoreClient, settings: ServerSettings) -> None:
        super().__init__(
            settings.name,
            settings.limit,
            task_keys=settings.task_keys,
            task_bytes=settings.task_bytes,
            max_queue=settings.max_queue,
        )
        self._settings = settings
        self._client = client
        self._state = State.CLOSED
        self._identity = Identity(bytes(NAMESPACE_BYTES), 0)
        self._part = settings.part or default_part()
        self._owner: Owner | None = None
        self._lanes: dict[Lane, deque[Task]] = {lane: deque() for lane in Lane}
        self._probes: dict[int, ProbeTask] = {}
        self._epoch = 0
        self._next_try = 0.0
        self._next_hold = 0.0
        self._next_touch = 0.0
        self._progress = 0.0
        """When a task last came to its end."""
        self._sick = False
        """The last thing that was heard of the store is a passing error."""
        self._forget_part()

    @classmethod
    def _settings_from(cls, name: str, options: CommonOptions, **own: Any) -> ServerSettings:
        """The settings of a tier, from its options and its own values for what is not among them.

        Raises `TypeError` for an option that there is not, as any call does.
        """
        for option in options:
            if option not in CommonOptions.__annotations__:
                raise TypeError(f"{cls.__name__}.__init__() got an unexpected keyword argument {option!r}")
        return ServerSettings(name, **{**own, **options})

    def _forget_part(self) -> None:
        """Know nothing of the part. Results of tasks that are under way change no account any more."""
        self._epoch += 1
        self._forget_records()
        self._removed: set[Name] = set()
        """What was removed while a scan was under way."""
        self._bad_later: list[LoadItem] = []
        """Bad records that were read while a scan was under way."""
        self._distrusted: set[OffloadKey] = set()
        """Keys whose records were read as bad, until the client has discarded those."""
        self._scanned = 0
        """The last generation that the scan gave to an entry."""
        self._purges: list[tuple[bytes, Ticket]] = []
        """Purges that wait for the end of a scan."""
        self._scanning_since = 0.0

    def _is_open(self) -> bool:
        return self._context is not None and self._state is not State.CLOSED

    def _is_ready(self) -> bool:
        return self._state is State.READY

    # lanes

    def _submit(self, task: Task) -> None:
        """Queue a task in its lane."""
        task.epoch = self._epoch
        task.queued_at = self._now()
        self._lanes[task.lane].append(task)

    def _feed(self) -> None:
        """Hand over what there is room for, by lane. One place is always kept for what is not a store."""
        while len(self._running) < self._settings.width:
            task = self._next_task()
            if task is None:
                return
            task.deadline = self._now() + self._patience(task)
            self._start(task)

    def _patience(self, task: Task) -> float:
        """How long a task may run: a request and its repetition, more for many keys."""
        keys = len(task.asked) if isinstance(task, ProbeTask) else 0
        return self._settings.timeout_s * (2 + keys // PROBES_PER_TIMEOUT)

    def _next_task(self) -> Task | None:
        stores = sum(task.lane is Lane.STORE for task in self._running)
        for lane, queue in self._lanes.items():
            if queue and (lane is not Lane.STORE or stores < max(self._settings.width - 1, 1)):
                return queue.popleft()
        return None

    def _tasks(self) -> Iterable[Task]:
        """All that have not been applied."""
        yield from self._running
        for queue in self._lanes.values():
            yield from queue

    def _busy(self, *kinds: type[Task]) -> bool:
        return any(isinstance(task, kinds) and task.epoch == self._epoch for task in self._tasks())

    def _hidden_name(self, key: OffloadKey) -> Name:
        """What a record is called that takes room but is not served, though it is of the own scope."""
        return scope_of(self._identity) + key

    # removal

    def _tell_gone(self, keys: list[OffloadKey]) -> None:
        self._outdate(keys)
        super()._tell_gone(keys)

    def _outdate(self, names: Iterable[Name]) -> None:
        """Probes under way must not find these, as far as they were not stored again.

        Also when their removal has ended: a probe may have looked before that, and answer after it.
        """
        gone = [name for name in names if self._index.get(name) is None]
        for probe in self._probes.values():
            probe.removed.update(gone)

    def _removal(self, victims: list[Victim], tickets: list[Ticket]) -> RemoveTask:
        return RemoveTask(self._client, victims, tickets)

    def _bury(self, victims: list[Victim], kept: dict[Name, int], *, done: bool) -> None:
        """Removals have ended. What could not be removed counts again and is tried again when it is the coldest.

        It is not served: it was told to be gone.
        """
        for victim in victims:
            left = kept.get(victim.name) if done else victim.allocated
            self._index.bury(victim.name, None)
            if left:
                self._index.add(self._hidden_name(victim.name) if is_served(victim.name) else victim.name, left)

    # the part

    def _attach(self) -> AttachTask:
        """A task that connects, if need be, and takes the part."""
        settings = self._settings
        setup = None
        if self._state in (State.CLOSED, State.DETACHED):
            setup = ClientSetup(self._identity, self._part, settings.verify, settings.timeout_s)
        self._owner = this_process()
        claim = Claim(self._part, settings.limit, settings.shared_limit)
        return AttachTask(self._client, setup, claim, self._owner)

    def _on_attached(self, task: AttachTask) -> None:
        """The store has answered, or has not; the part is ours, or is not."""
        now = self._now()
        self._next_try = now + self._settings.retry_s
        refusal = task.refusal if task.crash is None else Refusal(f"cannot be used: {task.crash}")
        if refusal is not None:
            self._owner = None
            self._next_hold = 0.0
            used = "reading only" if task.connected else "running without this tier"
            self._notice(f"{refusal.text}; {used}, trying again")
            self._state = State.READING if task.connected else State.DETACHED
            return
        if self.notices:
            self._notice(f"part {self._part} is written by this engine now")
        self._next_hold = now + self._settings.hold_check_s
        self._state = State.SCANNING
        self._scanning_since = now
        self._submit(ScanTask(self._client))

    def _on_scanned(self, task: ScanTask) -> None:
        if self._state is not State.SCANNING:
            return
        if task.found is None:
            self._next_try = self._now() + self._settings.retry_s
            return  # tried again by `_tick`
        for one in task.found:
            if one.name not in self._removed and one.name not in self._index.dying:
                self._index.add(one.name, one.allocated)
        self._scanned = max((entry.generation for entry in self._index.entries.values()), default=0)
        self._removed.clear()
        self._last_stamp = max(self._last_stamp, max((one.stamp for one in task.found), default=0))
        self._state = State.READY

    def _lose_part(self) -> None:
        """Somebody took the part away: the store began anew, or the claim was released."""
        self._notice(f"part {self._part} is not ours any more; taking it again")
        for item in list(self._pending.values()):
            self._end_item(item, FailCause.IO_ERROR)
        for _, ticket in self._purges:
            self._answer(ticket, ok=False)
        self._tell_lost()
        self._forget_part()
        self._state = State.READING
        self._owner = None
        self._next_try = 0.0

    def _on_held(self, task: HoldTask) -> None:
        self._next_hold = self._now() + self._settings.hold_check_s
        if task.held is False and self._state in (State.SCANNING, State.READY):
            self._lose_part()
