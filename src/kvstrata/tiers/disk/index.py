"""The index of one realm: key -> place and digest, in numpy columns with an open-addressing table.

One row per record, 68 bytes, and 8 bytes per table place. All calls take batches: `words` is a (n, 9) uint32 array of
keys (`words_of`). A row number stays valid until the row is deleted.

A row may be held for a record that is still being written: it has its key and length, and `segment` is PENDING.

A table place holds 0 (empty), 1 (deleted), or `tag << 32 | row + 2`. A key is looked for from its home place onwards
until an empty place; the tag saves looking at rows of other keys.
"""

from __future__ import annotations

import operator
import struct
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstrata.tiers.disk.format import KEY_WORDS, Words
from kvstrata.types import I32, I64, KEY_BYTES, Bool, OffloadKey

U64 = npt.NDArray[np.uint64]

PENDING = -2
"""The segment of a row whose record is being written."""
_NO_ROW = -1
_WINDOW = 8
_FEW = 256
_HASHED_AT_ONCE = 2048
_DELETED = np.uint64(1)
_ROW_BASE = np.uint64(2)
_HALF = np.uint64(32)
_WEIGHTS = np.array(
    [
        0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F,
        0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3, 0x1D8E4E27C47D124F,
    ],
    np.uint64,
)  # fmt: skip
_WEIGHT_NUMBERS = _WEIGHTS.tolist()
_NINE = struct.Struct("<9I")
_ALL = (1 << 64) - 1
_STEPS = np.arange(_WINDOW, dtype=np.int64)
_any, _all = np.logical_or.reduce, np.logical_and.reduce
"""Of few keys the cost is the number of calls, and these are what `any` and `all` come to after some."""


def words_of(keys: Sequence[OffloadKey]) -> Words:
    """The keys as the rows of a (n, 9) array; every key has 36 bytes."""
    return np.frombuffer(b"".join(keys), "<u4").reshape(-1, KEY_WORDS)


def keys_of(words: Words) -> list[OffloadKey]:
    """The keys of the rows, as bytes."""
    return np.ascontiguousarray(words).view(f"V{KEY_BYTES}").ravel().tolist()


def hashes_of(words: Words) -> U64:
    """A 64-bit mix of all nine words: keys of several groups share their first 32 bytes, which would not do alone."""
    mixed: U64
    if len(words) <= _HASHED_AT_ONCE:
        mixed = words.astype(np.uint64) @ _WEIGHTS
    else:
        mixed = np.empty(len(words), np.uint64)
        for at in range(0, len(words), _HASHED_AT_ONCE):  # small enough to stay in the cache
            part = words[at : at + _HASHED_AT_ONCE].astype(np.uint64)
            np.matmul(part, _WEIGHTS, out=mixed[at : at + _HASHED_AT_ONCE])
    return mixed ^ (mixed >> np.uint64(29))


def _values(hashes: U64, rows: I64) -> U64:
    """What the table holds for rows."""
    return (hashes << _HALF) | (rows + 2).view(np.uint64)


class Index:
    """See the module. Columns are public: `segment` is -1 in a free row, `stamp` is 0 until the first touch."""

    def __init__(self, capacity: int = 1024) -> None:
        self.taken = 0
        """Rows in use."""
        self.pending = 0
        """Those of them whose record is being written."""
        self.changes = 0
        """Calls that gave or took a row: what `find` said before the last one may be wrong."""
        self._used = 0  # rows ever handed out; above are untouched
        self._free = array("i")  # deleted rows, to be used again
        self._columns(max(capacity, 16))
        self._table: U64 = np.zeros(0, np.uint64)
        self._shift = np.uint64(0)
        self._deleted = 0
        self._rebuild(capacity)

    def __len__(self) -> int:
        return self.count

    @property
    def count(self) -> int:
        """Records that are held."""
        return self.taken - self.pending

    # rows

    def _columns(self, capacity: int) -> None:
        self.key: Words = np.empty((capacity, KEY_WORDS), np.uint32)
        self.digest: U64 = np.empty((capacity, 2), np.uint64)
        self.segment: I32 = np.empty(capacity, np.int32)
        self.offset: npt.NDArray[np.uint32] = np.empty(capacity, np.uint32)
        self.length: npt.NDArray[np.uint32] = np.empty(capacity, np.uint32)
        self.stamp: npt.NDArray[np.uint32] = np.empty(capacity, np.uint32)

    def _grow(self, needed: int) -> None:
        capacity = max(needed, len(self.segment) * 3 // 2)
        for name in ("key", "digest", "segment", "offset", "length", "stamp"):
            old: npt.NDArray[Any] = getattr(self, name)
            new = np.empty((capacity, *old.shape[1:]), old.dtype)
            new[: self._used] = old[: self._used]
            setattr(self, name, new)

    def _take_rows(self, count: int) -> I64:
        reused = min(count, len(self._free))
        fresh = count - reused
        if self._used + fresh > len(self.segment):
            self._grow(self._used + fresh)
        rows = np.arange(self._used - reused, self._used + fresh, dtype=np.int64)
        if reused:
            rows[:reused] = np.frombuffer(self._free[-reused:], np.int32)
            del self._free[-reused:]
        self._used += fresh
        return rows

    def live_rows(self) -> I64:
        """All rows of records that are held."""
        return np.flatnonzero(self.segment[: self._used] >= 0)

    def rows_of_segment(self, segment: int) -> I64:
        """The rows whose record lies in one segment."""
        return np.flatnonzero(self.segment[: self._used] == segment)

    @property
    def row_bound(self) -> int:
        """One more than the largest row number ever used."""
        return self._used

    # table

    def _home(self, hashes: U64) -> I64:
        return (hashes >> self._shift).view(np.int64)

    def _rebuild(self, wanted: int) -> None:
        bits = max(5, (2 * max(wanted, 1) - 1).bit_length())
        self._table = np.zeros(1 << bits, np.uint64)
        self._shift = np.uint64(64 - bits)
        self._deleted = 0
        rows = np.flatnonzero(self.segment[: self._used] != _NO_ROW) if self.taken else np.zeros(0, np.int64)
        step = 1 << 16
        for at in range(0, len(rows), step):
            part = rows[at : at + step]
            self._place(hashes_of(self.key[part]), part)

    def _place(self, hashes: U64, rows: I64) -> None:
        table, mask = self._table, len(self._table) - 1
        values = _values(hashes, rows)
        at = self._home(hashes)
        while len(at):
            if len(at) <= _FEW:
                self._place_each(at.tolist(), values.tolist())
                return
            found = table[at]
            free = found <= _DELETED
            spots = at[free]
            table[spots] = values[free]
            placed = np.zeros(len(at), np.bool_)
            placed[free] = table[spots] == values[free]
            # Where two of this call wanted one place, the last one has it.
            self._deleted -= int((placed & (found == _DELETED)).sum())
            left = ~placed
            at, values = (at[left] + 1) & mask, values[left]

    def _place_each(self, at: list[int], values: list[int]) -> None:
        # Rounds of array calls over few keys cost more than walking.
        table, mask = memoryview(self._table), len(self._table) - 1  # type: ignore[arg-type]
        for place, value in zip(at, values, strict=True):
            while (found := table[place]) > 1:
                place = (place + 1) & mask
            self._deleted -= found
            table[place] = value

    def find_held(self, words: Words) -> I64:
        """The row of each key whose record is held, or -1."""
        return self.held(self.find(words))

    def held(self, rows: I64) -> I64:
        """The same rows, and -1 for those whose record is still being written."""
        return np.where(self.segment.take(rows) >= 0, rows, -1) if self.pending else rows

    def find(self, words: Words, hashes: U64 | None = None) -> I64:
        """The row of each key, or -1. `hashes`: `hashes_of(words)`, if they are known."""
        count = len(words)
        rows = np.full(count, -1, np.int64)
        if not count or not self.taken:
            return rows
        if hashes is None:
            hashes = hashes_of(words)
        tags = (hashes << _HALF)[:, None]
        at = self._home(hashes)[:, None]
        table, mask, rows_end = self._table, len(self._table) - 1, np.uint64(self._used)
        todo: I64 | None = None  # None: all of them
        while True:
            found = table.take((at + _STEPS) & mask)
            # Equal tags leave the row; an empty place, a deleted one and other tags leave what is above every row.
            low = (found ^ tags) - _ROW_BASE
            which, column = (low < rows_end).nonzero()
            if len(which):
                row = low[which, column].astype(np.int64)
                if todo is not None:
                    which = todo[which]
                same = _all(self.key.take(row, axis=0) == words.take(which, axis=0), axis=1)
                rows[which[same]] = row[same]  # a key is there once; other hits only share its tag
            more: Bool = _all(found, axis=1)  # no empty place yet
            more &= (rows if todo is None else rows.take(todo)) < 0
            left = more.nonzero()[0]
            if not len(left):
                return rows
            todo = left if todo is None else todo.take(left)
            at, tags = at.take(left, axis=0) + _WINDOW, tags.take(left, axis=0)

    def find_key(self, key: OffloadKey) -> int:
        """The row of one key, or -1: for one key this is several times cheaper than `find`."""
        mixed = sum(map(operator.mul, _NINE.unpack(key), _WEIGHT_NUMBERS)) & _ALL
        mixed ^= mixed >> 29
        table, mask = memoryview(self._table), len(self._table) - 1  # type: ignore[arg-type]
        at, tag = mixed >> int(self._shift), mixed & 0xFFFFFFFF
        while value := int(table[at]):
            row = (value & 0xFFFFFFFF) - 2
            if row >= 0 and value >> 32 == tag and self.key[row].tobytes() == key:
                return row
            at = (at + 1) & mask
        return -1

    def insert(
        self,
        words: Words,
        digests: U64,
        segments: I32 | int,
        offsets: npt.ArrayLike,
        lengths: npt.ArrayLike,
        hashes: U64 | None = None,
    ) -> I64:
        """New rows for keys that are absent and differ from each other; the caller made sure of both.

        `hashes`: `hashes_of(words)`, if they are known.
        """
        rows = self._enter(words, lengths, hashes)
        self.segment[rows] = segments
        self.offset[rows] = offsets
        self.digest[rows] = digests
        return rows

    def reserve(self, words: Words, lengths: npt.ArrayLike, hashes: U64 | None = None) -> I64:
        """The same for records that are going to be written; `fill` or `delete` follows."""
        return self._mark_pending(self._enter(words, lengths, hashes))

    def reserve_absent(self, words: Words, lengths: npt.ArrayLike, hashes: U64) -> I64 | None:
        """`reserve` for any keys; None, and nothing done, if one of them seems to be there or to come twice.

        Looking for them and finding places for them is one look at the table.
        """
        count, ordered = len(words), np.sort(hashes)
        if _any(ordered[1:] == ordered[:-1]):
            return None
        self._make_room(count)
        home, table, mask = self._home(hashes), self._table, len(self._table) - 1
        places = home[:, None] + _STEPS
        places &= mask
        found = table.take(places)
        seems = found ^ (hashes << _HALF)[:, None]
        seems -= _ROW_BASE
        if _any(seems < np.uint64(self._used), axis=None):
            return None
        # Eight places of a key as one number: 0 if none of them is empty.
        full = np.flatnonzero((found == 0).view(np.uint64).ravel() == 0)
        if len(full) and self._seem_further_on(home[full].tolist(), hashes[full].tolist()):
            return None
        rows = self._new_rows(words, lengths)
        values = _values(hashes, rows)
        first = (found <= _DELETED).argmax(axis=1) + np.arange(0, count * _WINDOW, _WINDOW)
        spots, was = places.reshape(-1).take(first), found.reshape(-1).take(first)
        free: Bool = was <= _DELETED
        fit = free.nonzero()[0]
        table[spots.take(fit)] = values.take(fit)
        left = table.take(spots) != values  # of those that want the same place the last one has it
        if self._deleted:
            self._deleted -= int((was[~left] == _DELETED).sum())
        self._place_each(spots[left].tolist(), values[left].tolist())  # what lies before its spot is taken
        return self._mark_pending(rows)

    def _seem_further_on(self, at: list[int], hashes: list[int]) -> bool:
        """Whether a key of one of these tags lies behind the window of its home place, before an empty one."""
        table, mask = memoryview(self._table), len(self._table) - 1  # type: ignore[arg-type]
        for place, tag in zip(at, hashes, strict=True):
            place, tag = (place + _WINDOW) & mask, tag & 0xFFFFFFFF
            while value := table[place]:
                if value >> 32 == tag:
                    return True
                place = (place + 1) & mask
        return False

    def _mark_pending(self, rows: I64) -> I64:
        self.segment[rows] = PENDING
        self.pending += len(rows)
        return rows

    def fill(self, rows: I64, segments: I32 | int, offsets: npt.ArrayLike, digests: U64) -> None:
        """The records of reserved rows were written."""
        self.segment[rows] = segments
        self.offset[rows] = offsets
        self.digest[rows] = digests
        self.pending -= len(rows)

    def _enter(self, words: Words, lengths: npt.ArrayLike, hashes: U64 | None) -> I64:
        if not len(words):
            return np.zeros(0, np.int64)
        self._make_room(len(words))
        rows = self._new_rows(words, lengths)
        self._place(hashes_of(words) if hashes is None else hashes, rows)
        return rows

    def _make_room(self, count: int) -> None:
        if (self.taken + self._deleted + count) * 5 > len(self._table) * 3:
            self._rebuild(self.taken + count)

    def _new_rows(self, words: Words, lengths: npt.ArrayLike) -> I64:
        """Rows that have no place in the table yet."""
        rows = self._take_rows(len(words))
        self.key[rows] = words
        self.length[rows] = lengths
        self.stamp[rows] = 0
        self.taken += len(words)
        self.changes += 1
        return rows

    def delete(self, rows: I64) -> None:
        """Forget rows in use, each named once."""
        if not len(rows):
            return
        hashes = hashes_of(self.key[rows])
        values = _values(hashes, rows)
        at = self._home(hashes)
        table, mask = self._table, len(self._table) - 1
        while len(at):
            match = table[at] == values
            table[at[match]] = _DELETED
            at, values = (at[~match] + 1) & mask, values[~match]
        self._deleted += len(rows)
        if self.pending:
            self.pending -= int((self.segment[rows] == PENDING).sum())
        self.segment[rows] = _NO_ROW
        self._free.frombytes(rows.astype(np.int32).tobytes())
        self.taken -= len(rows)
        self.changes += 1
