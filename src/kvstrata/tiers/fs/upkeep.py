"""The fs tier's care for its directory: taking it, scanning, trimming, recency, durability, loss and return."""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.tiers.fs.attach import Attached, Refusal
from kvstrata.tiers.fs.core import State
from kvstrata.tiers.fs.scan import Scan
from kvstrata.tiers.fs.stores import Stores
from kvstrata.tiers.fs.tasks import AttachTask, FlushTask, ScanTask, SortTask, StrayTask, Task, TouchTask
from kvstrata.types import FailCause, OffloadKey

FLUSHES_PER_TASK = 64
TOUCHES_PER_TASK = 1024


class Upkeep(Stores):
    """Everything about the directory as a whole."""

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Drop keys; a store of one that is under way ends as CANCELLED."""
        names = dict.fromkeys(keys)
        for key in names:
            pending = self._pending.get(key)
            if pending is not None:
                self._doom(pending)
            if self._scan is not None and self._index.get(key) is None:
                self._scan.removed.add(key)
        victims = self._condemn(names)
        self._tell_removed(victims)
        self._delete(victims)
        self._publish()

    def flush(self) -> int:
        """Make all stores that have ended durable: their files and the names of these."""
        ticket = self._ticket()
        place = self._place
        if place is None:
            self._answer(ticket, ok=False)
            return ticket.number
        for task in self._running:
            if isinstance(task, FlushTask) and task.place is place:
                ticket.parts += 1
                task.tickets.append(ticket)
        names = list(self._unsynced)
        self._unsynced.clear()
        for start in range(0, len(names), FLUSHES_PER_TASK):
            ticket.parts += 1
            self._submit(FlushTask(place, names[start : start + FLUSHES_PER_TASK], [ticket]))
        self._part_done(ticket, ok=True)
        return ticket.number

    def _on_flushed(self, task: FlushTask) -> None:
        if not task.ok and task.place is self._place:
            self._unsynced.update({name: None for name in task.names if self._index.get(name) is not None})
        for ticket in task.tickets:
            self._part_done(ticket, ok=task.ok)

    def purge(self, namespace: bytes) -> int:
        """Remove all files of a namespace, also of one that this tier does not serve."""
        ticket = self._ticket()
        if self._place is None:
            self._answer(ticket, ok=False)
        elif self._scan is not None:
            self._scan.purges.append((namespace, ticket))
        else:
            self._purge(namespace, ticket)
        return ticket.number

    def _tick(self, now: float) -> None:
        """Do what is due at `now`."""
        match self._state:
            case State.DETACHED:
                attaching = any(isinstance(task, AttachTask) for task in self._running)
                if now >= self._next_retry and not attaching and self._context is not None:
                    identity = self._identity(self._context)
                    self._submit(AttachTask(self._files, self._path, identity, self._verify))
            case State.SCANNING:
                self._feed_scan(now)
                if self._waiting and self._is_late():
                    self._fail_waiting(FailCause.REFUSED)
            case State.READY:
                self._upkeep(now)

    def _upkeep(self, now: float) -> None:
        if self._touched and now >= self._next_touch:
            self._next_touch = now + self._touch_interval_s
            self._persist_touches()
        if (self._index.excess or self._index.strays) and now >= self._next_retry:
            self._next_retry = now + self._retry_s
            self._trim()
            if self._index.strays and self._place is not None:
                self._submit(StrayTask(self._place, list(self._index.strays)))

    def _on_upkeep(self, task: Task) -> None:
        match task:
            case ScanTask():
                self._on_scanned(task)
            case SortTask():
                self._on_sorted(task)
            case TouchTask():
                self._touching = False
            case StrayTask():
                for file in task.gone:
                    self._index.drop_stray(file)

    def _persist_touches(self, *, everything: bool = False) -> None:
        """Have recency written down, one task at a time."""
        while self._touched and self._place is not None and (everything or not self._touching):
            names = list(self._touched)[:TOUCHES_PER_TASK]
            for name in names:
                del self._touched[name]
            self._touching = True
            self._submit(TouchTask(self._place, self._stamped(names)))

    def _on_attached(self, task: AttachTask) -> None:
        if self._state is not State.DETACHED:
            if isinstance(task.outcome, Attached):
                task.outcome.place.close()
            return
        self._take_place(task.outcome or Refusal(f"{self._path} cannot be used: {task.crash}"))

    def _take_place(self, outcome: Attached | Refusal) -> None:
        """Begin to use a directory, or note why it cannot be used."""
        now = self._now()
        if isinstance(outcome, Refusal):
            self._next_retry = now + self._retry_s
            self._notice(f"{outcome.text}; running without this tier, trying again")
            return
        if self.notices:
            self._notice(f"{self._path} is in use by this engine now")
        self._place = outcome.place
        for file, size in outcome.strays.items():
            self._index.add_stray(file, size)
        self._scan = Scan(outcome.place, outcome.folders, now)
        self._state = State.SCANNING
        if outcome.folders:
            self._feed_scan(now)
        else:
            self._end_scan()

    def _feed_scan(self, now: float) -> None:
        if self._scan is not None:
            for task in self._scan.next_tasks(now):
                self._submit(task)

    def _on_scanned(self, task: ScanTask) -> None:
        scan, now = self._scan, self._now()
        if scan is None:
            return
        found = scan.take(task, now + self._retry_s)
        self._index.load(found)
        if scan.removed:
            self._delete(self._condemn([one.name for one in found if one.name in scan.removed]))
        self._feed_scan(now)

    def _on_sorted(self, task: SortTask) -> None:
        self._index.arrange(task.order)
        self._index.arrange(list(self._touched))
        self._last_stamp = max(self._last_stamp, max((one.mtime_ns for part in task.found for one in part), default=0))
        self._end_scan()

    def _end_scan(self) -> None:
        """All that is there is known: bring it under the limit, then serve what waited for that."""
        scan = self._scan
        self._scan = None
        self._state = State.READY
        self._trim()
        for namespace, ticket in scan.purges if scan is not None else ():
            self._purge(namespace, ticket)
        self._grant()

    def _detach(self) -> None:
        """The directory is gone: forget it, and try again later."""
        self._notice(f"{self._path} is gone; running without this tier, trying again")
        self._fail_waiting(FailCause.REFUSED)
        self._tell_lost()
        for _, ticket in self._scan.purges if self._scan is not None else ():
            self._answer(ticket, ok=False)
        self._retire_place()
        self._reset()
        self._state = State.DETACHED
        self._next_retry = self._now() + self._retry_s
