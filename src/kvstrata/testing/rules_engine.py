"""Rules of the engine: its requests, polls, takes, stores and resets, and what its ranks report."""

from __future__ import annotations

from kvstrata.core.messages import ALL_TIERS, RequestContext, RequestOptions
from kvstrata.core.requests import WAITING, RequestState
from kvstrata.testing.rules_keys import KeyRules
from kvstrata.testing.world import EngineRequest, RankLoad
from kvstrata.testing.world_checks import demand
from kvstrata.types import ResetReason

MOST_REQUESTS = 8


class EngineRules(KeyRules):
    """What the engine and its ranks do."""

    def new_request(self) -> None:
        """A request with a prompt of its own, or shared; through either door."""
        world, choices = self.world, self.choices
        if len(world.requests) >= MOST_REQUESTS:
            return
        reused = world.profile.churn and choices.below(10) == 9
        names = [f"r{i}" for i in range(world.names) if f"r{i}" not in world.requests] if reused else []
        if not names:
            names = [f"r{world.names}"]
            world.names += 1
        name = choices.pick(names)
        plain = choices.below(3) < 2
        faulty = world.profile.faults
        options = RequestOptions(
            load_tiers=ALL_TIERS if plain else self._filter(),
            store_tiers=ALL_TIERS if plain else self._filter(),
            may_load=plain or choices.below(10) != 9,
            may_store=plain or choices.below(6) != 5,
            max_hit_tokens=None if plain else choices.pick((None, None, None, 7, 0)),
            stall_s=None if plain or not faulty else choices.pick((None, 1.0, 0.0)),
            total_s=None if plain or not faulty else choices.pick((None, 1.0, 0.0)),
        )
        per_key = world.profile.per_key and choices.below(4) == 3
        excluded = choices.some(t.name for t in world.tiers) if per_key and choices.below(4) == 3 else ()
        context = RequestContext(name, options.load_tiers, frozenset(excluded))
        request = EngineRequest(
            name, world.fork(choices, name), choices.between(1, 60), options, per_key, context, mark=world.now
        )
        request.last_poll = world.now
        if choices.below(4) == 3:
            request.computed = choices.below(request.total)
        world.add(request)

    def poll(self, request: EngineRequest | None = None) -> None:
        """The same poll again, or the first one."""
        request = request or self._one()
        if request is not None:
            self._poll("poll", request, request.computed, request.total)

    def poll_grown_computed(self, request: EngineRequest | None = None) -> None:
        """The engine has found more in its own cache."""
        request = request or self._one()
        if request is not None and request.computed < request.total:
            more = self.choices.between(request.computed + 1, request.total)
            self._poll("poll C grown", request, more, request.total)

    def poll_shrunk_computed(self, request: EngineRequest | None = None) -> None:
        """The engine has lost some of its own cache."""
        request = request or self._one()
        if request is not None and request.computed:
            self._poll("poll C shrunk", request, self.choices.below(request.computed), request.total)

    def poll_grown_total(self, request: EngineRequest | None = None) -> None:
        """The request has generated tokens; the chunks that became whole may have been hashed, or not yet."""
        request = request or self._one()
        if request is not None and request.total < 80:
            total = request.total + self.choices.between(1, 12)
            if self.choices.below(3):
                self.world.strike("extend", request)
                self.world.extend(request, total)
            self._poll("poll n grown", request, request.computed, total)

    def _poll(self, event: str, request: EngineRequest, computed: int, total: int) -> None:
        world, checks = self.world, self.checks
        record = world.core.requests.require(request.request_id)
        world.strike(event, request)
        was = record.state
        unchanged = (computed, total) == (record.computed, record.total)
        same = was in WAITING and unchanged
        before = checks.before_poll()
        present = checks.present(request) if world.profile.at_once else []
        answer = world.poll(request, computed, total)
        checks.polled(request, answer, before, same and record.state is was)
        if world.profile.at_once and was is not RequestState.LOADING:
            world.settle()
            if answer.hit is None:
                answer = world.poll(request, computed, total)
                checks.polled(request, answer, before, False)
            if (was is RequestState.NEW or not unchanged) and not world.stores:
                checks.equals_oracle(request, present, answer)

    def engine_step(self) -> None:
        """The scheduler looks through its waiting queue and admits some of it."""
        world, admitted = self.world, 0
        for request in list(world.requests.values()):
            record = world.record(request)
            if record is None:
                continue
            if request.per_key:
                self.scan(request)
                continue
            if record.state in (RequestState.LOADING, RequestState.RUNNING):
                continue
            self.poll(request)
            if request.answer is not None and admitted < 2:
                admitted += 1
                self._take(request, request.answer.hit or 0)
        self.end_step()

    def take(self) -> None:
        """The engine takes the hit: all, a part, or nothing; also when it was lost since it was reported."""
        world, choices = self.world, self.choices
        reported = [r for r in world.requests.values() if r.answer is not None and not r.per_key]
        if not reported:
            return
        request = choices.pick([r for r in reported if r.answer is not None and r.answer.hit] or reported)
        hit = request.answer.hit if request.answer is not None and request.answer.hit else 0
        tokens = hit
        if world.profile.churn and choices.below(2):
            tokens = choices.pick((0, choices.below(hit + 1)))
        self._take(request, tokens)

    def _take(self, request: EngineRequest, tokens: int) -> None:
        world = self.world
        answer, record = request.answer, world.record(request)
        hit = answer.hit if answer is not None and answer.hit else 0
        kept = record is not None and record.state is RequestState.READY and record.hit == hit
        event = "take all" if tokens == hit else "take part" if tokens else "take none"
        event = event if hit else "take of no hit"
        world.strike(event if kept else "take of a lost hit", request)
        plan = world.take(request, tokens)
        self.checks.planned(request, tokens, plan, hit if kept else -1)

    def take_after_reset(self) -> None:
        """A reset comes between the report of a hit and its take."""
        if any(r.answer is not None and r.answer.hit for r in self.world.requests.values()):
            self._reset(ResetReason.MEMORY_GOING_AWAY)
            self.take()

    def report_load(self, load: RankLoad | None = None, fail_of_six: int = 1) -> None:
        """A rank reports a load."""
        world, choices = self.world, self.choices
        if not world.loads:
            return
        load = load or world.loads[choices.pick(list(world.loads))]
        self.checks.untouched(load)
        incomplete = not load.plan.complete
        ok = not incomplete and not (world.profile.faults and choices.below(6) >= 6 - fail_of_six)
        if load.left == 1:
            world.strike("load ok" if load.ok and ok else "load failed", load.plan.request_id)
        done = world.report_load(load, ok)
        expected = None if load.left else load.ok and load.epoch == world.epoch
        demand(done is expected, f"job {load.plan.job_id}: answered {done}, expected {expected}")

    def store(self) -> None:
        """The engine offers chunks of a request: all, some of a group, or a random part."""
        world, choices = self.world, self.choices
        request = self._one()
        if request is None:
            return
        chunks = [(g, i) for g, keys in enumerate(request.keys) for i in range(len(keys))]
        if choices.below(2):
            group = choices.below(len(request.keys))
            chunks = choices.some((g, i) for g, i in chunks if g == group)
        world.strike("store begun", request)
        plan = world.prepare_store(request, chunks)
        demand(plan is None or request.options.may_store, f"{request.request_id}: stores, but must not")
        demand(plan is None or {*plan.chunks} <= {*chunks}, f"{request.request_id}: stores other chunks")

    def report_store(self) -> None:
        """A rank reports a store."""
        world, choices = self.world, self.choices
        if not world.stores:
            return
        store = world.stores[choices.pick(list(world.stores))]
        ok = not (world.profile.faults and choices.below(6) == 5)
        if store.done == world.ranks - 1:
            world.strike("store ok" if store.ok and ok else "store failed", store.plan.request_id)
        world.report_store(store, ok)

    def extend(self) -> None:
        """Chunks of generated tokens are hashed."""
        request = self._one()
        if request is not None and request.total < 80:
            self.world.strike("extend", request)
            self.world.extend(request, request.total + self.choices.between(0, 8))

    def preempt(self) -> None:
        """A request loses its blocks."""
        request = self._one(RequestState.LOADING) if self.choices.below(3) else None
        request = request or self._any()
        if request is not None:
            self.world.strike("preempt", request)
            self.world.preempt(request)

    def finish(self) -> None:
        """A running request ends."""
        request = self._one(RequestState.RUNNING)
        if request is not None:
            self.world.strike("finish", request)
            self.world.finish(request)

    def abort(self, request: EngineRequest | None = None) -> None:
        """A request ends in whatever state it is."""
        request = request or self._any()
        if request is not None:
            self.world.strike("finish", request)
            self.world.finish(request)

    def reset(self) -> None:
        """The cache is reset, for either reason."""
        if self.choices.below(3):
            return
        self._reset(self.choices.pick(tuple(ResetReason)))
