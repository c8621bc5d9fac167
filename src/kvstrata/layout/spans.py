"""Sets of token counts kept as sorted, disjoint, closed spans: what the planner narrows group by group.

A group with all chunks present allows one span, whatever the length of the prompt; each hole adds one. So a set is
as small as the pattern of holes is simple, and two sets are intersected without a look at single chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstrata.types import I64, Bool

NOTHING: I64 = np.zeros(0, dtype=np.int64)
"""The empty array that answers share; read-only."""
NOTHING.setflags(write=False)


@dataclass(frozen=True, slots=True)
class Spans:
    """Token counts t with starts[i] <= t <= ends[i] for some i; both ascending, spans disjoint and not empty."""

    starts: I64
    ends: I64

    def __len__(self) -> int:
        return len(self.starts)

    def select(self, keep: Bool) -> Spans:
        """The spans marked in `keep`."""
        return self if keep.all() else Spans(self.starts[keep], self.ends[keep])

    def clip(self, low: int, high: int) -> Spans:
        """The part in [low, high]."""
        starts, ends = np.maximum(self.starts, low), np.minimum(self.ends, high)
        return Spans(starts, ends).select(starts <= ends)

    def holds(self, points: I64) -> Bool:
        """Which of `points` lie in the set."""
        if not len(self):
            return np.zeros(len(points), dtype=np.bool_)
        index = np.searchsorted(self.starts, points, side="right") - 1
        return (index >= 0) & (self.ends[index] >= points)

    def intersect(self, other: Spans) -> Spans:
        """The token counts in both sets; at most len(self) + len(other) spans."""
        if len(self) == 1:
            return other.clip(int(self.starts[0]), int(self.ends[0]))
        if len(other) == 1:
            return self.clip(int(other.starts[0]), int(other.ends[0]))
        first = np.searchsorted(other.ends, self.starts, side="left")
        count = np.searchsorted(other.starts, self.ends, side="right") - first
        mine = np.repeat(np.arange(len(self)), count)
        theirs = expand(first, first + count)
        return Spans(
            np.maximum(self.starts[mine], other.starts[theirs]), np.minimum(self.ends[mine], other.ends[theirs])
        )

    def merge(self, other: Spans) -> Spans:
        """The token counts of two sets that do not overlap."""
        starts = np.concatenate([self.starts, other.starts])
        order = np.argsort(starts, kind="stable")
        return Spans(starts[order], np.concatenate([self.ends, other.ends])[order])


def one_span(start: int, end: int) -> Spans:
    """The token counts from `start` to `end`, both included; empty if start > end."""
    count = 1 if start <= end else 0
    return Spans(np.full(count, start, dtype=np.int64), np.full(count, end, dtype=np.int64))


def runs(flags: Bool) -> tuple[I64, I64]:
    """Maximal runs of True as index ranges [first, last)."""
    padded = np.zeros(len(flags) + 2, dtype=np.bool_)
    padded[1:-1] = flags
    turns = np.flatnonzero(padded[1:] != padded[:-1])
    return turns[::2], turns[1::2]


def expand(lows: I64, highs: I64) -> I64:
    """The integers of all ranges [lows[i], highs[i]), one range after the other."""
    count = np.maximum(highs - lows, 0)
    before = np.cumsum(count) - count
    integers: I64 = np.arange(int(count.sum()), dtype=np.int64) + np.repeat(lows - before, count)
    return integers
