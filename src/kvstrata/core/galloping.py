"""Galloping: what to ask of a tier whose probes cost a round trip, and what its answers allow to assume. Pure.

Presence along a full-attention chain is nearly monotonic: tails are evicted before heads. So a few evenly spread chunks
of the open part are asked in each round, all at once, and a chunk with a present one next to the right among the
answers is *assumed* present. 2048 chunks take three rounds and at most 38 keys. An assumption may be fetched on, never
reported on: a hit is reported when all of it is ready in primary.

Windowed and recurrent groups are asked for what the best boundary needs and nothing else, until some of it is absent.
From then on each round reaches as much further towards the head as was found absent so far, since their chunks are kept
at few boundaries only and each boundary asked by itself would cost a round trip.
"""

from __future__ import annotations

import numpy as np

from kvstrata.types import I8, I64, Capabilities, Presence

NOT_ASKED = -1
ASKED = -2
"""Values of a request's record of answers besides those of `Presence`."""

FIRST_POINTS = 14
"""Chunks asked in the first round, the first and the last one included: nothing there and all there are common."""
POINTS = 12
"""Chunks asked in each later round."""


def gallops(capabilities: Capabilities) -> bool:
    """Whether probes of such a tier gallop."""
    return not capabilities.sync_probe and capabilities.probe_cost_s > 0


def inferred(kept: I8) -> I8:
    """The answers so far of one prefix group, by chunk, with `ASSUMED` where the next answer to the right is present.

    Only chunks that are not answered are assumed: one that the tier is itself still writing stays unknown.
    """
    answers = kept.copy()
    told = np.flatnonzero((kept == Presence.PRESENT) | (kept == Presence.ABSENT))
    open_ = np.flatnonzero(kept < 0)
    if len(told) and len(open_):
        right = np.searchsorted(told, open_)
        known = right < len(told)
        there = kept[told[right[known]]] == Presence.PRESENT
        answers[open_[known][there]] = Presence.ASSUMED
    return answers


def next_round(kept: I8, wanted: I64) -> I64:
    """Which of the `wanted` chunks of a prefix group to ask now; none while answers of the last round are due."""
    state = kept[wanted]
    if (state == ASKED).any():
        return wanted[:0]
    return _spread(wanted[state == NOT_ASKED], first=not (kept >= 0).any())


def _spread(index: I64, *, first: bool) -> I64:
    """Evenly spread entries of `index`, ascending: with both ends in the first round, else between them."""
    count = FIRST_POINTS if first else POINTS
    if len(index) <= count:
        return index
    steps = np.arange(count, dtype=np.int64)
    places = steps * (len(index) - 1) // (count - 1) if first else (steps + 1) * (len(index) + 1) // (count + 1) - 1
    return index.take(places)


def reach(kept: I8, wanted: I64, presence: I8, first: int) -> I64:
    """The `wanted` chunks of any other group that were not asked, and further unknown ones before them.

    `presence` is what is known of the group from all tiers, `first` its first chunk that a boundary may consume.
    """
    fresh: I64 = wanted[kept[wanted] == NOT_ASKED]
    further = int((kept == Presence.ABSENT).sum()) - 1
    if further <= 0 or not len(fresh):
        return fresh
    before = np.arange(first, int(wanted[0]), dtype=np.int64)
    before = before[(kept[before] == NOT_ASKED) & (presence[before] == Presence.UNKNOWN)]
    return np.concatenate([before[max(len(before) - further, 0) :], fresh])
