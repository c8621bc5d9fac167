"""What is asked of the core after every single step: the sums of `core/invariants.py`, over whole columns.

It counts bytes by state, pins and holds by owner, the queue, classes of promotions, and what each tier has in flight.
Placement in pages, the index, policies and waiters are walked through less often (`WatchedManager.full_check`).

A sum over columns that are the same, byte for byte, as after the step before is the same sum: it is compared with what
the core keeps every time, and computed when its columns have changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstrata.core.arrays import NO_SLOTS
from kvstrata.core.requests import HOLDING, Request, RequestState
from kvstrata.core.slots import QUARANTINED, READY, RESERVED
from kvstrata.testing.world_checks import demand
from kvstrata.types import I64, JobKind

if TYPE_CHECKING:
    from kvstrata.core.ledger import Job
    from kvstrata.testing.simulation.watch import WatchedManager

_QUEUED, _READY = RequestState.QUEUED, RequestState.READY
_LOAD, _CASCADE, _PROMOTE = JobKind.LOAD, JobKind.CASCADE, JobKind.PROMOTE
_Share = tuple[bytes, I64, int]
"""Marks of a job's keys, the slots that they leave to it, and their bytes."""


class Recount:
    """The sums of one manager, again."""

    def __init__(self, manager: WatchedManager) -> None:
        self._core, self._residency, self._grants = manager._core, manager.residency, manager._grants
        self._columns: tuple[bytes, ...] = ()
        self._sums: tuple[list[float], int, int] = ([], 0, 0)
        self._lengths = b""
        self._named: tuple[int, bytes] = (0, b"")
        """The slots that requests and jobs named when that was compared last; as many are requests'."""
        self._shares: dict[int, _Share] = {}
        """What jobs of tiers cover, as long as their marks and all lengths stay as they are."""

    def check(self) -> None:
        """Raises what does not add up between two calls."""
        moved = self._check_bytes()
        queued = 0
        holders: list[I64] = []
        for request in self._core.requests.values():
            if request.state in HOLDING:
                self._check_holder(request)
                holders += request.slots
            elif request.slots:
                demand(False, f"{request.request_id} ({request.state.value}): holds slots")
            else:
                queued += request.state is _QUEUED
        if queued != len(self._grants):
            demand(False, f"{len(self._grants)} entries in the queue for {queued} queued requests")
        self._check_owners(holders, moved)
        self._check_account()

    def _check_bytes(self) -> bool:
        """Whether any column has changed."""
        residency, table = self._residency, self._residency.table
        rows = table.rows
        state, length, pins, holds = table.state[:rows], table.length[:rows], table.pins[:rows], table.holds[:rows]
        columns = state.tobytes(), length.tobytes(), pins.tobytes(), holds.tobytes()
        moved = columns != self._columns
        if moved:
            self._columns = columns
            sums = np.bincount(state, length, 4).tolist()
            self._sums = sums, int(length.dot(pins > 0)), int(length.dot(holds > 0))
            if columns[1] != self._lengths:
                self._lengths = columns[1]
                self._shares.clear()
        sums, pinned, held = self._sums
        kept = residency.reserved_bytes, residency.resident_bytes, residency.quarantined_bytes
        if (sums[RESERVED], sums[READY], sums[QUARANTINED]) != kept:
            demand(False, f"free, reserved, resident and quarantined are {sums} bytes, kept are {kept}")
        if (pinned, held) != (residency.pinned_bytes, residency.held_bytes):
            demand(False, f"{pinned} bytes are pinned, {held} are held, not as kept")
        if residency.waste_bytes < 0:
            demand(False, "more bytes are accounted for than there are")
        return moved

    def _check_holder(self, request: Request) -> None:
        states = self._residency.state[request.held].tobytes()
        reserved = states.count(RESERVED)
        ready = request.state is not _READY or not reserved
        if request.pending != reserved or states.count(QUARANTINED) or not ready:
            name = f"{request.request_id} ({request.state.value})"
            demand(request.pending == reserved, f"{name}: counts {request.pending} on their way, holds {reserved}")
            demand(ready, f"{name}: has chunks on their way")
            demand(False, f"{name}: holds a quarantined slot")

    def _check_owners(self, holders: list[I64], moved: bool) -> None:
        """Every pin and hold has its owner; each tier's accounts are those of its jobs."""
        core = self._core
        pinning: list[I64] = []
        inflight, cascading, loads, late = ([0] * len(core.tiers) for _ in range(4))
        for job in core.ledger:
            kind = job.kind
            if kind is _LOAD:
                pinning.append(job.slots)
            elif kind is _CASCADE:
                _, slots, size = self._share(job, (~job.unpinned).tobytes())
                pinning.append(slots)
                cascading[job.tier] += size
            elif kind is _PROMOTE:
                loads[job.tier] += 1
                late[job.tier] += job.overdue
                inflight[job.tier] += self._share(job, job.open.tobytes())[2]
        self._compare(holders, pinning, moved)
        for i, tier in enumerate(core.tiers):
            kept = tier.inflight, tier.cascading, tier.loads_out, tier.overdue_jobs
            found = inflight[i], cascading[i], loads[i], late[i]
            if found != kept:
                name = tier.port.name
                demand(False, f"{name}: in flight, cascading, loads and overdue are {found}, kept are {kept}")

    def _share(self, job: Job, marks: bytes) -> _Share:
        """The marked slots of a job, and their bytes."""
        share = self._shares.get(job.job_id)
        if share is None or share[0] != marks:
            slots = job.slots[np.frombuffer(marks, np.bool_)]
            share = self._shares[job.job_id] = marks, slots, int(self._residency.length[slots].sum())
        return share

    def _compare(self, holders: list[I64], pinning: list[I64], moved: bool) -> None:
        holds, pins = self._residency.holds, self._residency.pins
        slots = np.concatenate([*holders, *pinning, NO_SLOTS])
        held = sum(map(len, holders))
        named = held, slots.tobytes()
        if named == self._named and not moved:
            return
        self._named = named
        if not len(slots):
            if np.count_nonzero(pins) or np.count_nonzero(holds):
                demand(False, "slots have pins or holds that nobody owns")
            return
        if np.count_nonzero(np.bincount(slots[:held], minlength=len(holds)) != holds):
            demand(False, "holds of slots are not those of requests")
        if np.count_nonzero(np.bincount(slots, minlength=len(pins)) != pins):
            demand(False, "pins of slots are not those of requests and jobs")

    def _check_account(self) -> None:
        c = self._core.counters
        classes = c.consumed + c.not_taken + c.cancelled + c.expired + c.failed
        if c.promoted != classes + c.promotions_open:
            demand(False, f"promoted {c.promoted}, {classes} + {c.promotions_open} classed")
        tags = self._residency.tag.tobytes()
        tagged = len(tags) - tags.count(0)  # 0: PromotionTag.NONE
        if tagged != c.promotions_open:
            demand(False, f"{tagged} slots are tagged, {c.promotions_open} promotions are open")
