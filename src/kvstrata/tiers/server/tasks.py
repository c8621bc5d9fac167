"""What workers do for a server tier, by its client. Orders go in, results come out; see `common.tasks`."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstrata.tiers.common import tasks
from kvstrata.tiers.common.claims import Claim, Owner, PlaceError, Refusal, give_back, holds, take_part
from kvstrata.tiers.common.index import Name, Victim
from kvstrata.tiers.common.tasks import Ticket, Waiter
from kvstrata.tiers.server.client import ClientSetup, FoundRecord, ReadItem, StoreClient, WriteItem
from kvstrata.types import FailCause, OffloadKey


class Lane(enum.IntEnum):
    """Which task goes first; a lower number does."""

    PROBE = 0
    LOAD = 1
    UPKEEP = 2
    STORE = 3


class Task(tasks.Task):
    """One batch for the client."""

    lane = Lane.UPKEEP
    epoch = 0
    """Which holding of the part the task belongs to; results of an earlier one change no account."""

    def __init__(self, client: StoreClient) -> None:
        super().__init__()
        self.client = client
        self.queued_at = 0.0
        self.deadline = math.inf
        """When it is given up, once it was handed over."""


@dataclass(slots=True, eq=False)
class LoadItem:
    """One record to be read, and the job that waits for it."""

    read: ReadItem
    waiter: Waiter
    job: tasks.Cancellable
    generation: int | None
    """Version that the index knew; None if the record is not in the own part, as far as is known."""
    skipped: bool = True
    """Not read, because its job was cancelled before."""
    settled: bool = False
    """Answered before the read came back: its time was up."""


@dataclass(slots=True, eq=False)
class StoreItem(tasks.StoreItem):
    """One record to be written, and when it is given up if it was not handed over."""

    write: WriteItem = field(kw_only=True)
    deadline: float = field(kw_only=True)


class ProbeTask(Task):
    """Asks for keys."""

    lane = Lane.PROBE

    def __init__(
        self, client: StoreClient, ticket: int, keys: Sequence[OffloadKey], asked: list[int], *, own: bool
    ) -> None:
        super().__init__(client)
        self.own = own
        self.ticket = ticket
        self.keys = keys
        self.asked = asked
        """Indices of the keys that the store is asked for; the others are in the index."""
        self.removed: set[OffloadKey] = set()
        """Keys that were removed, or whose removal has ended, since the probe was taken."""
        self.found: list[bool | FailCause] = []

    def run(self) -> None:
        self.found = self.client.exists([self.keys[index] for index in self.asked], own=self.own)


class LoadTask(Task):
    """Reads items; each fails alone."""

    lane = Lane.LOAD

    def __init__(self, client: StoreClient, items: list[LoadItem]) -> None:
        super().__init__(client)
        self.items = items

    def run(self) -> None:
        items = [item for item in self.items if not item.job.cancelled and not item.settled]
        for item in items:
            item.skipped = False
            item.read.failed = FailCause.IO_ERROR
        self.client.read([item.read for item in items])


class StoreTask(Task):
    """Removes victims, then writes items. `reserved` covers both at every moment in between."""

    lane = Lane.STORE

    def __init__(self, client: StoreClient, items: list[StoreItem], victims: list[Victim], reserved: int) -> None:
        super().__init__(client)
        self.items = items
        self.victims = victims
        self.reserved = reserved
        self.kept: dict[Name, int] = {}

    def run(self) -> None:
        self.kept = remove_victims(self.client, self.victims)
        room = self.reserved - sum(self.kept.values())
        batch: list[WriteItem] = []
        for item in self.items:
            if item.cancelled:
                continue
            if item.need > room:
                item.write.fail(FailCause.NO_SPACE)
                continue
            room -= item.need
            item.write.fail(FailCause.IO_ERROR, uncertain=True)
            batch.append(item.write)
        if batch:
            self.client.write(batch)


class RemoveTask(Task):
    """Deletes records of the own part."""

    def __init__(self, client: StoreClient, victims: list[Victim], tickets: Sequence[Ticket] = ()) -> None:
        super().__init__(client)
        self.victims = victims
        self.reserved = sum(victim.allocated for victim in victims)
        self.tickets = list(tickets)
        self.kept: dict[Name, int] = {victim.name: victim.allocated for victim in victims}

    def run(self) -> None:
        self.kept = remove_victims(self.client, self.victims)


class DiscardTask(Task):
    """Sees to it that bad versions are not served again. `victims` are those that the index knew."""

    def __init__(self, client: StoreClient, items: list[ReadItem], victims: list[Victim]) -> None:
        super().__init__(client)
        self.items = items
        self.victims = victims
        self.reserved = sum(victim.allocated for victim in victims)
        self.kept: dict[Name, int] = {victim.name: victim.allocated for victim in victims}

    def run(self) -> None:
        done = self.client.discard(self.items)
        gone = {item.key for item, ok in zip(self.items, done, strict=True) if ok}
        self.kept = {name: size for name, size in self.kept.items() if name not in gone}


class TouchTask(Task):
    """Writes recency down."""

    def __init__(self, client: StoreClient, stamps: list[tuple[OffloadKey, int]]) -> None:
        super().__init__(client)
        self.stamps = stamps

    def run(self) -> None:
        self.client.touch(self.stamps)


class AttachTask(Task):
    """Connects, takes the part, and finds what lies in it."""

    def __init__(self, client: StoreClient, setup: ClientSetup | None, claim: Claim, owner: Owner) -> None:
        super().__init__(client)
        self._orders = (setup, claim, owner)
        self.connected = setup is None
        """Whether the store can be used, if only for reading."""
        self.refusal: Refusal | None = Refusal("the store does not answer")

    def run(self) -> None:
        setup, claim, owner = self._orders
        try:
            if setup is not None:
                self.client.open(setup)
            self.connected = True
            self.refusal = take_part(self.client.claims, claim, owner)
        except PlaceError as error:
            self.refusal = Refusal(str(error), error.permanent)


class ScanTask(Task):
    """Finds what lies in the own part."""

    def __init__(self, client: StoreClient) -> None:
        super().__init__(client)
        self.found: list[FoundRecord] | None = None
        """Coldest first; None if the part could not be read to its end."""

    def run(self) -> None:
        try:
            found = [one for page in self.client.scan() for one in page]
        except PlaceError:
            return
        found.sort(key=lambda one: one.stamp)
        self.found = found


class HoldTask(Task):
    """Looks whether the part is still ours."""

    def __init__(self, client: StoreClient, part: str, owner: Owner) -> None:
        super().__init__(client)
        self._orders = (part, owner)
        self.held: bool | None = None
        """None: could not be found out."""

    def run(self) -> None:
        try:
            self.held = holds(self.client.claims, *self._orders)
        except PlaceError:
            self.held = None


class LeaveTask(Task):
    """Gives the part back and disconnects; the last task of a tier."""

    def __init__(self, client: StoreClient, part: str, owner: Owner | None) -> None:
        super().__init__(client)
        self._orders = (part, owner)

    def run(self) -> None:
        part, owner = self._orders
        try:
            if owner is not None:
                give_back(self.client.claims, part, owner)
        except PlaceError:
            pass  # the next owner finds a dead process
        finally:
            self.client.close()


def remove_victims(client: StoreClient, victims: Sequence[Victim]) -> dict[Name, int]:
    """Delete victims; returns those that would not go, with their sizes."""
    if not victims:
        return {}
    gone = client.remove([victim.name for victim in victims])
    return {victim.name: victim.allocated for victim, ok in zip(victims, gone, strict=True) if not ok}
