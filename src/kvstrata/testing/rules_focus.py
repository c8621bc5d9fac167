"""Rules that follow one request while something of it is under way."""

from __future__ import annotations

from kvstrata.core.requests import RequestState
from kvstrata.testing.rules_engine import EngineRules
from kvstrata.testing.rules_tiers import LOAD_CAUSES, TierRules
from kvstrata.testing.scripted import PendingJob, PendingProbe, ScriptedTier
from kvstrata.testing.world import EngineRequest, RankLoad
from kvstrata.types import FailCause, ResetReason


class FocusRules(EngineRules, TierRules):
    """One request in focus: it moves on, and then what it has under way comes to something."""

    def overtake(self) -> None:
        """Something of a request is under way; the request moves on, and then it comes, or something else strikes."""
        world, choices = self.world, self.choices
        busy = {load.plan.request_id for load in world.loads.values()}
        busy |= {job.request_id for job in world.core.ledger if job.tier >= 0 and job.request_id}
        busy |= {probe.request.request_id for probe in world.manager._presence.probes.values()}
        busy |= {name for name, request in world.requests.items() if request.per_key}
        names = [name for name in world.requests if name in busy]
        loading = [load.plan.request_id for load in world.loads.values() if load.plan.request_id in world.requests]
        if loading and choices.below(2):
            names = loading
        if not names:
            return
        name = choices.pick(names)
        for _ in range(choices.between(0, 3)):
            if name in world.requests:
                self._move_on(world.requests[name])
        for _ in range(choices.between(1, 2)):
            self._strike_back(name)

    def _move_on(self, request: EngineRequest) -> None:
        """The engine does something with this one request."""
        world, choices = self.world, self.choices
        if request.per_key:
            match choices.below(6):
                case 0 | 1:
                    world.strike("preempt", request)
                    world.preempt(request)
                case 2:
                    for load in [one for one in world.loads.values() if one.plan.request_id == request.request_id]:
                        self._report_whole(load)
                case 5:
                    self.abort(request)
                case _:
                    self.scan(request)
            return
        record = world.record(request)
        loading = record is not None and record.state is RequestState.LOADING
        match 0 if loading else choices.below(7):
            case 0:
                world.strike("preempt", request)
                world.preempt(request)
            case 1:
                self.poll_grown_computed(request)
                if request.answer is not None:
                    self._take(request, request.answer.hit or 0)
            case 2:
                self.poll_grown_total(request)
            case 3:
                self.poll_shrunk_computed(request)
            case 4 if request.answer is not None:
                self._take(request, request.answer.hit or 0)
            case 5 if choices.below(2):
                self.abort(request)
            case _:
                self.poll(request)

    def _strike_back(self, name: str) -> None:
        """What the request has under way comes to something; or what strikes everybody strikes it now."""
        world, choices = self.world, self.choices
        loads, jobs, probes = self._loads_of(name), self._jobs_of(name), self._probes_of(name)
        match choices.below(6):
            case 0 | 1 if loads:
                self._report_whole(loads[0], 3)
            case 0 | 1 | 2 if jobs:
                job = choices.pick(jobs)
                self._end_job(job)
                world.settle()
            case 0 | 1 | 2 if probes:
                choices.pick(probes).finish(error=choices.pick((None, FailCause.IO_ERROR)))
                world.settle()
            case 3:
                self.time_large()
            case 4:
                choices.pick((self.time_small, self.tier_loses, self.silence))()
            case 5:
                self._reset(choices.pick(tuple(ResetReason)))

    def _loads_of(self, name: str) -> list[RankLoad]:
        """Loads of a request that the ranks have not reported."""
        return [load for load in self.world.loads.values() if load.plan.request_id == name]

    def _jobs_of(self, name: str) -> list[PendingJob]:
        """Promotions that were started for a request and that tiers have not ended."""
        ledger = self.world.core.ledger
        return [
            job
            for job in (*self.world.lost, *(job for tier in self.world.scripted for job in tier.loads))
            if (known := ledger.get(job.job.job_id)) is not None and known.request_id == name
        ]

    def _probes_of(self, name: str) -> list[PendingProbe]:
        """Probes that were made for a request and that tiers have not answered."""
        book = self.world.manager._presence.probes
        tickets = {ticket for ticket, probe in book.items() if probe.request.request_id == name}
        return [probe for i, tier in enumerate(self.world.tiers) if isinstance(tier, ScriptedTier)
                for probe in tier.probes if (i, probe.ticket) in tickets]  # fmt: skip

    def _report_whole(self, load: RankLoad, fail_of_six: int = 0) -> None:
        """All ranks report."""
        while load.left:
            self.report_load(load, fail_of_six)

    def _end_job(self, job: PendingJob) -> None:
        """A load ends: well, or for any cause."""
        if job in self.world.lost:
            self.world.lost.remove(job)
        rest = [i for i in range(len(job.job.keys)) if i not in job.reported]
        if self.choices.below(3):
            job.finish(failed={i: self.choices.pick(LOAD_CAUSES) for i in self.choices.some(rest)})
        else:
            job.finish()
