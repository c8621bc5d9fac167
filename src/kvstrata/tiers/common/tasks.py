"""The frame of work that a tier hands to its executor. A task carries its orders in and its results out.

A task runs at most once. Whoever abandons it sets `abandoned` first and looks at `started` afterwards; the task sets
`started` first and looks at `abandoned` afterwards. So one of the two sees the other, and the job it belongs to ends
exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvstrata.types import OffloadKey

MAX_TEXT = 200

Item = TypeVar("Item")


class Task:
    """One piece of blocking work. `run` must not touch anything of the tier but the task itself."""

    def __init__(self) -> None:
        self.started = False
        self.abandoned = False
        self.crash: str | None = None
        self.report: Callable[[Any], None] | None = None
        """Called by the worker with the task, as the last thing it does."""

    def __call__(self) -> None:
        self.started = True
        if not self.abandoned:
            try:
                self.run()
            except Exception as error:  # a worker survives everything, also our own faults
                self.crash = f"{type(error).__name__}: {error}"[:MAX_TEXT]
        if self.report is not None:
            self.report(self)

    def run(self) -> None:
        """The work."""
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class Waiter:
    """One index of one job that an item of a task answers."""

    job_id: int
    index: int


@dataclass(slots=True, eq=False)
class Cancellable:
    """The part of a job that workers look at."""

    cancelled: bool = False


@dataclass(slots=True, eq=False)
class Ticket:
    """A flush or purge in progress: it is answered when `parts` tasks have reported."""

    number: int
    parts: int = 0
    ok: bool = True


@dataclass(slots=True, eq=False)
class StoreItem:
    """One record to be written, and who waits for it. The first waiter's job owns the payload's range."""

    key: OffloadKey
    need: int
    owner: int
    waiters: list[Waiter]
    cancelled: bool = False
    doomed: bool = False
    """Removed while it was being written: the record goes as soon as it is there."""
    tickets: list[Ticket] = field(default_factory=list)
    granted: bool = False


def cut(items: Iterable[Item], size: Callable[[Item], int], most_items: int, most_bytes: int) -> list[list[Item]]:
    """Items cut into parts, in order, of at most `most_items` items and about `most_bytes` bytes."""
    parts: list[list[Item]] = []
    total = 0
    for item in items:
        if not parts or len(parts[-1]) == most_items or total >= most_bytes:
            parts.append([])
            total = 0
        parts[-1].append(item)
        total += size(item)
    return parts
