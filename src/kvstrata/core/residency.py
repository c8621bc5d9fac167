"""Which chunks are in primary, where, in which state, and who forbids their eviction.

The one owner of these facts. Every call is a batch; nothing here is an object per chunk. Conservation holds after
every call: free + reserved + resident + quarantined + waste = capacity, in bytes of true chunk length, where waste is
what rounding loses (slot strides, page ends, the end of primary).

A broken duty of the caller (a wrong state, a pin below zero, an unknown group) raises `InternalError` before anything
has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvstrata.core.arrays import all_are, any_of, ascending, distinct
from kvstrata.core.index import KeyIndex
from kvstrata.core.pages import Geometry, make_geometry
from kvstrata.core.pins import Pins
from kvstrata.core.placement import Placement
from kvstrata.core.slots import QUARANTINED, READY, RESERVED, SlotState, SlotTable
from kvstrata.errors import InternalError
from kvstrata.policy.base import EvictionPolicy
from kvstrata.types import I8, I32, I64, OffloadKey

__all__ = ["Residency", "ResidencyStatistics", "SlotState"]

Slots = Sequence[int] | I32 | I64


def _ignore(slots: I64, keys: Sequence[OffloadKey]) -> None:
    """Nobody listens to evictions."""


@dataclass(frozen=True, slots=True)
class ResidencyStatistics:
    """A snapshot of primary; bytes by true chunk length, a slot counts once however many pin or hold it."""

    capacity_bytes: int
    free_bytes: int
    reserved_bytes: int
    resident_bytes: int
    quarantined_bytes: int
    waste_bytes: int
    pinned_bytes: int
    held_bytes: int
    keys: int
    page_bytes: int
    pages: int
    empty_pages: int
    rows: int
    published: int
    evicted: int
    refused: int


class Residency:
    """Primary as the core sees it: keys to slots, states, pins, holds, and room for more.

    `policy` orders the first size class; further classes get `policy.fresh()`. Slot numbers are stable while a slot
    is not FREE. The columns (`state`, `pins`, `holds`, `group`, `offset`, `length`, `job`, `tag`) are arrays by slot
    number; they are read-only for others except `job` and `tag`, which belong to the manager and are reset to 0
    by `reserve`. They are replaced when they grow: do not keep one over a `reserve`.
    """

    def __init__(
        self,
        capacity_bytes: int,
        group_bytes: Sequence[int],
        policy: EvictionPolicy,
        *,
        alignment: int = 1,
        tail_room: int = 0,
    ) -> None:
        self.geometry: Geometry = make_geometry(capacity_bytes, group_bytes, alignment, tail_room)
        self.table = SlotTable(self.geometry)
        self.policies = [policy] + [policy.fresh() for _ in self.geometry.classes[1:]]
        self.index = KeyIndex()
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = 0
        self.resident_bytes = 0
        self.quarantined_bytes = 0
        self._lengths = np.array(group_bytes, dtype=np.int64)
        self._class_of = np.array(self.geometry.class_of, dtype=np.int64)
        self.pinned_ready_bytes = 0
        """Bytes of READY slots with pins; with the reserved and quarantined ones, all that cannot be evicted."""
        self._pins = Pins(self.table, self._tightened, self._loosened)
        self._placement = Placement(self.table, self.policies, self._drop)
        self._evicted_now: list[OffloadKey] = []
        self.on_evict: Callable[[I64, Sequence[OffloadKey]], None] = _ignore
        """Told of evicted slots, with their keys, while their columns still stand."""
        self._published = 0
        self._evicted = 0
        self._refused = 0

    # Columns.

    @property
    def state(self) -> I8:
        return self.table.state

    @property
    def pins(self) -> I32:
        return self.table.pins

    @property
    def holds(self) -> I32:
        return self.table.holds

    @property
    def group(self) -> np.typing.NDArray[np.int16]:
        return self.table.group

    @property
    def offset(self) -> I64:
        return self.table.offset

    @property
    def length(self) -> I64:
        return self.table.length

    @property
    def job(self) -> I64:
        return self.table.job

    @property
    def tag(self) -> I8:
        return self.table.tag

    # Keys.

    def find(self, keys: Sequence[OffloadKey]) -> I64:
        """The slot of each key, reserved or ready; -1 where there is none."""
        return self.index.find(keys)

    def lacks(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether none of the keys is reserved or ready."""
        return self.index.lacks(keys)

    def slot_of(self, key: OffloadKey) -> int:
        """The slot of a key, or -1."""
        return self.index.slots.get(key, -1)

    def key_of(self, slot: int) -> OffloadKey | None:
        """The key of a reserved or ready slot; None for others."""
        return self.index.key_of(slot)

    def keys_of(self, slots: Slots) -> list[OffloadKey]:
        """The keys of reserved or ready slots."""
        return self.index.keys_of(_list(slots))

    def states(self, slots: Slots) -> I8:
        """The state of each slot, as an int8 array of `SlotState` values."""
        states: I8 = self.table.state[_array(slots)]
        return states

    # Room.

    @property
    def free_bytes(self) -> int:
        """Bytes that slots can still be made of: free slots of used pages, and empty pages whole."""
        table, geometry = self.table, self.geometry
        free = (geometry.pages - sum(table.used_pages)) * geometry.page_bytes
        for kind, shape in enumerate(geometry.classes):
            free += (table.used_pages[kind] * shape.per_page - table.used_slots[kind]) * shape.stride
        return free

    @property
    def waste_bytes(self) -> int:
        """What rounding loses now: slot strides, page ends, the end of primary."""
        used = self.reserved_bytes + self.resident_bytes + self.quarantined_bytes
        return self.capacity_bytes - self.free_bytes - used

    def can_place(self, groups: Sequence[int] | Mapping[int, int], *, free_of: Slots = ()) -> bool:
        """Whether one `reserve` of these chunks would succeed now.

        `groups` names the group of each chunk, or maps groups to numbers of chunks. `free_of` are slots to be
        counted as if nothing forbade their eviction. O(classes) without `free_of`.
        """
        if isinstance(groups, Mapping):
            needs = [0] * len(self.geometry.classes)
            for group, count in groups.items():
                needs[self.geometry.class_of[group]] += count
        else:
            needs = self._needs(np.asarray(groups, dtype=np.int64))[0]
        if not len(free_of):
            return self.table.slack(needs) >= 0
        stuck = np.unique(_array(free_of))
        stuck = stuck[self._is_stuck(stuck)]
        self.table.unstick(stuck)
        try:
            return self.table.slack(needs) >= 0
        finally:
            self.table.stick(stuck)

    def reserve(
        self, keys: Sequence[OffloadKey], groups: Sequence[int] | I32 | I64, *, keep: Slots = ()
    ) -> tuple[I64, list[OffloadKey]] | None:
        """Takes a slot for every chunk, evicting what is coldest, or takes and evicts nothing and returns None.

        `keys` are distinct and neither reserved nor ready; `groups[i]` is the group of `keys[i]`. `keep` are slots
        that this call must not evict. Returns the slots (RESERVED, no pins) in the order of `keys`, neighbours where
        possible, and the keys that were evicted.
        """
        if not len(keys):
            return np.zeros(0, dtype=np.int64), []
        of_group = np.asarray(groups, dtype=np.int64)
        self._check_new(keys, of_group)
        needs, kinds = self._needs(of_group)
        kept = self._keep(keep)
        try:
            if self.table.slack(needs) < 0:
                self._refused += 1
                return None
            placed = self._placement.place(needs)
        finally:
            if len(kept):
                self.unpin(kept)
        slots = placed[0]
        if self.table.mixed:
            slots = np.empty(len(keys), dtype=np.int64)
            for kind, part in enumerate(placed):
                slots[kinds == kind] = part
        self._enter(keys, slots, of_group)
        evicted, self._evicted_now = self._evicted_now, []
        return slots, evicted

    def _check_new(self, keys: Sequence[OffloadKey], groups: I64) -> None:
        if len(groups) != len(keys):
            raise InternalError(f"residency: {len(keys)} keys were reserved with {len(groups)} groups")
        self.index.demand_new(keys)

    def _needs(self, groups: I64) -> tuple[list[int], I64]:
        """Slots per class, and the class of each chunk."""
        if not self.table.mixed:
            return [len(groups)], groups
        kinds = self._class_of[groups]
        return np.bincount(kinds, minlength=len(self.policies)).tolist(), kinds

    def _keep(self, keep: Slots) -> I64:
        """Pins what must be kept for the length of one call."""
        if not len(keep):
            return np.zeros(0, dtype=np.int64)
        slots: I64 = np.unique(_array(keep))
        slots = slots[self.table.state[slots] == READY]
        self.pin(slots)
        return slots

    def _enter(self, keys: Sequence[OffloadKey], slots: I64, groups: I64) -> None:
        table = self.table
        table.group[slots] = groups
        table.length[slots] = self._lengths[groups]
        table.job[slots] = 0
        table.tag[slots] = 0
        self.reserved_bytes += table.bytes_of(slots)
        self.index.enter(keys, slots, len(table.state))

    # Life of a slot.

    def publish(self, slots: Slots, anchor: int = -1) -> None:
        """RESERVED to READY; each group's slots are one chain, head first, below `anchor` if that is its group's."""
        numbers = _array(slots)
        if not len(numbers):
            return
        self._demand(numbers, "publish", (RESERVED,))
        table = self.table
        table.state[numbers] = READY
        size = self.table.bytes_of(numbers)
        self.reserved_bytes -= size
        self.resident_bytes += size
        self._published += len(numbers)
        pinned = table.pins[numbers]
        if any_of(pinned):
            self.pinned_ready_bytes += table.bytes_of(numbers[pinned > 0])
            table.unstick(numbers[pinned == 0])
        else:
            table.unstick(numbers)
        table.stamp_now(numbers)
        for group, part in self._by_group(numbers):
            chain = part.tolist()
            above = anchor if anchor >= 0 and table.state[anchor] == READY and table.group[anchor] == group else -1
            policy = self.policies[self.geometry.class_of[group]]
            policy.insert(chain, above, self.index.keys_of(chain) if policy.remembers_keys else ())

    def release(self, slots: Slots) -> None:
        """RESERVED, without pins, to FREE: the job ended without bytes."""
        numbers = _array(slots)
        self._demand(numbers, "release", (RESERVED,), pins=False)
        self.reserved_bytes -= self.table.bytes_of(numbers)
        self.index.forget(numbers)
        self.table.unstick(numbers)
        self.table.vacate(numbers)

    def evict(self, slots: Slots) -> list[OffloadKey]:
        """READY, without pins, to FREE; returns the keys."""
        numbers = _array(slots)
        self._demand(numbers, "evict", (READY,), pins=False)
        for kind, part in self._by_kind(numbers):
            self._drop(kind, part)
        self.table.vacate(numbers)
        keys, self._evicted_now = self._evicted_now, []
        return keys

    def quarantine(self, slots: Slots) -> None:
        """RESERVED or READY to QUARANTINED: the key is gone, the slot is not used until `requite`. Pins stay."""
        numbers = _array(slots)
        self._demand(numbers, "quarantine", (RESERVED, READY))
        table = self.table
        ready = numbers[table.state[numbers] == READY]
        self._retire(ready)
        size, was_ready = self.table.bytes_of(numbers), self.table.bytes_of(ready)
        self.resident_bytes -= was_ready
        self.reserved_bytes -= size - was_ready
        self.quarantined_bytes += size
        self.index.forget(numbers)
        pinned = table.pins[ready] > 0
        self.pinned_ready_bytes -= table.bytes_of(ready[pinned])
        table.stick(ready[~pinned])
        table.state[numbers] = QUARANTINED

    def requite(self, slots: Slots) -> None:
        """QUARANTINED, without pins, to FREE: the job that might have touched it has ended."""
        numbers = _array(slots)
        self._demand(numbers, "requite", (QUARANTINED,), pins=False)
        self.quarantined_bytes -= self.table.bytes_of(numbers)
        self.table.unstick(numbers)
        self.table.vacate(numbers)

    def _demand(self, slots: I64, verb: str, states: Sequence[np.int8], pins: bool = True) -> None:
        """The slots are distinct, in one of `states`, and without pins unless these are allowed."""
        found = self.table.state[slots]
        left, plain = len(slots), ascending(slots)
        for state in states:
            left -= found.tobytes().count(state)
        if left or (not plain and any_of(slots < 0)):
            fits = np.isin(found, states) & (slots >= 0)
            bad = int(np.flatnonzero(~fits)[0])
            raise InternalError(f"residency: cannot {verb} slot {slots[bad]}, which is {SlotState(found[bad]).name}")
        if not pins and any_of(self.table.pins[slots]):
            bad = int(np.flatnonzero(self.table.pins[slots])[0])
            raise InternalError(f"residency: cannot {verb} slot {slots[bad]}, which is pinned")
        if not plain and not distinct(slots):
            raise InternalError(f"residency: cannot {verb} one slot twice in one call")

    def _drop(self, kind: int, slots: I64) -> None:
        """Evicts chunks of one class from policy and index; what becomes of their slots is the caller's affair."""
        numbers = slots.tolist()
        self.policies[kind].evicted(numbers)
        self.table.hidden[slots] = False
        self.resident_bytes -= self.table.bytes_of(slots)
        self._evicted += len(numbers)
        keys = self.index.forget(slots)
        self.on_evict(slots, keys)
        self._evicted_now += keys

    def _retire(self, ready: I64) -> None:
        """Takes READY slots out of the policies without calling it an eviction."""
        if len(ready):
            self.table.hidden[ready] = False
            for kind, part in self._by_kind(ready):
                self.policies[kind].remove(part.tolist())

    # Pins and holds.

    @property
    def pinned_bytes(self) -> int:
        return self._pins.pinned_bytes

    @property
    def held_bytes(self) -> int:
        return self._pins.held_bytes

    def pin(self, slots: Slots) -> None:
        """One reference more on each slot, reserved or ready; a slot may be named several times."""
        self._pins.pin(_array(slots))

    def pin_ready(self, slots: I64) -> None:
        """`pin` for slots that the caller knows to be READY, and distinct."""
        self._pins.pin_ready(slots)

    def unpin(self, slots: Slots, *, once: bool = False) -> None:
        """Gives back references; below zero, or below what is held, is an error that changes nothing.

        `once`: the caller knows that no slot is named twice.
        """
        self._pins.unpin(_array(slots), once)

    def hold(self, slots: Slots) -> None:
        """A pin that a waiting request owns: pins and holds both move."""
        self._pins.hold(_array(slots))

    def hold_ready(self, slots: I64) -> None:
        """`hold` for at least one slot, all of which the caller has just seen to be READY."""
        self._pins.hold_ready(slots)

    def unhold(self, slots: Slots) -> None:
        """Ends holds and their pins; below zero is an error that changes nothing."""
        self._pins.unhold(_array(slots))

    def hand_over(self, slots: Slots) -> None:
        """Ends holds and keeps their pins, which belong to a job from now on."""
        self._pins.hand_over(_array(slots))

    @property
    def stuck_bytes(self) -> int:
        """Bytes that neither a grant nor a store can have now; a pinned slot under a job counts once."""
        return self.reserved_bytes + self.quarantined_bytes + self.pinned_ready_bytes

    def _tightened(self, ready: I64) -> None:
        """READY slots that got their first pin."""
        self.pinned_ready_bytes += self.table.bytes_of(ready)
        self.table.stick(ready)

    def _loosened(self, ready: I64) -> None:
        """READY slots whose last pin has gone."""
        self.pinned_ready_bytes -= self.table.bytes_of(ready)
        self.table.unstick(ready)
        shown = ready[self.table.hidden[ready]]
        if len(shown):
            self.table.hidden[shown] = False
            for kind, part in self._by_kind(shown):
                self.policies[kind].show(part.tolist())

    def touch(self, slots: Slots, *, used: bool = True) -> None:
        """READY slots were used now; chain order, head first. Slots in other states are passed over.

        Without `used` they become the newest, but for no use.
        """
        numbers = _array(slots)
        states = self.table.state[numbers]
        if not all_are(states, READY):
            numbers = numbers[states == READY]
        if len(numbers):
            self.table.stamp_now(numbers)
            for kind, part in self._by_kind(numbers):
                policy = self.policies[kind]
                (policy.touch if used else policy.renew)(part.tolist())

    # Looking at it.

    def statistics(self) -> ResidencyStatistics:
        """A frozen snapshot, O(classes)."""
        return ResidencyStatistics(
            capacity_bytes=self.capacity_bytes,
            free_bytes=self.free_bytes,
            reserved_bytes=self.reserved_bytes,
            resident_bytes=self.resident_bytes,
            quarantined_bytes=self.quarantined_bytes,
            waste_bytes=self.waste_bytes,
            pinned_bytes=self.pinned_bytes,
            held_bytes=self.held_bytes,
            keys=len(self.index),
            page_bytes=self.geometry.page_bytes,
            pages=self.geometry.pages,
            empty_pages=self.table.empty_pages(),
            rows=self.table.rows,
            published=self._published,
            evicted=self._evicted,
            refused=self._refused,
        )

    def check(self) -> None:
        """Recounts everything; raises `InternalError` naming the first thing that does not add up. O(rows)."""
        from kvstrata.core.residency_check import check_residency

        check_residency(self)

    # Helpers.

    def _is_stuck(self, slots: I64) -> np.typing.NDArray[np.bool_]:
        states = self.table.state[slots]
        stuck: np.typing.NDArray[np.bool_] = (
            (states == RESERVED) | (states == QUARANTINED) | ((states == READY) & (self.table.pins[slots] > 0))
        )
        return stuck

    def _by_kind(self, slots: I64) -> Iterator[tuple[int, I64]]:
        """`slots` by size class, order kept."""
        if not self.table.mixed:
            yield 0, slots
            return
        kinds = self._class_of[self.table.group[slots]]
        for kind in range(len(self.policies)):
            part = slots[kinds == kind]
            if len(part):
                yield kind, part

    def _by_group(self, slots: I64) -> Iterator[tuple[int, I64]]:
        if len(self._lengths) == 1:
            yield 0, slots
            return
        groups = self.table.group[slots]
        first = int(groups[0])
        if not any_of(groups != groups[0]):
            yield first, slots
            return
        for group in dict.fromkeys(groups.tolist()):
            yield group, slots[groups == group]


def _array(slots: Slots) -> I64:
    return np.asarray(slots, dtype=np.int64)  # what numpy indexes with fastest


def _list(slots: Slots) -> list[int]:
    return slots.tolist() if isinstance(slots, np.ndarray) else list(slots)
