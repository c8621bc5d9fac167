"""Stores: accelerator -> primary. Only keys that are not present; published per job when all ranks have reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvstrata.core.cascades import Cascades
from kvstrata.core.ledger import Job
from kvstrata.core.messages import ALL_TIERS, StorePlan
from kvstrata.core.promotions import Promotions
from kvstrata.core.requests import Request
from kvstrata.core.slots import READY
from kvstrata.core.state import CoreState
from kvstrata.types import I64, JobKind, OffloadKey


class Stores:
    """Jobs from the accelerator to primary."""

    def __init__(self, core: CoreState, promotions: Promotions, cascades: Cascades) -> None:
        self._core = core
        self._promotions = promotions
        self._cascades = cascades
        self._narrowed = False
        """Whether any store was one that not all tiers may get."""

    def plan(self, request: Request, chunks: Sequence[tuple[int, int]]) -> StorePlan | None:
        """Slots for those of `chunks` (group, chunk index; chain order) that are not present, as many as fit.

        What does not fit is left out from the end, so that a chain keeps its head. None: nothing to store.
        """
        core = self._core
        if not request.options.may_store or not chunks:
            return None
        keys = [request.keys[g][i] for g, i in chunks]
        if len(set(keys)) < len(keys):
            chunks = list(dict.fromkeys(chunks))
            keys = [request.keys[g][i] for g, i in chunks]
        if not core.residency.lacks(keys):
            found = core.residency.find(keys)
            absent = np.flatnonzero(found < 0).tolist()
            if self._narrowed and len(absent) < len(keys):
                self._claim(request, keys, found)
            chunks, keys = [chunks[i] for i in absent], [keys[i] for i in absent]
        slots = self._reserve(keys, [g for g, _ in chunks]) if keys else None
        if slots is None:
            core.counters.store_no_room += len(keys)
            return None
        core.counters.store_no_room += len(keys) - len(slots)
        if len(slots) < len(keys):
            chunks, keys = chunks[: len(slots)], keys[: len(slots)]
        job = core.ledger.accept(
            JobKind.STORE, core.generation, slots, keys, request.request_id, core.now, reports=core.ranks
        )
        job.store_tiers = request.options.store_tiers
        self._narrowed |= job.store_tiers != ALL_TIERS
        core.residency.job[slots] = job.job_id
        offsets, lengths = core.ranges_of(slots)
        return StorePlan(job.job_id, request.request_id, chunks, slots, offsets, lengths, keys)

    def _claim(self, request: Request, keys: Sequence[OffloadKey], found: I64) -> None:
        """What others have stored, or are storing, for fewer tiers goes to the rest of this request's."""
        residency, admit = self._core.residency, request.options.store_tiers
        ready = []
        for key, slot in zip(keys, found.tolist(), strict=True):
            if slot >= 0 and residency.state[slot] == READY:
                ready.append(key)
            elif slot >= 0:
                job = self._core.ledger.get(int(residency.job[slot]))
                if job is not None and job.kind is JobKind.STORE:
                    job.claims.append((key, admit))
        self._cascades.claim(ready, admit)

    def _reserve(self, keys: Sequence[OffloadKey], groups: Sequence[int]) -> I64 | None:
        """The longest leading part that can be placed; None if not even one chunk can."""
        residency = self._core.residency
        whole = residency.reserve(keys, groups)
        if whole is not None:
            return whole[0]
        fits, too_many = 0, len(keys)
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if residency.can_place(groups[:middle]):
                fits = middle
            else:
                too_many = middle
        part = residency.reserve(keys[:fits], groups[:fits]) if fits else None
        return None if part is None else part[0]

    def complete(self, job: Job, ok: bool, digests: Mapping[OffloadKey, bytes] | None) -> None:
        """One rank's report; when all have reported, the job's chunks are published, or given up."""
        core = self._core
        job.ok &= ok
        job.reports_left -= 1
        if job.reports_left > 0:
            return
        core.ledger.end(job)
        core.room = True
        if job.quarantined:
            core.residency.requite(np.array(job.quarantined, np.int64))
            core.counters.late += len(job.slots)
        elif job.ok:
            self._publish(job, digests or {})
        else:
            self._promotions.fail_waiters(job.slots)
            core.residency.job[job.slots] = 0
            core.residency.release(job.slots)

    def _publish(self, job: Job, digests: Mapping[OffloadKey, bytes]) -> None:
        core = self._core
        core.counters.stored += len(job.slots)
        core.counters.stored_bytes += core.byte_size(job.slots)
        request = core.requests.get(job.request_id)
        for group, chain in self._chains(job.slots):
            anchor = -1 if request is None else self._anchor(request, group)
            self._promotions.publish(chain, anchor)
            if request is not None:
                request.anchors[group] = core.residency.key_of(int(chain[-1])) or b""
        if request is not None and len(request.keys) == 1:
            request.moved = [job.slots]
        self._cascades.offer(job.keys, job.slots, digests, job.store_tiers)
        for key, admit in job.claims:
            self._cascades.claim([key], admit)

    def _chains(self, slots: I64) -> list[tuple[int, I64]]:
        """The slots of each group."""
        if len(self._core.layout.groups) == 1:
            return [(0, slots)]
        groups = self._core.residency.group[slots]
        return [(group, slots[groups == group]) for group in sorted(set(groups.tolist()))]

    def _anchor(self, request: Request, group: int) -> int:
        """The slot of the last chunk stored for this request, if it is still there: the chain goes on behind it."""
        last = request.anchors.get(group)
        return self._core.residency.slot_of(last) if last else -1
