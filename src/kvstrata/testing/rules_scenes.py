"""Scenes: one request is brought on purpose into a chosen state while something of it is under way; then it strikes.

What random steps meet once in thousands of runs (a promotion that fails while its request is already loading) a scene
sets up in a few calls. It tries, and does not insist: where it ends elsewhere, it strikes there.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from kvstrata.testing.coverage import (
    FETCHING,
    GONE,
    KEY_LOADING,
    KEY_NEW,
    KEY_RUNNING,
    LOADING,
    PER_KEY,
    QUEUED,
    TWO_PHASE,
)  # fmt: skip
from kvstrata.testing.rules_leads import LeadRules
from kvstrata.testing.rules_tiers import LOAD_CAUSES
from kvstrata.testing.scripted import PendingJob, PendingProbe
from kvstrata.testing.world import EngineRequest, RankLoad
from kvstrata.types import FailCause, ResetReason


class Way(enum.Enum):
    """What is under way in a scene."""

    NOTHING = "nothing"
    PROMOTION = "promotion"
    LOAD = "load"
    PROBE = "probe"
    STORE = "store"


# What is rare by itself is chosen more often.
WAYS = (*Way, Way.PROBE, Way.NOTHING, Way.PROMOTION, Way.PROMOTION)
TARGETS = (*TWO_PHASE, QUEUED, FETCHING, LOADING, LOADING, GONE)
KEY_TARGETS = (*PER_KEY, KEY_NEW, KEY_LOADING, KEY_RUNNING, GONE)


class SceneRules(LeadRules):
    """Scenes with one request as their actor."""

    def scene(self) -> None:
        """Something of one request is under way, the request moves to some state, and then something strikes it."""
        choices = self.choices
        self._kept, self._later = None, False
        if choices.below(2):
            self._tidy(None)
        late = any(not tier.capabilities.sync_probe for tier in self.world.scripted)
        way = choices.pick([way for way in WAYS if late or way is not Way.PROBE])
        self._later = way is Way.PROBE
        request = self._actor(per_key=way is not Way.STORE and choices.below(3) == 2)
        if request is None:
            return
        self._start(way, request)
        self._lead(request, choices.pick(KEY_TARGETS if request.per_key else TARGETS))
        what = choices.below(8)
        if way is not Way.NOTHING and what < 5:
            self._come(way, request.request_id)
        elif what % 2 and self._here(request):
            self._strike(request)
        else:
            self._strike_everybody(request)

    # -- something gets under way

    def _start(self, way: Way, request: EngineRequest) -> None:
        """Sometimes a part of it is in primary already."""
        choices = self.choices
        loading = KEY_LOADING if request.per_key else LOADING
        if choices.below(2) or way is Way.LOAD:
            self._fetch(request)
            self._lead(request, loading)
            if way is not Way.LOAD and choices.below(2):
                self._report_other(request)
        if not self._here(request):
            return
        match way:
            case Way.LOAD:
                self._keep_last(self._loads_of(request.request_id))
            case Way.STORE:
                self._begin_store(request)
            case Way.PROMOTION:
                if self.world.state(request) == LOADING:
                    self._preempt(request)
                self._grow(request, put=True)
                self._fetch(request)
                self._keep_last(self._jobs_of(request.request_id))
            case Way.PROBE:
                self._begin_probe(request)

    def _keep_last(self, under_way: Sequence[RankLoad | PendingJob | PendingProbe]) -> None:
        self._kept = under_way[-1] if under_way else None

    def _begin_store(self, request: EngineRequest) -> None:
        self._grow(request, put=False)
        self.world.strike("store begun", request)
        chunks = [(g, i) for g, keys in enumerate(request.keys) for i in range(len(keys))]
        self.world.prepare_store(request, chunks)

    def _begin_probe(self, request: EngineRequest) -> None:
        """It asks for new chunks; where it asks once more, the first probe is not what it waits for."""
        if self.world.state(request) == LOADING:
            self._preempt(request)
        self._grow(request, put=self.choices.below(4) > 0)
        self._ask(request)
        self._keep_last(self._probes_of(request.request_id))
        if self._here(request) and self.choices.below(4):
            self._preempt(request)

    # -- it comes

    def _come(self, way: Way, name: str) -> None:
        """What is under way comes to something."""
        choices = self.choices
        if way is Way.STORE:
            for store in [one for one in self.world.stores.values() if one.plan.request_id == name]:
                ok = choices.below(2) == 0
                while store.done < self.world.ranks:
                    if store.done == self.world.ranks - 1:
                        self.world.strike("store ok" if store.ok and ok else "store failed", name)
                    self.world.report_store(store, ok)
        elif way is Way.LOAD:
            loads = self._loads_of(name)
            for load in [load for load in loads if load is self._kept] or loads[:1]:
                self._report_whole(load, 3)
        elif choices.below(5) == 4:
            self._advance("time large", self.world.config.job_idle_s)
        elif way is Way.PROMOTION:
            jobs = self._jobs_of(name)
            for job in [job for job in jobs if job is self._kept] or jobs[:1]:
                self._end_somehow(job)
            self.world.settle()
        else:
            probes = self._probes_of(name)
            for probe in [probe for probe in probes if probe is self._kept] or probes[:1]:
                probe.finish(error=choices.pick((None, FailCause.IO_ERROR)))
            self.world.settle()

    def _end_somehow(self, job: PendingJob) -> None:
        """A promotion lands, or fails as a whole for one cause."""
        if self.choices.below(3) == 0:
            self._end_job(job)
            return
        if job in self.world.lost:
            self.world.lost.remove(job)
        cause = self.choices.pick(LOAD_CAUSES)
        job.finish(failed={i: cause for i in range(len(job.job.keys)) if i not in job.reported})

    def _strike_everybody(self, request: EngineRequest) -> None:
        """What is not about this request alone strikes it too."""
        choices = self.choices
        match choices.below(7):
            case 0 | 1:
                self._reset(choices.pick(tuple(ResetReason)))
                self._take_lost(request)
            case 2:
                self.time_large()
            case 3:
                self.time_small()
            case 4:
                self.silence()
            case 5:
                self.tier_loses()
            case _:
                self._break_a_tier()

    def _strike(self, request: EngineRequest) -> None:
        """What the engine may do at any time."""
        choices = self.choices
        calls: list[Callable[[EngineRequest], object]] = [self._preempt, self.abort]
        if request.per_key:
            calls.append(self._lookups)
        elif request.answer is not None and request.answer.hit and choices.below(2):
            self._reset(choices.pick(tuple(ResetReason)))
            calls = [self._take_lost]
        else:
            calls += [self.poll_shrunk_computed] * (6 if request.computed else 1)
            calls += [self.poll_grown_computed, self.poll_grown_total, self.poll]
        choices.pick(calls)(request)

    def _take_lost(self, request: EngineRequest) -> None:
        """What was reported is taken, if it is not too late even for that."""
        if self._here(request) and request.answer is not None:
            self._take(request, request.answer.hit or 0)

    def _break_a_tier(self) -> None:
        """Reads of somebody fail until a breaker opens."""
        other = self._actor(per_key=False)
        if other is None:
            return
        self._fetch(other)
        for job in self._jobs_of(other.request_id):
            for i in range(len(job.job.keys)):
                if i not in job.reported:
                    job.progress(failed={i: FailCause.IO_ERROR})
        self.world.settle()
