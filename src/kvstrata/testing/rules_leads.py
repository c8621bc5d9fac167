"""Leading one request, on purpose, into a chosen state, while something of it is kept under way."""

from __future__ import annotations

from kvstrata.core.messages import RequestContext, RequestOptions
from kvstrata.core.residency import SlotState
from kvstrata.testing.coverage import (
    FETCHING,
    GONE,
    KEY_LOADING,
    KEY_NEW,
    KEY_RUNNING,
    KEY_WAITING,
    LOADING,
    NEW,
    QUEUED,
    READY,
    RESOLVING,
    RUNNING,
)  # fmt: skip
from kvstrata.testing.rules_engine import MOST_REQUESTS
from kvstrata.testing.rules_focus import FocusRules
from kvstrata.testing.scripted import PendingJob, PendingProbe, ScriptedTier
from kvstrata.testing.world import EngineRequest, RankLoad

LONGEST = 100
"""Tokens up to which a scene lets a prompt grow."""


class LeadRules(FocusRules):
    """How an actor comes to be, and how it is led on; what may not be touched before the end is `_kept`."""

    _kept: RankLoad | PendingJob | PendingProbe | None = None
    _later = False
    """Whether prompts are put into tiers that answer probes later, if there are any."""

    # -- the actor

    def _actor(self, *, per_key: bool) -> EngineRequest | None:
        """A new request with a prompt of its own, all of which a tier that can be read holds; None without one."""
        world, choices = self.world, self.choices
        tiers = self._readable()
        if not tiers:
            self._mend()
            return None
        if len(world.requests) >= MOST_REQUESTS:
            self.abort()
        name = f"r{world.names}"
        world.names += 1
        context = RequestContext(name)
        most = choices.pick((1, 2, 4)) * max(world.layout.tokens_per_chunk)
        total = choices.between(2, min(most + 2, LONGEST // 2))
        request = EngineRequest(
            name, ((name, 1 << 30),), total, RequestOptions(), per_key, context, mark=world.now
        )  # fmt: skip
        request.last_poll = world.now
        if not per_key and choices.below(2):
            request.computed = choices.below(request.total)
        world.add(request)
        self._put_keys(choices.pick(tiers), request.keys)
        return request if name in world.requests else None

    def _mend(self) -> None:
        """Tiers come back: what hangs ends, purges become durable, and breakers have their time."""
        self._tidy(None)
        self.purge_durable()
        self.time_large()
        self.world.settle()

    def _tidy(self, request: EngineRequest | None) -> None:
        """Room is made: what is being read comes, and all others leave."""
        world = self.world
        for job in [*world.lost, *(job for tier in world.scripted for job in tier.loads)]:
            if job.is_load and job is not self._kept:
                job.finish()
        world.lost = [job for job in world.lost if not job.is_load or job is self._kept]
        for tier in world.scripted:
            tier.writing = set()
        world.settle()
        for other in list(world.requests.values()):
            if other is not request:
                self.abort(other)

    def _readable(self) -> list[ScriptedTier]:
        core = self.world.core
        tiers = [self.world.tiers[tier.index] for tier in core.tiers if core.readable(tier)]
        scripted = [tier for tier in tiers if isinstance(tier, ScriptedTier)]
        late = [tier for tier in scripted if not tier.capabilities.sync_probe] if self._later else []
        return late or scripted

    # -- it asks, and gets longer

    def _here(self, request: EngineRequest) -> bool:
        """Whether the request was not forgotten."""
        return self.world.requests.get(request.request_id) is request

    def _ask(self, request: EngineRequest) -> None:
        """One step of the engine for this request."""
        if request.per_key:
            self._lookups(request)
            self.end_step()
        elif self.world.state(request) != LOADING:
            self.poll(request)

    def _fetch(self, request: EngineRequest) -> None:
        """Ask until tiers are reading for the request."""
        for _ in range(3):
            if not self._here(request) or self._jobs_of(request.request_id):
                return
            self._ask(request)
            self._answer(request)

    def _grow(self, request: EngineRequest, *, put: bool) -> None:
        """The prompt gets longer by a few chunks, which a tier holds already, or nobody."""
        world, choices = self.world, self.choices
        if request.total >= LONGEST:
            return
        total = request.total + choices.between(1, 2 * max(world.layout.tokens_per_chunk))
        if not request.per_key:
            world.strike("extend", request)
        world.extend(request, total)
        tiers = self._readable() if put else []
        if tiers:
            self._put_keys(choices.pick(tiers), request.keys)
        if request.per_key:
            request.total = total
        elif world.state(request) != LOADING:
            self._poll("poll n grown", request, request.computed, total)

    # -- the request moves on

    def _lead(self, request: EngineRequest, target: str) -> None:
        """Try to bring the request into a state."""
        for _ in range(8):
            if not self._here(request) or self.world.state(request) == target:
                return
            if target == GONE:
                self.abort(request)
            elif request.per_key:
                self._lead_by_keys(request, target)
            else:
                self._lead_by_polls(request, target)

    def _preempt(self, request: EngineRequest) -> None:
        self.world.strike("preempt", request)
        self.world.preempt(request)

    def _report_other(self, request: EngineRequest) -> bool:
        """The newest load that the scene does not keep is reported; False if there is none."""
        loads = [load for load in self._loads_of(request.request_id) if load is not self._kept]
        if loads:
            self._report_whole(loads[-1])
        return bool(loads)

    def _lead_by_polls(self, request: EngineRequest, target: str) -> None:
        state = self.world.state(request)
        if target == NEW or (state == LOADING and not (target == RUNNING and self._report_other(request))):
            self._preempt(request)
        elif state == LOADING:
            return
        elif target == RESOLVING:
            for tier in self.world.scripted:
                tier.writing = {key for keys in self.world.keys_of(request.path, LONGEST) for key in keys}
            self._grow(request, put=False)
            self.poll(request)
        elif target == QUEUED:
            self._crowd()
            self._grow_here(request)
        elif target == FETCHING:
            if state == RESOLVING:
                self._answer(request)
            else:
                self._grow(request, put=True)
        else:
            self._lead_to_hit(request, state, target)

    def _grow_here(self, request: EngineRequest) -> None:
        if self._here(request):
            self._grow(request, put=True)

    def _lead_to_hit(self, request: EngineRequest, state: str, target: str) -> None:
        """Towards a reported hit, or past it."""
        choices = self.choices
        if state == READY and request.answer is not None:
            hit = request.answer.hit or 0
            if target == RUNNING:
                self._take(request, 0)
            elif hit:
                self._take(request, choices.pick((hit, hit, choices.between(1, hit))))
            elif request.computed:
                self.poll_shrunk_computed(request)
            else:
                self._grow(request, put=True)
        elif state in (RESOLVING, FETCHING, QUEUED):
            self._wait(request, state, target)
            if self._here(request):
                self.poll(request)
        else:
            self.poll(request)

    def _wait(self, request: EngineRequest, state: str, target: str) -> None:
        """It waits: that comes, or time runs out, or it is not needed any more; what the scene keeps hangs."""
        match self.choices.below(5):
            case 0 | 1 if state == FETCHING:
                self._land_some(request)
                self._advance("time large", 2.5)
            case 0 if target != LOADING:
                self._poll("poll C grown", request, request.total, request.total)
            case 0:
                self._advance("time large", 2.5)
            case _ if state == QUEUED:
                self._tidy(request)
            case _:
                for job in self._jobs_of(request.request_id):
                    if job is not self._kept:
                        job.finish()
                self._answer(request)

    def _answer(self, request: EngineRequest) -> None:
        """All its probes are answered, but for what the scene keeps."""
        for tier in self.world.scripted:
            tier.writing = set()
        for probe in self._probes_of(request.request_id):
            if probe is not self._kept:
                probe.finish()
        self.world.settle()

    def _land_some(self, request: EngineRequest) -> None:
        """A leading part of what is being read for it lands; the jobs go on."""
        for job in self._jobs_of(request.request_id):
            rest = [i for i in range(len(job.job.keys)) if i not in job.reported and job.job.keys[i] in job.tier.held]
            job.progress(rest[: len(rest) // 2] if job is self._kept else rest)
        self.world.settle()

    def _crowd(self) -> None:
        """Somebody else fills primary, and waits."""
        for _ in range(self.choices.between(1, 2)):
            other = self._actor(per_key=False)
            if other is not None:
                self._grow(other, put=True)
                self._fetch(other)

    def _lead_by_keys(self, request: EngineRequest, target: str) -> None:
        state = self.world.state(request)
        if target == KEY_NEW and state in (KEY_LOADING, KEY_RUNNING):
            self._preempt(request)
        elif target == KEY_WAITING:
            self._lookups(request)
        elif not (target == KEY_RUNNING and state == KEY_LOADING and self._report_other(request)):
            self._load_ready(request)

    def _load_ready(self, request: EngineRequest) -> None:
        """Load those of its keys that are readable; where none is, some land."""
        residency = self.world.core.residency
        self._lookups(request)
        keys = [key for group in request.keys for key in group if key not in request.bad]
        ready = [key for key in keys if (s := residency.slot_of(key)) >= 0 and residency.state[s] == SlotState.READY]
        if ready:
            self._load_keys(request, self.choices.some(ready) or ready)
            return
        self.end_step()
        self.world.settle()
        if self._jobs_of(request.request_id):
            self._land_some(request)
        else:
            self._answer(request)
