"""Promotions: reserved slots that wait for their turn, are being read, land or fail; who waits for them; pacing.

A reserved slot's `job` column says where it stands: minus the id of the batch that queues it, or the id of the job
that reads it. Its waiters, in order, are kept here; they hold the slot.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from kvstrata.core.arrays import NO_SLOTS, count_of, slot_array, where
from kvstrata.core.ledger import Job
from kvstrata.core.messages import CancelJob, EventKind, SubmitLoad
from kvstrata.core.requests import Request
from kvstrata.core.slots import RESERVED
from kvstrata.core.state import PRIMARY, Batch, CoreState, TierState
from kvstrata.core.statistics import PromotionTag
from kvstrata.core.waiters import Waiters
from kvstrata.types import I64, FailCause, JobKind, TierJob


class Promotions:
    """Everything between the reservation of a slot for a promotion and its landing or failure."""

    def __init__(self, core: CoreState) -> None:
        self._core = core
        self._batches = 0
        self._queued: dict[int, tuple[TierState, Batch]] = {}
        """Batches that still stand in a tier's queue, by id."""
        self._unsent: dict[tuple[int, Request], tuple[Batch, list[int]]] = {}
        """Batches of the per-key door that are still being collected in this step, with their slots so far."""
        self.waiters = Waiters(core.residency.table)
        """Who waits for a reserved slot, and holds it. Slots of stores have waiters too."""

    def start(self, request: Request, tier: int, slots: I64) -> None:
        """Queue freshly reserved slots, in token order, to be read from `tier` for `request`."""
        self._core.account.started(slots)
        self._core.tiers[tier].queue.append(self._batch(request, self._core.tiers[tier], slots))
        self.waiters.join(request, slots)

    def _batch(self, request: Request, tier: TierState, slots: I64) -> Batch:
        self._batches += 1
        batch = Batch(self._batches, request, slots)
        self._queued[batch.batch_id] = (tier, batch)
        self._core.pump = True
        self._core.residency.job[slots] = -self._batches
        return batch

    def collect(self, request: Request, tier: TierState, slot: int) -> None:
        """The same for one slot of the per-key door; `send` hands the step's batches over, one per (tier, request)."""
        slots = slot_array([slot])
        self._core.account.started(slots)
        self._gather(request, tier, slot)
        self.waiters.join(request, slots)

    def _gather(self, request: Request, tier: TierState, slot: int) -> None:
        batch, slots = self._unsent.get((tier.index, request), (None, []))
        if batch is None:
            batch = self._batch(request, tier, NO_SLOTS)
            self._unsent[(tier.index, request)] = batch, slots
        slots.append(slot)
        self._core.residency.job[slot] = -batch.batch_id

    def send(self) -> None:
        """The step is over: what was collected takes its place in the queues."""
        for (tier, _), (batch, slots) in self._unsent.items():
            batch.slots = slot_array(slots)
            self._core.tiers[tier].queue.append(batch)
        self._unsent.clear()

    def leave(self, request: Request, slots: I64, tag: PromotionTag) -> None:
        """`request` lets go of slots it holds, for the reason `tag`. What nobody waits for any more is given up.

        A queued promotion passes to the oldest remaining waiter whose options admit its tier. One that is being read
        goes on and lands evictable, unless the request was aborted or reset: then its slot is quarantined.
        """
        residency = self._core.residency
        residency.unhold(slots)
        self._core.account.released(slots, tag)
        self._core.room = True
        states = residency.state[slots]
        if count_of(states, RESERVED):
            reserved = slots[states == RESERVED]
            orphans = self.waiters.leave(request, reserved)
            self._pass_on(request, self.waiters.waited_for(reserved).tolist())
            self._give_up(orphans, tag)
        self._close(request)

    def _close(self, request: Request) -> None:
        """What was given up of this step's batches may be reserved again: further slots go into new batches."""
        for tier in self._core.tiers if self._unsent else ():
            batch, slots = self._unsent.pop((tier.index, request), (None, []))
            if batch is not None:
                batch.slots = slot_array(slots)
                tier.queue.append(batch)

    def _pass_on(self, owner: Request, slots: Sequence[int]) -> None:
        """Slots of `owner` that others still wait for get an heir that may read their tier."""
        heirs: dict[tuple[int, Request], list[int]] = {}
        for slot in slots:
            tier, batch = self._source(slot)
            if tier is None:
                continue
            heir = next((r for r in self.waiters.of(slot) if r.admits(tier.port)), None)
            if heir is None:
                self._refuse(slot)
            elif batch is not None and batch is self._unsent.get((tier.index, owner), (None, []))[0]:
                self._gather(heir, tier, slot)
            elif batch is not None and batch.request is owner:
                heirs.setdefault((tier.index, heir), []).append(slot)
        for (tier_index, heir), inherited in heirs.items():
            tier = self._core.tiers[tier_index]
            tier.queue.append(self._batch(heir, tier, slot_array(inherited)))

    def _source(self, slot: int) -> tuple[TierState | None, Batch | None]:
        """The tier that a reserved slot is read from, None for a store; and the batch, if it is still queued."""
        at = int(self._core.residency.job[slot])
        if at < 0:
            return self._queued[-at]
        job = self._core.ledger.get(at)
        return (self._core.tiers[job.tier] if job is not None and job.kind is JobKind.PROMOTE else None), None

    def _pop(self, tier: TierState) -> Batch:
        batch = tier.queue.popleft()
        del self._queued[batch.batch_id]
        return batch

    def _rest(self, tier: TierState) -> I64:
        """Takes the first batch out of the queue; returns its slots that are still queued."""
        batch = self._pop(tier)
        return batch.slots[self._live(batch)]

    def _refuse(self, slot: int) -> None:
        """No remaining waiter may read the slot's tier: it fails for them."""
        slots = slot_array([slot])
        self._core.residency.tag[slots] = PromotionTag.CANCELLED
        self.fail_waiters(slots)
        self._give_up(slots, PromotionTag.CANCELLED)

    def _give_up(self, orphans: I64, tag: PromotionTag) -> None:
        """Reserved slots without a waiter: free the queued ones, cancel those being read where the reason asks it."""
        if not len(orphans):
            return
        at = self._core.residency.job[orphans]
        if (queued := orphans[at < 0]).size:
            self._core.account.dropped(queued)
            self._release(queued)
        if tag is PromotionTag.CANCELLED:
            for job_id in np.unique(at[at > 0]).tolist():
                job = self._core.ledger.get(job_id)
                if job is not None and job.kind is JobKind.PROMOTE:
                    self._cancel(job, orphans[at == job_id])

    def _release(self, queued: I64) -> None:
        """Slots that no tier was told about go back, and leave their batch."""
        self._core.residency.job[queued] = 0
        self._core.residency.release(queued)

    def _cancel(self, job: Job, slots: I64) -> None:
        """Nobody wants what is being read into these slots: quarantine them until the job has ended."""
        self._core.account.dropped(slots)
        self._quarantine(job, slots)
        if not job.cancelled and set(job.slots[job.still_open()].tolist()) <= set(job.quarantined):
            job.cancelled = True
            self._core.commands.append(CancelJob(job.tier, job.job_id))

    def _quarantine(self, job: Job, slots: I64) -> None:
        self._core.residency.quarantine(slots)
        job.quarantined.extend(slots.tolist())

    # -- handing over

    def pump(self) -> None:
        """Hand over what pacing admits, in order of grants and, within one, in token order."""
        for tier in self._core.tiers:
            while tier.queue and self._hand_over(tier):
                pass

    def _hand_over(self, tier: TierState) -> bool:
        """One job from the head of the tier's queue; False if nothing can be handed over now."""
        batch = tier.queue[0]
        places = self._live(batch)
        if not len(places):
            self._pop(tier)
            return True
        if not self._core.readable(tier):
            return False
        slots = self._admit(tier, batch.slots[places])
        if not len(slots):
            return False
        batch.at = int(places[len(slots) - 1]) + 1
        core = self._core
        keys = core.residency.keys_of(slots)
        job = core.ledger.accept(
            JobKind.PROMOTE, core.generation, slots, keys, batch.request.request_id, core.now, tier=tier.index
        )
        core.residency.job[slots] = job.job_id
        size = core.byte_size(slots)
        tier.inflight += size
        tier.loads_out += 1
        tier.reads.asked()
        tier.counters.promoted += len(slots)
        tier.counters.promoted_bytes += size
        offsets, lengths = core.ranges_of(slots)
        core.commands.append(SubmitLoad(tier.index, TierJob(job.job_id, keys, offsets.tolist(), lengths.tolist())))
        return True

    def _live(self, batch: Batch) -> I64:
        """Places in the batch of what is still queued: not given up, not inherited by another batch."""
        mine = self._core.residency.job[batch.slots[batch.at :]] == -batch.batch_id
        return where(mine) + batch.at

    def _admit(self, tier: TierState, queued: I64) -> I64:
        """The leading part of `queued` that fits under the in-flight share of one tier; at least one chunk when idle.

        A small remainder waits until a quarter of the share is free, so that paced reads stay large.
        """
        core = self._core
        if tier.reads.is_trial or tier.overdue_jobs:
            room = core.inflight_limit - tier.inflight  # of what is overdue, `readable` takes care
            return queued[:1] if tier.overdue_jobs or core.byte_size(queued[:1]) <= room else NO_SLOTS
        queued = queued[: tier.port.capabilities.max_batch]
        if core.byte_size(queued) <= core.inflight_limit - tier.inflight:
            return queued
        ends = np.cumsum(core.residency.length[queued])
        fit = int(np.searchsorted(ends, core.inflight_limit - tier.inflight, side="right"))
        if tier.inflight and fit < len(queued) and (fit == 0 or ends[fit - 1] < core.inflight_limit // 4):
            return NO_SLOTS
        return queued[: max(fit, 0 if tier.inflight else 1)]

    def queued_slots(self) -> list[int]:
        """All slots that wait for their turn."""
        collecting = [slot for batch, slots in self._unsent.values() for slot in slots
                      if self._core.residency.job[slot] == -batch.batch_id]  # fmt: skip
        return collecting + [
            slot for _, batch in self._queued.values() for slot in batch.slots[self._live(batch)].tolist()
        ]

    # -- outcomes

    def landed(self, job: Job, index: I64) -> None:
        """The bytes of these keys of a promotion are in primary and verified."""
        residency, tier = self._core.residency, self._core.tiers[job.tier]
        slots = job.slots_at(index)
        tier.inflight -= self._core.byte_size(slots)
        tier.reads.success()
        wanted = slots[(residency.job[slots] == job.job_id) & (residency.state[slots] == RESERVED)]
        self._core.counters.late += len(slots) - len(wanted)
        if len(wanted):
            tier.counters.landed += len(wanted)
            self.publish(wanted)

    def publish(self, slots: I64, anchor: int = -1) -> None:
        """Reserved slots, in chain order, become readable; their waiters are told."""
        residency = self._core.residency
        residency.job[slots] = 0
        residency.publish(slots, anchor)
        self._core.room = True
        if self._core.events_on:
            self._core.emit(EventKind.STORED, PRIMARY, residency.keys_of(slots))
        for waiting, part in self.waiters.take(slots):
            for request in waiting:
                self._have_landed(request, len(part))

    def _have_landed(self, request: Request, chunks: int) -> None:
        request.pending -= chunks
        if request.clock is not None:
            request.clock.progress(self._core.now)
        if request.pending == 0:
            self._core.dirty[request] = None

    def failed(self, job: Job, failures: Sequence[tuple[int, FailCause]]) -> None:
        """These keys of a promotion did not come. Their slots are returned when the job has ended."""
        core, tier = self._core, self._core.tiers[job.tier]
        slots = job.slots[[i for i, _ in failures]]
        tier.inflight -= core.byte_size(slots)
        for _, cause in failures:
            tier.counters.failed[cause] = tier.counters.failed.get(cause, 0) + 1
        if job.generation == core.generation:
            self._blame(job, failures)
        live = slots[(core.residency.job[slots] == job.job_id) & (core.residency.state[slots] == RESERVED)]
        if len(live):
            core.account.failed(live)
            gone = {int(job.slots[i]) for i, cause in failures if cause is FailCause.GONE} if tier.gallops else set()
            self.fail_waiters(live, tier, gone)
            self._quarantine(job, live)

    def _blame(self, job: Job, failures: Sequence[tuple[int, FailCause]]) -> None:
        """Note verdicts on the keys; one report is one success or failure of the tier."""
        core, tier = self._core, self._core.tiers[job.tier]
        for i, cause in failures:
            core.verdicts.failed(tier.index, job.keys[i], cause, shared=tier.port.capabilities.shared, now=core.now)
        if any(cause.is_passing for _, cause in failures):
            tier.reads.failure(core.now)
        elif any(cause is not FailCause.CANCELLED for _, cause in failures):
            tier.reads.success()

    def fail_waiters(self, slots: I64, tier: TierState | None = None, gone: Collection[int] = ()) -> None:
        """The chunks of these reserved slots will not come: they are absent for everybody who waits for them.

        `tier` is the one that failed to deliver them, if one was asked. It simply lacks what is in `gone`: for whom
        that was an assumption, another tier may still have it.
        """
        residency = self._core.residency
        for waiting, part in self.waiters.take(slots):
            keys = residency.keys_of(part)
            for request in waiting:
                residency.unhold(part)
                request.forget(part)
                request.pending -= len(part)
                request.round_failed = True
                for slot, key in zip(part.tolist(), keys, strict=True):
                    group = int(residency.group[slot])
                    if tier is None or slot not in gone or not request.mistaken(tier.index, group, key):
                        request.failed.add(key)
                if tier is not None:
                    request.plain.add(tier.index)
                self._core.dirty[request] = None
        self._core.room = True

    def ended(self, job: Job) -> None:
        """The tier touches the job's slots no more: return what was quarantined under it."""
        tier = self._core.tiers[job.tier]
        tier.loads_out -= 1
        if job.overdue:
            tier.overdue_jobs -= 1
            tier.overdue -= self._core.byte_size(slot_array(job.quarantined))
        tier.reads.released()
        self._core.residency.requite(slot_array(job.quarantined))
        self._core.room = True

    def overdue(self, job: Job) -> None:
        """A bound of the job has passed: let its requests go, keep its slots out of use until it has ended."""
        tier = self._core.tiers[job.tier]
        failures = [(i, FailCause.TIMEOUT) for i in job.still_open().tolist()]
        job.open[:] = False
        self.failed(job, failures)
        tier.overdue_jobs += 1
        tier.overdue += self._core.byte_size(slot_array(job.quarantined))
        tier.counters.overdue_jobs += 1
        tier.reads.failure(self._core.now, at_once=True)

    def fail_queue(self, tier: TierState) -> None:
        """The tier is not asked any more (its breaker opened): what is queued for it fails now, not later."""
        while tier.queue:
            queued = self._rest(tier)
            if len(queued):
                self._core.account.failed(queued)
                self.fail_waiters(queued)
                self._release(queued)

    def drop_all(self) -> None:
        """A new generation: nothing is queued, nobody waits; what is being read is quarantined and cancelled."""
        core = self._core
        self.send()
        for tier in core.tiers:
            while tier.queue:
                queued = self._rest(tier)
                core.residency.tag[queued] = PromotionTag.CANCELLED
                core.account.dropped(queued)
                self._release(queued)
        self.waiters.clear()
        for job in list(core.ledger):
            if job.kind is JobKind.PROMOTE:
                live = slot_array(
                    s for s in job.slots.tolist()
                    if core.residency.job[s] == job.job_id and core.residency.state[s] == RESERVED
                )  # fmt: skip
                core.residency.tag[live] = PromotionTag.CANCELLED
                core.account.dropped(live)
                self._quarantine(job, live)
                if not job.cancelled:
                    job.cancelled = True
                    core.commands.append(CancelJob(job.tier, job.job_id))
