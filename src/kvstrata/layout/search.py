"""The search behind the planner: narrows the possible boundaries group by group. `planner` tells the idea."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvstrata.layout.groups import Layout, Range
from kvstrata.layout.kinds.base import multiples
from kvstrata.layout.spans import NOTHING, Spans, one_span, runs
from kvstrata.types import I8, I64, Presence

_POINTS = 1 << 18  # most boundaries, free of charge for a chunked local group, that are looked at in one round
_CANDIDATES = 1 << 12  # boundaries looked at in the first round under a byte limit; doubles up to _POINTS


_ABSENT, _UNKNOWN = int(Presence.ABSENT), int(Presence.UNKNOWN)


@dataclass(slots=True)
class Cut:
    """Who lowered the best boundary last: `group` (None: the byte limit), and what it was before."""

    group: int | None
    before: int


_PRESENT: I8 = np.full(1 << 10, Presence.PRESENT, np.int8)


def all_present(chunks: int) -> I8:
    """The presence of so many chunks that are all there; not to be written to."""
    return _PRESENT[:chunks] if chunks <= len(_PRESENT) else np.full(chunks, Presence.PRESENT, np.int8)


class Search:
    """One search for the best boundary, unknown chunks taken as present."""

    def __init__(self, layout: Layout, presence: Sequence[I8], computed: int, top: int, byte_limit: int | None) -> None:
        self.layout, self.presence, self.computed, self.top, self.byte_limit = (
            layout,
            presence,
            computed,
            top,
            byte_limit,
        )
        self.passes = 0
        self.rounds = 1
        self.cut: Cut | None = None
        step, idle = layout.kind_step, layout.idle_step
        # The limit itself needs no alignment, only what the kinds ask for.
        self.top_allowed = bool(step) and top % step == 0 and not (idle and top % idle == 0)
        self.needed: tuple[Range, ...] | None = None
        """What the boundary that was found needs, where finding it has told."""

    @property
    def binding(self) -> list[int]:
        """Groups that demand chunks at every boundary: they bind all of them."""
        groups = self.layout.groups
        return [g for g in self.layout.order if groups[g].drafter or not groups[g].kind.free_step]

    @property
    def loose(self) -> list[int]:
        """Groups that have boundaries free of charge."""
        groups = self.layout.groups
        return [g for g in self.layout.order if not groups[g].drafter and groups[g].kind.free_step > 1]

    def highest(self) -> int | None:
        """The boundary above which prefix groups and alignment leave none; None if that takes a search to tell."""
        best = self.ceiling(self._upper())[0]
        return best if best > self.computed and self.byte_limit is None else None

    def best(self) -> int | None:
        """The largest boundary, or None."""
        upper = self._upper()
        if self.layout.kind_step == 0 or upper <= self.computed:
            return None
        highest = self._highest(upper)
        if highest is not None:
            return highest
        possible = self._usable(one_span(self.computed + 1, upper))
        for g in self.binding:
            if not len(possible):
                return None
            possible = self._narrow(g, possible, self._reach(g, possible))
        if not self.loose:
            return self._pick(possible)
        return self._best_loose(possible)

    def _highest(self, upper: int) -> int | None:
        """The largest boundary that prefix groups and alignment leave, if all other groups allow it too.

        Nothing above it is possible, so it is the answer, without a search. None: search.
        """
        best, cut = self.ceiling(upper)
        if best <= self.computed or self.byte_limit is not None:
            return None
        needed = self.layout.needed_ranges(best, self.computed)
        for flags, (lo, hi) in zip(self.presence, needed, strict=True):
            if lo < hi and (hi > len(flags) or _ABSENT in flags[lo:hi].tobytes()):
                return None
        self.needed = needed
        self.passes, self.cut = len(self.layout.groups), cut
        return best

    def ceiling(self, upper: int) -> tuple[int, Cut | None]:
        """The largest boundary, at most `upper`, that prefix groups and alignment leave, and who lowered it last.

        The computed tokens if they leave none, or if there is no prefix group that could say.
        """
        layout, best = self.layout, self._aligned(upper)
        cut: Cut | None = None
        if not layout.groups[layout.order[0]].kind.prefix:
            return self.computed, None
        for g in layout.order:
            group, tokens = layout.groups[g], layout.tokens_per_chunk[g]
            if not group.kind.prefix:
                break
            flags, first = self.presence[g], self.computed // tokens
            gap = flags[first:].tobytes().find(_ABSENT)
            whole = len(flags) if gap < 0 else first + gap
            lowered = self._aligned(min(upper, (whole - group.drafter) * tokens))
            if lowered < best:
                best, cut = lowered, Cut(g, best)
        return max(best, self.computed), cut

    def _aligned(self, ceiling: int) -> int:
        """The largest boundary at or below `ceiling` by alignment and kinds alone, in a layout with prefix groups."""
        if self.top_allowed and ceiling == self.top:
            return ceiling
        step = self.layout.boundary_step
        return ceiling // step * step if step else 0

    def _best_loose(self, possible: Spans) -> int | None:
        """Add the groups that have free boundaries, window by window from the top to keep memory bounded."""
        if not len(possible):
            return None
        reach = {g: self._reach(g, possible) for g in self.loose}
        for turn, (low, high) in enumerate(self._windows(possible)):
            self.rounds += turn > 0
            part = possible.clip(low, high)
            for g in self.loose:
                if not len(part):
                    break
                self.passes += turn > 0  # in the first round `_reach` was this group's pass
                part = self._narrow(g, part, self._with_free(g, part, reach[g]))
            found = self._pick(part)
            if found is not None:
                return found
        return None

    def _upper(self) -> int:
        """No boundary lies above: something must be consumed, and chunks beyond the arrays are absent."""
        if not self.layout.idle_step:
            return self.top
        spans = zip(self.presence, self.layout.tokens_per_chunk, strict=True)
        return min(self.top, max(len(flags) * tokens for flags, tokens in spans))

    def _reach(self, g: int, possible: Spans) -> Spans:
        """The boundaries that group g allows by its present and unknown chunks; one pass over these."""
        self.passes += 1
        group, tokens = self.layout.groups[g], self.layout.tokens_per_chunk[g]
        first = self.computed // tokens  # no kind consumes a chunk before it
        last = -(-int(possible.ends[-1]) // tokens) + group.drafter
        begins, finishes = runs(np.asarray(self.presence[g][first:last]) != Presence.ABSENT)
        starts = group.kind.earliest(begins + first, self.computed, tokens)
        ends = (finishes + first - group.drafter) * tokens
        return Spans(starts, ends).select(starts <= ends)

    def _with_free(self, g: int, possible: Spans, reach: Spans) -> Spans:
        """The boundaries of `reach`, and those in `possible` at which group g consumes nothing."""
        free, low, high = self.layout.groups[g].kind.free_step, int(possible.starts[0]) - 1, int(possible.ends[-1])
        every = self._free_every(g)
        points = multiples(every, low, high) if every <= high else NOTHING
        if high == self.top and self.top % free == 0:
            points = np.union1d(points, [self.top])
        points = points[possible.holds(points) & ~reach.holds(points)]
        return reach.merge(Spans(points, points))

    def _free_every(self, g: int) -> int:
        """The distance of aligned boundaries at which group g consumes nothing."""
        return math.lcm(self.layout.groups[g].kind.free_step, self.layout.boundary_step)

    def _windows(self, possible: Spans) -> Iterator[Range]:
        low, high = int(possible.starts[0]), int(possible.ends[-1])
        width = _POINTS * min(self._free_every(g) for g in self.loose)
        while high >= low:
            yield max(low, high - width + 1), high
            high -= width

    def _narrow(self, g: int, possible: Spans, allowed: Spans) -> Spans:
        before = int(self._tops(possible)[-1])
        rest = self._usable(possible.intersect(allowed))
        if not len(rest) or self._tops(rest)[-1] < before:
            self.cut = Cut(g, before)
        return rest

    def _tops(self, spans: Spans) -> I64:
        """Per span the largest boundary that alignment and kinds allow; below the span's start if there is none."""
        step, idle = self.layout.boundary_step, self.layout.idle_step
        tops = spans.ends // step * step
        if idle and step % idle == 0:
            tops = spans.starts - 1
        elif idle:
            # One step below a multiple of `idle_step` is none, since that does not divide the step.
            tops = np.where(tops % idle == 0, tops - step, tops)
        if self.top_allowed and len(spans) and spans.ends[-1] == self.top:
            tops[-1] = self.top
        return tops

    def _usable(self, spans: Spans) -> Spans:
        return spans.select(self._tops(spans) >= spans.starts)

    def _pick(self, possible: Spans) -> int | None:
        """The largest boundary in `possible` that keeps to the byte limit."""
        if not len(possible):
            return None
        best = int(self._tops(possible)[-1])
        if self.byte_limit is None or self._bytes(np.array([best]))[0] <= self.byte_limit:
            return best
        self.cut = Cut(None, best)
        return self._pick_within(possible, self._byte_ceiling(best))

    def _byte_ceiling(self, best: int) -> int:
        """No boundary above it keeps to the byte limit, by prefix groups alone: theirs only grow with the boundary."""
        limit, computed, layout = self.byte_limit or 0, self.computed, self.layout
        sizes = [
            (layout.tokens_per_chunk[g], layout.chunk_bytes[g]) for g in layout.order if layout.groups[g].kind.prefix
        ]

        def prefix_bytes(boundary: int) -> int:
            return sum((-(-boundary // tokens) - computed // tokens) * size for tokens, size in sizes)

        return computed + bisect_right(range(computed + 1, best + 1), limit, key=prefix_bytes)

    def _pick_within(self, possible: Spans, high: int) -> int | None:
        """Look through all edges from `high` down, in growing rounds: bytes go up and down between them."""
        layout, low_end = self.layout, int(possible.starts[0]) - 1
        density = sum(1 / tokens for tokens in layout.tokens_per_chunk)
        density += sum(2 / layout.groups[g].kind.free_step for g in self.loose)
        wanted = _CANDIDATES
        while high > low_end:
            low = max(low_end, high - max(1, int(wanted / density)))
            candidates = self._candidates(low, high)
            candidates = candidates[possible.holds(candidates)]
            candidates = candidates[self._bytes(candidates) <= (self.byte_limit or 0)]
            if len(candidates):
                return int(candidates[-1])
            high, wanted = low, min(2 * wanted, _POINTS)
        return None

    def _candidates(self, low: int, high: int) -> I64:
        """The boundaries in (low, high] of which none is dominated by a larger one before the next edge."""
        layout, step, idle = self.layout, self.layout.boundary_step, self.layout.idle_step
        pairs = zip(layout.groups, layout.tokens_per_chunk, strict=True)
        edges = [group.kind.edges(low, high, tokens) for group, tokens in pairs]
        found = np.unique(np.concatenate([*edges, np.array([high])])) // step * step
        if idle:
            found = found[found % idle != 0]
        if self.top_allowed and high == self.top:
            found = np.append(found, self.top)
        return np.unique(found[found > low])

    def _bytes(self, boundaries: I64) -> I64:
        """Payload bytes that each boundary consumes; a round of its own."""
        self.rounds += 1
        total = np.zeros(len(boundaries), dtype=np.int64)
        layout = self.layout
        for group, tokens, size in zip(layout.groups, layout.tokens_per_chunk, layout.chunk_bytes, strict=True):
            if size:
                self.passes += 1
                lo, hi = group.kind.consumed(boundaries, self.computed, tokens)
                total += (hi - lo) * size
        return total

    def unknown(self, ranges: Sequence[Range]) -> tuple[I64, ...] | None:
        """The chunks in `ranges` to probe next, None if all are present."""
        layout = self.layout
        found = []
        pairs = list(zip(ranges, self.presence, strict=True))
        if not any(lo < hi and _UNKNOWN in flags[lo:hi].tobytes() for (lo, hi), flags in pairs):
            return None
        for (lo, hi), flags in pairs:
            offsets = np.flatnonzero(np.asarray(flags[lo:hi]) == Presence.UNKNOWN) if lo < hi else NOTHING
            found.append(offsets + lo if len(offsets) else NOTHING)
        first = [g for g in layout.order if layout.groups[g].kind.prefix and len(found[g])]
        if first:
            return tuple(found[g] if g in first else NOTHING for g in range(len(found)))
        return tuple(found) if any(len(chunks) for chunks in found) else None
