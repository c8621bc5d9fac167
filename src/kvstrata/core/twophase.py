"""The two-phase door: resolve first, fetch exactly that, report when all of it is pinned (DESIGN section 3).

Between events a waiting request is not looked at: a poll compares C, n and the state. What it waits for tells it:
probes and landings mark it dirty, room is offered to the head of the queue, clocks have one timer per request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from kvstrata.core.arrays import count_of
from kvstrata.core.clocks import Pace, WaitClock
from kvstrata.core.grants import Grants, Placement
from kvstrata.core.messages import WAIT, Answer, AnswerCause
from kvstrata.core.presence import PresenceBook, nowhere
from kvstrata.core.requests import HOLDING, WAITING, Door, Request, RequestState
from kvstrata.core.state import CoreState, TierState
from kvstrata.core.statistics import PromotionTag
from kvstrata.layout.groups import Range
from kvstrata.layout.planner import resolve
from kvstrata.types import I64

_PACES = {
    RequestState.RESOLVING: Pace.RUNNING,
    RequestState.FETCHING: Pace.RUNNING,
    RequestState.QUEUED: Pace.BY_POLLS,
    RequestState.READY: Pace.STOPPED,
    RequestState.NEW: Pace.STOPPED,
}

RETRY_FIRST_S = 0.005
RETRY_MOST_S = 0.1
"""How soon a tier that answers at once, but did not know yet, is asked again; doubles."""


MOST_BOUNDS = 1024
"""Bounds of waits that are remembered, by what they follow from; clients may name their own."""


def new_clock(core: CoreState, request: Request) -> WaitClock:
    """The clocks of a wait that begins now."""
    stall, total = wait_bounds(core, request, [tier for tier in core.tiers if request.admits(tier.port)])
    return WaitClock(stall, total, core.config.poll_gap_s, core.now)


def wait_bounds(core: CoreState, request: Request, tiers: Sequence[TierState]) -> tuple[float, float]:
    """Stall and total, without its bytes, of a wait for these tiers; where 0 is set the bounds of jobs rule."""
    config, options = core.config, request.options
    known = (options.stall_s, options.total_s, *(tier.index for tier in tiers))
    bounds = core.bounds.get(known)
    if bounds is not None:
        return bounds

    def longest(own: float | None, by_tier: Mapping[str, float], default: float, job: float) -> float:
        values = [by_tier.get(tier.port.name, default) for tier in tiers] if own is None else [own]
        return max((value or job for value in values), default=default or job)

    stall = longest(options.stall_s, config.tier_stall_s, config.stall_s, config.job_idle_s)
    total = longest(options.total_s, config.tier_total_s, config.total_s, config.job_total_s)
    if len(core.bounds) < MOST_BOUNDS:
        core.bounds[known] = stall, total
    return stall, total


class TwoPhaseDoor:
    """Takes requests from their first poll to a reported hit."""

    def __init__(self, core: CoreState, presence: PresenceBook, grants: Grants) -> None:
        self._core = core
        self._presence = presence
        self._grants = grants

    # -- polls

    def poll(self, request: Request, computed: int, total: int) -> Answer:
        """The hit at `computed` of `total` tokens, or "wait"; O(1) while nothing has changed."""
        now = self._core.now
        request.enter(Door.TWO_PHASE)
        request.last_poll = now
        unchanged = computed == request.computed and total == request.total
        if unchanged and request.state in WAITING:
            if request.state is RequestState.QUEUED:
                self._count_poll(request)
            return self.answer(request)
        if request.state is RequestState.LOADING:
            return WAIT
        if not (unchanged and request.state is RequestState.READY):
            if request.state is RequestState.QUEUED:
                assert request.clock is not None
                request.clock.account(now)  # one that voids the plan is a poll like any other
            self._begin(request, computed, total)
        return self.answer(request)

    def answer(self, request: Request) -> Answer:
        """What a poll says in the state that the request is in."""
        return Answer(request.hit, request.cause) if request.state is RequestState.READY else WAIT

    def _count_poll(self, request: Request) -> None:
        """A poll of a queued request lets its clocks run by one gap."""
        assert request.clock is not None
        request.clock.account(self._core.now)
        deadline = request.clock.deadline()
        if deadline <= self._core.now:
            self.expire(request)
        elif deadline < math.inf:
            self._arm(request)

    def _begin(self, request: Request, computed: int, total: int) -> None:
        """A first poll, or one that finds C or n changed: what was planned is void."""
        if request.state is RequestState.RUNNING:
            self.forget_wait(request)
            request.move(RequestState.NEW)
        if not request.order:
            request.order = self._core.requests.next_order()
        if request.clock is None:
            request.clock = new_clock(self._core, request)
        if request.state is RequestState.QUEUED:
            self._grants.dequeue(request)
        request.computed, request.total = computed, total
        request.byte_limit = None
        self._plan(request)

    def _plan(self, request: Request) -> None:
        """Answer at once what needs no plan, else make one and submit it."""
        assert request.clock is not None
        if not request.options.may_load:
            self._answer_none(request, AnswerCause.NOT_ALLOWED, PromotionTag.NOT_TAKEN)
        elif request.primary_only:
            self.answer_from_primary(request, request.cause, PromotionTag.NOT_TAKEN)
        elif request.clock.exhausted:
            self.expire(request)
        elif self._at_hand(request):
            self._submit(request, at_hand=True)
        elif self._decide(request):
            self._submit(request)

    def _at_hand(self, request: Request) -> bool:
        """Whether primary has all of the largest plan: then that is the plan, made without a look at any tier."""
        near = self._presence.at_hand(request, request.computed, self._limit(request))
        if near is None:
            return False
        self._fix(request, near.boundary, near.ranges, near.slots)
        request.sources = [nowhere(hi - lo) for lo, hi in near.ranges]
        assert request.clock is not None
        request.clock.fix_bytes_once(self._grants.plan_bytes(request) / self._core.config.min_rate_bytes_per_s)
        return True

    def replan(self, request: Request) -> None:
        """Some of its chunks must not be used any more (an earlier load of them failed): a plan for them is void."""
        if request.state in WAITING or request.state is RequestState.READY:
            self._begin(request, request.computed, request.total)

    # -- phase 1

    def _limit(self, request: Request) -> int:
        limit = self._core.layout.limit(request.total)
        cap = request.options.max_hit_tokens
        return limit if cap is None else min(limit, request.computed + max(cap, 0))

    def _decide(self, request: Request) -> bool:
        """Make the plan; False if the request now waits for probes. It may still hold its earlier plan's slots."""
        layout = self._core.layout
        while True:
            if request.primary_only:
                gathered = self._presence.gather_ready(request, request.computed, request.total)
            else:
                gathered = self._presence.gather(request, request.computed, request.total, self._limit(request))
            decision = resolve(
                layout,
                gathered.presence,
                request.computed,
                request.total,
                limit=self._limit(request),
                byte_limit=request.byte_limit,
            )
            wanted = self._presence.doubts(request, gathered, decision) if decision.decided else decision.probe
            if wanted is None:
                break
            if not self._presence.ask(request, wanted, gathered):
                self._wait_for_probes(request, retry=gathered.must_retry or not request.probes_out)
                return False
        slots = [s[lo:hi] for s, (lo, hi) in zip(gathered.slots, decision.ranges, strict=True)]
        self._fix(request, decision.boundary, decision.ranges, None if request.primary_only else slots)
        request.sources = [s[lo:hi] for s, (lo, hi) in zip(gathered.sources, decision.ranges, strict=True)]
        if request.hit > 0:
            self._fix_clock(request)
        return True

    def _fix(self, request: Request, boundary: int, ranges: tuple[Range, ...], slots: list[I64] | None) -> None:
        """The plan, with the slots that its chunks have now, or -1, where they were looked up."""
        request.boundary, request.ranges = boundary, ranges
        request.found = None if slots is None else (self._core.residency.index.version, slots)
        request.retry_s = 0.0

    def _fix_clock(self, request: Request) -> None:
        """The first plan's bytes, and the tiers that it reads, fix the clocks."""
        core = self._core
        assert request.clock is not None
        if request.clock.fixed:
            return
        read = self._read(request)
        stall, total = wait_bounds(core, request, read or [t for t in core.tiers if request.admits(t.port)])
        request.clock.fix_once(stall, total + self._grants.plan_bytes(request) / core.config.min_rate_bytes_per_s)

    def _wait_for_probes(self, request: Request, *, retry: bool) -> None:
        """Nobody waits while holding; what will not be told is asked again after a while."""
        self._grants.give_back(request, PromotionTag.NOT_TAKEN)
        request.retry_at = None
        if retry:
            request.retry_s = min(max(2 * request.retry_s, RETRY_FIRST_S), RETRY_MOST_S)
            request.retry_at = self._core.now + request.retry_s
        self._enter(request, RequestState.RESOLVING)

    # -- phase 2

    def _submit(self, request: Request, *, at_hand: bool = False) -> None:
        """A plan is made: place it at once if it is its turn, or if it needs no new slot; else queue for room."""
        if request.hit <= 0:
            self._answer_none(request, AnswerCause.NOTHING_STORED, PromotionTag.NOT_TAKEN)
            return
        head = self._grants.head
        first = head is None or request.order < head.order
        if at_hand and first and self._grants.place_ready(request):
            self._placed(request)
            return
        if request.state in HOLDING:
            alone = self._grants.plan_bytes(request) > self._core.share_limit and not self._grants.others_hold(request)
            if self._grants.place(request, alone=alone, new_slots=first) is Placement.DONE:
                self._placed(request)
                return
            self._grants.give_back(request, PromotionTag.NOT_TAKEN)
            head = self._grants.head
            first = head is None or request.order < head.order
        if first:
            if self._turn(request):
                return
        elif self._grants.place(request, new_slots=False) is Placement.DONE:
            self._placed(request)
            return
        request.found = None
        self._enter(request, RequestState.QUEUED)
        self._grants.enqueue(request)

    def serve_queue(self) -> None:
        """Room was given back: serve the queue from its head until one has to wait."""
        while (head := self._grants.head) is not None:
            if not self._turn(head):
                return
            self._grants.dequeue(head)

    def _turn(self, request: Request) -> bool:
        """Serve the request whose turn it is; False if it has to wait for room. It holds nothing."""
        grants, core = self._grants, self._core
        while request.hit > 0:
            whole = grants.plan_bytes(request)
            alone = whole > core.share_limit
            if alone and grants.others_hold(request):
                return False
            if alone and whole > grants.room_by_bytes():
                if grants.jobs_hold_most():
                    return False
                if not self._shrink(request, grants.room_by_bytes()):
                    return True
                continue
            placement = grants.place(request, alone=alone)
            if placement is Placement.DONE:
                self._placed(request)
                return True
            if placement is Placement.STALE:
                if not self._decide(request):
                    return True
                continue
            if grants.others_hold(request) or grants.jobs_will_free(request):
                return False
            if not self._shrink(request, min(whole, request.byte_limit or whole) // 2):
                return True
        self._answer_none(request, AnswerCause.NOTHING_STORED, PromotionTag.NOT_TAKEN)
        return True

    def _shrink(self, request: Request, byte_limit: int) -> bool:
        """Resolve again for fewer bytes; False if the request is answered, or waits for probes, instead."""
        if byte_limit < sum(self._core.layout.chunk_bytes):
            self._core.counters.no_room += 1
            self.answer_from_primary(request, AnswerCause.NO_ROOM, PromotionTag.NOT_TAKEN)
            return False
        request.byte_limit = byte_limit
        return self._decide(request)

    def _placed(self, request: Request) -> None:
        """The plan has its slots."""
        request.rounds = max(request.rounds, 1)
        request.cause = AnswerCause.HIT
        self._enter(request, RequestState.READY if request.pending == 0 else RequestState.FETCHING)

    # -- outcomes

    def settle(self, request: Request) -> None:
        """An event concerned this request: a probe was answered, chunks landed or failed."""
        if request.state is RequestState.RESOLVING:
            self._plan(request)
        elif request.round_failed and request.state in HOLDING:
            self._next_round(request)
        elif request.state is RequestState.FETCHING and request.pending == 0:
            for tier in self._read(request):
                tier.reads.in_time()
            self._enter(request, RequestState.READY)
        request.round_failed = False

    def _next_round(self, request: Request) -> None:
        """A chunk failed: resolve again without it. Fetching anew is a new round, of which there are so many."""
        decided = self._decide(request)
        if not decided or self._grants.must_fetch(request):
            if request.rounds >= self._core.config.max_fetch_rounds:
                self.answer_from_primary(request, AnswerCause.ROUNDS, PromotionTag.NOT_TAKEN)
                return
            request.rounds += 1
        if decided:
            self._submit(request)

    def answer_from_primary(self, request: Request, cause: AnswerCause, tag: PromotionTag) -> None:
        """Answer with the largest boundary whose chunks are all ready in primary at this moment."""
        core, grants = self._core, self._grants
        grants.dequeue(request)
        self._presence.void(request)
        request.primary_only = True
        others = grants.others_hold(request)
        left = (core.share_limit if others else core.residency.capacity_bytes - core.store_reserve) - others
        request.byte_limit = max(left - core.overdue_bytes(), core.residency.held_bytes - others)
        self._decide(request)
        if request.hit > 0 and grants.place(request, alone=True, new_slots=False, tag=tag) is Placement.DONE:
            request.cause = cause
            self._enter(request, RequestState.READY)
        else:
            self._answer_none(request, cause, tag)

    def _answer_none(self, request: Request, cause: AnswerCause, tag: PromotionTag) -> None:
        """The answer is: compute."""
        self._grants.give_back(request, tag)
        request.boundary = request.computed
        request.ranges = tuple((0, 0) for _ in request.keys)
        request.sources = [np.empty(0, np.int8) for _ in request.keys]
        request.cause = cause
        self._enter(request, RequestState.READY)

    # -- clocks and silence

    def expire(self, request: Request) -> None:
        """A clock ran out. Where the wait brought less than half of what it was for, its tiers hear of it."""
        assert request.clock is not None
        self._core.counters.clock_expired += 1
        wanted, slow = request.hit, self._waited_for(request)
        if slow:
            request.clock.account(self._core.now)
        waited = request.clock.waited
        self.answer_from_primary(request, AnswerCause.CLOCK, PromotionTag.EXPIRED)
        for tier in slow if 2 * request.hit < max(wanted, 1) else ():
            tier.reads.late(self._core.now, waited)

    def _waited_for(self, request: Request) -> list[TierState]:
        """The tiers that keep a request waiting; none if its clocks are its own, which say nothing of a tier."""
        if request.options.stall_s is not None or request.options.total_s is not None:
            return []
        if request.state is RequestState.RESOLVING:
            return self._presence.asked_by(request)
        return self._read(request) if request.state is RequestState.FETCHING else []

    def _read(self, request: Request) -> list[TierState]:
        """The tiers that the chunks of the plan are read from."""
        return [tier for tier in self._core.tiers if any(count_of(some, tier.index) for some in request.sources)]

    def on_timer(self, request: Request) -> None:
        """The request's timer fired: whatever is due happens, and the timer is set anew."""
        now = self._core.now
        if request.state not in WAITING and request.state is not RequestState.READY:
            return
        assert request.clock is not None
        if now >= request.last_poll + self._core.config.silence_s:  # as the timer counts, or it fires for ever
            self._core.counters.silences += 1
            self.release(request, PromotionTag.EXPIRED)
            request.order = 0
        elif request.state in WAITING and request.clock.expired(now):
            self.expire(request)
        elif request.retry_at is not None and request.retry_at <= now and request.state is RequestState.RESOLVING:
            self._presence.forget_unknown(request)
            if self._decide(request):
                self._submit(request)
        else:
            self._arm(request)

    def _enter(self, request: Request, state: RequestState) -> None:
        """Change state, with the pace of its clocks and its timer."""
        request.move(state)
        if request.clock is not None:
            request.clock.switch(_PACES[state], self._core.now)
        if state is not RequestState.RESOLVING:
            request.retry_at = None
        if state is not RequestState.NEW:
            self._arm(request)

    def _arm(self, request: Request) -> None:
        assert request.clock is not None
        due = min(request.clock.deadline(), request.last_poll + self._core.config.silence_s)
        self._core.set_timer(request, due if request.retry_at is None else min(due, request.retry_at))

    # -- leaving

    def release(self, request: Request, tag: PromotionTag) -> None:
        """Give back grant, pins and place, in whatever state of waiting; the next poll resolves anew."""
        self._grants.dequeue(request)
        self._presence.void(request)
        self._grants.give_back(request, tag)
        request.byte_limit = None
        request.timer += 1
        self._enter(request, RequestState.NEW)

    def resume(self, request: Request) -> None:
        """After a reset: resolve again, without waiting for a poll, on what is left of the clocks."""
        self._enter(request, RequestState.RESOLVING)
        self._core.dirty[request] = None

    def forget_wait(self, request: Request) -> None:
        """A wait has ended with an answer that was taken; the next one has new clocks and a new place."""
        self._presence.void(request)
        request.order = 0
        request.clock = None
        request.rounds = 0
        request.plain.clear()
        request.primary_only = False
        request.byte_limit = None
        request.retry_s = 0.0
        request.timer += 1
