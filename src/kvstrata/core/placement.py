"""One transaction on primary: free slots first, then the coldest chunks and pages.

Feasibility is decided before anything moves (`SlotTable.slack`), and every single step keeps it: a slot inside a page
that is stuck already costs nothing; opening a flexible page costs one, and is allowed while the class still wants
flexible pages of its own, or there is slack. So a transaction that starts always ends, and needs no way back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvstrata.core.arrays import any_of
from kvstrata.core.slots import FREE, RESERVED, SlotTable
from kvstrata.errors import InternalError
from kvstrata.policy.base import EvictionPolicy
from kvstrata.types import I64

_NEVER = np.iinfo(np.int64).max
_LOOK_AHEAD = 32
_NONE: I64 = np.zeros(0, dtype=np.int64)

Drop = Callable[[int, I64], None]
"""Told the class and the slots whose chunks are evicted, before the slots are used again."""


class Placement:
    """Finds slots for a transaction. `drop` takes evicted chunks out of index and policy."""

    def __init__(self, table: SlotTable, policies: Sequence[EvictionPolicy], drop: Drop) -> None:
        self.table = table
        self._policies = policies
        self._drop = drop
        self.floor = [0] * len(policies)
        """By class: no page of another class is colder than this stamp."""

    def place(self, needs: list[int]) -> list[I64]:
        """Takes `needs[c]` slots of each class c, all RESERVED on return, in the order of their offsets.

        The caller guarantees that the slack of `needs` is not negative.
        """
        needs = list(needs)
        taken: list[list[I64]] = [[] for _ in needs]
        for kind in range(len(needs)):
            if needs[kind]:
                self._take_partial(kind, needs, taken[kind])
                self._take_empty(kind, needs, taken[kind])
        for kind in range(len(needs)):
            if needs[kind]:
                _Eviction(self, kind, needs, taken[kind]).run()
        return [self._in_order(parts) for parts in taken]

    def _in_order(self, parts: list[I64]) -> I64:
        if not parts:
            return _NONE
        slots = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if self.table.mixed:
            slots = slots[np.argsort(self.table.offset[slots], kind="stable")]
        else:
            slots = np.sort(slots)  # rows were laid out in the order of their pages
        self.table.stamp_now(slots)
        return slots

    def budget(self, kind: int, needs: Sequence[int]) -> int:
        """How many flexible pages a class may still open; with one class there is nothing to save them for."""
        if not self.table.mixed:
            return self.table.geometry.pages
        return self.table.pages_wanted(kind, needs[kind]) + self.table.slack(needs)

    def _take_partial(self, kind: int, needs: list[int], taken: list[I64]) -> None:
        table = self.table
        if not table.partial[kind]:
            return
        size = table.geometry.classes[kind].per_page
        budget = self.budget(kind, needs)
        chosen, room = [], 0
        for page in table.partial[kind]:
            if table.mixed and not table.page_stuck[page]:
                if not budget:
                    continue
                budget -= 1
            chosen.append(page)
            room += size - int(table.page_used[page])
            if room >= needs[kind]:
                break
        for page in chosen:
            slots = table.take_from_page(page, needs[kind])
            needs[kind] -= len(slots)
            taken.append(slots)

    def _take_empty(self, kind: int, needs: list[int], taken: list[I64]) -> None:
        table = self.table
        size = table.geometry.classes[kind].per_page
        available = table.empty_pages()
        if not available or not needs[kind]:
            return
        count = min(-(-needs[kind] // size), available, self.budget(kind, needs))
        if count:
            need = min(needs[kind], count * size)
            taken.append(table.take_pages(kind, table.carve(kind, count), need))
            needs[kind] -= need

    def coldest_pages(self, kind: int, count: int) -> list[int]:
        """Up to `count` flexible pages with chunks of other classes, coldest (by their hottest chunk) first."""
        table = self.table
        carved = table.carved
        stamps = table.page_stamp[:carved]
        foreign = np.flatnonzero((table.page_used[:carved] > 0) & (table.page_class[:carved] != kind))
        self.floor[kind] = int(stamps[foreign].min()) if len(foreign) else table.tick
        pages = foreign[table.page_stuck[foreign] == 0]
        if count < len(pages):
            pages = pages[np.argpartition(stamps[pages], count - 1)[:count]]
        ordered: list[int] = pages[np.argsort(stamps[pages], kind="stable")].tolist()
        return ordered

    def take_over(self, kind: int, pages: Sequence[int], need: int) -> I64:
        """Evicts whole pages of other classes and takes up to `need` slots of a class in their place."""
        table = self.table
        for page in pages:
            other = int(table.page_class[page])
            row = int(table.page_row[page])
            states = table.state[row : row + table.geometry.classes[other].per_page]
            slots = np.flatnonzero(states != FREE) + row
            self._drop(other, slots)
            table.vacate(slots)
        need = min(need, len(pages) * table.geometry.classes[kind].per_page)
        return table.take_pages(kind, table.carve(kind, len(pages)), need)

    def reuse(self, slots: I64) -> None:
        """Evictable slots change their chunk and stay in their page."""
        self.table.state[slots] = RESERVED
        self.table.stick(slots)

    def drop_own(self, kind: int, slots: I64, skipped: list[int]) -> None:
        """Ends a search of a class: `slots` are evicted, `skipped` ones are pinned."""
        if len(slots):
            self._drop(kind, slots)
        if skipped:
            self.table.hidden[skipped] = True
            self._policies[kind].hide(skipped)

    def victims(self, kind: int, need: int) -> Iterator[Sequence[int]]:
        return self._policies[kind].victim_lists(max(need, _LOOK_AHEAD))


class _Eviction:
    """The evictions of one class in one transaction: its own coldest chunks, or colder pages of other classes."""

    def __init__(self, placement: Placement, kind: int, needs: list[int], taken: list[I64]) -> None:
        self._place = placement
        self._table = placement.table
        self._kind = kind
        self._needs = needs
        self._taken = taken
        self._victims = placement.victims(kind, needs[kind])
        self._pending = _NONE  # own victims that were looked at and not decided
        self._pinned: list[int] = []
        self._own: list[I64] = []
        self._foreign: list[int] | None = None

    def run(self) -> None:
        needs, kind = self._needs, self._kind
        while needs[kind] > 0:
            if not len(self._pending):
                self._look_further()
            if self._table.mixed and self._take_foreign():
                continue
            if not len(self._pending):
                raise InternalError(f"primary: {needs[kind]} slots of class {kind} were promised and cannot be found")
            self._take_own()
        own = np.concatenate(self._own) if self._own else _NONE
        self._place.drop_own(kind, own, self._pinned)

    def _look_further(self) -> None:
        """Reads on until some victim of the class is evictable, or there is none left."""
        while not len(self._pending):
            batch = next(self._victims, None)
            if batch is None:
                return
            slots = np.array(batch, dtype=np.int64)
            pins = self._table.pins[slots]
            if any_of(pins):
                free = pins == 0
                self._pinned.extend(slots[~free].tolist())
                slots = slots[free]
            self._pending = slots

    def _take_foreign(self) -> bool:
        """Takes the pages of other classes that are colder than the next victim of this class."""
        table, kind = self._table, self._kind
        own = table.stamp[self._pending[0]] if len(self._pending) else _NEVER
        if own <= self._place.floor[kind]:
            return False
        need = self._needs[kind]
        most = min(-(-need // table.geometry.classes[kind].per_page), self._place.budget(kind, self._needs))
        if most <= 0:
            return False
        if self._foreign is None:
            self._foreign = self._place.coldest_pages(kind, most)
        colder = [page for page in self._foreign[:most] if table.page_stamp[page] < own]
        if not colder:
            return False
        self._foreign = self._foreign[len(colder) :]
        slots = self._place.take_over(kind, colder, need)
        self._needs[kind] -= len(slots)
        self._taken.append(slots)
        return True

    def _take_own(self) -> None:
        """Takes victims of the class, as far as they are no hotter than the next foreign page and allowed."""
        batch, self._pending = self._pending, _NONE
        need = self._needs[self._kind]
        if self._foreign:
            hotter = np.flatnonzero(self._table.stamp[batch] > self._table.page_stamp[self._foreign[0]])
            if len(hotter) and hotter[0]:
                need = min(need, int(hotter[0]))
        batch, self._pending = batch[:need], batch[need:]
        slots = self._allowed(batch)
        if len(slots):
            self._place.reuse(slots)
            self._needs[self._kind] -= len(slots)
            self._own.append(slots)
            self._taken.append(slots)

    def _allowed(self, batch: I64) -> I64:
        """The victims that may be taken: each flexible page that is opened costs one of the budget."""
        if not self._table.mixed:
            return batch
        pages = self._table.page_of(batch)
        flexible = self._table.page_stuck[pages] == 0
        budget = self._place.budget(self._kind, self._needs)
        if int(np.count_nonzero(flexible)) <= budget:
            return batch
        opened: set[int] = set()
        keep = []
        for page, costs in zip(pages.tolist(), flexible.tolist(), strict=True):
            if costs and page not in opened:
                if len(opened) == budget:
                    keep.append(False)
                    continue
                opened.add(page)
            keep.append(True)
        allowed: I64 = batch[np.array(keep)]
        return allowed
