"""The tier contract suite fails tiers that break a rule: each broken tier is caught by the test that names the rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstrata.testing.tier_contract import TierContract
from kvstrata.tiers.base import Tier
from kvstrata.tiers.memory import MemoryTier
from kvstrata.types import I8, FailCause, JobEnded, KeysDone, OffloadKey, TierEvent, TierJob, TierUsage


class ShowsTooEarly(MemoryTier):
    """Answers present for everything."""

    def probe(self, keys: Sequence[OffloadKey]) -> I8:
        return np.full(len(keys), 2, dtype=np.int8)


class EndsTwice(MemoryTier):
    def submit_store(self, job: TierJob) -> None:
        super().submit_store(job)
        self._emit(JobEnded(job.job_id))


class NeverEnds(MemoryTier):
    def poll(self) -> list[TierEvent]:
        return [event for event in super().poll() if not isinstance(event, JobEnded)]


class DoesNotVerify(MemoryTier):
    def __init__(self, **settings: object) -> None:
        super().__init__(verify=False, **settings)  # type: ignore[arg-type]


class ForgetsTheLimit(MemoryTier):
    def _make_room(self, most: int) -> None:
        """Evict nothing."""

    def usage(self) -> TierUsage:
        usage = super().usage()
        return TierUsage(min(usage.bytes_held, self._limit or 0), 0, self._limit, usage.keys)


class WritesBesideItsRange(MemoryTier):
    def submit_load(self, job: TierJob) -> None:
        super().submit_load(job)
        if self._context is not None and job.keys:
            self._context.region[job.offsets[0] + job.lengths[0]] = 0


class DropsOnPassingErrors(MemoryTier):
    def submit_load(self, job: TierJob) -> None:
        self._emit(KeysDone(job.job_id, (), [(i, FailCause.GONE) for i in range(len(job.keys))]), JobEnded(job.job_id))


class EvictsTheWarmest(MemoryTier):
    def _make_room(self, most: int) -> None:
        self._entries = type(self._entries)(reversed(self._entries.items()))
        super()._make_room(most)
        self._entries = type(self._entries)(reversed(self._entries.items()))


class EvictsInSilence(MemoryTier):
    def poll(self) -> list[TierEvent]:
        return [event for event in super().poll() if isinstance(event, KeysDone | JobEnded)]


class ServesAfterClose(MemoryTier):
    def close(self, timeout: float = 5.0) -> None:
        """Keep everything."""


class FailsOnDuplicates(MemoryTier):
    def submit_store(self, job: TierJob) -> None:
        if len(set(job.keys)) < len(job.keys):
            self._emit(JobEnded(job.job_id, FailCause.REFUSED))
        else:
            super().submit_store(job)


BROKEN = [
    (ShowsTooEarly, "test_a_key_is_visible_only_when_its_bytes_are_there"),
    (ShowsTooEarly, "test_probe_and_load_agree"),
    (EndsTwice, "test_what_was_stored_is_loaded"),
    (NeverEnds, "test_what_was_stored_is_loaded"),
    (DoesNotVerify, "test_damaged_bytes_are_a_miss_and_neighbours_are_not"),
    (ForgetsTheLimit, "test_the_limit_is_hard"),
    (WritesBesideItsRange, "test_what_was_stored_is_loaded"),
    (DropsOnPassingErrors, "test_results_are_per_key"),
    (EvictsTheWarmest, "test_the_coldest_is_evicted_first"),
    (EvictsInSilence, "test_evictions_are_told"),
    (ServesAfterClose, "test_close_is_idempotent_and_afterwards_all_is_refused"),
    (FailsOnDuplicates, "test_a_key_twice_in_one_store"),
]


def suite_for(make: Callable[..., MemoryTier]) -> type[TierContract]:
    class Suite(TierContract):
        persistent = False

        def make(self, limit: int | None) -> Tier:
            return make(limit=limit)

        def capacity(self, chunks: int) -> int:
            return chunks * self.chunk_bytes

        def damage(self, tier: Tier, key: OffloadKey) -> None:
            assert isinstance(tier, MemoryTier)
            tier.damage(key)

    return Suite


def run(suite: type[TierContract], test: str, place: Path) -> None:
    """Run one test of a suite as pytest would, teardown included."""
    instance = suite()
    instance.place = place
    instance._rigs = []
    getattr(instance, test)()


@pytest.mark.parametrize(("broken", "test"), BROKEN)
def test_a_broken_tier_is_caught_by_name(broken: type[MemoryTier], test: str, tmp_path: Path) -> None:
    run(suite_for(MemoryTier), test, tmp_path)
    with pytest.raises((AssertionError, KeyError)):
        run(suite_for(broken), test, tmp_path)
