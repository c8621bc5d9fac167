"""Pins and holds of slots: references that forbid eviction, and their bytes.

A pin belongs to exactly one request or job; a hold is a pin that a waiting request owns. A slot counts once in
`pinned_bytes` and in `held_bytes`, however many pin or hold it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvstrata.core.arrays import all_are, any_of, distinct
from kvstrata.core.slots import READY, RESERVED, SlotTable
from kvstrata.errors import InternalError
from kvstrata.types import I8, I32, I64


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
        if len(slots):
            self._pin(slots, distinct(slots))

    def pin_ready(self, slots: I64, once: bool = True) -> None:
        """`pin` for slots that are known to be ready, and whether they are distinct: neither is looked at again."""
        fresh = _add(self._table.pins, slots, once)
        if len(fresh):
            self.pinned_bytes += self._table.bytes_of(fresh)
            self._tightened(fresh)

    def unpin(self, slots: I64, once: bool = False) -> None:
        """Gives back references; below zero, or below what is held, is an error that changes nothing.

        `once`: no slot is named twice.
        """
        if len(slots):
            self._unpin(slots, once or distinct(slots))

    def hold(self, slots: I64) -> None:
        """Pins that a waiting request owns."""
        if len(slots):
            once = distinct(slots)
            self._pin(slots, once)
            self.held_bytes += self._table.bytes_of(_add(self._table.holds, slots, once))

    def hold_ready(self, slots: I64) -> None:
        """`hold` for slots that are known to be ready: their states are not looked at again."""
        once = distinct(slots)
        self.pin_ready(slots, once)
        self.held_bytes += self._table.bytes_of(_add(self._table.holds, slots, once))

    def unhold(self, slots: I64) -> None:
        """Ends holds and their pins; below zero is an error that changes nothing."""
        if len(slots):
            once = distinct(slots)
            loose = _subtract(self._table.holds, slots, None, once, "let go more often than held")
            self.held_bytes -= self._table.bytes_of(loose)
            self._unpin(slots, once)

    def hand_over(self, slots: I64) -> None:
        """Holds end, their pins go on: they belong to a job from now on."""
        if len(slots):
            loose = _subtract(self._table.holds, slots, None, distinct(slots), "let go more often than held")
            self.held_bytes -= self._table.bytes_of(loose)

    def _pin(self, slots: I64, once: bool) -> None:
        table = self._table
        states = table.state[slots]
        all_ready = all_are(states, READY)
        if any_of(slots < 0) or not (all_ready or _pinnable(states)):
            raise InternalError("residency: cannot pin a slot that is neither reserved nor ready")
        fresh = _add(table.pins, slots, once)
        if len(fresh):
            self.pinned_bytes += table.bytes_of(fresh)
            self._tightened(fresh if all_ready else fresh[table.state[fresh] == READY])

    def _unpin(self, slots: I64, once: bool) -> None:
        table = self._table
        loose = _subtract(table.pins, slots, table.holds, once, "unpinned more often than pinned")
        if len(loose):
            self.pinned_bytes -= table.bytes_of(loose)
            states = table.state[loose]
            self._loosened(loose if all_are(states, READY) else loose[states == READY])


def _pinnable(states: I8) -> bool:
    """Whether all states are reserved or ready."""
    kinds = states.tobytes()
    return kinds.count(RESERVED) + kinds.count(READY) == len(kinds)


def _add(column: I32, slots: I64, once: bool) -> I64:
    """Adds one per mention (`once`: no slot is named twice); returns the distinct slots that were at zero."""
    before = column[slots]
    if once and not any_of(before):
        column[slots] = 1
        return slots
    fresh: I64
    if once:
        column[slots] = before + 1
        fresh = slots[before == 0]
        return fresh
    np.add.at(column, slots, 1)
    return np.unique(slots[before == 0])


def _subtract(column: I32, slots: I64, least: I32 | None, once: bool, what: str) -> I64:
    """Takes one away per mention, not below `least`; returns the distinct slots that are at zero now."""
    before = column[slots]
    if once and (least is None or not any_of(least[slots])):  # nothing is held: zero is the bound
        lone = any_of(before == 1)
        if lone == len(slots):
            column[slots] = 0
            return slots
        if not lone and any_of(before > 1) == len(slots):
            column[slots] = before - 1
            return slots[:0]
    if once:
        after = before - 1
    else:
        np.subtract.at(column, slots, 1)
        after = column[slots]
    short = after < (0 if least is None else least[slots])
    if any_of(short):
        column[slots] = before
        bad = slots[short.nonzero()[0][0]]
        raise InternalError(f"residency: slot {bad} was {what}")
    if once:
        column[slots] = after
        return slots[after == 0] if any_of(after) else slots
    return np.unique(slots[after == 0])
