"""What one writer's records take, in memory, in order of use. Belongs to the caller's thread.

Bytes are in exactly one of two accounts: `held` (files that are there) and `reserved` (files that are being written
or removed). Their sum never exceeds the limit, and what lies in the place never exceeds their sum. A "file" is one
record, whatever the tier calls it: a file, an object, a value.

A record is called by its *name*: the key for what the tier serves, and something longer (namespace + key) for what
only takes room (another namespace, or a record that a load would not accept).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvstrata.types import KEY_BYTES

Name: TypeAlias = bytes


def is_served(name: Name) -> bool:
    """Whether a name stands for a chunk of the tier's own namespace that a load would accept."""
    return len(name) == KEY_BYTES


@dataclass(frozen=True, slots=True)
class Victim:
    """A file that is to be removed: what it takes, and the version that must go (None: any)."""

    name: Name
    allocated: int
    inode: int | None = None


class Found(Protocol):
    """One file that a scan found."""

    @property
    def name(self) -> Name:
        """What it is called."""
        ...

    @property
    def allocated(self) -> int:
        """What it takes."""
        ...


@dataclass(slots=True)
class Entry:
    """One file: what it takes, and which version of it this is."""

    allocated: int
    generation: int


class Index:
    """Names to entries, coldest first.

    `fresh` holds what unfinished jobs have stored: served like the rest, but no victim, so that a job never evicts
    the head of its own chain. `dying` are names whose file is on its way out: nothing may be written there.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.entries: OrderedDict[Name, Entry] = OrderedDict()
        self.fresh: dict[Name, Entry] = {}
        self.dying: set[Name] = set()
        self.strays: dict[str, int] = {}
        """Temporary files that could not be removed; they count as held."""
        self.held = 0
        self.evictable = 0
        """The part of `held` that eviction can free."""
        self.reserved = 0
        self.hidden = 0
        """How many entries are not served: other namespaces, and records that a load would not accept."""
        self.peak = 0
        self.evicted = 0
        self._generations = itertools.count(1)

    def __len__(self) -> int:
        """How many keys are served."""
        return len(self.entries) + len(self.fresh) - self.hidden

    def get(self, name: Name) -> Entry | None:
        """The entry of a name."""
        return self.entries.get(name) or self.fresh.get(name)

    def add(self, name: Name, allocated: int, *, fresh: bool = False) -> None:
        """A file is there now; it is the warmest. An earlier version of it is no more."""
        self.pop(name)
        entry = Entry(allocated, next(self._generations))
        if fresh:
            self.fresh[name] = entry
        else:
            self.entries[name] = entry
            self.evictable += allocated
        self.hidden += not is_served(name)
        self.held += allocated
        self.note_peak()

    def add_stray(self, file: str, size: int) -> None:
        """A temporary file is left over."""
        self.drop_stray(file)
        self.strays[file] = size
        self.held += size
        self.note_peak()

    def drop_stray(self, file: str) -> None:
        """A left-over temporary file is gone."""
        self.held -= self.strays.pop(file, 0)

    def load(self, found: Iterable[Found]) -> None:
        """Add what a scan found, in any order."""
        for one in found:
            self.add(one.name, one.allocated)

    def pop(self, name: Name) -> Entry | None:
        """The file is there no more, or no longer counted here."""
        entry = self.entries.pop(name, None)
        if entry is not None:
            self.evictable -= entry.allocated
        else:
            entry = self.fresh.pop(name, None)
        if entry is not None:
            self.held -= entry.allocated
            self.hidden -= not is_served(name)
        return entry

    def touch(self, names: Sequence[Name]) -> None:
        """Make names the warmest, the first the very warmest: of a chain, the tail goes before the head."""
        entries = self.entries
        for name in reversed(names):
            if name in entries:
                entries.move_to_end(name)

    def arrange(self, names: Sequence[Name]) -> None:
        """Put entries in this order, coldest first, behind whatever is not named."""
        entries = self.entries
        for name in names:
            if name in entries:
                entries.move_to_end(name)

    def settle(self, names: Sequence[Name]) -> None:
        """The job that stored `names`, in chain order, has ended: they may be evicted now."""
        for name in reversed(names):
            entry = self.fresh.pop(name, None)
            if entry is not None:
                self.entries[name] = entry
                self.evictable += entry.allocated

    @property
    def room(self) -> int | None:
        """Bytes below the limit; negative while more is there than the limit allows, None without a limit."""
        return None if self.limit is None else self.limit - self.held - self.reserved

    @property
    def excess(self) -> int:
        """Bytes held above the limit: old files under a limit that was lowered, or that could not be removed."""
        return 0 if self.limit is None else max(self.held - self.limit, 0)

    def victims(self, amount: int) -> list[Name]:
        """The coldest names that free at least `amount` bytes together, or all if that is not enough."""
        picked: list[Name] = []
        if amount <= 0:
            return picked
        for name, entry in self.entries.items():
            picked.append(name)
            amount -= entry.allocated
            if amount <= 0:
                break
        return picked

    def condemn(self, names: Iterable[Name], inode: int | None = None) -> list[Victim]:
        """Take names out, to be removed from the directory; returns those that were there.

        The caller reserves their bytes until the removal is confirmed.
        """
        victims: list[Victim] = []
        for name in names:
            entry = self.pop(name)
            if entry is not None:
                victims.append(Victim(name, entry.allocated, inode))
                self.dying.add(name)
        return victims

    def bury(self, name: Name, kept: int | None) -> None:
        """A removal has ended. `kept`: bytes of a file that is still there after all, and counts again."""
        self.dying.discard(name)
        if kept:
            self.add(name, kept)

    def note_peak(self) -> None:
        """Remember the most that was ever held and reserved."""
        self.peak = max(self.peak, self.held + self.reserved)
