"""P7: with a slow, sick or empty tier, simulated throughput is at least 0.97 of that without the tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvstrata.core.manager import TieringOffloadingManager as Manager
from kvstrata.sim import replay, stack
from kvstrata.sim.replay import ReplaySettings, run_replay
from kvstrata.sim.timed import TimedTier
from kvstrata.sim.workloads import builtin_workload
from kvstrata.types import I8, FailCause, JobEnded, KeysDone, Presence, TierEvent, TierJob

REQUESTS = 120
SEEDS = (1, 2)
LEAST = 0.97
MODELS = ("plain", "recurrent")
Events = list[TierEvent]


class SickTier(TimedTier):
    """A tier with one fault, all the time."""

    fault: Callable[[SickTier, Events], Events]
    slower = 1.0
    boasts = False
    """It says that it has everything."""
    now = 0.0
    ended = 0

    def _schedule(self, job: TierJob, *, load: bool) -> None:
        super()._schedule(job, load=load)
        mine = self._jobs[job.job_id]
        now = self._clock.monotonic()
        mine.due = [now + (due - now) * self.slower for due in mine.due]

    def probe(self, keys: Sequence[bytes]) -> I8 | int:
        """The tier's answer, or a boast."""
        return np.full(len(keys), Presence.PRESENT, np.int8) if self.boasts else super().probe(keys)

    def poll(self) -> Events:
        """What the fault leaves of the reports."""
        self.now = self._clock.monotonic()
        return type(self).fault(self, super().poll())


def well(tier: SickTier, events: Events) -> Events:
    return events


def dead(tier: SickTier, events: Events) -> Events:
    return [event for event in events if not isinstance(event, KeysDone | JobEnded)]


def lossy(tier: SickTier, events: Events) -> Events:
    kept: Events = []
    for event in events:
        if isinstance(event, KeysDone | JobEnded) and event.job_id % 5 == 0:
            continue
        kept.append(event)
    return kept


def hanging(tier: SickTier, events: Events) -> Events:
    return events if int(tier.now / 7) % 2 else dead(tier, events)


def failing(cause: FailCause, share: int = 1) -> Callable[[SickTier, Events], Events]:
    def fault(tier: SickTier, events: Events) -> Events:
        out: Events = []
        for event in events:
            if isinstance(event, KeysDone):
                bad = [index for index in event.done if index % share == 0]
                good = [index for index in event.done if index % share]
                out.append(KeysDone(event.job_id, good, [*event.failed, *((index, cause) for index in bad)]))
            else:
                out.append(event)
        return out

    return fault


FAULTS: dict[str, dict[str, Any]] = {
    "slow": {"fault": staticmethod(well), "slower": 300.0},
    "very slow": {"fault": staticmethod(well), "slower": 30_000.0},
    "dead": {"fault": staticmethod(dead)},
    "losing completions": {"fault": staticmethod(lossy)},
    "hanging now and then": {"fault": staticmethod(hanging)},
    "failing": {"fault": staticmethod(failing(FailCause.IO_ERROR))},
    "failing in part": {"fault": staticmethod(failing(FailCause.IO_ERROR, 2))},
    "corrupt": {"fault": staticmethod(failing(FailCause.CORRUPT))},
    "full": {"fault": staticmethod(failing(FailCause.NO_SPACE))},
    "boasting": {"fault": staticmethod(well), "boasts": True},
}


def throughput(model: str) -> float:
    """Requests per simulated second over all seeds."""
    seconds = 0.0
    for seed in SEEDS:
        settings = ReplaySettings(
            model=model, concurrency=8, tier="memory", disk_bytes=None, payload_scale=1e-6, seed=seed,
            primary_bytes=60_000,
        )  # fmt: skip
        report = run_replay(settings, builtin_workload(REQUESTS, seed)).report
        assert report.wrong_chunks == 0
        assert report.requests == REQUESTS
        seconds += report.simulated_s
    return REQUESTS * len(SEEDS) / seconds


@pytest.fixture(scope="module")
def without() -> dict[str, float]:
    """The throughput with primary alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack, "TieringOffloadingManager", lambda layout, config, _: Manager(layout, config, []))
        return {model: throughput(model) for model in MODELS}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_sick_tier_is_not_worse_than_none(
    name: str, without: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "TimedTier", type("Sick", (SickTier,), FAULTS[name]))
    ratios = {model: throughput(model) / plain for model, plain in without.items()}
    assert min(ratios.values()) >= LEAST, (name, ratios)


@pytest.mark.slow
def test_a_tier_that_is_well_is_worth_it(without: dict[str, float]) -> None:
    assert np.mean([throughput(model) / plain for model, plain in without.items()]) > 1.01
