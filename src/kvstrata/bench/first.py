"""The first resolve of one prompt against a full primary and the index of a disk tier that holds a million keys."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstrata.bench.steady import SteadyMix
from kvstrata.bench.tiers import IndexTier
from kvstrata.bench.workloads import CHUNK_BYTES
from kvstrata.runtime.clock import SystemClock
from kvstrata.tiers.disk.index import Index, words_of
from kvstrata.types import I8, OffloadKey, Presence, make_key

BATCH = 64
RUNS = 7
SIZES = (2048, 4096, 8192, 16_384)


@dataclass(frozen=True, slots=True)
class FirstRow:
    """Best of some runs; `order`: keys that were stored together ("chain"), "random" ones, or "none" that is there."""

    order: str
    keys: int
    ms: float
    us_per_key: float
    hit_tokens: int


class DiskIndexTier(IndexTier):
    """Answers probes from the disk tier's own index."""

    def __init__(self, keys: Sequence[OffloadKey]) -> None:
        super().__init__("disk-index")
        self._rows = Index(len(keys))
        for at in range(0, len(keys), 65_536):
            words = words_of(keys[at : at + 65_536])
            count = len(words)
            self._rows.insert(words, np.zeros((count, 2), np.uint64), 0, np.arange(count), np.full(count, CHUNK_BYTES))

    def _presence(self, keys: Sequence[OffloadKey]) -> I8:
        there = (self._rows.find(words_of(keys)) >= 0).astype(np.int8)
        there *= Presence.PRESENT
        return there


class FirstResolve:
    """A full primary, and a tier with a million other keys below it."""

    def __init__(self, slots: int, tier_keys: int) -> None:
        self._below = _keys(1, tier_keys)
        mix = SteadyMix(slots, 0, BATCH, "lru", below=[DiskIndexTier(self._below)])
        for _ in range(slots // BATCH):
            mix.store_batch(mix.next_keys())
        self.core = mix.core
        self._asked = 0

    def keys(self, order: str, count: int) -> list[OffloadKey]:
        """Keys of one prompt that primary lacks; a chain lies in the tier's index as it was stored."""
        if order == "none":
            return _keys(3, count)
        if order == "chain":
            return self._below[:count]
        chosen = np.random.default_rng(2).permutation(len(self._below))[:count]
        return [self._below[i] for i in chosen.tolist()]

    def measure(self, order: str, count: int) -> FirstRow:
        """Gather and plan for a new request of these keys, as its first poll does, several times."""
        keys, clock, took, boundary = self.keys(order, count), SystemClock(), [], 0
        total = 16 * count
        for _ in range(RUNS):
            self._asked += 1
            name = f"first{self._asked}"
            self.core.add_request(name, [keys])
            gc.collect()
            began = clock.monotonic()
            boundary = self.core.plan(name, 0, total).boundary
            took.append(clock.monotonic() - began)
            self.core.finish(name)
        return FirstRow(order, count, min(took) * 1e3, min(took) / count * 1e6, boundary)


def _keys(seed: int, count: int) -> list[OffloadKey]:
    raw = np.random.default_rng(seed).bytes(32 * count)
    return [make_key(raw[at : at + 32], 0) for at in range(0, len(raw), 32)]


def measure(slots: int, tier_keys: int) -> list[FirstRow]:
    """All rows."""
    rig = FirstResolve(slots, tier_keys)
    return [rig.measure(order, count) for order in ("chain", "random", "none") for count in SIZES if count <= slots]
