"""A manager that is watched: every call is a step, and after each one what must hold is asked for.

What is compared comes from the calls, commands and events themselves: deadlines, jobs, uses of primary, presence and
contents are accounted for a second time here, without a look at the core's own accounts where that can be had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstrata.core.manager import TieringOffloadingManager
from kvstrata.core.messages import (
    Answer,
    AnswerCause,
    Command,
    LoadPlan,
    RequestOptions,
    StorePlan,
    SubmitLoad,
    SubmitStore,
    TierPort,
)
from kvstrata.core.requests import WAITING, Request, RequestState
from kvstrata.core.residency import SlotState
from kvstrata.core.settings import CoreConfig
from kvstrata.layout.groups import Layout
from kvstrata.testing.coverage import Coverage, state_name
from kvstrata.testing.oracle import fits, oracle
from kvstrata.testing.simulation.content import Content
from kvstrata.testing.simulation.legal import LEGAL
from kvstrata.testing.simulation.recount import Recount
from kvstrata.testing.simulation.shadow import Shadow
from kvstrata.testing.simulation.watch_checks import check_events, check_holders, check_jobs
from kvstrata.testing.world_checks import SLACK, demand
from kvstrata.types import (
    I64,
    JobEnded,
    KeysDone,
    KeysRemoved,
    OffloadKey,
    ProbeDone,
    ResetReason,
    TierEvent,
)

FULL_EVERY = 24
"""Steps from one full recount to the next."""


@dataclass(slots=True)
class WatchedJob:
    """A job that a tier has."""

    tier: int
    load: bool
    keys: Sequence[OffloadKey]
    offsets: Sequence[int]
    lengths: Sequence[int]
    epoch: int
    since: float
    progressed: float
    open: set[int]
    overdue: bool = False
    overdue_since: float = 0.0
    cancelled: bool = False


@dataclass(slots=True)
class Wait:
    """What a request has waited, counted here."""

    waited: float = 0.0
    quiet: float = 0.0
    polled: float = 0.0
    mark: float = 0.0
    bad: set[OffloadKey] = field(default_factory=set)
    """Keys whose load failed for it."""


class WatchedManager(TieringOffloadingManager):
    """See the module. `steps` counts the events that were applied; polls that change nothing are none."""

    def __init__(
        self, layout: Layout, config: CoreConfig, tiers: Sequence[TierPort], *, ranks: int, content: Content,
        region: memoryview, coverage: Coverage, say: Any, steady: bool,
    ) -> None:  # fmt: skip
        super().__init__(layout, config, tiers, ranks=ranks, events=True)
        self.content, self.region, self.coverage, self.steady = content, region, coverage, steady
        self.config = config
        self.steps = 0
        self.shadow = Shadow(config.capacity_bytes)
        self.jobs: dict[int, WatchedJob] = {}
        self.clocks: dict[str, Wait] = {}
        self.loads: dict[int, tuple[LoadPlan, int, int]] = {}
        """Loads with the ranks: plan, reports left, epoch."""
        self.stores: dict[int, tuple[StorePlan, int, int]] = {}
        self.offered: dict[str, set[OffloadKey]] = {}
        """Per tier what was stored for it and has not left primary since."""
        self.resident: set[OffloadKey] = set()
        self.answered = 0
        self.listeners: dict[int, Callable[[TierEvent, WatchedJob | None], None]] = {}
        """Who else wants to hear what a tier reports."""
        self._epochs = {0: content.epoch}
        """Epoch of the content, by generation of the core."""
        self._ids: set[int] = set()
        self._decided: set[int] = set()
        """Loads that were decided, but not handed over yet, when time moved last."""
        self._say = say
        self._since_full = 0
        self._recount = Recount(self)
        self.held_before = 0
        self._opened = 0
        self._start_promotions = self._promotions.start
        self._promotions.start = self._watch_start  # type: ignore[method-assign]
        self._enter_state = self._two_phase._enter
        self._two_phase._enter = self._watch_enter  # type: ignore[method-assign]

    # -- time

    def advance(self, now: float) -> None:
        """Let the waits go on, and see that whoever is due was served."""
        core = self._core
        passed = now - core.now
        if passed <= 0.0:
            super().advance(now)
            return
        for request in core.requests.values():
            self._pass(request, passed, now)
        for name, wait in self.clocks.items():
            record = core.requests.get(name)
            if record is None or record.state is not RequestState.QUEUED:
                wait.mark = now
        self._note_due(now)
        self._decided = {c.job.job_id for c in core.commands if isinstance(c, SubmitLoad)}
        before = (core.counters.clock_expired, core.counters.silences, len(core.commands), len(core.ledger))
        super().advance(now)
        self._bounds()
        after = (core.counters.clock_expired, core.counters.silences, len(core.commands), len(core.ledger))
        if before != after:
            self._step("time")

    def _pass(self, request: Request, passed: float, now: float) -> None:
        if request.state in (RequestState.RESOLVING, RequestState.FETCHING):
            wait = self.clocks[request.request_id]
            wait.waited += passed
            wait.quiet += passed
            if passed > 0.5:
                self._strike("time large", request)
        if request.state in (*WAITING, RequestState.READY) and request.last_poll + self.config.silence_s <= now:
            self._strike("silence", request)

    def _due(self, job: WatchedJob) -> float:
        return min(job.progressed + self.config.job_idle_s, job.since + self.config.job_total_s)

    def _note_due(self, now: float) -> None:
        """In which state a request is when a load for it becomes overdue."""
        for job_id, job in self.jobs.items():
            if job.load and job.open and not job.overdue and self._due(job) <= now:
                known = self._core.ledger.get(job_id)
                if known is not None:
                    self._strike("load overdue", self._core.requests.get(known.request_id))

    def _bounds(self) -> None:
        """Jobs are overdue exactly when they are; whoever still waits is within its clocks."""
        now = self._core.now
        for job_id, job in self.jobs.items():
            if not job.overdue and job.open:
                due = self._due(job)
                known = self._core.ledger.get(job_id)
                if known is None:
                    raise AssertionError(f"job {job_id} is with its tier, but the core has forgotten it")
                late = known.overdue
                if late != (due <= now):
                    said = "counts as overdue before its time" if late else "is overdue, and nobody says so"
                    raise AssertionError(f"job {job_id} {said}: due at {due}, it is {now}")
                if late:
                    job.overdue, job.overdue_since = True, now
                    self.coverage.note("jobs overdue")
        self._overdue_mark()
        for name, wait in self.clocks.items():
            record = self._core.requests.get(name)
            if record is None or record.state not in WAITING:
                continue
            if record.state is not RequestState.QUEUED:
                self._in_time(record, wait)

    def _overdue_mark(self) -> None:
        """Tiers that hang at once each had their share in flight; nothing is added once the mark is reached."""
        late = [job for job in self.jobs.values() if job.load and job.overdue]
        if not late:
            return
        size = sum(job.lengths[i] for job in late for i in job.open)
        most = self._core.inflight_limit * max(len({job.tier for job in late}), 1)
        demand(size <= most, f"{size} bytes are overdue, the mark is {most}")

    def _in_time(self, record: Request, wait: Wait) -> None:
        total, stall = self._limits(record)
        silent, most = self._core.now - wait.polled, self.config.silence_s
        if wait.waited <= total + SLACK and wait.quiet <= stall + SLACK and silent < most + SLACK:
            return
        name = f"{record.request_id} ({record.state.value})"
        demand(wait.waited <= total + SLACK, f"{name}: waited {wait.waited} s, its bound is {total}")
        demand(wait.quiet <= stall + SLACK, f"{name}: nothing came for {wait.quiet} s, its bound is {stall}")
        demand(False, f"{name}: keeps its place after {silent} s of silence")

    def _limits(self, record: Request) -> tuple[float, float]:
        """The longest wait in all, and without a sign of life of any tier, that the settings allow."""
        config, options = self.config, record.options
        tiers = [tier.port for tier in self._core.tiers if options.load_tiers.accepts(tier.port)]
        totals = [config.tier_total_s.get(tier.name, config.total_s) for tier in tiers] or [config.total_s]
        stalls = [config.tier_stall_s.get(tier.name, config.stall_s) for tier in tiers] or [config.stall_s]
        totals = totals if options.total_s is None else [options.total_s]
        stalls = stalls if options.stall_s is None else [options.stall_s]
        sizes = self.layout.chunk_bytes
        extra = sum(len(k) * size for k, size in zip(record.keys, sizes, strict=True)) / config.min_rate_bytes_per_s
        return max(t or config.job_total_s for t in totals) + extra, max(s or config.job_idle_s for s in stalls)

    # -- requests

    def add_request(
        self, request_id: str, keys: Sequence[Sequence[OffloadKey]], options: RequestOptions | None = None
    ) -> None:
        """A new request."""
        now = self._core.now
        self.clocks[request_id] = Wait(polled=now, mark=now)
        super().add_request(request_id, keys, options)
        for name in [name for name in self.clocks if self._core.requests.get(name) is None]:
            del self.clocks[name]
        self._step("add")

    def extend_keys(self, request_id: str, keys: Sequence[Sequence[OffloadKey]]) -> None:
        """Chunks became whole."""
        self._strike("extend", self._core.requests.get(request_id))
        super().extend_keys(request_id, keys)
        self._step("extend")

    def waits(self, request_id: str, computed: int, total: int) -> bool:
        """A poll that would change nothing: contact all the same."""
        waits = super().waits(request_id, computed, total)
        if waits:
            self.clocks[request_id].polled = self._core.now
            self._strike("poll", self._core.requests.get(request_id))
        return waits

    def poll(self, request_id: str, computed: int, total: int) -> Answer:
        """One poll; its answer is checked against the bytes of primary and the table of what a boundary consumes."""
        core = self._core
        record = core.requests.require(request_id)
        wait, was = self.clocks[request_id], record.state
        same = (computed, total) == (record.computed, record.total)
        if was is RequestState.QUEUED:
            gap = min(core.now - wait.mark, self.config.poll_gap_s)
            wait.waited, wait.quiet = wait.waited + gap, wait.quiet + gap
        elif was is RequestState.RUNNING:
            wait.waited = wait.quiet = 0.0
        wait.mark = wait.polled = core.now
        event = (
            "poll" if computed == record.computed else "poll C grown" if computed > record.computed else "poll C shrunk"
        )
        self._strike("poll n grown" if total > record.total and record.total else event, record)
        touched = core.counters.keys_gathered, core.counters.resolves
        stood = (record.boundary, record.cause) if same and was is RequestState.READY else None
        answer = super().poll(request_id, computed, total)
        if stood == (record.boundary, record.cause) and record.state is RequestState.READY:
            if answer.hit != record.hit:
                demand(False, f"{request_id}: told {answer.hit}, was told {record.hit}")
            return answer  # the same answer again: what it promises is looked at when it is taken
        if answer.hit is None:
            if same and was in WAITING and record.state is was and was is not RequestState.QUEUED:
                demand(
                    touched == (core.counters.keys_gathered, core.counters.resolves),
                    f"{request_id}: a waiting poll touched keys",
                )
                return answer
            if record.state in WAITING:
                self._in_time(record, wait)
        else:
            self._check_answer(record, answer, computed, total)
            self.answered += 1
            self.coverage.note(f"answer {answer.cause.value}")
        self._step("poll")
        return answer

    def _check_answer(self, record: Request, answer: Answer, computed: int, total: int) -> None:
        name, hit = record.request_id, answer.hit or 0
        demand(record.state is RequestState.READY, f"{name}: answered in state {record.state.value}")
        limit, cap = self.layout.limit(total), record.options.max_hit_tokens
        limit = limit if cap is None else min(limit, computed + cap)
        demand(0 <= hit <= max(limit - computed, 0), f"{name}: hit {hit} at {computed} of {total}")
        if not hit:
            return
        demand(record.options.may_load, f"{name}: a hit, but it must not read")
        every = [frozenset(range(len(keys) + 2)) for keys in record.keys]
        load = fits(self.layout, every, computed, computed + hit)
        found = tuple(tuple(range(lo, hi)) for lo, hi in record.ranges)
        demand(load == found, f"{name}: {computed + hit} consumes {load} from {computed}, the plan has {found}")
        keys = [k for group, (lo, hi) in zip(record.keys, record.ranges, strict=True) for k in group[lo:hi]]
        demand(not self.clocks[name].bad.intersection(keys), f"{name}: a hit on chunks whose load failed for it")
        slots = self.residency.find(keys)
        demand(bool((slots >= 0).all()), f"{name}: reports a hit, but primary lacks chunks of it")
        demand(bool((self.residency.pins[slots] > 0).all()), f"{name}: reports a hit that is not pinned")
        for key, slot in zip(keys, slots.tolist(), strict=True):
            self.demand_right(
                f"{name}: reported hit", key, int(self.residency.offset[slot]), int(self.residency.length[slot])
            )

    def demand_right(self, what: str, key: OffloadKey, offset: int, length: int, epoch: int | None = None) -> None:
        """The bytes of primary at this place are those of the key."""
        fault = self.content.chunk_fault(key, bytes(self.region[offset : offset + length]), epoch)
        if fault:
            demand(False, f"{what}: {key[:4].hex()} at {offset}: {fault}")

    def take(self, request_id: str, tokens: int) -> LoadPlan | None:
        """The engine takes tokens of the hit."""
        record = self._core.requests.require(request_id)
        hit = record.hit if record.state is RequestState.READY else -1
        self._strike("take all" if tokens == hit and hit else "take part" if tokens else "take none", record)
        plan = super().take(request_id, tokens)
        wait = self.clocks[request_id]
        wait.waited = wait.quiet = 0.0
        if plan is None:
            demand(not tokens, f"{request_id}: took {tokens} tokens, got no load")
        else:
            demand(tokens > 0, f"{request_id}: a load of nothing")
            demand(plan.complete or tokens < hit or hit < 0, f"{request_id}: a whole hit is not complete")
            offsets, lengths = plan.offsets.tolist(), plan.lengths.tolist()
            self._new_id(plan.job_id)
            self.shadow.begin(plan.job_id, offsets, lengths, writes=False)
            self.loads[plan.job_id] = (plan, self._core.ranks, self.content.epoch)
            for key, offset, length in zip(plan.keys, offsets, lengths, strict=True):
                self.demand_right(f"load {plan.job_id}", key, offset, length)
        self._step("take")
        return plan

    def complete_load(self, job_id: int, ok: bool = True) -> bool | None:
        """One rank reports a load."""
        plan, left, epoch = self.loads.pop(job_id)
        if left > 1:
            self.loads[job_id] = (plan, left - 1, epoch)
        else:
            self.shadow.end(job_id)
        record = self._core.requests.get(plan.request_id)
        self._strike("load ok" if ok else "load failed", record)
        done = super().complete_load(job_id, ok)
        demand((done is None) == (left > 1), f"load {job_id}: answered {done} with {left - 1} reports to come")
        if done is not None:
            demand(not done or epoch == self.content.epoch, f"load {job_id} of an older epoch may be used")
            if not done and plan.request_id in self.clocks:
                self.clocks[plan.request_id].bad.update(plan.keys)
        self._step("load report")
        return done

    def prepare_store(self, request_id: str, chunks: Sequence[tuple[int, int]]) -> StorePlan | None:
        """The engine offers chunks."""
        record = self._core.requests.require(request_id)
        self._strike("store begun", record)
        plan = super().prepare_store(request_id, chunks)
        if plan is not None:
            demand(record.options.may_store, f"{request_id}: stores, but must not")
            demand(set(plan.chunks) <= set(chunks), f"{request_id}: stores chunks that were not offered")
            wanted = [record.keys[g][i] for g, i in plan.chunks]
            demand(list(plan.keys) == wanted, f"{request_id}: stores under other keys")
            self._new_id(plan.job_id)
            self.shadow.begin(plan.job_id, plan.offsets.tolist(), plan.lengths.tolist(), writes=True)
            self.stores[plan.job_id] = (plan, self._core.ranks, self.content.epoch)
        self._step("store")
        return plan

    def complete_store(self, job_id: int, ok: bool = True, digests: Mapping[OffloadKey, bytes] | None = None) -> None:
        """One rank reports a store; what it publishes must be right."""
        plan, left, epoch = self.stores.pop(job_id)
        if left > 1:
            self.stores[job_id] = (plan, left - 1, epoch)
        else:
            self.shadow.end(job_id)
        self._strike("store ok" if ok else "store failed", self._core.requests.get(plan.request_id))
        resets, stored = self._core.counters.resets, self._core.counters.stored
        super().complete_store(job_id, ok, digests)
        published = self._core.counters.stored > stored
        for wait in self.clocks.values() if published else ():
            wait.quiet = 0.0  # somebody may have waited for these chunks
        demand(not published or left == 1, f"store {job_id} is published before all ranks have reported")
        if published and self._core.counters.resets == resets:
            self._check_published(plan)
        self._step("store report")

    def _check_published(self, plan: StorePlan) -> None:
        request = self._core.requests.get(plan.request_id)
        for tier in self._core.tiers if request is not None else ():
            if request is not None and request.options.store_tiers.accepts(tier.port):
                self.offered.setdefault(tier.port.name, set()).update(plan.keys)
        slots = self.residency.find(plan.keys)
        for key, slot, offset, length in zip(
            plan.keys, slots.tolist(), plan.offsets.tolist(), plan.lengths.tolist(), strict=True
        ):
            if slot >= 0 and self.residency.offset[slot] == offset:
                self.demand_right(f"store {plan.job_id}", key, offset, length)

    def preempt(self, request_id: str) -> None:
        """The engine took its blocks."""
        self._strike("preempt", self._core.requests.get(request_id))
        super().preempt(request_id)
        self._step("preempt")

    def finish(self, request_id: str) -> None:
        """The request is over."""
        self._strike("finish", self._core.requests.get(request_id))
        super().finish(request_id)
        self.clocks.pop(request_id, None)
        self._step("finish")

    def reset_cache(self, reason: ResetReason = ResetReason.CONTENT_INVALID) -> None:
        """A new generation; the caller has moved the epoch on."""
        for request in self._core.requests.values():
            self._strike(f"reset {reason.value}", request)
        super().reset_cache(reason)
        self._epochs[self._core.generation] = self.content.epoch
        ready = int((self.residency.state == SlotState.READY).sum())
        demand(not ready, f"{ready} chunks are readable right after a reset")
        self._step("reset")

    # -- tiers

    def take_commands(self) -> list[Command]:
        """Jobs go out: within the shares, for plans that need them, from and to bytes that nobody else uses."""
        commands = super().take_commands()
        for command in commands:
            if isinstance(command, SubmitLoad | SubmitStore):
                self._handed(command)
        return commands

    def _handed(self, command: SubmitLoad | SubmitStore) -> None:
        job, load, now = command.job, isinstance(command, SubmitLoad), self._core.now
        others = [other for other in self.jobs.values() if other.tier == command.tier and other.load == load]
        self._new_id(job.job_id)
        self.shadow.begin(job.job_id, job.offsets, job.lengths, writes=load)
        known = self._core.ledger.get(job.job_id)  # a reset may have come between decision and hand-over
        epoch = self.content.epoch if known is None else self._epochs[known.generation]
        self.jobs[job.job_id] = WatchedJob(
            command.tier, load, job.keys, job.offsets, job.lengths, epoch, now, now,
            set(range(len(job.keys))),
        )  # fmt: skip
        moving = sum(sum(other.lengths[i] for i in other.open) for other in others if not other.overdue)
        moving += sum(job.lengths)
        limit = max(self._core.inflight_limit, max(job.lengths))
        demand(
            moving <= limit or not others, f"tier {command.tier}: {moving} bytes are handed over, the share is {limit}"
        )
        # What was decided before time moved was decided when nothing was overdue yet.
        early = now if job.job_id in self._decided else float("inf")
        if load and any(other.overdue and other.overdue_since < early for other in others):
            trials = [other for other in others if not other.overdue and other.open]
            demand(
                not trials and len(job.keys) == 1, f"tier {command.tier} has overdue loads and gets more than a trial"
            )
        if not load:
            for key, offset, length in zip(job.keys, job.offsets, job.lengths, strict=True):
                self.demand_right(f"cascade {job.job_id}", key, offset, length, epoch)
        self._say(f"  {type(command).__name__} {job.job_id} to tier{command.tier}: {len(job.keys)} keys")

    def _new_id(self, job_id: int) -> None:
        demand(job_id not in self._ids, f"job id {job_id} is used twice")
        self._ids.add(job_id)

    def on_event(self, tier: int, event: TierEvent) -> None:
        """A tier reports."""
        self._say(f"  tier{tier}: {type(event).__name__} {getattr(event, 'job_id', '')}")
        if tier in self.listeners:
            self.listeners[tier](event, self.jobs.get(event.job_id) if isinstance(event, KeysDone) else None)
        if isinstance(event, KeysRemoved):
            if event.keys:
                for request in self._core.requests.values():
                    self._strike("tier lost keys", request)
        else:
            for wait in self.clocks.values():
                wait.quiet = 0.0
        if isinstance(event, KeysDone):
            self._keys_came(tier, event)
        elif isinstance(event, JobEnded):
            self._ended(tier, event)
        elif isinstance(event, ProbeDone):
            probe = self._presence.probes.get((tier, event.ticket))
            if probe is not None:
                current = self._core.requests.get(probe.request.request_id)
                self._strike("probe answered" if event.error is None else "probe error", current)
        super().on_event(tier, event)
        opened = sum(each.reads.opened for each in self._core.tiers)
        if opened > self._opened:
            for request in self._core.requests.values():
                self._strike("breaker opened", request)
        self._opened = opened
        self._step("event")

    def _keys_came(self, tier: int, event: KeysDone) -> None:
        job = self.jobs.get(event.job_id)
        if job is None or job.tier != tier:
            return
        job.progressed = self._core.now
        fresh = [i for i in event.done if i in job.open]
        failed = [i for i, _ in event.failed if i in job.open]
        job.open.difference_update(event.done, failed)
        self.shadow.end(event.job_id, event.done)
        if job.load:
            known = self._core.ledger.get(event.job_id)
            owner = self._core.requests.get(known.request_id) if known is not None else None
            if event.done:
                self._strike("landed", owner)
            if event.failed:
                self._strike("failed", owner)
            # What was asked for before the content became invalid publishes nothing, whatever it brings.
            for i in fresh if job.epoch == self.content.epoch else ():
                self.demand_right(f"promotion {event.job_id}", job.keys[i], job.offsets[i], job.lengths[i], job.epoch)

    def _ended(self, tier: int, event: JobEnded) -> None:
        job = self.jobs.pop(event.job_id, None)
        if job is not None:
            self.shadow.end(event.job_id)
            known = self._core.ledger.get(event.job_id)
            demand(known is not None, f"job {event.job_id} ends at its tier, but the core has forgotten it")
            if job.load and known is not None:
                self._strike("load ended", self._core.requests.get(known.request_id))

    # -- while a call runs

    def _watch_start(self, request: Request, tier: int, slots: I64) -> None:
        """Promotions begin: exactly what the plan needs, from a tier that the request admits, in the order of turns."""
        name, head = request.request_id, self._grants.head
        demand(
            head is None or head is request or request.order < head.order,
            f"{name} gets new slots while an older request waits for room",
        )
        planned = {k for group, (lo, hi) in zip(request.keys, request.ranges, strict=True) for k in group[lo:hi]}
        keys = self.residency.keys_of(slots)
        demand(planned.issuperset(keys), f"{name}: promotes chunks that its plan does not need")
        demand(request.options.may_load, f"{name}: promotes, but must not read")
        demand(request.options.load_tiers.accepts(self._core.tiers[tier].port), f"{name}: promotes from a refused tier")
        if any(len(other.held) for other in self._core.requests.values() if other is not request):
            most = self.residency.capacity_bytes - self._core.store_reserve
            # What the request's former plan held is let go of right after.
            slots_held = np.unique(np.concatenate([other.held for other in self._core.requests.values()]))
            held = self._core.byte_size(slots_held)
            demand(held <= most, f"{name}: waiting requests hold {held} bytes; what is left for them is {most}")
        self._start_promotions(request, tier, slots)

    def _watch_enter(self, request: Request, state: RequestState) -> None:
        """A request that is answered from what is ready in primary gets the largest such boundary."""
        self._enter_state(request, state)
        if state is RequestState.READY and request.cause in (AnswerCause.CLOCK, AnswerCause.ROUNDS):
            limit, cap = self.layout.limit(request.total), request.options.max_hit_tokens
            limit = limit if cap is None else min(limit, request.computed + max(cap, 0))
            ready = [
                {i for i, key in enumerate(keys) if key not in request.unloadable and self._is_ready(key)}
                for keys in request.keys
            ]
            best = oracle(
                self.layout, ready, request.computed, request.total, limit=limit, byte_limit=request.byte_limit
            ).boundary  # fmt: skip
            demand(
                request.boundary == best or request.boundary == request.computed,
                f"{request.request_id}: answered {request.boundary} from primary, the oracle says {best}",
            )

    def _is_ready(self, key: OffloadKey) -> bool:
        slot = self.residency.slot_of(key)
        return slot >= 0 and int(self.residency.state[slot]) == SlotState.READY

    # -- after each call

    def _step(self, what: str) -> None:
        self.steps += 1
        self._since_full += 1
        self._recount.check()
        if self._since_full >= FULL_EVERY:
            self.full_check()

    def full_check(self) -> None:
        """Everything that can be stated between two calls."""
        self._since_full = 0
        self.check()
        check_jobs(self)
        check_holders(self)
        check_events(self)
        core = self._core
        due = self.next_deadline()
        waiting = any(r.state in WAITING for r in core.requests.values())
        demand(due is not None or not waiting, "somebody waits, but no deadline is set")
        demand(len(core.requests) <= self.config.max_requests, f"{len(core.requests)} records are kept")
        demand(len(core.verdicts) <= self.config.max_verdicts, f"{len(core.verdicts)} verdicts are kept")

    def _strike(self, event: str, record: Request | None) -> None:
        state = state_name(record)
        if state not in LEGAL[event]:
            demand(False, f"{event} strikes a request that is {state}: that was thought impossible")
        self.coverage.strike(event, state)
