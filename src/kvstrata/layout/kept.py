"""What is stored of a request: kept boundaries, and the chunks that they consume.

Full attention and chunked local groups store every whole chunk. Sliding-window and recurrent groups store only what a
kept boundary consumes. Kept boundaries are joint: token counts at which *every* group has all it consumes within the
whole, final chunks of the request's stored range. Rounding each group down by itself would keep chunks that never
meet at one boundary, and lose the next turn.

Words used here: `total` is the end of the stored range, in tokens (the prompt's length where only the prompt is
stored; None while it is not known, where generated tokens are stored too). `final` is how many tokens of the request
are final now: computed, accepted, and outside the margin that the engine may prefill again. `finished` says that no
token will follow.

The functions are the definition. `StoreCursor` (layout/cursor.py) gives the same chunks step by step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvstrata.layout.groups import Layout
from kvstrata.layout.kinds.base import NEVER, multiples
from kvstrata.layout.spans import NOTHING, expand
from kvstrata.types import I64, Bool


def default_keep_interval(layout: Layout) -> int:
    """Four times the largest window, at least 1024, rounded up to the largest tokens per chunk."""
    window = max(int(group.kind.parameters.get("window", 0)) for group in layout.groups)
    largest = max(layout.tokens_per_chunk)
    return -(-max(4 * window, 1024) // largest) * largest


def whole_chunks(layout: Layout, total: int | None, final: int, *, finished: bool = False) -> list[int]:
    """Per group how many chunks of the stored range are whole and final.

    A drafter's newest chunk is written again with the next token: it counts when the request has finished or has
    gone past it.
    """
    end = final if total is None else min(total, final)
    counts = []
    for group, tokens in zip(layout.groups, layout.tokens_per_chunk, strict=True):
        late = group.drafter and not finished
        counts.append(max(0, min(end, final - late)) // tokens)
    return counts


def joint_boundaries(layout: Layout, marks: Iterable[int] | I64, whole: Sequence[int] | None) -> I64:
    """For each mark the largest joint boundary at or below it, 0 if there is none.

    `whole` are the whole chunks per group, as `whole_chunks` gives them; None for as many as needed.
    """
    tops = np.array(marks if isinstance(marks, np.ndarray) else list(marks), dtype=np.int64)
    step, idle = layout.boundary_step, layout.idle_step
    if not len(tops) or layout.kind_step == 0 or (idle and step % idle == 0):
        return np.zeros_like(tops)
    hard, loose = _bounds(layout, whole)
    tops = np.minimum(np.maximum(tops, 0), max(hard, 0)) // step * step
    while True:
        before = tops
        for bound, free in loose:
            held = (tops <= bound) | (tops % free == 0)
            tops = np.where(held, tops, np.maximum(bound, tops // free * free) // step * step)
        if idle:
            tops = np.where((tops > 0) & (tops % idle == 0), tops - step, tops)
        if (tops == before).all():
            return tops


def _bounds(layout: Layout, whole: Sequence[int] | None) -> tuple[int, list[tuple[int, int]]]:
    """The end of what all groups bind, and (end, free step) of those that are free at some boundaries."""
    hard, loose = NEVER, []
    if whole is not None:
        for group, tokens, count in zip(layout.groups, layout.tokens_per_chunk, whole, strict=True):
            bound = (count - group.drafter) * tokens
            if group.drafter or not group.kind.free_step:
                hard = min(hard, bound)
            elif group.kind.free_step > 1:
                loose.append((bound, group.kind.free_step))
    return hard, loose


def _own_boundaries(layout: Layout, marks: Sequence[int], whole: Sequence[int]) -> list[int]:
    """Those marks that are joint boundaries themselves, aligned or not: each may be the limit of a next request."""
    hard, loose = _bounds(layout, whole)
    step, idle = layout.kind_step, layout.idle_step
    return [
        mark
        for mark in marks
        if 0 < mark <= hard
        and step
        and mark % step == 0
        and not (idle and mark % idle == 0)
        and all(mark <= bound or mark % free == 0 for bound, free in loose)
    ]


def kept_boundaries(
    layout: Layout,
    total: int | None,
    prompt: int,
    final: int,
    interval: int | None,
    junctions: Iterable[int] = (),
    *,
    finished: bool = False,
) -> list[int]:
    """The kept boundaries that can be stored at `final` tokens, ascending.

    Kept are, all of them joint: the largest at or below each multiple of `interval` (None: no such marks), each
    junction of a shared prefix, prompt - 1, prompt, and the end of the stored range once that is known; and prompt -
    1, prompt and the end themselves where the kinds allow, because a request of one more token has them as its limit.
    """
    end = total
    if finished:
        end = final if total is None else min(total, final)
    whole = None if end is None else whole_chunks(layout, end, end, finished=True)
    last = final if end is None else end
    named = [prompt - 1, prompt, *junctions]
    if end is not None:
        named = [min(mark, end) for mark in (*named, end)]
    marks = multiples(interval, 0, last) if interval else NOTHING
    found = joint_boundaries(layout, np.concatenate([marks, np.array(named, dtype=np.int64)]), whole)
    if whole is not None and end is not None:
        limits = {min(mark, end) for mark in (prompt - 1, prompt)} | {end}
        found = np.append(found, np.array(_own_boundaries(layout, sorted(limits), whole), dtype=np.int64))
    found = np.unique(found[found > 0])
    ready = _ready(layout, found, whole_chunks(layout, total, final, finished=finished))
    return [int(boundary) for boundary in found[ready]]


def _ready(layout: Layout, boundaries: I64, whole: Sequence[int]) -> Bool:
    """Which boundaries need only chunks that are whole."""
    ready = np.ones(len(boundaries), dtype=np.bool_)
    for g, count in enumerate(whole):
        lo, hi = layout.needed(g, boundaries, 0)
        ready &= (lo >= hi) | (hi <= count)
    return ready


def ready_at(layout: Layout, boundaries: I64) -> I64:
    """For each boundary the final tokens at which all that it needs is whole, while the request goes on."""
    when = np.zeros(len(boundaries), dtype=np.int64)
    if not len(boundaries):
        return when
    for g, (group, tokens) in enumerate(zip(layout.groups, layout.tokens_per_chunk, strict=True)):
        lo, hi = layout.needed(g, boundaries, 0)
        when = np.maximum(when, np.where(lo < hi, hi * tokens + group.drafter, 0))
    return when


def stored_chunks(
    layout: Layout,
    boundaries: Iterable[int],
    final: int,
    *,
    total: int | None = None,
    finished: bool = False,
) -> tuple[I64, ...]:
    """Per group the chunks to store, ascending, for these kept boundaries; a drafter's next chunk is among them."""
    at = np.array(list(boundaries), dtype=np.int64)
    chosen = []
    for g, count in enumerate(whole_chunks(layout, total, final, finished=finished)):
        if layout.groups[g].kind.stores_all:
            chosen.append(np.arange(count, dtype=np.int64))
            continue
        chunks = np.unique(expand(*layout.needed(g, at, 0)))
        chosen.append(chunks[chunks < count])
    return tuple(chosen)
