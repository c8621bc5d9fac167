"""P7: with a slow, sick or empty tier, simulated throughput is at least 0.97 of that without the tier."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvstrata.core.manager import TieringOffloadingManager as Manager
from kvstrata.sim import replay, stack
from kvstrata.sim.replay import ReplaySettings, run_replay
from kvstrata.sim.timed import TimedTier
from kvstrata.sim.workloads import builtin_workload
from kvstrata.testing.simulation.faults import KINDS
from kvstrata.tiers.base import TierContext
from kvstrata.types import I8, FailCause, JobEnded, KeysDone, Presence, ProbeDone, TierEvent, TierJob

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
    scribbles = False
    """It writes rubbish where a load is to go, before the load does."""
    loses_every_s, lost_share = math.inf, 0.0
    """How often it loses how much of what it holds."""
    crashes = False
    """What it does at that moment fails, too."""
    answers: Presence | FailCause | None = None
    """What probes are told, later: UNKNOWN every second one, anything else all; None: the truth, at once."""
    now = 0.0
    round = 0

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.broken: set[int] = set()
        self.asked: list[tuple[int, list[bytes]]] = []
        self.tickets = 0
        if self.answers is not None:
            self.capabilities = replace(self.capabilities, sync_probe=False)

    def open(self, context: TierContext) -> None:
        """Open, and know primary."""
        self.region = context.region
        super().open(context)

    def _schedule(self, job: TierJob, *, load: bool) -> None:
        super()._schedule(job, load=load)
        mine = self._jobs[job.job_id]
        now = self._clock.monotonic()
        mine.due = [now + (due - now) * self.slower for due in mine.due]
        if load and self.scribbles:
            for offset, length in zip(job.offsets, job.lengths, strict=True):
                self.region[offset : offset + length] = b"\xee" * length

    def probe(self, keys: Sequence[bytes]) -> I8 | int:
        """The tier's answer, a boast, or none yet."""
        if self.answers is not None:
            self.tickets += 1
            self.asked.append((self.tickets, list(keys)))
            return self.tickets
        return np.full(len(keys), Presence.PRESENT, np.int8) if self.boasts else super().probe(keys)

    def poll(self) -> Events:
        """What the fault leaves of the reports."""
        self.now = self._clock.monotonic()
        if int(self.now / self.loses_every_s) != self.round:
            self.round = int(self.now / self.loses_every_s)
            held = list(self.tier._entries)  # type: ignore[attr-defined]
            self.tier.remove(held[: int(len(held) * self.lost_share)])
            if self.crashes:
                self.broken.update(self._jobs)
        return [*type(self).fault(self, super().poll()), *self._answers()]

    def _answers(self) -> Events:
        asked, self.asked = self.asked, []
        error = self.answers if isinstance(self.answers, FailCause) else None
        told: Events = []
        for ticket, keys in asked:
            truth = self.tier.probe(keys)
            assert not isinstance(truth, int)
            known = truth if self.answers is Presence.UNKNOWN and ticket % 2 else np.full(len(keys), self.said, np.int8)
            told.append(ProbeDone(ticket, known, error))
        return told

    @property
    def said(self) -> Presence:
        """What an answer is that does not say the truth."""
        return Presence.UNKNOWN if self.answers is Presence.UNKNOWN else Presence.ABSENT


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


def losing_probes(tier: SickTier, events: Events) -> Events:
    tier.asked.clear()
    return events


def crashing(tier: SickTier, events: Events) -> Events:
    out: Events = []
    for event in events:
        if isinstance(event, KeysDone) and event.job_id in tier.broken:
            bad = [*event.failed, *((index, FailCause.IO_ERROR) for index in event.done)]
            event = KeysDone(event.job_id, [], bad)
        out.append(event)
    return out


def twice(tier: SickTier, events: Events) -> Events:
    return [event for event in events for _ in range(2)]


def cancelling(tier: SickTier, events: Events) -> Events:
    kept = (event for event in events if not isinstance(event, KeysDone))
    return [JobEnded(e.job_id, FailCause.CANCELLED) if isinstance(e, JobEnded) else e for e in kept]


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
    "reporting twice": {"fault": staticmethod(twice)},
    "cancelling": {"fault": staticmethod(cancelling)},
    "scribbling": {"fault": staticmethod(well), "scribbles": True},
    "evicting much": {"fault": staticmethod(well), "loses_every_s": 20.0, "lost_share": 0.3},
    "crashing": {"fault": staticmethod(crashing), "loses_every_s": 30.0, "lost_share": 1.0, "crashes": True},
    "not knowing at first": {"fault": staticmethod(well), "answers": Presence.UNKNOWN},
    "failing probes": {"fault": staticmethod(well), "answers": FailCause.IO_ERROR},
    "losing probes": {"fault": staticmethod(losing_probes), "answers": Presence.ABSENT},
}

KINDS_OF = {
    "late": ("slow", "very slow"), "lost": ("dead", "losing completions"), "stall": ("hanging now and then",),
    "failed": ("failing",), "partial": ("failing in part",), "corrupt": ("corrupt",), "full": ("full",),
    "vanished": ("boasting",), "duplicate": ("reporting twice",), "cancelled": ("cancelling",),
    "scribble": ("scribbling",), "keys removed": ("evicting much",), "limit change": ("evicting much",),
    "crash": ("crashing",), "probe unknown": ("not knowing at first",), "probe error": ("failing probes",),
    "probe lost": ("losing probes",), "device error": ("failing", "failing in part"), "bit rot": ("corrupt",),
    "device full": ("full",),
}  # fmt: skip
"""By kind of fault of the simulation: the sick tiers that have it. A device's faults are seen as those of its tier."""
NOT_OF_A_TIER = {
    "reset memory", "reset content", "clock jump", "silence", "abort", "preempt", "cache dropped", "part taken",
    "copy failed", "restart", "power cut",
}  # fmt: skip
"""Faults of the engine, its ranks, its process or its time."""


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


def test_each_kind_of_fault_of_a_tier_has_a_sick_tier() -> None:
    assert set(KINDS_OF) | NOT_OF_A_TIER == set(KINDS)
    assert {name for names in KINDS_OF.values() for name in names} == set(FAULTS)


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
