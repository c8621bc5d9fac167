"""Slots of primary: which bytes are whose, and what may be moved.

A page is carved for one size class at a time; its slots are a run of rows in columns (numpy arrays by slot number).
Rows exist for carved pages only. A page that has become empty may be carved for another class; its run of rows is
then kept for the next page of its old class, so rows never exceed what each class once had carved.

A slot is *stuck* when it can be neither used nor evicted: reserved, quarantined, or ready with pins. Counters per
class of used and stuck slots and pages are kept at every change, so that feasibility is O(classes). With one class
it does not matter in which page a slot lies: then stuck slots are counted, and stuck pages are not.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstrata.core.pages import Geometry
from kvstrata.types import I32, I64


class SlotState(enum.IntEnum):
    """The life of a slot; the values of the `state` column."""

    FREE = 0
    RESERVED = 1  # one writer job owns it
    READY = 2
    QUARANTINED = 3  # an overdue or cancelled job may still write into it


FREE, RESERVED, READY, QUARANTINED = (np.int8(state) for state in SlotState)

_FEW = 24
"""Up to so many numbers are added faster one by one."""

_ROW_COLUMNS = {
    "state": np.int8,
    "pins": np.int32,
    "holds": np.int32,
    "group": np.int16,
    "offset": np.int64,
    "length": np.int64,
    "job": np.int64,
    "tag": np.int8,
    "crowd": np.int32,
    "hidden": np.bool_,
}
_PAGE_COLUMNS = {"page_class": np.int16, "page_row": np.int32, "page_used": np.int32, "page_stuck": np.int32}


class SlotTable:
    """Pages, rows and their counters. It moves no key and asks no policy; `Residency` does.

    Columns are replaced when they grow: do not keep one over a call that may carve a page.
    """

    state: npt.NDArray[np.int8]
    pins: I32
    holds: I32
    group: npt.NDArray[np.int16]
    offset: I64
    length: I64
    job: I64
    tag: npt.NDArray[np.int8]
    crowd: I32
    hidden: npt.NDArray[np.bool_]
    page_class: npt.NDArray[np.int16]
    page_row: I32
    page_used: I32
    page_stuck: I32
    stamp: I64
    page_stamp: I64

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        classes = len(geometry.classes)
        self.mixed = classes > 1
        """More than one class: pages may change hands, so recency is stamped by slot and page."""
        self.rows = 0
        self.carved = 0
        """Pages that were carved at least once; the others lie behind them, untouched."""
        self._row_columns = dict(_ROW_COLUMNS)
        self._page_columns = dict(_PAGE_COLUMNS)
        if max(geometry.lengths) < 1 << 31:
            self._row_columns["length"] = np.int32
        if self.mixed:
            self._row_columns["stamp"] = np.int64
            self._page_columns["page_stamp"] = np.int64
        for name, kind in (self._row_columns | self._page_columns).items():
            setattr(self, name, np.zeros(0, dtype=kind))
        self.used_slots = [0] * classes
        self.used_pages = [0] * classes
        self.stuck_slots = [0] * classes
        self.stuck_pages = [0] * classes
        self.partial: list[dict[int, None]] = [{} for _ in range(classes)]
        """By class: pages with used and with free slots."""
        self.empty: list[list[int]] = [[] for _ in range(classes)]
        """By class: carved pages without a used slot. Any class may take them."""
        self._spare_runs: list[list[int]] = [[] for _ in range(classes)]

        self.tick = 0
        lengths = set(geometry.lengths)
        self._only_length = lengths.pop() if len(lengths) == 1 else 0

    def columns(self) -> list[npt.NDArray[np.generic]]:
        """All columns, of rows and of pages."""
        return [getattr(self, name) for name in (*self._row_columns, *self._page_columns)]

    def bytes_of(self, slots: I64) -> int:
        """True bytes of the chunks in used slots."""
        if self._only_length:
            return len(slots) * self._only_length
        lengths = self.length[slots]
        return sum(lengths.tolist()) if len(slots) <= _FEW else int(lengths.sum())

    def page_of(self, slots: I64) -> I64:
        """The page of each slot that lies in a carved page."""
        return self.offset[slots] // self.geometry.page_bytes

    # Recency, kept only where pages may change hands.

    def stamp_now(self, slots: I64) -> None:
        """`slots` and their pages are the hottest now."""
        if self.mixed:
            self.tick += 1
            self.stamp[slots] = self.tick
            self.page_stamp[self.page_of(slots)] = self.tick

    # Feasibility.

    def flexible_pages(self) -> int:
        """Pages without a stuck slot: empty, or such that all their chunks can be evicted."""
        return self.geometry.pages - sum(self.stuck_pages)

    def reachable(self, kind: int) -> int:
        """Slots of a class that are free or evictable inside pages that cannot become empty."""
        return self.geometry.classes[kind].per_page * self.stuck_pages[kind] - self.stuck_slots[kind]

    def pages_wanted(self, kind: int, need: int) -> int:
        """How many flexible pages `need` slots of a class take beyond what is reachable."""
        return max(0, -(-(need - self.reachable(kind)) // self.geometry.classes[kind].per_page))

    def slack(self, needs: Sequence[int]) -> int:
        """Flexible pages left over by `needs` (slots per class); negative means: cannot be placed.

        With one class, slots left over.
        """
        if not self.mixed:
            geometry = self.geometry
            return geometry.pages * geometry.classes[0].per_page - self.stuck_slots[0] - needs[0]
        return self.flexible_pages() - sum(self.pages_wanted(kind, need) for kind, need in enumerate(needs) if need)

    # Counters.

    def stick(self, slots: I64) -> None:
        """Distinct slots that were not stuck are so from now on."""
        if not self.mixed:
            self.stuck_slots[0] += len(slots)
        elif len(slots) <= _FEW:
            for page in self.page_of(slots).tolist():
                kind, before = self.page_class[page], self.page_stuck[page]
                self.page_stuck[page] = before + 1
                self.stuck_slots[kind] += 1
                self.stuck_pages[kind] += not before
        else:
            pages, counts = _by_page(self.page_of(slots))
            before = self.page_stuck[pages]
            self.page_stuck[pages] = before + counts
            self._tally(self.stuck_slots, pages, counts)
            fresh = before == 0
            if fresh.any():
                self._tally(self.stuck_pages, pages[fresh], 1)

    def unstick(self, slots: I64) -> None:
        """Distinct slots that were stuck are so no more."""
        if not self.mixed:
            self.stuck_slots[0] -= len(slots)
        elif len(slots) <= _FEW:
            for page in self.page_of(slots).tolist():
                kind, after = self.page_class[page], self.page_stuck[page] - 1
                self.page_stuck[page] = after
                self.stuck_slots[kind] -= 1
                self.stuck_pages[kind] -= not after
        else:
            pages, counts = _by_page(self.page_of(slots))
            after = self.page_stuck[pages] - counts
            self.page_stuck[pages] = after
            self._tally(self.stuck_slots, pages, -counts)
            loose = after == 0
            if loose.any():
                self._tally(self.stuck_pages, pages[loose], -1)

    def _tally(self, counter: list[int], pages: I64, steps: I64 | int) -> None:
        """Adds `steps` to the counters of the classes of `pages`."""
        if len(pages) == 1:
            counter[self.page_class[pages[0]]] += int(steps if isinstance(steps, int) else steps[0])
            return
        kinds = self.page_class[pages]
        for kind in range(len(counter)):
            mine = kinds == kind
            if isinstance(steps, int):
                counter[kind] += steps * int(np.count_nonzero(mine))
            else:
                counter[kind] += int(steps.dot(mine))

    def vacate(self, slots: I64) -> None:
        """Used slots, no longer stuck, become free."""
        self.state[slots] = FREE
        pages, counts = _by_page(self.page_of(slots))
        left = self.page_used[pages] - counts
        self.page_used[pages] = left
        kinds = self.page_class[pages].tolist()
        for page, kind, used, gone in zip(pages.tolist(), kinds, left.tolist(), counts.tolist(), strict=True):
            self.used_slots[kind] -= gone
            if used:
                self.partial[kind][page] = None
            else:
                self.used_pages[kind] -= 1
                self.partial[kind].pop(page, None)
                self.empty[kind].append(page)

    # Taking free slots. They become RESERVED and stuck.

    def take_from_page(self, page: int, need: int) -> I64:
        """Up to `need` free slots of a partly used page."""
        kind = int(self.page_class[page])
        row = int(self.page_row[page])
        size = self.geometry.classes[kind].per_page
        slots = np.flatnonzero(self.state[row : row + size] == FREE)[:need] + row
        self.page_used[page] += len(slots)
        self.used_slots[kind] += len(slots)
        if self.page_used[page] == size:
            del self.partial[kind][page]
        self.state[slots] = RESERVED
        self.stick(slots)
        return slots

    def take_pages(self, kind: int, pages: I64, need: int) -> I64:
        """`need` slots out of empty pages of a class, filling one page after the other."""
        size = self.geometry.classes[kind].per_page
        full, rest = divmod(need, size)
        rows = self.page_row[pages].astype(np.int64)
        slots = (rows[:full, None] + np.arange(size)).ravel()
        self.page_used[pages[:full]] = size
        if rest:
            slots = np.concatenate((slots, rows[full] + np.arange(rest)))
            self.page_used[pages[full]] = rest
            self.partial[kind][int(pages[full])] = None
        self.used_slots[kind] += need
        self.used_pages[kind] += len(pages)
        self.state[slots] = RESERVED
        self.stick(slots)
        return slots

    # Carving.

    def empty_pages(self) -> int:
        """Pages without a used slot, carved or not."""
        return self.geometry.pages - sum(self.used_pages)

    def carve(self, kind: int, count: int) -> I64:
        """`count` empty pages for a class, in ascending order; they leave the empty lists.

        Pages of the class itself come first, then untouched ones, then empty ones of other classes.
        """
        own = self.empty[kind]
        pages = [own.pop() for _ in range(min(count, len(own)))]
        fresh = min(count - len(pages), self.geometry.pages - self.carved)
        if fresh:
            new = np.arange(self.carved, self.carved + fresh)
            self.carved += fresh
            self._grow("page", self.carved)
            self._lay_out(kind, new)
            pages.extend(new.tolist())
        for other, stock in enumerate(self.empty):
            while other != kind and stock and len(pages) < count:
                pages.append(self._convert(stock.pop(), kind))
        pages.sort()
        return np.array(pages, dtype=np.int64)

    def _convert(self, page: int, kind: int) -> int:
        self._spare_runs[int(self.page_class[page])].append(int(self.page_row[page]))
        self._lay_out(kind, np.array([page]))
        return page

    def _lay_out(self, kind: int, pages: I64) -> None:
        """Gives each of `pages` a run of rows for `kind`."""
        shape = self.geometry.classes[kind]
        spare = self._spare_runs[kind]
        runs = [spare.pop() for _ in range(min(len(spare), len(pages)))]
        new = len(pages) - len(runs)
        first = self.rows
        self.rows += new * shape.per_page
        self._grow("row", self.rows)
        starts = np.array(runs + [first + run * shape.per_page for run in range(new)])
        self.page_class[pages] = kind
        self.page_row[pages] = starts
        inside = np.arange(shape.per_page)
        rows = (starts[:, None] + inside).ravel()
        origin = pages * self.geometry.page_bytes
        self.offset[rows] = (origin[:, None] + inside * shape.stride).ravel()

    def _grow(self, what: str, size: int) -> None:
        """Makes columns at least `size` long, an eighth longer if primary has room for it."""
        columns = self._row_columns if what == "row" else self._page_columns
        if size <= len(getattr(self, next(iter(columns)))):
            return
        room = size + size // 8
        if not self.mixed:
            pages = self.geometry.pages
            room = min(room, pages if what == "page" else pages * self.geometry.classes[0].per_page)
        for name, kind in columns.items():
            old = getattr(self, name)
            column: npt.NDArray[np.generic] = np.zeros(room, dtype=kind)
            if len(old):
                column[: len(old)] = old
            setattr(self, name, column)


def _by_page(pages: I64) -> tuple[I64, I64]:
    """The distinct pages in order of appearance, and how often each appears."""
    counts = Counter(pages.tolist())
    size = len(counts)
    return np.fromiter(counts, np.int64, size), np.fromiter(counts.values(), np.int64, size)
