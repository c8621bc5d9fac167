"""The incremental form of the store rule: what became storable since the last call, per request and step."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from heapq import heapify, heappop

import numpy as np

from kvstrata.layout.groups import Layout
from kvstrata.layout.kept import joint_boundaries, kept_boundaries, ready_at, whole_chunks
from kvstrata.layout.kinds.base import NEVER, multiples
from kvstrata.layout.spans import NOTHING, expand
from kvstrata.types import I64


class StoreCursor:
    """Walks through one request and names each chunk to store once, when its bytes are whole and final.

    Call `advance` whenever tokens became final, and once with `finished=True`. Below `next_at` final tokens a call
    finds nothing, at the cost of one comparison; callers may test that themselves. All other calls cost O(groups +
    new chunks). Over the request the results add up to `kept_boundaries` and `stored_chunks` at its end.

    `total` is the end of the stored range: the prompt's length to store the prompt only (the default policy), None to
    store generated tokens too. Without `total` the end of the range is known only when the request has finished; an
    engine that has freed the window's older blocks by then cannot store that last boundary whole, and the next turn
    falls back to the boundary of the last interval.

    `interval=None` and `named_only=True` suit engines that leave recurrent states only at some places (mode "align"):
    then only boundaries that are named by `keep` are stored.
    """

    __slots__ = (
        "_claims",
        "_done",
        "_interval",
        "_junctions",
        "_layout",
        "_marked",
        "_named_only",
        "_nothing",
        "_prompt",
        "_stored",
        "_total",
        "_waiting",
        "_whole",
        "next_at",
    )

    def __init__(
        self,
        layout: Layout,
        prompt: int,
        interval: int | None,
        *,
        total: int | None = None,
        junctions: Iterable[int] = (),
        named_only: bool = False,
    ) -> None:
        self._layout, self._prompt, self._interval, self._total = layout, prompt, interval, total
        self._junctions = list(junctions)
        self._named_only = named_only
        self._nothing = (NOTHING,) * len(layout.groups)
        self._claims = [_Claims() for _ in layout.groups]  # of groups that store only what is kept
        self._stored = [0] * len(layout.groups)  # whole chunks given out, of groups that store all
        self._marked = 0  # multiples of the interval up to here are in `_waiting`
        self._done = False
        self._whole = None if total is None else whole_chunks(layout, total, total, finished=True)
        self._waiting: list[tuple[int, int]] = []  # heap of (final tokens needed, boundary)
        self._plan()
        self.next_at = self._next()

    def advance(self, final: int, *, finished: bool = False) -> tuple[I64, ...]:
        """Per group the chunks that are to be stored now, ascending. Less than before, or after the end: nothing."""
        if self._done or (final < self.next_at and not finished):
            return self._nothing
        self._done = finished
        boundaries = self._last(final) if finished else self._due(final)
        whole = whole_chunks(self._layout, self._total, final, finished=finished)
        fresh = tuple(self._take(g, boundaries, count) for g, count in enumerate(whole))
        self.next_at = NEVER if finished else self._next()
        return fresh

    def keep(self, mark: int) -> None:
        """Keep the largest joint boundary at or below `mark` too: a junction, or a state that is handed off there."""
        if self._done:
            return
        self._junctions.append(mark)
        self._wait(joint_boundaries(self._layout, [self._clip(mark)], self._whole))
        self.next_at = self._next()

    def _plan(self) -> None:
        """Queue what is known at the start."""
        if self._total is not None and not self._named_only:
            # All kept boundaries of a known range are known; they only wait for their chunks.
            kept = kept_boundaries(self._layout, self._total, self._prompt, NEVER >> 1, self._interval, self._junctions)
            self._wait(np.array(kept, dtype=np.int64))
            return
        marks = [*self._junctions] if self._named_only else [self._prompt - 1, self._prompt, *self._junctions]
        self._wait(joint_boundaries(self._layout, [self._clip(mark) for mark in marks], self._whole))

    def _clip(self, mark: int) -> int:
        return mark if self._total is None else min(mark, self._total)

    def _wait(self, boundaries: I64, least: I64 | int = 0) -> None:
        real = boundaries > 0
        when = np.maximum(ready_at(self._layout, boundaries), least)
        self._waiting.extend(zip(when[real].tolist(), boundaries[real].tolist(), strict=True))
        heapify(self._waiting)

    def _due(self, final: int) -> I64:
        """The kept boundaries that have become storable."""
        if self._total is None and self._interval and not self._named_only:
            marks = multiples(self._interval, self._marked, final)
            self._marked = max(self._marked, final // self._interval * self._interval)
            self._wait(joint_boundaries(self._layout, marks, None), marks)
        due = []
        while self._waiting and self._waiting[0][0] <= final:
            due.append(heappop(self._waiting)[1])
        return np.array(sorted(due), dtype=np.int64)

    def _last(self, final: int) -> I64:
        """The kept boundaries of a request that has ended; the end of its range is known now."""
        if self._named_only:
            end = final if self._total is None else min(final, self._total)
            whole = whole_chunks(self._layout, end, end, finished=True)
            kept = joint_boundaries(self._layout, [min(mark, end) for mark in self._junctions], whole)
            return np.unique(kept[kept > 0])
        kept_list = kept_boundaries(
            self._layout, self._total, self._prompt, final, self._interval, self._junctions, finished=True
        )
        return np.array(kept_list, dtype=np.int64)

    def _take(self, g: int, boundaries: I64, count: int) -> I64:
        if self._layout.groups[g].kind.stores_all:
            first, self._stored[g] = self._stored[g], max(self._stored[g], count)
            return np.arange(first, count, dtype=np.int64) if first < count else NOTHING
        if not len(boundaries):
            return NOTHING
        lo, hi = self._layout.needed(g, boundaries, 0)
        return self._claims[g].take(lo.tolist(), hi.tolist())

    def _next(self) -> int:
        """The least final tokens at which there is something new."""
        soonest = self._waiting[0][0] if self._waiting else NEVER
        if self._total is None and self._interval and not self._named_only:
            soonest = min(soonest, self._marked + self._interval)
        for g, (group, tokens) in enumerate(zip(self._layout.groups, self._layout.tokens_per_chunk, strict=True)):
            end = (self._stored[g] + 1) * tokens
            if group.kind.stores_all and (self._total is None or end <= self._total):
                soonest = min(soonest, end + group.drafter)
        return soonest


class _Claims:
    """A set of chunk numbers as ascending, disjoint, not touching ranges."""

    __slots__ = ("ends", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    def take(self, lows: list[int], highs: list[int]) -> I64:
        """Add the ranges [lows[i], highs[i]) and return what was new, ascending if they are."""
        fresh: list[tuple[int, int]] = []
        for lo, hi in zip(lows, highs, strict=True):
            if lo < hi:
                self._add(lo, hi, fresh)
        if not fresh:
            return NOTHING
        starts, ends = zip(*fresh, strict=True)
        return expand(np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64))

    def _add(self, lo: int, hi: int, fresh: list[tuple[int, int]]) -> None:
        # Ranges i to j - 1 overlap or touch [lo, hi); they become one with it.
        i, j = bisect_left(self.ends, lo), bisect_right(self.starts, hi)
        at = lo
        for start, end in zip(self.starts[i:j], self.ends[i:j], strict=True):
            if at < start:
                fresh.append((at, start))
            at = max(at, end)
        if at < hi:
            fresh.append((at, hi))
        if i < j:
            lo, hi = min(lo, self.starts[i]), max(hi, self.ends[j - 1])
        self.starts[i:j], self.ends[i:j] = [lo], [hi]
