"""Who waits for which reserved slot: crowds of requests, each shared by all slots that the same requests wait for.

A promotion's slots are waited for by one request, so they share one crowd; a slot names its crowd in the `crowd`
column (0: nobody waits). So waiting costs four bytes per slot and no object, and a landing batch is one look-up.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstrata.core.arrays import any_of
from kvstrata.core.requests import Request
from kvstrata.core.slots import SlotTable
from kvstrata.types import I64

Crowd = tuple[Request, ...]
"""Requests that wait for the same slots, oldest first."""


class Waiters:
    """The one owner of the `crowd` column."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._crowds: dict[int, Crowd] = {}
        self._slots: dict[int, int] = {}
        """By crowd: how many slots it waits for."""
        self._free: list[int] = []
        """Numbers that no crowd has any more."""

    def of(self, slot: int) -> Crowd:
        """Who waits for a slot, oldest first."""
        return self._crowds.get(int(self._table.crowd[slot]), ())

    def join(self, request: Request, slots: I64) -> None:
        """`request` waits for these slots, behind those who do already."""
        for waiting, part in self._parts(slots):
            self._settle(part, (*waiting, request))

    def leave(self, request: Request, slots: I64) -> I64:
        """`request` waits for these slots no more; returns those that nobody waits for now, but it did."""
        orphans = slots[:0]
        for waiting, part in self._parts(slots):
            if request not in waiting:
                continue
            others = tuple(other for other in waiting if other is not request)
            self._settle(part, others)
            if not others:
                orphans = np.concatenate((orphans, part)) if len(orphans) else part
        return orphans

    def take(self, slots: I64) -> list[tuple[Crowd, I64]]:
        """Nobody waits for these slots any more; returns who did, and for which of them."""
        found = [(waiting, part) for waiting, part in self._parts(slots) if waiting]
        for _, part in found:
            self._settle(part, ())
        return found

    def waited_for(self, slots: I64) -> I64:
        """Those of `slots` that anybody waits for."""
        found: I64 = slots[self._table.crowd[slots] != 0]
        return found

    def clear(self) -> None:
        """Nobody waits for anything any more."""
        self._table.crowd[:] = 0
        self._crowds.clear()
        self._slots.clear()
        self._free.clear()

    def counts(self) -> dict[int, int]:
        """How many requests wait for each slot that is waited for. O(rows), for checks."""
        waited = self._table.crowd.nonzero()[0].tolist()
        return {slot: len(self.of(slot)) for slot in waited}

    def _parts(self, slots: I64) -> Iterator[tuple[Crowd, I64]]:
        """`slots` by crowd, order kept. A part may be settled before the next one is asked for."""
        if not len(slots):
            return
        crowds = self._table.crowd[slots]
        first = int(crowds[0])
        if not any_of(crowds != first):
            yield self._crowds.get(first, ()), slots
            return
        for number in dict.fromkeys(crowds.tolist()):
            yield self._crowds.get(number, ()), slots[crowds == number]

    def _settle(self, slots: I64, waiting: Crowd) -> None:
        """From now on `waiting` wait for `slots`, which had one crowd so far."""
        column = self._table.crowd
        old = int(column[slots[0]])
        if old:
            left = self._slots[old] - len(slots)
            if left:
                self._slots[old] = left
            else:
                del self._slots[old], self._crowds[old]
                self._free.append(old)
        if not waiting:
            column[slots] = 0
            return
        number = self._free.pop() if self._free else len(self._crowds) + 1
        column[slots] = number
        self._crowds[number], self._slots[number] = waiting, len(slots)
