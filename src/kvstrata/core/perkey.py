"""The per-key door: `lookup(key, ctx)` for engines whose scheduler asks key by key (DESIGN section 3, rules 1 to 9).

Scanning and promoting happen in one go here; P1's zeros hold for the two-phase door only.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.core.arrays import slot_array
from kvstrata.core.clocks import Pace
from kvstrata.core.galloping import ASKED, NOT_ASKED
from kvstrata.core.grants import Grants
from kvstrata.core.loads import Loads
from kvstrata.core.messages import LoadPlan, RequestContext, RequestOptions
from kvstrata.core.presence import PresenceBook
from kvstrata.core.promotions import Promotions
from kvstrata.core.requests import Door, Request, RequestState
from kvstrata.core.slots import READY
from kvstrata.core.state import CoreState, TierState
from kvstrata.core.statistics import PromotionTag
from kvstrata.core.twophase import new_clock
from kvstrata.types import LookupResult, OffloadKey, Presence, key_group


class PerKeyDoor:
    """Answers single keys; what it promotes stays pinned until loaded, finished, timed out or silent."""

    def __init__(
        self, core: CoreState, presence: PresenceBook, promotions: Promotions, grants: Grants, loads: Loads
    ) -> None:
        self._core = core
        self._presence = presence
        self._promotions = promotions
        self._grants = grants
        self._loads = loads
        self._to_ask: dict[tuple[int, Request], list[OffloadKey]] = {}

    def lookup(self, key: OffloadKey, context: RequestContext) -> LookupResult:
        """Where the key stands; may reserve its place and start its promotion."""
        request = self._request(context)
        answer = self._answer(request, key)
        if answer is not LookupResult.RETRY:
            self._observe_delay(request, key)
        self._set_pace(request)
        return answer

    def _request(self, context: RequestContext) -> Request:
        """The record of the asking request, made at its first lookup; the step's first lookup counts as a poll."""
        core = self._core
        request = core.requests.get(context.request_id)
        if request is None:
            options = RequestOptions(load_tiers=context.load_tiers)
            request = Request(context.request_id, [[] for _ in core.layout.groups], options, core.now)
            core.requests.add(request)
        request.enter(Door.PER_KEY)
        request.context = context
        request.last_poll = core.now
        if request.state in (RequestState.LOADING, RequestState.RUNNING):
            request.clock, request.primary_only = None, False
            request.move(RequestState.NEW)
        if request.state is RequestState.NEW:
            if request.clock is None:
                request.clock, request.fetch_step = new_clock(core, request), -1
            request.move(RequestState.RESOLVING)
        elif request.step != core.step and request.clock is not None:
            request.clock.account(core.now)
            if request.clock.expired(core.now):
                self.expire(request)
        if request.step != core.step:
            request.step, request.blocked, request.retrying = core.step, None, False
        return request

    def _answer(self, request: Request, key: OffloadKey) -> LookupResult:
        if key in request.unloadable or not request.options.may_load:
            return LookupResult.MISS
        slot = self._core.residency.slot_of(key)
        if slot >= 0 and self._core.residency.state[slot] == READY:
            return LookupResult.HIT
        if request.primary_only:
            return LookupResult.MISS
        if slot >= 0:
            self._join(request, slot)
            return LookupResult.HIT_PENDING
        if key in request.failed:
            return LookupResult.MISS
        if request.blocked is not None:
            return request.blocked
        return self._ask_tiers(request, key)

    def _join(self, request: Request, slot: int) -> None:
        """Wait for what is on its way into a slot, and hold it if the budget has it: it then outlives its owner."""
        residency = self._core.residency
        if slot in request.key_slots:
            return
        if residency.holds[slot] or self._in_budget(int(residency.length[slot])):
            residency.hold(slot_array([slot]))
            request.key_slots[slot] = None
            request.pending += 1
            self._promotions.waiters.join(request, slot_array([slot]))
        else:
            request.retrying = True

    def _in_budget(self, size: int) -> bool:
        """Whether waiting requests may hold so many bytes more."""
        core = self._core
        held = core.residency.held_bytes + size
        return (
            held + core.overdue_bytes() <= core.share_limit
            and held <= core.residency.capacity_bytes - core.store_reserve
        )

    def _ask_tiers(self, request: Request, key: OffloadKey) -> LookupResult:
        """The first tier in order that is known to have the key is read."""
        core, unknown = self._core, False
        for tier in core.tiers:
            if not request.admits(tier.port):
                continue
            if not core.readable(tier) or core.verdicts.blocks(tier.index, key, core.now):
                continue
            known = self._known(request, tier, key)
            if known == Presence.PRESENT:
                return self._promote(request, tier, key)
            if known != Presence.ABSENT:
                unknown = True
                request.delays.setdefault((tier.index, key), core.now)
        request.retrying |= unknown
        return LookupResult.RETRY if unknown else LookupResult.MISS

    def _known(self, request: Request, tier: TierState, key: OffloadKey) -> int:
        """What the tier says of the key; an asynchronous tier is asked at the end of the step, until it knows."""
        place = (tier.index, key)
        if tier.port.capabilities.sync_probe:
            answers = tier.port.probe([key])
            tier.counters.probed += request.key_answers.setdefault(place, ASKED) == ASKED
            known = Presence.ABSENT if isinstance(answers, int) or len(answers) != 1 else int(answers[0])
            request.key_answers[place] = known
            return known
        known = request.key_answers.get(place, NOT_ASKED)
        if known in (NOT_ASKED, Presence.UNKNOWN):
            waiting = self._to_ask.setdefault((tier.index, request), [])
            if key not in waiting:
                waiting.append(key)
        return known

    def _promote(self, request: Request, tier: TierState, key: OffloadKey) -> LookupResult:
        """Reserve the slot at once; without room the answer holds for the request's other keys in this step."""
        core, group = self._core, key_group(key)
        reserved = None
        if not core.residency.can_place([group]):
            core.counters.no_room += 1
            request.blocked = LookupResult.MISS
        elif not self._in_budget(core.layout.chunk_bytes[group]):
            request.blocked = LookupResult.MISS if request.key_slots else LookupResult.RETRY
        else:
            reserved = core.residency.reserve([key], [group])
        if reserved is None:
            return request.blocked or LookupResult.MISS
        slot = int(reserved[0][0])
        core.residency.hold(reserved[0])
        request.key_slots[slot] = None
        request.pending += 1
        self._promotions.collect(request, tier, slot)
        if request.fetch_step in (-1, core.step) and request.clock is not None:
            request.fetch_step = core.step
            request.clock.extend(core.layout.chunk_bytes[group] / core.config.min_rate_bytes_per_s)
        return LookupResult.HIT_PENDING

    def end_step(self) -> None:
        """Hand over what this step collected: one batch of reads per (tier, request), and the probes."""
        self._promotions.send()
        for (tier, request), keys in self._to_ask.items():
            if request.state is not RequestState.FINISHED:
                self._presence.ask_keys(request, self._core.tiers[tier], keys)
        self._to_ask.clear()

    def prepare_load(self, keys: Sequence[OffloadKey], context: RequestContext) -> LoadPlan | None:
        """Pin the keys for a load and let go of everything else the request holds; None if one is not readable."""
        request = self._request(context)
        plan = self._loads.plan_keys(request, list(dict.fromkeys(keys)))
        if plan is not None:
            self._grants.give_back(request, PromotionTag.NOT_TAKEN)
            request.move(RequestState.READY)
            request.move(RequestState.LOADING)
        return plan

    # -- clocks

    def _observe_delay(self, request: Request, key: OffloadKey) -> None:
        """The probe delay of a key ends with its first answer that is not "ask again"; observed once."""
        for tier in self._core.tiers if request.delays else ():
            since = request.delays.pop((tier.index, key), None)
            if since is not None:
                tier.counters.delays += 1
                tier.counters.delay_s += self._core.now - since

    def _set_pace(self, request: Request) -> None:
        """Time counts while something is on its way, by polls while room is missing, not while all is ready."""
        assert request.clock is not None
        if request.pending or request.retrying or request.probes_out:
            pace = Pace.RUNNING
        elif request.blocked is LookupResult.RETRY:
            pace = Pace.BY_POLLS
        else:
            pace = Pace.STOPPED
        before = request.clock.deadline()
        request.clock.switch(pace, self._core.now)
        if request.timer == 0 or request.clock.deadline() != before:
            self._arm(request)

    def _arm(self, request: Request) -> None:
        assert request.clock is not None
        self._core.set_timer(request, min(request.clock.deadline(), request.last_poll + self._core.config.silence_s))

    def settle(self, request: Request) -> None:
        """Chunks landed or failed, or a probe was answered."""
        request.round_failed = False
        self._set_pace(request)

    def expire(self, request: Request) -> None:
        """A clock ran out: from now on only what is readable in primary counts."""
        self._core.counters.clock_expired += 1
        request.primary_only = True
        self.release(request, PromotionTag.EXPIRED)

    def release(self, request: Request, tag: PromotionTag) -> None:
        """Let go of everything and void what is known; what this step has looked up is not asked for any more."""
        self._presence.void(request)
        for place in [place for place in self._to_ask if place[1] is request]:
            del self._to_ask[place]
        self._grants.give_back(request, tag)
        request.retrying, request.blocked = False, None
        if request.clock is not None:
            request.clock.switch(Pace.STOPPED, self._core.now)

    def on_timer(self, request: Request) -> None:
        """The request's timer fired."""
        if request.clock is None or request.state is not RequestState.RESOLVING:
            return
        if self._core.now >= request.last_poll + self._core.config.silence_s:  # as the timer counts
            self._core.counters.silences += 1
            self.release(request, PromotionTag.EXPIRED)
        elif request.clock.expired(self._core.now):
            self.expire(request)
        else:
            self._arm(request)
