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
_RATHER_EACH = 32
"""Up to so few places are looked at one by one."""
_AT_ONCE = 2048
"""Keys of a piece of work: so few that all it touches stays in the cache."""
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
_STEPS = np.arange(_WINDOW, dtype=np.int64)[:, None]
"""As a column: numpy is at its best along the last axis, so that is the one of the keys."""
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
    if len(words) <= _AT_ONCE:
        mixed = words.astype(np.uint64) @ _WEIGHTS
    else:
        mixed = np.empty(len(words), np.uint64)
        for at in range(0, len(words), _AT_ONCE):
            part = words[at : at + _AT_ONCE].astype(np.uint64)
            np.matmul(part, _WEIGHTS, out=mixed[at : at + _AT_ONCE])
    return mixed ^ (mixed >> np.uint64(29))


def _values(hashes: U64, rows: I64) -> U64:
    """What the table holds for rows."""
    return (hashes << _HALF) | (rows + 2).view(np.uint64)


def _where(rows: I64) -> I64 | slice:
    """The rows as a slice if they follow each other, which costs a fraction to fill."""
    first, count = int(rows[0]), len(rows)
    if int(rows[-1]) - first == count - 1 and _all(rows[1:] - rows[:-1] == 1):
        return slice(first, first + count)
    return rows


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
        # It shrinks by half at most: what was deleted may come again.
        bits = max(5, (2 * max(wanted, 1) - 1).bit_length(), len(self._table).bit_length() - 2)
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
        if not count or not self.taken:
            return np.full(count, -1, np.int64)
        if hashes is None:
            hashes = hashes_of(words)
        if count <= _AT_ONCE:
            return self._find(words, hashes)
        cuts = [slice(at, at + _AT_ONCE) for at in range(0, count, _AT_ONCE)]
        return np.concatenate([self._find(words[cut], hashes[cut]) for cut in cuts])

    def _find(self, words: Words, hashes: U64) -> I64:
        rows = np.full(len(words), -1, np.int64)
        tags = hashes << _HALF
        at = self._home(hashes)
        table, mask, rows_end = self._table, len(self._table) - 1, np.uint64(self._used)
        todo: I64 | None = None  # None: all of them
        while True:
            places = _STEPS + at
            places &= mask
            found = table.take(places)
            # Equal tags leave the row; an empty place, a deleted one and other tags leave what is above every row.
            low = found ^ tags
            low -= _ROW_BASE
            column, which = (low < rows_end).nonzero()
            if len(which):
                row = low[column, which].view(np.int64)
                if todo is not None:
                    which = todo.take(which)
                same: Bool = self.key.take(row, axis=0) == words.take(which, axis=0)
                if not _all(same, axis=None):  # a key is there once; other hits only share its tag
                    right = _all(same, axis=1)
                    which, row = which[right], row[right]
                rows[which] = row
            more: Bool = _all(found, axis=0)  # no empty place yet
            more &= (rows if todo is None else rows.take(todo)) < 0
            left = more.nonzero()[0]
            if not len(left):
                return rows
            todo = left if todo is None else todo.take(left)
            at, tags = at.take(left) + _WINDOW, tags.take(left)

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
        if len(rows):
            self._set(rows, segments, offsets, digests)
        return rows

    def _set(self, rows: I64, segments: I32 | int, offsets: npt.ArrayLike, digests: U64) -> None:
        where = _where(rows)
        self.segment[where] = segments
        self.offset[where] = offsets
        self.digest[where] = digests

    def reserve(self, words: Words, lengths: npt.ArrayLike, hashes: U64 | None = None) -> I64:
        """The same for records that are going to be written; `fill` or `delete` follows."""
        return self._mark_pending(self._enter(words, lengths, hashes))

    def reserve_absent(self, words: Words, lengths: npt.ArrayLike, hashes: U64) -> I64 | None:
        """`reserve` for any keys; None, and nothing done, if one of them seems to be there or to come twice.

        Looking for them and finding places for them is one look at the table.
        """
        self._make_room(len(words))
        table = self._table
        spots = self._home(hashes)
        was = table.take(spots)
        others = was.nonzero()[0]  # whose home place is not empty
        if len(others) and not self._choose(spots, was, others, hashes):
            return None
        rows = self._new_rows(words, lengths)
        values = _values(hashes, rows)
        free: Bool = was <= _DELETED
        if _all(free):
            table[spots] = values
        else:
            table[spots[free]] = values[free]
        won = table.take(spots) == values  # of those that want the same place the last one has it
        if self._deleted:
            self._deleted -= int((was[won] == _DELETED).sum())
        left = (~won).nonzero()[0]
        twice = self._place_late(spots.take(left).tolist(), values.take(left).tolist())
        self._mark_pending(rows)
        if twice:
            self.delete(rows)
            return None
        return rows

    def _choose(self, spots: I64, was: U64, others: I64, hashes: U64) -> bool:
        """Find the first free place for `others` of some keys, and note it and what is there; False if one is there."""
        home, own = spots.take(others), hashes.take(others)
        places = _STEPS + home
        places &= len(self._table) - 1
        found = self._table.take(places)
        seems = found ^ (own << _HALF)
        seems -= _ROW_BASE
        if seems.min() < np.uint64(self._used):
            return False
        full = _all(found, axis=0).nonzero()[0]
        if len(full) and self._seem_further_on(home.take(full).tolist(), own.take(full).tolist()):
            return False
        first = (found <= _DELETED).argmax(axis=0), np.arange(len(others))
        spots[others], was[others] = places[first], found[first]
        return True

    def _place_late(self, at: list[int], values: list[int]) -> bool:
        """Place keys that lost their place to others of the same call; whether one of them seems to come twice.

        Keys that are the same want the same place, so the second one meets the first one on its way.
        """
        table, mask = memoryview(self._table), len(self._table) - 1  # type: ignore[arg-type]
        twice = False
        for place, value in zip(at, values, strict=True):
            while (found := table[place]) > 1:
                twice |= found >> 32 == value >> 32
                place = (place + 1) & mask
            self._deleted -= found
            table[place] = value
        return twice

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
        if len(rows):
            self._set(rows, segments, offsets, digests)
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
        where = _where(rows)
        self.key[where] = words
        self.length[where] = lengths
        self.stamp[where] = 0
        self.taken += len(words)
        self.changes += 1
        return rows

    def delete(self, rows: I64) -> None:
        """Forget rows in use, each named once."""
        if not len(rows):
            return
        spots = self._spots(rows)
        self._table[spots] = _DELETED
        self._deleted += len(rows)
        self._clean(spots)
        if self.pending:
            self.pending -= int((self.segment[rows] == PENDING).sum())
        self.segment[rows] = _NO_ROW
        self._free.frombytes(rows.astype(np.int32).tobytes())
        self.taken -= len(rows)
        self.changes += 1

    def _spots(self, rows: I64) -> I64:
        """Where the table has these rows, in any order."""
        hashes = hashes_of(self.key.take(rows, axis=0))
        values, at = _values(hashes, rows), self._home(hashes)
        table, mask = self._table, len(self._table) - 1
        here: Bool = table.take(at) == values
        spots = [at[here]]
        while not _all(here):
            left = (~here).nonzero()[0]
            at, values = at.take(left), values.take(left)
            places = (_STEPS + (at + 1)) & mask
            hit = table.take(places) == values
            spots.append(places[hit])
            here = _any(hit, axis=0)
            at = at + _WINDOW
        return np.concatenate(spots)

    def _clean(self, spots: I64) -> None:
        """Deleted places before an empty one are empty too: nothing lies behind them. `spots`: those just deleted."""
        table, mask = self._table, len(self._table) - 1
        spots = spots[table.take((spots + 1) & mask) == 0]
        while len(spots) > _RATHER_EACH:
            table[spots] = 0
            self._deleted -= len(spots)
            spots = (spots - 1) & mask
            spots = spots[table.take(spots) == _DELETED]
        each = memoryview(table)  # type: ignore[arg-type]
        for spot in spots.tolist():
            while each[spot] == 1:
                each[spot] = 0
                self._deleted -= 1
                spot = (spot - 1) & mask
