"""Pins and holds of slots: references that forbid eviction, and their bytes.

A pin belongs to exactly one request or job; a hold is a pin that a waiting request owns. A slot counts once in
`pinned_bytes` and in `held_bytes`, however many pin or hold it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvstrata.core.slots import READY, RESERVED, SlotTable
from kvstrata.errors import InternalError
from kvstrata.types import I32, I64


class Pins:
    """Keeps the `pins` and `holds` columns of a table.

    `tightened` is told READY slots that got their first pin, `loosened` those whose last pin has gone.
    """

    def __init__(self, table: SlotTable, tightened: Callable[[I64], None], loosened: Callable[[I64], None]) -> None:
        self._table = table
        self._tightened = tightened
        self._loosened = loosened
        self.pinned_bytes = 0
        self.held_bytes = 0

    def pin(self, slots: I64) -> None:
        """One reference more on each slot, reserved or ready; a slot may be named several times."""
        if not len(slots):
            return
        table = self._table
        states = table.state[slots]
        lowest, highest = states.min(), states.max()
        if lowest < RESERVED or highest > READY or slots.min() < 0:
            raise InternalError("residency: cannot pin a slot that is neither reserved nor ready")
        fresh = self._add(table.pins, slots)
        if len(fresh):
            self.pinned_bytes += table.bytes_of(fresh)
            self._tightened(fresh if lowest == READY else fresh[table.state[fresh] == READY])

    def unpin(self, slots: I64) -> None:
        """Gives back references; below zero, or below what is held, is an error that changes nothing."""
        table = self._table
        loose = self._subtract(table.pins, slots, table.holds, "unpinned more often than pinned")
        if len(loose):
            self.pinned_bytes -= table.bytes_of(loose)
            ready = table.state[loose] == READY
            self._loosened(loose if ready.all() else loose[ready])

    def hold(self, slots: I64) -> None:
        """Pins that a waiting request owns."""
        self.pin(slots)
        if len(slots):
            self.held_bytes += self._table.bytes_of(self._add(self._table.holds, slots))

    def unhold(self, slots: I64) -> None:
        """Ends holds and their pins; below zero is an error that changes nothing."""
        loose = self._subtract(self._table.holds, slots, None, "let go more often than held")
        self.held_bytes -= self._table.bytes_of(loose)
        self.unpin(slots)

    def _add(self, column: I32, slots: I64) -> I64:
        """Adds one per mention; returns the distinct slots that were at zero."""
        before = column[slots]
        if _distinct(slots):
            column[slots] = before + 1
            return slots[before == 0] if before.any() else slots
        np.add.at(column, slots, 1)
        return np.unique(slots[before == 0])

    def _subtract(self, column: I32, slots: I64, least: I32 | None, what: str) -> I64:
        """Takes one away per mention, not below `least`; returns the distinct slots that are at zero now."""
        before = column[slots]
        distinct = _distinct(slots)
        if distinct:
            after = before - 1
        else:
            np.subtract.at(column, slots, 1)
            after = column[slots]
        short = after < (0 if least is None else least[slots])
        if short.any():
            column[slots] = before
            bad = slots[np.flatnonzero(short)[0]]
            raise InternalError(f"residency: slot {bad} was {what}")
        if distinct:
            column[slots] = after
            return slots[after == 0] if after.any() else slots
        return np.unique(slots[after == 0])


def _distinct(slots: I64) -> bool:
    return len(set(slots.tolist())) == len(slots)
