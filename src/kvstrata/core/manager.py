"""The core's face: facts in, jobs out, time as an argument.

`advance` sets the time, everything else happens at that time. What tiers are to do comes out of `take_commands`; what
they did goes into `on_event`. No call blocks, no call touches a clock, thread, file or socket. All calls come from one
thread at a time (`runtime.driver` holds a lock).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvstrata.core.arrays import NO_SLOTS, any_of
from kvstrata.core.cascades import Cascades
from kvstrata.core.grants import Grants
from kvstrata.core.invariants import check_all
from kvstrata.core.ledger import Job
from kvstrata.core.loads import Loads
from kvstrata.core.messages import (
    WAIT,
    Answer,
    CacheEvent,
    CancelJob,
    Command,
    EventKind,
    LoadPlan,
    RequestContext,
    RequestOptions,
    StorePlan,
    SubmitLoad,
    SubmitStore,
    TierPort,
)
from kvstrata.core.perkey import PerKeyDoor
from kvstrata.core.presence import PresenceBook
from kvstrata.core.promotions import Promotions
from kvstrata.core.requests import WAITING, Door, Request, RequestState
from kvstrata.core.residency import Residency, ResidencyStatistics
from kvstrata.core.settings import CoreConfig
from kvstrata.core.slots import READY
from kvstrata.core.state import PRIMARY, CoreState
from kvstrata.core.statistics import Alarm, Counters, PromotionTag, TierCounters, alarms
from kvstrata.core.stores import Stores
from kvstrata.core.twophase import TwoPhaseDoor
from kvstrata.errors import StateError
from kvstrata.layout.groups import Layout
from kvstrata.layout.planner import Decision, resolve
from kvstrata.policy.registry import make_policy
from kvstrata.types import (
    I64,
    Flushed,
    JobEnded,
    JobKind,
    KeysDone,
    KeysRemoved,
    LookupResult,
    OffloadKey,
    Presence,
    ProbeDone,
    ResetReason,
    TierEvent,
)


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot of everything that the core counts."""

    counters: Counters
    tiers: Mapping[str, TierCounters]
    primary: ResidencyStatistics
    requests: int
    waiting: int
    queued: int
    fetching: int
    jobs: int
    oldest_job_s: float
    alarms: Sequence[Alarm] = ()


_DEFAULT_OPTIONS = RequestOptions()

_READY, _TWO_PHASE = RequestState.READY, Door.TWO_PHASE
_STANDING = (WAITING | {RequestState.READY}) - {RequestState.QUEUED}
"""States in which a poll counts nothing: clocks run by themselves, or stand still."""


class TieringOffloadingManager:
    """Decides what is stored, promoted, cascaded and loaded, for all requests over all tiers."""

    def __init__(
        self, layout: Layout, config: CoreConfig, tiers: Sequence[TierPort], *, ranks: int = 1, events: bool = False
    ) -> None:
        residency = Residency(
            config.capacity_bytes,
            layout.chunk_bytes,
            make_policy(config.policy),
            alignment=config.alignment,
            tail_room=config.tail_room,
        )
        self._core = core = CoreState(layout, config, tiers, residency, ranks)
        core.events_on = events
        self._presence = PresenceBook(core)
        self._promotions = Promotions(core)
        self._cascades = Cascades(core, self._presence)
        self._grants = Grants(core, self._promotions)
        self._stores = Stores(core, self._promotions, self._cascades)
        self._loads = Loads(core)
        self._two_phase = TwoPhaseDoor(core, self._presence, self._grants)
        self._per_key = PerKeyDoor(core, self._presence, self._promotions, self._grants, self._loads)
        residency.on_evict = self._evicted

    @property
    def layout(self) -> Layout:
        """The layout that this core was made for."""
        return self._core.layout

    @property
    def residency(self) -> Residency:
        """Primary's slots; read only for everybody but the core."""
        return self._core.residency

    # -- time

    def advance(self, now: float) -> None:
        """Set the time (seconds, monotonic) and do what is due: clocks, breakers, overdue jobs. O(1) if nothing is."""
        core = self._core
        core.now = max(core.now, now)
        due = False
        for tier in core.tiers:
            due |= tier.reads.advance(core.now)
            due |= tier.writes.advance(core.now)
            if tier.offer_at is not None and tier.offer_at <= core.now:
                tier.offer_at, due = None, True
        for job in core.ledger.overdue(core.now):
            if job.kind is JobKind.PROMOTE:
                self._promotions.overdue(job)
            else:
                self._cascades.overdue(job)
            core.commands.append(CancelJob(job.tier, job.job_id))
            due = True
        for probe in self._presence.overdue() if self._presence.probes else ():
            core.dirty[probe.request] = None
        while core.timers and core.timers[0][0] <= core.now:
            _, _, version, request = heapq.heappop(core.timers)
            if version == request.timer and request.state is not RequestState.FINISHED:
                self._door(request).on_timer(request)
                due = True
        self._settle(changed=due)

    def next_deadline(self) -> float | None:
        """When `advance` has something to do even if nothing else happens (a lower bound), or None."""
        core = self._core
        while core.timers and core.timers[0][2] != core.timers[0][3].timer:
            heapq.heappop(core.timers)
        due = [core.timers[0][0] if core.timers else None, core.ledger.deadline(), self._presence.deadline()]
        for tier in core.tiers:
            due += [tier.reads.deadline(), tier.writes.deadline(), tier.offer_at]
        return min((at for at in due if at is not None), default=None)

    def take_commands(self) -> list[Command]:
        """Jobs out: what the tiers are to do, in order. Each command is handed out once."""
        core = self._core
        commands, core.commands = core.commands, []
        for command in commands:
            if isinstance(command, SubmitLoad | SubmitStore):
                core.ledger.hand_over(command.job.job_id, core.now)
        return commands

    def take_events(self) -> list[CacheEvent]:
        """What appeared at or left primary and the tiers since the last call, if events are on."""
        events = list(self._core.events)
        self._core.events.clear()
        return events

    # -- requests

    def add_request(
        self, request_id: str, keys: Sequence[Sequence[OffloadKey]], options: RequestOptions | None = None
    ) -> None:
        """A request with the keys of its whole chunks so far, per group of the layout, in token order."""
        core = self._core
        if len(keys) != len(core.layout.groups):
            raise StateError(f"request {request_id}: {len(keys)} key lists for {len(core.layout.groups)} groups")
        core.requests.add(Request(request_id, [list(group) for group in keys], options or _DEFAULT_OPTIONS, core.now))
        self._trim()

    def _trim(self) -> None:
        """Too many records: the longest silent one is finished."""
        surplus = self._core.requests.surplus()
        if surplus is not None:
            self.finish(surplus.request_id)

    def extend_keys(self, request_id: str, keys: Sequence[Sequence[OffloadKey]]) -> None:
        """Keys of chunks that became whole since, per group."""
        request = self._core.requests.require(request_id)
        for kept, new in zip(request.keys, keys, strict=True):
            kept.extend(new)

    def waits(self, request_id: str, computed: int, total: int) -> bool:
        """Whether a poll would only be answered "wait" now, because nothing has changed; counts as that poll.

        Three comparisons. It changes nothing but the time of last contact, so it may be called from the engine's
        thread while another thread is inside the core: what that thread decides is seen by the next call.
        """
        return self.standing(request_id, computed, total) is WAIT

    def standing(self, request_id: str, computed: int, total: int) -> Answer | None:
        """The answer that a poll would repeat, because nothing has changed; None if a poll has something to do.

        What is said of `waits` holds here too.
        """
        core = self._core
        request = core.requests.get(request_id)
        if (
            request is None
            or request.state not in _STANDING
            or computed != request.computed
            or total != request.total
            or request.door is not _TWO_PHASE
        ):
            return None
        request.last_poll = core.now
        return WAIT if request.state is not _READY else Answer(request.hit, request.cause)

    def poll(self, request_id: str, computed: int, total: int) -> Answer:
        """The two-phase door: external tokens at hand when the engine has `computed` of `total`, or "wait".

        Every hit that is not None is to be answered with `take`, also 0.
        """
        standing = self.standing(request_id, computed, total)
        if standing is not None:
            return standing
        core = self._core
        request = core.requests.require(request_id)
        answer = self._two_phase.poll(request, computed, total)
        if core.room or core.pump or core.dirty:
            self._settle(changed=False)
        return answer if answer.hit is not None else self._two_phase.answer(request)

    def plan(self, request_id: str, computed: int, total: int) -> Decision:
        """What the first phase would decide for a request now; nothing is changed, promoted or waited for.

        Tiers that answer at once are asked; what others have not said yet is unknown.
        """
        request = self._core.requests.require(request_id)
        gathered = self._presence.gather(request, computed, total)
        return resolve(self._core.layout, gathered.presence, computed, total)

    def take(self, request_id: str, tokens: int) -> LoadPlan | None:
        """The engine took `tokens` of the reported hit and computes the rest; what it did not take is released."""
        request = self._core.requests.require(request_id)
        request.enter(Door.TWO_PHASE)
        plan = None
        if tokens > 0:
            plan = self._loads.plan(request, tokens)
        if request.state is not RequestState.RUNNING and request.state is not RequestState.LOADING:
            self._two_phase.release(request, PromotionTag.NOT_TAKEN)
            self._two_phase.forget_wait(request)
            if plan is not None:
                request.move(RequestState.READY)
                request.move(RequestState.LOADING)
            else:
                request.move(RequestState.RUNNING)
        self._settle()
        return plan

    def hit_sources(self, request_id: str) -> tuple[tuple[range, Sequence[int]], ...]:
        """Per group the chunks of the reported hit, and where each was when it was planned: a tier, or -1: primary."""
        request = self._core.requests.require(request_id)
        return tuple(
            (range(lo, hi), [int(source) for source in sources])
            for (lo, hi), sources in zip(request.ranges, request.sources, strict=False)
        )

    def failed_chunks(self, request_id: str) -> int:
        """How many chunks could not be brought for this request, so that it is answered without them."""
        return len(self._core.requests.require(request_id).failed)

    def complete_load(self, job_id: int, ok: bool = True) -> bool | None:
        """One rank reports a load; None until all have, then whether its bytes may be used.

        A load that a content reset overtook is answered False although the copy worked.
        """
        job = self._job(job_id, JobKind.LOAD)
        done = None if job is None else self._loads.complete(job, ok)
        request = self._core.requests.get(job.request_id) if job is not None and done is False else None
        if request is not None and request.door is Door.TWO_PHASE:
            self._two_phase.replan(request)
        self._settle()
        return done

    def prepare_store(self, request_id: str, chunks: Sequence[tuple[int, int]]) -> StorePlan | None:
        """Slots for chunks (group, chunk index) that the engine has now; fewer or none where they are not needed."""
        plan = self._stores.plan(self._core.requests.require(request_id), chunks)
        self._settle()
        return plan

    def complete_store(self, job_id: int, ok: bool = True, digests: Mapping[OffloadKey, bytes] | None = None) -> None:
        """One rank reports a store; when all have, its chunks are published and cascaded."""
        job = self._job(job_id, JobKind.STORE)
        if job is not None:
            self._stores.complete(job, ok, digests)
        self._settle()

    def _job(self, job_id: int, kind: JobKind) -> Job | None:
        job = self._core.ledger.get(job_id)
        if job is not None and job.kind is not kind:
            raise StateError(f"job {job_id}: is a {job.kind.value}, not a {kind.value}")
        return job

    def preempt(self, request_id: str) -> None:
        """The engine took the request's blocks away; its next poll resolves anew. Legal in every state."""
        request = self._core.requests.require(request_id)
        self._let_go(request, PromotionTag.NOT_TAKEN)
        if request.state in (RequestState.RUNNING, RequestState.LOADING):
            self._two_phase.forget_wait(request)
            request.move(RequestState.NEW)
        self._settle()

    def finish(self, request_id: str) -> None:
        """The request is over (done or aborted), in whatever state. Unknown ids are ignored."""
        request = self._core.requests.get(request_id)
        if request is None:
            return
        self._let_go(request, PromotionTag.CANCELLED)
        self._touch_chain(request)
        request.move(RequestState.FINISHED)
        self._core.dirty.pop(request, None)
        self._core.requests.remove(request)
        self._settle()

    def _let_go(self, request: Request, tag: PromotionTag) -> None:
        """Drop everything that a waiting request holds or waits for; jobs that were handed over go on."""
        if request.door is Door.PER_KEY:
            self._per_key.release(request, tag)
        elif request.state in WAITING or request.state is RequestState.READY:
            self._two_phase.release(request, tag)

    def _touch_chain(self, request: Request) -> None:
        """What a finished request leaves in primary becomes the newest, its tails before its heads to go."""
        residency = self._core.residency
        moved = request.moved or [NO_SLOTS] * len(request.keys)
        for keys, known in zip(request.keys, moved, strict=True):
            if len(known) == len(keys) and residency.index.has(known, keys):
                residency.touch(known, used=False)
                continue
            slots = residency.find(keys)
            here = slots >= 0
            residency.touch(slots if any_of(here) == len(slots) else slots[here], used=False)

    # -- the per-key door

    def lookup(self, key: OffloadKey, ctx: RequestContext) -> LookupResult:
        """Where one key stands for the request of `ctx`; may start its promotion."""
        answer = self._per_key.lookup(key, ctx)
        self._trim()
        return answer

    def prepare_load(self, keys: Sequence[OffloadKey], ctx: RequestContext) -> LoadPlan | None:
        """Pin keys that lookups found for a load; None if one of them is not readable in primary."""
        plan = self._per_key.prepare_load(keys, ctx)
        self._settle()
        return plan

    def on_schedule_end(self) -> None:
        """The engine's step is over: hand over what its lookups collected."""
        self._per_key.end_step()
        self._core.step += 1
        self._settle()

    # -- facts from tiers

    def on_event(self, tier: int, event: TierEvent) -> None:
        """Something a tier reports. What contradicts the ledger is dropped and counted."""
        if isinstance(event, KeysDone):
            self._keys_done(tier, event)
        elif isinstance(event, JobEnded):
            self._job_ended(tier, event)
        elif isinstance(event, ProbeDone):
            request = self._presence.answered(self._core.tiers[tier], event)
            if request is not None:
                if request.clock is not None:
                    request.clock.progress(self._core.now)
                self._core.dirty[request] = None
        elif isinstance(event, KeysRemoved):
            self._presence.facts(tier, event.keys, Presence.ABSENT)
            self._core.emit(EventKind.REMOVED, self._core.tiers[tier].port.name, event.keys)
        else:
            self._flushed(tier, event)
        self._settle()

    def _keys_done(self, tier: int, event: KeysDone) -> None:
        job = self._core.ledger.get(event.job_id)
        if job is None or job.tier != tier:
            self._core.counters.late += len(event.done) + len(event.failed)
            return
        done = job.report(event.done)
        failed = [(i, cause) for i, cause in event.failed if job.is_open(i)]
        self._core.counters.late += len(event.done) + len(event.failed) - len(done) - len(failed)
        job.progressed = self._core.now
        promotes = job.kind is JobKind.PROMOTE
        if failed:
            job.report([i for i, _ in failed])
            (self._promotions if promotes else self._cascades).failed(job, failed)
        if len(done):
            if promotes:
                self._promotions.landed(job, done)
            else:
                self._cascades.done(job, done)

    def _job_ended(self, tier: int, event: JobEnded) -> None:
        job = self._core.ledger.get(event.job_id)
        if job is None or job.tier != tier:
            self._core.counters.late += 1
            return
        if any_of(job.open):
            self._keys_done(tier, KeysDone(job.job_id, (), [(i, event.cause) for i in job.still_open().tolist()]))
        self._core.ledger.end(job)
        if job.kind is JobKind.PROMOTE:
            self._promotions.ended(job)
        else:
            self._cascades.ended(job)

    def _flushed(self, tier: int, event: Flushed) -> None:
        state = self._core.tiers[tier]
        if state.fenced and event.ticket == state.purge_ticket:
            state.purge_ticket = None
            if not event.ok:
                self._cascades.purge(state)
            elif not self._cascades.stale(state):
                state.fenced = False

    def purge_submitted(self, tier: int, ticket: int) -> None:
        """The purge that a `PurgeTier` command asked for has this ticket; its `Flushed` opens the tier again."""
        self._core.tiers[tier].purge_ticket = ticket

    # -- reset

    def reset_cache(self, reason: ResetReason = ResetReason.CONTENT_INVALID) -> None:
        """Begin a new generation: primary is dropped, and with `CONTENT_INVALID` every tier is fenced and purged.

        Returns at once. Slots under unfinished jobs are quarantined until these end; what completes late publishes
        nothing and changes no verdict.
        """
        core = self._core
        core.generation += 1
        core.counters.resets += 1
        invalid = reason is ResetReason.CONTENT_INVALID
        waiting = [r for r in core.requests.values() if r.state in WAITING or r.state is RequestState.READY]
        for request in waiting:
            self._let_go(request, PromotionTag.CANCELLED)
        self._promotions.drop_all()
        self._cascades.drop_all(purged=invalid)
        for job in core.ledger:
            self._overtake(job, invalid)
        ready = np.flatnonzero(core.residency.state == READY)
        pinned = ready[core.residency.pins[ready] > 0]
        core.account.dropped(pinned)
        core.emit(EventKind.REMOVED, PRIMARY, core.residency.keys_of(pinned))
        core.residency.quarantine(pinned)
        core.residency.evict(ready[core.residency.pins[ready] == 0])
        if invalid:
            core.verdicts.clear()
            for tier in core.tiers:
                self._cascades.purge(tier)
        for request in waiting:
            if request.door is Door.TWO_PHASE:
                self._two_phase.resume(request)
        self._settle()

    def _overtake(self, job: Job, invalid: bool) -> None:
        """A reset overtakes a job: a store publishes nothing, a load of invalid content counts as failed."""
        core = self._core
        if job.kind is JobKind.STORE and not job.quarantined:
            core.residency.quarantine(job.slots)
            job.quarantined = job.slots.tolist()
        elif job.kind is JobKind.LOAD:
            job.ok &= not invalid
        elif job.kind is JobKind.CASCADE and invalid:
            core.commands.append(CancelJob(job.tier, job.job_id))

    # -- after every call

    def _door(self, request: Request) -> TwoPhaseDoor | PerKeyDoor:
        return self._per_key if request.door is Door.PER_KEY else self._two_phase

    def _settle(self, *, changed: bool = True) -> None:
        """Carry what happened to those who wait for it, until nothing is left to carry; then hand over jobs.

        A poll or a step in which nothing `changed` looks at no queue.
        """
        core = self._core
        core.pump |= changed or core.room or bool(core.dirty)
        while True:
            if core.dirty:
                request = next(iter(core.dirty))
                del core.dirty[request]
                self._door(request).settle(request)
            elif core.room:
                core.room = False
                self._two_phase.serve_queue()
            elif not self._fail_closed_queues():
                break
        if core.pump:
            core.pump = False
            self._promotions.pump()
            self._cascades.pump()

    def _fail_closed_queues(self) -> bool:
        """What is queued for a tier that is not asked any more fails now; True if anything did."""
        failed = False
        for tier in self._core.tiers:
            if tier.queue and not self._core.will_read(tier):
                self._promotions.fail_queue(tier)
                failed = True
        return failed

    def _evicted(self, slots: I64, keys: Sequence[OffloadKey]) -> None:
        """Residency evicted these ready slots."""
        self._core.counters.evicted += len(slots)
        self._core.account.dropped(slots)
        self._core.emit(EventKind.REMOVED, PRIMARY, keys)

    # -- looking

    @property
    def idle(self) -> bool:
        """Whether nothing waits, nothing is in flight and nothing is queued."""
        core = self._core
        waiting = core.requests.waiting > 0
        queued = any(tier.queue or tier.cascades for tier in core.tiers)
        return not (waiting or queued or len(core.ledger) or self._presence.probes or core.commands)

    @property
    def counters(self) -> Counters:
        """The live counters, to read at once and not to keep: O(1), where `statistics` goes over all requests."""
        return self._core.counters

    def statistics(self) -> Statistics:
        """A frozen snapshot; the counters in it are copies. O(1) in requests and chunks."""
        core = self._core
        tiers = {tier.port.name: tier.counters.copy() for tier in core.tiers}
        oldest = core.ledger.oldest(core.now)
        return Statistics(
            core.counters.copy(),
            tiers,
            core.residency.statistics(),
            len(core.requests),
            core.requests.waiting,
            len(self._grants),
            core.requests.population[RequestState.FETCHING],
            len(core.ledger),
            oldest,
            alarms(tiers, oldest, core.config.job_total_s),
        )

    def close_account(self) -> None:
        """The run is over: promotions that nobody has used and nobody holds get their final class."""
        core = self._core
        tags, holds = core.residency.tag, core.residency.holds
        core.account.dropped(np.flatnonzero((tags != PromotionTag.NONE) & (holds == 0)))

    def check(self) -> None:
        """Recount everything; raises `InternalError` for the first invariant that does not hold."""
        check_all(self._core, self._presence, self._promotions, self._grants)
