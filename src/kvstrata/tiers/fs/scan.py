"""The search for old files after the fs tier has taken its directory: what is still to do, and what was found."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstrata.tiers.common.index import Name
from kvstrata.tiers.common.tasks import Ticket
from kvstrata.tiers.fs.find import Found
from kvstrata.tiers.fs.place import Place
from kvstrata.tiers.fs.tasks import ScanTask, SortTask, Task
from kvstrata.types import OffloadKey

MAX_AT_ONCE = 8
"""Scan tasks handed over at a time, so that loads find their way in between."""


@dataclass(slots=True, eq=False)
class Scan:
    """Bookkeeping of one scan. Until it has finished, a key that was not found may still be there."""

    place: Place
    todo: list[tuple[str, str]]
    since: float
    running: int = 0
    found: list[list[Found]] = field(default_factory=list)
    removed: set[Name] = field(default_factory=set)
    """What was removed or failed before the scan came to it: it must not come back with what the scan finds."""
    purges: list[tuple[bytes, Ticket]] = field(default_factory=list)
    retry_at: float = 0.0
    sorting: bool = False

    def next_tasks(self, now: float) -> list[Task]:
        """What can be handed over now."""
        tasks: list[Task] = []
        if now >= self.retry_at:
            while self.todo and self.running < MAX_AT_ONCE:
                self.running += 1
                tasks.append(ScanTask(self.place, *self.todo.pop()))
        if not self.todo and not self.running and not self.sorting:
            self.sorting = True
            tasks.append(SortTask(self.place, self.found))
        return tasks

    def take(self, task: ScanTask, retry_at: float) -> list[Found]:
        """The new finds of a task; a directory that could not be read is tried again later."""
        self.running -= 1
        if task.found is None:
            self.todo.append((task.namespace, task.fan))
            self.retry_at = retry_at
            return []
        self.found.append(task.found)
        return task.found

    def may_hold(self, key: OffloadKey) -> bool:
        """Whether a key that is not known may turn up yet."""
        return key not in self.removed
