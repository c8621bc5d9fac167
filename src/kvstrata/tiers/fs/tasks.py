"""What workers do for the fs tier. A task carries its orders in and its results out; it shares nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstrata.tiers.common import tasks
from kvstrata.tiers.common.index import Name, Victim
from kvstrata.tiers.common.record import Identity
from kvstrata.tiers.common.tasks import Cancellable, Ticket, Waiter
from kvstrata.tiers.fs.attach import Attached, Refusal, attach
from kvstrata.tiers.fs.files import FileSystem
from kvstrata.tiers.fs.find import Found, scan_folder
from kvstrata.tiers.fs.place import (
    Failure,
    Folders,
    Place,
    Written,
    file_name,
    read_record,
    remove_record,
    split_name,
    sync_records,
    write_record,
)
from kvstrata.types import FailCause, OffloadKey


class Task(tasks.Task):
    """One piece of blocking work. `run` must not touch anything but the task itself and the place."""

    place: Place | None = None
    """The place that the task works in; None for tasks that look for one."""

    @property
    def lost(self) -> bool:
        """Whether the work found out that the directory is gone."""
        return False


@dataclass(slots=True, eq=False)
class StoreItem(tasks.StoreItem):
    """One file to be written."""

    payload: memoryview = field(kw_only=True)
    digest: bytes | None = field(kw_only=True)
    mtime_ns: int = field(kw_only=True)
    written: Written | None = None
    retried: bool = False
    """There was no room once, though the index thought so; the second answer counts."""


@dataclass(slots=True, eq=False)
class LoadItem:
    """One record to be read into `target`."""

    key: OffloadKey
    target: memoryview
    waiter: Waiter
    generation: int | None
    """Version that the index knew; None while a scan has not reached the key."""
    job: Cancellable
    failure: Failure | None = None
    skipped: bool = True
    """Not read, because its job was cancelled before."""


class StoreTask(Task):
    """Removes victims, then writes items. `reserved` covers both at every moment in between."""

    def __init__(
        self, place: Place, items: list[StoreItem], victims: list[Victim], reserved: int, min_free: int
    ) -> None:
        super().__init__()
        self.place: Place = place
        self.items = items
        self.victims = victims
        self.reserved = reserved
        self.min_free = min_free
        self.kept: dict[Name, int] = {}
        self.free_bytes: int | None = None

    def run(self) -> None:
        with Folders(self.place) as folders:
            room = self.reserved - self._remove_victims(folders)
            free = self.place.free_bytes()
            self.free_bytes = free
            spare = None if free is None else free - self.min_free
            for item in self.items:
                if item.cancelled:
                    continue
                if item.need > room or (spare is not None and item.need > spare):
                    item.written = Written(failure=Failure(FailCause.NO_SPACE))
                    continue
                item.written = write_record(folders, item.key, item.payload, item.digest, item.mtime_ns)
                # A file that failed and could not be removed takes room too.
                taken = item.need if item.written.failure is None or item.written.stray else 0
                room -= taken
                spare = None if spare is None else spare - taken

    def _remove_victims(self, folders: Folders) -> int:
        for victim in self.victims:
            kept = remove_record(folders, victim)
            if kept is not None:
                self.kept[victim.name] = kept
        return sum(self.kept.values())

    @property
    def lost(self) -> bool:
        failures = [item.written.failure for item in self.items if item.written is not None]
        return any(failure is not None and failure.lost for failure in failures)


class LoadTask(Task):
    """Reads items, one after the other; each fails alone."""

    def __init__(self, place: Place, items: list[LoadItem]) -> None:
        super().__init__()
        self.place: Place = place
        self.items = items

    def run(self) -> None:
        with Folders(self.place) as folders:
            for item in self.items:
                if not item.job.cancelled:
                    item.failure = read_record(folders, item.key, item.target)
                    item.skipped = False

    @property
    def lost(self) -> bool:
        return any(item.failure is not None and item.failure.lost for item in self.items)


class UnlinkTask(Task):
    """Removes files; with tickets, durably."""

    def __init__(self, place: Place, victims: list[Victim], tickets: Sequence[Ticket] = ()) -> None:
        super().__init__()
        self.place: Place = place
        self.victims = victims
        self.reserved = sum(victim.allocated for victim in victims)
        self.tickets = list(tickets)
        self.kept: dict[Name, int] = {}
        self.synced = True

    def run(self) -> None:
        with Folders(self.place) as folders:
            for victim in self.victims:
                kept = remove_record(folders, victim)
                if kept is not None:
                    self.kept[victim.name] = kept
            if self.tickets:
                self.synced = sync_records(folders, [victim.name for victim in self.victims], contents=False)


class FlushTask(Task):
    """Makes files and their names durable."""

    def __init__(self, place: Place, names: list[Name], tickets: list[Ticket]) -> None:
        super().__init__()
        self.place: Place = place
        self.names = names
        self.tickets = tickets
        self.ok = False

    def run(self) -> None:
        with Folders(self.place) as folders:
            self.ok = sync_records(folders, self.names, contents=True)


class TouchTask(Task):
    """Writes recency down, as modification times. What fails is only colder than it should be."""

    def __init__(self, place: Place, stamps: list[tuple[Name, int]]) -> None:
        super().__init__()
        self.place: Place = place
        self.stamps = stamps

    def run(self) -> None:
        with Folders(self.place) as folders:
            for name, mtime_ns in self.stamps:
                try:
                    file = file_name(split_name(self.place, name)[1])
                    self.place.files.set_mtime(file, mtime_ns, folders.of(name))
                except OSError:
                    continue


class StrayTask(Task):
    """Tries again to remove temporary files that could not be removed."""

    def __init__(self, place: Place, names: list[str]) -> None:
        super().__init__()
        self.place: Place = place
        self.names = names
        self.gone: list[str] = []

    def run(self) -> None:
        for name in self.names:
            try:
                self.place.files.unlink(name, self.place.tmp_fd)
            except FileNotFoundError:
                pass
            except OSError:
                continue
            self.gone.append(name)


class AttachTask(Task):
    """Tries again to get hold of the directory."""

    def __init__(self, files: FileSystem, path: str, identity: Identity, verify: bool) -> None:
        super().__init__()
        self._orders = (files, path, identity, verify)
        self.outcome: Attached | Refusal | None = None

    def run(self) -> None:
        files, path, identity, verify = self._orders
        self.outcome = attach(files, path, identity, verify=verify)


class ScanTask(Task):
    """Finds the files of one fan-out directory."""

    def __init__(self, place: Place, namespace: str, fan: str) -> None:
        super().__init__()
        self.place: Place = place
        self.namespace = namespace
        self.fan = fan
        self.found: list[Found] | None = None
        """None: the directory could not be read; it has to be tried again."""

    def run(self) -> None:
        with Folders(self.place) as folders:
            try:
                self.found = scan_folder(folders, self.namespace, self.fan)
            except OSError:
                self.found = None


class SortTask(Task):
    """Brings all that a scan found into order of use, coldest first."""

    def __init__(self, place: Place, found: list[list[Found]]) -> None:
        super().__init__()
        self.place: Place = place
        self.found = found
        self.order: list[Name] = []

    def run(self) -> None:
        everything = [one for part in self.found for one in part]
        times = np.fromiter((one.mtime_ns for one in everything), dtype=np.int64, count=len(everything))
        self.order = [everything[int(i)].name for i in np.argsort(times, kind="stable")]
