"""Small questions to small arrays, asked where numpy answers fastest.

At the size of a batch (64) most of a numpy call is its wrapper: counting takes a fifth of `any` and `all`, and
`int64` indices a fifth of `int32` ones, which are converted at every use. So slot numbers are int64 inside the core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from kvstrata.types import I8, I64, Bool

NO_SLOTS: I64 = np.empty(0, np.int64)
"""The empty array that answers share; read-only."""
NO_SLOTS.setflags(write=False)

_UNSET: I64 = np.full(1 << 10, -1, np.int64)


def no_slots(chunks: int) -> I64:
    """-1 for so many chunks; not to be written to."""
    return _UNSET[:chunks] if chunks <= len(_UNSET) else np.full(chunks, -1, np.int64)


any_of: Callable[[npt.NDArray[Any]], int] = np.count_nonzero
"""How many entries are not zero; truthy if any is."""


def slot_array(slots: Iterable[int]) -> I64:
    """Slot numbers as the array that residency works on."""
    return np.array(slots if isinstance(slots, list | np.ndarray) else list(slots), np.int64)


def where(flags: Bool) -> I64:
    """The indices of what is set, in a flat array."""
    return flags.nonzero()[0]


def count_of(column: I8, value: SupportsIndex) -> int:
    """How many entries of an int8 array are `value` (not negative)."""
    return column.tobytes().count(value)


def all_are(column: I8 | Bool, value: SupportsIndex) -> bool:
    """Whether every entry of an int8 array is `value` (not negative)."""
    return column.tobytes().count(value) == len(column)


def ascending(slots: npt.NDArray[Any]) -> bool:
    """Whether the numbers go up strictly, from 0 or more: then none is negative, and none is named twice."""
    count = len(slots)
    return count > 0 and slots[0] >= 0 and (count == 1 or any_of(slots[1:] > slots[:-1]) == count - 1)


def distinct(slots: npt.NDArray[Any]) -> bool:
    """Whether no number is named twice."""
    return len(set(slots.tolist())) == len(slots)


def index_array(index: Iterable[int]) -> I64:
    """Indices into a job's keys, as the array that they are looked up with."""
    if isinstance(index, range):
        return np.arange(index.start, index.stop, index.step, dtype=np.int64)
    return np.fromiter(index, np.int64)
