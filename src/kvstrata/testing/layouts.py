"""Random layouts and patterns of presence for property tests; the caller passes the seeded generator."""

from __future__ import annotations

import numpy as np

from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds import ChunkedLocal, FullAttention, Kind, RecurrentState, SlidingWindow
from kvstrata.types import I8, Presence


def random_layout(rng: np.random.Generator, *, groups: int = 12, drafters: bool = True) -> Layout:
    """1 to `groups` groups of all kinds with unlike, often non-dividing block sizes."""
    count = int(rng.integers(1, groups + 1))
    kinds = rng.integers(0, 4, size=count) if rng.random() < 0.8 else np.full(count, rng.integers(0, 4))
    sizes = [[1, 2, 3, 4, 5, 6, 7, 8], [2, 4, 8, 16], [4], [3, 5, 7]][int(rng.integers(4))]
    made = []
    for kind in kinds:
        drafter = bool(drafters and kind < 2 and rng.random() < 0.2)
        size = int(rng.choice(sizes))
        made.append(Group(_random_kind(rng, int(kind)), size, drafter=drafter, chunk_bytes=int(rng.integers(1, 50))))
    alignment = int(rng.choice([1, 1, 1, 2, 3, 4, 8, 10]))
    return Layout(tuple(made), int(rng.choice([1, 1, 2, 3, 4])), alignment)


def _random_kind(rng: np.random.Generator, kind: int) -> Kind:
    match kind:
        case 0:
            return FullAttention()
        case 1:
            return SlidingWindow(int(rng.integers(1, 25)), int(rng.choice([0, 0, 0, 1, 3, 8])))
        case 2:
            return ChunkedLocal(int(rng.choice([1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32])))
    return RecurrentState()


def random_presence(rng: np.random.Generator, layout: Layout, total: int, *, unknown: float = 0.0) -> list[I8]:
    """Presence per group: a prefix, holes, single chunks or all; `unknown` is the share of unknown chunks.

    Arrays may be shorter than the prompt, or reach over its end (a partly filled last chunk, or the next one).
    """
    return [_random_flags(rng, -(-total // tokens) + 1, unknown) for tokens in layout.tokens_per_chunk]


def _random_flags(rng: np.random.Generator, count: int, unknown: float) -> I8:
    density = float(rng.choice([0.3, 0.7, 0.9, 0.97, 1.0, 1.0]))
    there = rng.random(count) < density
    if rng.random() < 0.3:
        there[int(rng.integers(0, count + 1)) :] = False
    flags = np.where(there, np.int8(Presence.PRESENT), np.int8(Presence.ABSENT)).astype(np.int8)
    flags[rng.random(count) < unknown] = Presence.UNKNOWN
    return flags[: int(rng.integers(0, count + 1))] if rng.random() < 0.1 else flags
