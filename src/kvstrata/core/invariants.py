"""The invariants of the core, coded once (docs/invariants.md numbers them); tests call them after every step.

Everything is recounted from the records of requests, jobs and queues, and compared with the counters and columns that
the core works on. The first thing that does not hold raises `InternalError`.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvstrata.core.grants import Grants
from kvstrata.core.presence import PresenceBook
from kvstrata.core.promotions import Promotions
from kvstrata.core.requests import HOLDING, WAITING, Door, Request, RequestState
from kvstrata.core.slots import QUARANTINED, RESERVED
from kvstrata.core.state import CoreState
from kvstrata.core.statistics import PromotionTag
from kvstrata.errors import InternalError
from kvstrata.types import JobKind


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise InternalError(what)


def check_all(core: CoreState, presence: PresenceBook, promotions: Promotions, grants: Grants) -> None:
    """All invariants that can be stated between two calls."""
    core.residency.check()
    check_pins(core)
    check_requests(core, grants)
    check_waiters(core, promotions)
    check_jobs(core, promotions)
    check_account(core)
    check_limits(core)
    if not len(core.ledger) and not any(r.state in WAITING or r.state in HOLDING for r in core.requests.values()):
        check_idle(core)


def check_pins(core: CoreState) -> None:
    """Every pin belongs to exactly one request or job, and every one of these has its pin."""
    holds: Counter[int] = Counter()
    for request in core.requests.values():
        holds.update(request.held.tolist())
    pins = Counter(holds)
    for job in core.ledger:
        if job.kind is JobKind.LOAD:
            pins.update(job.slots.tolist())
        elif job.kind is JobKind.CASCADE:
            pins.update(job.slots[~job.unpinned].tolist())
    for name, column, expected in (("holds", core.residency.holds, holds), ("pins", core.residency.pins, pins)):
        found = {int(slot): int(column[slot]) for slot in np.flatnonzero(column)}
        _demand(found == dict(expected), f"{name}: slots have {found}, requests and jobs own {dict(expected)}")


def check_requests(core: CoreState, grants: Grants) -> None:
    """Nobody waits for room while holding; a request holds only what its state allows; the queue is who is queued."""
    queued = [r for r in core.requests.values() if r.state is RequestState.QUEUED]
    _demand(len(queued) == len(grants), f"queue: {len(grants)} entries for {len(queued)} queued requests")
    for request in core.requests.values():
        name = f"request {request.request_id} ({request.state.value})"
        if request.door is Door.TWO_PHASE:
            _demand(request.state in HOLDING or not len(request.held), f"{name}: holds slots")
        _check_pending(core, request, name)
    head = grants.head
    _demand(head is None or head.order == min(r.order for r in queued), "queue: the head is not the oldest")


def _check_pending(core: CoreState, request: Request, name: str) -> None:
    states = core.residency.state[request.held]
    reserved = int((states == RESERVED).sum())
    _demand(request.pending == reserved, f"{name}: counts {request.pending} chunks on their way, holds {reserved}")
    _demand(bool((states != QUARANTINED).all()), f"{name}: holds a quarantined slot")
    if request.state is RequestState.READY:
        _demand(request.pending == 0, f"{name}: has chunks on their way")


def check_waiters(core: CoreState, promotions: Promotions) -> None:
    """Who waits for a reserved slot is who holds it."""
    expected: Counter[int] = Counter()
    for request in core.requests.values():
        held = request.held
        expected.update(held[core.residency.state[held] == RESERVED].tolist())
    found = promotions.waiters.counts()
    _demand(found == dict(expected), f"waiters: {found}, holders of reserved slots: {dict(expected)}")


def check_jobs(core: CoreState, promotions: Promotions) -> None:
    """A reserved slot has exactly one writer: a queued batch, a promotion or a store; a quarantined one has a job."""
    writers: Counter[int] = Counter()
    for slot in promotions.queued_slots():
        writers[slot] += 1
    touched: set[int] = set()
    for job in core.ledger:
        slots = job.slots.tolist()
        touched.update(slots)
        if job.kind in (JobKind.PROMOTE, JobKind.STORE):
            writers.update(s for s in slots if core.residency.job[s] == job.job_id
                           and core.residency.state[s] == RESERVED)  # fmt: skip
    reserved = set(np.flatnonzero(core.residency.state == RESERVED).tolist())
    _demand(set(writers) == reserved, f"writers of {sorted(writers)}, reserved are {sorted(reserved)}")
    _demand(all(n == 1 for n in writers.values()), "a reserved slot has two writers")
    quarantined = set(np.flatnonzero(core.residency.state == QUARANTINED).tolist())
    _demand(quarantined <= touched, f"slots {sorted(quarantined - touched)} are quarantined without a job")


def check_account(core: CoreState) -> None:
    """P1: promoted is the sum of its classes and of what is still open."""
    c = core.counters
    classes = c.consumed + c.not_taken + c.cancelled + c.expired + c.failed
    _demand(
        c.promoted == classes + c.promotions_open, f"promoted {c.promoted}, classes {classes} + {c.promotions_open}"
    )
    tagged = int((core.residency.tag != PromotionTag.NONE).sum())
    _demand(tagged == c.promotions_open, f"{tagged} slots are tagged, {c.promotions_open} promotions are open")


def check_limits(core: CoreState) -> None:
    """Pacing and queues: what tiers and queues hold is what the ledger says, within the limits."""
    for tier in core.tiers:
        name = tier.port.name
        loads = [job for job in core.ledger if job.kind is JobKind.PROMOTE and job.tier == tier.index]
        _demand(tier.loads_out == len(loads), f"{name}: counts {tier.loads_out} loads, the ledger has {len(loads)}")
        late = [job for job in loads if job.overdue]
        _demand(tier.overdue_jobs == len(late), f"{name}: counts {tier.overdue_jobs} overdue loads of {len(late)}")
        inflight = sum(core.byte_size(job.slots[job.still_open()]) for job in loads)
        _demand(tier.inflight == inflight, f"{name}: counts {tier.inflight} bytes in flight of {inflight}")
        _demand(tier.inflight <= core.inflight_limit, f"{name}: {tier.inflight} bytes in flight exceed the share")
        cascades = [job for job in core.ledger if job.kind is JobKind.CASCADE and job.tier == tier.index]
        pinned = sum(core.byte_size(job.slots[~job.unpinned]) for job in cascades)
        _demand(tier.cascading == pinned, f"{name}: counts {tier.cascading} bytes under cascades of {pinned}")
        _demand(len(tier.cascades) <= core.config.cascade_queue, f"{name}: the cascade queue is over its bound")


def check_idle(core: CoreState) -> None:
    """An idle system is clean: no pins, nothing reserved, nothing quarantined."""
    residency = core.residency
    queued = any(tier.queue for tier in core.tiers)
    per_key = any(r.door is Door.PER_KEY for r in core.requests.values())
    if queued or per_key:
        return
    _demand(residency.held_bytes == 0 and residency.pinned_bytes == 0, "idle, but slots are pinned")
    _demand(residency.reserved_bytes == 0, "idle, but slots are reserved")
    _demand(residency.quarantined_bytes == 0, "idle, but slots are quarantined")
