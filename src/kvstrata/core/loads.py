"""Loads: what the engine took of a hit is handed to the ranks, pinned by the job until all of them have reported."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstrata.core.arrays import NO_SLOTS, all_are
from kvstrata.core.ledger import Job
from kvstrata.core.messages import LoadPlan, TouchKeys
from kvstrata.core.requests import Request, RequestState
from kvstrata.core.slots import READY
from kvstrata.core.state import CoreState
from kvstrata.types import I64, JobKind, OffloadKey


class Loads:
    """Jobs from primary to the accelerator."""

    def __init__(self, core: CoreState) -> None:
        self._core = core

    def plan(self, request: Request, tokens: int) -> LoadPlan:
        """A load of `tokens` of the reported hit, which is READY; fewer than the hit take fewer chunks.

        A part that needs a chunk that is not held (an earlier window), or a hit that is not held any more, gives a
        plan that is not `complete`: it loads nothing and is to be reported as failed.
        """
        boundary = request.computed + tokens
        ready = request.state is RequestState.READY
        if ready and tokens == request.hit:
            ranges, complete = request.ranges, True
        else:
            ranges = self._core.layout.consumed_ranges(boundary, request.computed)
            complete = (
                ready
                and tokens < request.hit
                and all(
                    lo >= hi or (have_lo <= lo and hi <= have_hi)
                    for (lo, hi), (have_lo, have_hi) in zip(ranges, request.ranges, strict=True)
                )
            )
        if not complete:
            ranges = tuple((0, 0) for _ in ranges)
        parts = [
            slots[lo - have_lo : hi - have_lo] if hi > lo else slots[:0]
            for slots, (lo, hi), (have_lo, _) in zip(request.slots, ranges, request.ranges, strict=False)
        ]
        keys: list[OffloadKey] = []
        for group, (lo, hi) in zip(request.keys, ranges, strict=True):
            keys += group[lo:hi]
        slots = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else NO_SLOTS
        job = self._accept(request, slots, keys)
        if ready and tokens == request.hit:  # all that it holds is loaded: its pins become the job's
            self._core.residency.hand_over(slots)
            request.moved, request.slots = request.slots, []
            self._core.room = True
        else:
            self._core.residency.pin(slots)
        offsets, lengths = self._core.ranges_of(slots)
        return LoadPlan(
            job.job_id, request.request_id, request.computed, boundary, ranges, slots, offsets, lengths, keys, complete
        )

    def plan_keys(self, request: Request, keys: Sequence[OffloadKey]) -> LoadPlan | None:
        """A load of single keys through the per-key door; None if one of them is not readable in primary."""
        slots = self._core.residency.find(keys)
        if (slots < 0).any() or (self._core.residency.state[slots] != READY).any():
            return None
        job = self._accept(request, slots, keys)
        self._core.residency.pin(slots)
        offsets, lengths = self._core.ranges_of(slots)
        return LoadPlan(job.job_id, request.request_id, 0, 0, (), slots, offsets, lengths, keys)

    def _accept(self, request: Request, slots: I64, keys: Sequence[OffloadKey]) -> Job:
        """Enter a load; pinning its slots is the caller's."""
        core = self._core
        job = core.ledger.accept(
            JobKind.LOAD, core.generation, slots, keys, request.request_id, core.now, reports=core.ranks
        )
        request.loads.add(job.job_id)
        request.load_job = job.job_id
        core.account.consumed(slots)
        core.counters.loads += 1
        core.counters.loaded += len(slots)
        return job

    def complete(self, job: Job, ok: bool) -> bool | None:
        """One rank's report; None until all have reported, then whether the load worked on every rank."""
        core = self._core
        job.ok &= ok
        job.reports_left -= 1
        if job.reports_left > 0:
            return None
        core.ledger.end(job)
        core.unpin(job.slots)
        states = core.residency.state[job.slots]
        still = job.slots if all_are(states, READY) else job.slots[states == READY]
        if job.generation == core.generation and len(still):
            core.residency.touch(still)
        if job.ok and job.keys and job.generation == core.generation:
            core.commands.extend(TouchKeys(tier.index, job.keys) for tier in core.tiers)
        if not job.ok:
            core.counters.load_failures += 1
        request = core.requests.get(job.request_id)
        if request is not None and job.job_id in request.loads:
            request.loads.remove(job.job_id)
            if not job.ok:
                request.unloadable.update(job.keys)
            if request.state is RequestState.LOADING and request.load_job == job.job_id:
                request.move(RequestState.RUNNING)
        return job.ok
