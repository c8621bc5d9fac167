"""What must hold in the world of random tests after every step, besides the invariants that the core states itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstrata.core.messages import Answer, EventKind, LoadPlan, SubmitLoad, SubmitStore
from kvstrata.core.requests import HOLDING, WAITING, Door, Request, RequestState
from kvstrata.core.residency import SlotState
from kvstrata.core.state import PRIMARY
from kvstrata.testing.oracle import fits, oracle
from kvstrata.testing.scripted import ScriptedTier
from kvstrata.testing.world import EngineRequest, RankLoad, World
from kvstrata.types import I64, LookupResult, OffloadKey

SLACK = 1e-6


def demand(holds: bool, what: str) -> None:
    """Raise unless it holds."""
    if not holds:
        raise AssertionError(what)


class Checks:
    """The checks of one world; `install` lets it see each promotion as it starts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.core = world.core
        self._held = 0
        self._calls_of_start = world.manager._promotions.start
        world.manager._promotions.start = self._start  # type: ignore[method-assign]

    # -- while a call runs

    def _start(self, request: Request, tier: int, slots: I64) -> None:
        """Promotions start: exactly what the plan needs, from a tier that the request admits, in the order of turns."""
        name = request.request_id
        head = self.world.manager._grants.head
        demand(
            head is None or head is request or request.order < head.order,
            f"{name} gets new slots while the older {'' if head is None else head.request_id} waits for room",
        )
        keys = self.core.residency.keys_of(slots)
        planned = {key for group, (lo, hi) in zip(request.keys, request.ranges, strict=True) for key in group[lo:hi]}
        demand(planned.issuperset(keys), f"{name}: promotes chunks that its plan does not need")
        demand(request.options.may_load, f"{name}: promotes, but must not load")
        port = self.core.tiers[tier].port
        demand(request.options.load_tiers.accepts(port), f"{name}: promotes from {port.name}, which it refuses")
        self._calls_of_start(request, tier, slots)

    # -- after each call

    def after(self) -> None:
        """Everything that can be stated between two calls."""
        self.world.manager.check()
        self._jobs()
        self._holders()
        self._records()
        self._events()
        self._deadlines()

    def _jobs(self) -> None:
        """Each job is at exactly one place: with the ranks, with a tier, or on its way there."""
        world = self.world
        commands = [c.job.job_id for c in self.core.commands if isinstance(c, SubmitLoad | SubmitStore)]
        demand(len(set(commands)) == len(commands), "a job is handed out twice")
        demand(not world.job_ids.intersection(commands), "a job id is used twice")
        expected = {*commands, *world.outstanding, *world.loads, *world.stores}
        found = {job.job_id for job in self.core.ledger}
        demand(found == expected, f"the ledger has jobs {sorted(found)}, the world {sorted(expected)}")

    def _holders(self) -> None:
        """What a request holds is what its plan needs; all of it is there when the hit is reported; shares hold."""
        core, residency = self.core, self.core.residency
        largest = 0
        for request in core.requests.values():
            held = request.held
            largest = max(largest, core.byte_size(held))
            if request.door is not Door.TWO_PHASE or request.state not in HOLDING:
                continue
            planned = [k for group, (lo, hi) in zip(request.keys, request.ranges, strict=True) for k in group[lo:hi]]
            name = f"{request.request_id} ({request.state.value})"
            demand(len(held) == len(planned), f"{name}: holds {len(held)} slots for {len(planned)} chunks")
            demand(residency.keys_of(held) == planned, f"{name}: holds other chunks than its plan names")
            if request.state is RequestState.READY and len(held):
                ready = residency.state[held] == SlotState.READY
                demand(bool(ready.all()), f"{name}: reports a hit whose chunks are not ready")
        now, before = residency.held_bytes, self._held
        self._held = now
        demand(
            now <= max(core.share_limit, largest, before),
            f"{now} bytes are held, {before} were, the share is {core.share_limit}, the largest holder has {largest}",
        )

    def _records(self) -> None:
        """Bounds of what is remembered, and of waits."""
        core, world = self.core, self.world
        demand(len(core.requests) <= world.config.max_requests, f"{len(core.requests)} records are kept")
        demand(len(core.verdicts) <= world.config.max_verdicts, f"{len(core.verdicts)} verdicts are kept")
        for request in world.requests.values():
            record = world.record(request)
            if record is None or request.per_key or record.state not in WAITING:
                continue
            if record.state is not RequestState.QUEUED:
                self.bounded(request, record)
                silent = world.now - request.last_poll
                demand(silent < world.config.silence_s, f"{request.request_id}: holds its place after {silent} s")

    def bounded(self, request: EngineRequest, record: Request) -> None:
        """The request still waits: it must be within its clocks."""
        total, stall = self.bounds(request)
        name = f"{request.request_id} ({record.state.value})"
        demand(request.waited <= total + SLACK, f"{name}: waited {request.waited} s, its bound is {total}")
        demand(request.quiet <= stall + SLACK, f"{name}: nothing came for {request.quiet} s, its bound is {stall}")

    def bounds(self, request: EngineRequest) -> tuple[float, float]:
        """The longest wait in all, and without any sign of life of a tier, that the request's clocks allow."""
        config, options = self.world.config, request.options
        stalls = [config.stall_s if options.stall_s is None else options.stall_s, *config.tier_stall_s.values()]
        totals = [config.total_s if options.total_s is None else options.total_s, *config.tier_total_s.values()]
        sizes = self.world.layout.chunk_bytes
        plan = sum(len(keys) * size for keys, size in zip(request.keys, sizes, strict=True))
        extra = plan / config.min_rate_bytes_per_s
        total = max(seconds or config.job_total_s for seconds in totals) + extra
        return total, max(seconds or config.job_idle_s for seconds in stalls)

    def _events(self) -> None:
        """The cache events replay to what primary really has."""
        world = self.world
        for event in world.manager.take_events():
            if event.place != PRIMARY:
                continue
            keys = set(event.keys)
            demand(len(keys) == len(event.keys), "a cache event names a key twice")
            if event.kind is EventKind.STORED:
                demand(not keys & world.resident, "an event stores a key that was there")
                world.resident |= keys
            else:
                demand(keys <= world.resident, "an event removes a key that was not there")
                world.resident -= keys
                for offered in world.offered.values():
                    offered -= keys
        ready = np.flatnonzero(self.core.residency.state == SlotState.READY)
        found = set(self.core.residency.keys_of(ready))
        demand(found == world.resident, f"events tell of {len(world.resident)} resident keys, {len(found)} are there")

    def _deadlines(self) -> None:
        """The driver sleeps until the next deadline: it must exist while anybody waits, and lie ahead."""
        due = self.world.manager.next_deadline()
        waiting = any(r.state in WAITING for r in self.core.requests.values() if r.door is Door.TWO_PHASE)
        demand(due is not None or not waiting, "somebody waits, but no deadline is set")

    def after_advance(self) -> None:
        """Everything that was due has been done."""
        due = self.world.manager.next_deadline()
        for _ in range(2):
            if due is not None and due <= self.core.now:
                self.world.manager.advance(self.core.now)
                due = self.world.manager.next_deadline()
        demand(due is None or due > self.core.now, f"at {self.core.now} the next deadline is {due}")

    # -- answers

    def before_poll(self) -> tuple[int, ...]:
        """How many keys were touched so far, anywhere."""
        counters = self.core.counters
        touched = sum(t.total_keys_touched for t in self.world.tiers if isinstance(t, ScriptedTier))
        return counters.keys_gathered, counters.resolves, touched, self.core.counters.promoted

    def polled(self, request: EngineRequest, answer: Answer, before: tuple[int, ...], unchanged: bool) -> None:
        """A poll was answered; `unchanged` if the request waited, and still does, for the same C and n."""
        record = self.core.requests.require(request.request_id)
        if answer.hit is None:
            if unchanged:
                demand(before == self.before_poll(), f"{request.request_id}: a waiting poll touched keys")
            if record.state in WAITING:
                self.bounded(request, record)
            return
        demand(record.state is RequestState.READY, f"{request.request_id}: answered in state {record.state.value}")
        limit = self.limit(request)
        demand(0 <= answer.hit <= max(limit - request.computed, 0), f"{request.request_id}: hit {answer.hit}")
        demand(answer.hit == 0 or request.options.may_load, f"{request.request_id}: a hit, but it must not load")
        if answer.hit:
            boundary = request.computed + answer.hit
            self._consumes(request, boundary, record.ranges)
            keys = {k for group, (lo, hi) in zip(request.keys, record.ranges, strict=True) for k in group[lo:hi]}
            demand(not keys & request.bad, f"{request.request_id}: a hit on chunks whose load failed for it")

    def limit(self, request: EngineRequest) -> int:
        """The largest boundary that the request may get."""
        limit, cap = self.world.layout.limit(request.total), request.options.max_hit_tokens
        return limit if cap is None else min(limit, request.computed + cap)

    def _consumes(self, request: EngineRequest, boundary: int, ranges: Sequence[tuple[int, int]]) -> None:
        """The ranges are exactly what the boundary consumes, by the oracle's table."""
        every = [frozenset(range(len(keys) + 2)) for keys in request.keys]
        load = fits(self.world.layout, every, request.computed, boundary)
        found = tuple(tuple(range(lo, hi)) for lo, hi in ranges)
        demand(load == found, f"{request.request_id}: {boundary} consumes {load}, the plan has {found}")

    def present(self, request: EngineRequest) -> list[set[int]]:
        """Which chunks the request could have now, by plain sets: in primary, or on a tier that it admits."""
        core = self.core
        tiers = [t for t in self.world.scripted if request.options.load_tiers.accepts(t)]
        return [
            {i for i, key in enumerate(group) if core.residency.slot_of(key) >= 0 or any(key in t.held for t in tiers)}
            for group in request.keys
        ]

    def equals_oracle(self, request: EngineRequest, present: list[set[int]], answer: Answer) -> None:
        """Tiers answer at once, nothing fails and there is room: the hit is the brute-force one."""
        bad = [{i for i, key in enumerate(keys) if key in request.bad} for keys in request.keys]
        sets = [have - gone for have, gone in zip(present, bad, strict=True)]
        if not request.options.may_load:
            sets = [set() for _ in sets]
        expected = oracle(
            self.world.layout, sets, request.computed, request.total, limit=self.limit(request)
        ).boundary  # fmt: skip
        demand(
            answer.hit is not None and request.computed + answer.hit == expected,
            f"{request.request_id}: hit {answer.hit} at {request.computed}, the oracle says {expected}",
        )
        self.world.coverage.note("answers equal to the oracle")

    # -- loads and lookups

    def planned(self, request: EngineRequest, tokens: int, plan: LoadPlan | None, reported: int) -> None:
        """The engine took tokens of a hit."""
        if not tokens:
            demand(plan is None, f"{request.request_id}: a load of nothing")
            return
        demand(plan is not None, f"{request.request_id}: took {tokens} tokens, got no load")
        if plan is None or not plan.complete:
            demand(tokens < reported or reported < 0, f"{request.request_id}: a whole hit is not complete")
            demand(plan is None or not len(plan.slots), "an incomplete load has slots")
            return
        demand(plan.boundary == request.computed + tokens, f"{request.request_id}: another boundary than it took")
        self._consumes(request, plan.boundary, plan.ranges)
        wanted = [k for group, (lo, hi) in zip(request.keys, plan.ranges, strict=True) for k in group[lo:hi]]
        demand(list(plan.keys) == wanted, f"{request.request_id}: a load of other keys")
        self.content(plan)

    def content(self, plan: LoadPlan) -> None:
        """What a load delivers is what was stored."""
        for key, offset, length in zip(plan.keys, plan.offsets.tolist(), plan.lengths.tolist(), strict=True):
            self.readable(key, offset, length)

    def readable(self, key: OffloadKey, offset: int, length: int) -> None:
        """The bytes at this place were stored under the key, in this epoch."""
        found = self.world.read(offset, length)
        if found not in self.world.valid.get(key, ()):
            old = found in self.world.old.get(key, ())
            raise AssertionError(f"{key[:4].hex()}: {'bytes of an older epoch' if old else 'wrong bytes'} at {offset}")

    def untouched(self, load: RankLoad) -> None:
        """Nobody has written to the slots of a load since it was handed over."""
        plan = load.plan
        for offset, content in zip(plan.offsets.tolist(), load.content, strict=True):
            found = self.world.read(offset, len(content))
            demand(found == content, f"job {plan.job_id}: its slot at {offset} was written during the load")

    def looked_up(self, request: EngineRequest, key: OffloadKey, answer: LookupResult) -> None:
        """The per-key door answered."""
        residency = self.core.residency
        slot = residency.slot_of(key)
        state = SlotState(int(residency.state[slot])) if slot >= 0 else SlotState.FREE
        name = f"{request.request_id}: {key[:4].hex()} is {state.name} and answered {answer.value}"
        match answer:
            case LookupResult.HIT:
                demand(state is SlotState.READY, name)
                self.readable(key, int(residency.offset[slot]), int(residency.length[slot]))
            case LookupResult.HIT_PENDING:
                demand(state is SlotState.RESERVED, name)
            case LookupResult.MISS if key in request.bad or not request.options.may_load:
                pass
            case _:
                demand(state is not SlotState.READY, name)
        if answer in (LookupResult.HIT_PENDING, LookupResult.RETRY):
            total, _ = self.bounds(request)
            demand(request.waited <= total + SLACK, f"{name} after {request.waited} s, its bound is {total}")

    # -- at the end

    def clean(self) -> None:
        """After the end: idle, nothing pinned, everything accounted for."""
        world, core = self.world, self.core
        residency = core.residency
        demand(world.manager.idle, "everything has ended, but the core is not idle")
        for what in ("held_bytes", "pinned_bytes", "reserved_bytes", "quarantined_bytes"):
            demand(getattr(residency, what) == 0, f"everything has ended, but {what} is {getattr(residency, what)}")
        kept = residency.free_bytes + residency.resident_bytes + residency.waste_bytes
        demand(kept == residency.capacity_bytes, f"{kept} bytes of {residency.capacity_bytes} are accounted for")
        demand(not core.requests.values(), "records are left")
        for tier in core.tiers:
            name = tier.port.name
            left = (tier.inflight, tier.loads_out, tier.overdue, tier.overdue_jobs, tier.cascading, tier.cascades_out)
            demand(not any(left), f"{name}: {left} are left in flight")
            demand(not tier.queue and not tier.cascades, f"{name}: its queues are not empty")
        for key, slot in [(k, residency.slot_of(k)) for k in world.resident]:
            self.readable(key, int(residency.offset[slot]), int(residency.length[slot]))
        world.manager.close_account()
        world.manager.check()
        counters = core.counters
        demand(counters.promotions_open == 0, f"{counters.promotions_open} promotions have no class")
        if not (world.profile.faults or world.profile.churn):
            wasted = (counters.not_taken, counters.cancelled, counters.expired, counters.failed)
            demand(not any(wasted), f"nothing failed or changed, but of the promoted chunks {wasted} were wasted")

    def cascaded(self) -> None:
        """Tiers hold right bytes; where nothing failed, what was stored and is in primary is on every tier."""
        world = self.world
        for tier in world.scripted:
            right = all(payload in world.valid.get(key, ()) for key, payload in tier.held.items())
            demand(right, f"{tier.name} holds wrong bytes")
            if world.profile.faults or world.profile.churn:
                continue
            owed = [key for key in world.resident & world.offered.get(tier.name, set()) if key not in tier.held]
            demand(not owed, f"{tier.name} never got {len(owed)} chunks that were stored for it")
