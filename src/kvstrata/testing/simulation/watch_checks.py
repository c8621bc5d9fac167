"""What is asked of a watched manager from time to time, and at the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstrata.core.messages import EventKind, SubmitLoad, SubmitStore
from kvstrata.core.requests import HOLDING, RequestState
from kvstrata.core.residency import SlotState
from kvstrata.core.state import PRIMARY
from kvstrata.testing.world_checks import SLACK, demand

if TYPE_CHECKING:
    from kvstrata.testing.simulation.watch import WatchedManager


def check_jobs(manager: WatchedManager) -> None:
    """Each job is at one place: with a tier, with the ranks, or on its way there."""
    commands = [c.job.job_id for c in manager._core.commands if isinstance(c, SubmitLoad | SubmitStore)]
    demand(len(set(commands)) == len(commands), "a job is handed out twice")
    expected = {*commands, *manager.jobs, *manager.loads, *manager.stores}
    found = {job.job_id for job in manager._core.ledger}
    demand(found == expected, f"the ledger has jobs {sorted(found)}, handed out are {sorted(expected)}")


def check_holders(manager: WatchedManager) -> None:
    """What a request holds is what its plan names; what is reported is ready; the share holds."""
    core, residency, largest = manager._core, manager.residency, 0
    for request in core.requests.values():
        held = request.held
        largest = max(largest, core.byte_size(held))
        if request.state in HOLDING:
            planned = [k for group, (lo, hi) in zip(request.keys, request.ranges, strict=True) for k in group[lo:hi]]
            demand(
                residency.keys_of(held) == planned,
                f"{request.request_id} ({request.state.value}): holds other chunks than its plan names",
            )
            silent = core.now - manager.clocks[request.request_id].polled
            demand(
                silent < manager.config.silence_s + SLACK, f"{request.request_id}: holds after {silent} s of silence"
            )
        if request.state is RequestState.READY and len(held):
            ready = residency.state[held] == SlotState.READY
            demand(bool(ready.all()), f"{request.request_id}: reports a hit whose chunks are not ready")
    now, before = residency.held_bytes, manager.held_before
    manager.held_before = now
    demand(now <= max(core.share_limit, largest, before), f"{now} bytes are held, the share is {core.share_limit}")


def check_events(manager: WatchedManager) -> None:
    """The cache events replay to what primary really has."""
    for event in manager.take_events():
        if event.place != PRIMARY:
            continue
        keys = set(event.keys)
        demand(len(keys) == len(event.keys), "a cache event names a key twice")
        if event.kind is EventKind.STORED:
            demand(not keys & manager.resident, "an event stores a key that was there")
            manager.resident |= keys
        else:
            demand(keys <= manager.resident, "an event removes a key that was not there")
            manager.resident -= keys
            for offered in manager.offered.values():
                offered -= keys
    ready = np.flatnonzero(manager.residency.state == SlotState.READY)
    found = set(manager.residency.keys_of(ready))
    demand(found == manager.resident, f"events tell of {len(manager.resident)} resident keys, {len(found)} are there")


def clean(manager: WatchedManager) -> None:
    """Everything has ended: nothing may be left of it."""
    core, residency = manager._core, manager.residency
    demand(manager.idle, "everything has ended, but the core is not idle")
    for what in ("held_bytes", "pinned_bytes", "reserved_bytes", "quarantined_bytes"):
        demand(getattr(residency, what) == 0, f"everything has ended, but {what} is {getattr(residency, what)}")
    kept = residency.free_bytes + residency.resident_bytes + residency.waste_bytes
    demand(kept == residency.capacity_bytes, f"{kept} bytes of {residency.capacity_bytes} are accounted for")
    demand(not core.requests.values(), "records are left")
    demand(not (manager.jobs or manager.loads or manager.stores), "jobs are left")
    for tier in core.tiers:
        left = (tier.inflight, tier.loads_out, tier.overdue, tier.overdue_jobs, tier.cascading, tier.cascades_out)
        demand(not any(left) and not tier.queue and not tier.cascades, f"{tier.port.name}: {left} are left")
        demand(not tier.fenced, f"{tier.port.name} is still fenced")
        states = (tier.reads.state.value, tier.writes.state.value)
        demand(states == ("closed", "closed"), f"{tier.port.name}: its breakers are {states}")
    manager.full_check()
    for key in manager.resident:
        slot = residency.slot_of(key)
        manager.demand_right("at the end", key, int(residency.offset[slot]), int(residency.length[slot]))
    manager.close_account()
    manager.check()
    counters = core.counters
    demand(counters.promotions_open == 0, f"{counters.promotions_open} promotions have no class")
    if manager.steady:
        wasted = (counters.not_taken, counters.cancelled, counters.expired, counters.failed)
        demand(not any(wasted), f"nothing failed or changed, but of the promoted chunks {wasted} were wasted")
