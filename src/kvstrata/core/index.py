"""Keys of primary: from key to slot and back, in batches at the speed of C."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt

from kvstrata.core.arrays import no_slots
from kvstrata.errors import InternalError
from kvstrata.types import I64, OffloadKey

_NO_KEY = b""
_REBUILD_FROM = 1024
_WINDOW = 64
"""So many keys of a piece are compared at a time at first, and twice as many each time after that."""
_PIECE = 8
_WINDOW = 64
"""From so many keys on it pays to see whether they lie in one piece."""


class KeyIndex:
    """A dict of keys and a column of them by slot; no Python loop per key on the way to an answer.

    Deleted entries stay in a dict until it is full, and then it grows to three times what it holds. Copying it when
    a third of it is dead costs the same work and half of the memory.
    """

    def __init__(self) -> None:
        self.slots: dict[OffloadKey, int] = {}
        self.keys: npt.NDArray[np.object_] = np.empty(0, object)
        """By slot; empty where there is none."""
        self.version = 0
        """Counts changes: what was found stays true as long as it does not move."""
        self._forgotten = 0

    def __len__(self) -> int:
        return len(self.slots)

    def find(self, keys: Sequence[OffloadKey]) -> I64:
        """The slot of each key, or -1."""
        if len(keys) >= _PIECE and (found := self._in_pieces(keys)) is not None:
            return found
        if self.slots.keys().isdisjoint(keys):  # ends at the first key that is here, and costs half if none is
            return no_slots(len(keys)).copy()
        return np.fromiter(map(self.slots.get, keys, repeat(-1)), np.int64, len(keys))

    def _in_pieces(self, keys: Sequence[OffloadKey]) -> I64 | None:
        """`find` for keys whose slots are a few runs of neighbours, as what was stored together mostly is; else None.

        The keys of a run are compared, and not looked up one by one.
        """
        parts, at = [], 0
        while at < len(keys):
            first = self.slots.get(keys[at], -1)
            if first < 0:
                return None
            size = self._piece(first, keys, at)
            if size < _PIECE and at + size < len(keys):
                return None
            parts.append(np.arange(first, first + size))
            at += size
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _piece(self, first: int, keys: Sequence[OffloadKey], at: int) -> int:
        """How many keys from `at` on lie in neighbouring slots from `first` on, where the first one does."""
        some, most, size = 1, len(keys) - at, _WINDOW
        while some < most:
            here = self.keys[first + some : first + some + size].tolist()
            asked = keys[at + some : at + some + size]
            if here != asked:
                same, other = 0, len(asked)  # up to the one they are the same, up to the other they are not
                while other - same > 1:
                    middle = (same + other) // 2
                    if here[same:middle] == asked[same:middle]:
                        same = middle
                    else:
                        other = middle
                return some + same
            some += len(asked)
            size *= 2
        return most

    def lacks(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether none of the keys is here; ends at the first that is."""
        return self.slots.keys().isdisjoint(keys)

    def key_of(self, slot: int) -> OffloadKey | None:
        return (self.keys[slot] or None) if 0 <= slot < len(self.keys) else None

    def keys_of(self, slots: Sequence[int]) -> list[OffloadKey]:
        """The keys of slots that all have one."""
        keys: list[OffloadKey] = list(map(self.keys.__getitem__, slots))
        if _NO_KEY in keys:
            raise InternalError("residency: a slot without a key was asked for its key")
        return keys

    def has(self, slots: I64, keys: Sequence[OffloadKey]) -> bool:
        """Whether these are still the slots of these keys, a list; much cheaper than finding them."""
        return bool(self.keys[slots].tolist() == keys)

    def demand_new(self, keys: Sequence[OffloadKey]) -> None:
        """Raises unless `keys` are distinct and none is here."""
        if not self.slots.keys().isdisjoint(keys):
            raise InternalError("residency: a key was reserved that is in primary already")
        if len(set(keys)) != len(keys):
            raise InternalError("residency: a key was reserved twice in one call")

    def enter(self, keys: Sequence[OffloadKey], slots: I64, rows: int) -> None:
        """Adds new keys; `rows`: so many slots there is room for now."""
        if len(self.keys) < rows:
            longer: npt.NDArray[np.object_] = np.full(rows, _NO_KEY, object)
            longer[: len(self.keys)] = self.keys
            self.keys = longer
        self.version += 1
        self.slots.update(zip(keys, slots.tolist(), strict=True))
        self.keys[slots] = np.array(keys, object)

    def forget(self, slots: I64) -> list[OffloadKey]:
        """Takes out the keys of slots and returns them."""
        self.version += 1
        keys: list[OffloadKey] = self.keys[slots].tolist()
        deque(map(self.slots.__delitem__, keys), maxlen=0)
        self.keys[slots] = _NO_KEY
        self._forgotten += len(keys)
        if self._forgotten > _REBUILD_FROM and 2 * self._forgotten > len(self.slots):
            self.slots = dict(self.slots)
            self._forgotten = 0
        return keys
