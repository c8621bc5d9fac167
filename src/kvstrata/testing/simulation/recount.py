"""What is asked of the core after every single step: the sums of `core/invariants.py`, over whole columns.

It counts bytes by state, pins and holds by owner, the queue, classes of promotions, and what each tier has in flight.
Placement in pages, the index, policies and waiters are walked through less often (`WatchedManager.full_check`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstrata.core.requests import HOLDING, Request, RequestState
from kvstrata.core.slots import QUARANTINED, READY, RESERVED
from kvstrata.core.statistics import PromotionTag
from kvstrata.testing.world_checks import demand
from kvstrata.types import I64, JobKind

if TYPE_CHECKING:
    from kvstrata.core.residency import Residency
    from kvstrata.core.state import CoreState
    from kvstrata.testing.simulation.watch import WatchedManager


def recount(manager: WatchedManager) -> None:
    """Raises what does not add up between two calls."""
    core, residency = manager._core, manager.residency
    _check_bytes(residency)
    requests = core.requests.values()
    queued = 0
    for request in requests:
        queued += request.state is RequestState.QUEUED
        _check_request(request, residency)
    demand(queued == len(manager._grants), f"{len(manager._grants)} entries in the queue for {queued} queued requests")
    _check_owners(core, residency, requests)
    _check_account(core, residency)


def _check_bytes(residency: Residency) -> None:
    table = residency.table
    rows = table.rows
    state, length = table.state[:rows], table.length[:rows]
    sums = np.bincount(state, length, 4).tolist()
    found = sums[RESERVED], sums[READY], sums[QUARANTINED]
    kept = residency.reserved_bytes, residency.resident_bytes, residency.quarantined_bytes
    demand(found == kept, f"reserved, resident and quarantined are {found} bytes, kept are {kept}")
    pinned, held = int(length[table.pins[:rows] > 0].sum()), int(length[table.holds[:rows] > 0].sum())
    demand(
        (pinned, held) == (residency.pinned_bytes, residency.held_bytes), f"{pinned} bytes are pinned, {held} are held"
    )
    demand(residency.waste_bytes >= 0, "more bytes are accounted for than there are")


def _check_request(request: Request, residency: Residency) -> None:
    if request.state in HOLDING:
        states = residency.state[request.held]
        reserved = np.count_nonzero(states == RESERVED)
        name = f"{request.request_id} ({request.state.value})"
        demand(request.pending == reserved, f"{name}: counts {request.pending} chunks on their way, holds {reserved}")
        demand(not (states == QUARANTINED).any(), f"{name}: holds a quarantined slot")
        demand(request.state is not RequestState.READY or not reserved, f"{name}: has chunks on their way")
    else:
        demand(not request.slots, f"{request.request_id} ({request.state.value}): holds slots")


def _check_owners(core: CoreState, residency: Residency, requests: list[Request]) -> None:
    """Every pin and hold has its owner; each tier's accounts are those of its jobs."""
    holders = [part for request in requests for part in request.slots]
    pinning = list(holders)
    inflight, cascading, loads, late = ([0] * len(core.tiers) for _ in range(4))
    length = residency.length
    for job in core.ledger:
        if job.kind is JobKind.LOAD:
            pinning.append(job.slots)
        elif job.kind is JobKind.CASCADE:
            pinned = job.slots[~job.unpinned]
            pinning.append(pinned)
            cascading[job.tier] += int(length[pinned].sum())
        elif job.kind is JobKind.PROMOTE:
            loads[job.tier] += 1
            late[job.tier] += job.overdue
            inflight[job.tier] += int(length[job.slots[job.still_open()]].sum())
    _compare("holds", holders, residency.holds)
    _compare("pins", pinning, residency.pins)
    for i, tier in enumerate(core.tiers):
        kept = tier.inflight, tier.cascading, tier.loads_out, tier.overdue_jobs
        found = inflight[i], cascading[i], loads[i], late[i]
        demand(found == kept, f"{tier.port.name}: in flight, cascading, loads and overdue are {found}, kept are {kept}")


def _compare(what: str, owned: list[I64], column: np.typing.NDArray[np.int32]) -> None:
    if owned:
        found = np.bincount(np.concatenate(owned), minlength=len(column))
        demand(bool((found == column).all()), f"{what} of slots are not those of requests and jobs")
    else:
        demand(not column.any(), f"slots have {what} that nobody owns")


def _check_account(core: CoreState, residency: Residency) -> None:
    c = core.counters
    classes = c.consumed + c.not_taken + c.cancelled + c.expired + c.failed
    demand(c.promoted == classes + c.promotions_open, f"promoted {c.promoted}, {classes} + {c.promotions_open} classed")
    tagged = int(np.count_nonzero(residency.tag != PromotionTag.NONE))
    demand(tagged == c.promotions_open, f"{tagged} slots are tagged, {c.promotions_open} promotions are open")
