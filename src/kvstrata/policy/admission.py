"""Admission: which chunks are worth storing at all, by how often their keys were seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstrata.errors import ConfigError
from kvstrata.types import Bool, OffloadKey


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """What an admission rule has answered so far, and how many keys it remembers now."""

    admitted: int
    rejected: int
    remembered: int


class ThresholdAdmission:
    """Admits a key from its `threshold`-th sighting on; the default admits everything and remembers nothing.

    Counts live in two generations of at most `capacity` keys each: a full young one becomes the old one, and the
    old one is forgotten. A key seen again moves to the young one with its count, so what keeps coming is kept.
    """

    def __init__(self, threshold: int = 1, capacity: int = 65_536) -> None:
        if threshold < 1:
            raise ConfigError(f"admission threshold must be at least 1, not {threshold}")
        if capacity < 1:
            raise ConfigError(f"admission capacity must be at least 1 key, not {capacity}")
        self._threshold = threshold
        self._capacity = capacity
        self._young: dict[OffloadKey, int] = {}
        self._old: dict[OffloadKey, int] = {}
        self._admitted = 0
        self._rejected = 0

    def admit(self, keys: Sequence[OffloadKey]) -> Bool:
        """Counts one sighting of each key and says which may be stored."""
        if self._threshold == 1:
            self._admitted += len(keys)
            return np.ones(len(keys), dtype=np.bool_)
        answers = np.fromiter((self._sight(key) >= self._threshold for key in keys), np.bool_, len(keys))
        admitted = int(np.count_nonzero(answers))
        self._admitted += admitted
        self._rejected += len(keys) - admitted
        return answers

    def _sight(self, key: OffloadKey) -> int:
        count = self._young.get(key)
        if count is None:
            count = self._old.pop(key, 0)
            if len(self._young) >= self._capacity:
                self._old, self._young = self._young, {}
        count = min(count + 1, self._threshold)
        self._young[key] = count
        return count

    def statistics(self) -> AdmissionStatistics:
        return AdmissionStatistics(self._admitted, self._rejected, len(self._young) + len(self._old))
