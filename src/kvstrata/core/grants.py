"""Grants: the slots and pins that a waiting request gets for its plan, all in one transaction or none.

The queue is ordered by first poll. While its head waits for room nobody younger gets a new slot; nobody waits while
holding. What waiting requests hold together is bounded, each held slot counting once (DESIGN section 5, "Grants").
"""

from __future__ import annotations

import bisect
import enum
from dataclasses import dataclass

import numpy as np

from kvstrata.core.arrays import NO_SLOTS, all_are, any_of, count_of, where
from kvstrata.core.promotions import Promotions
from kvstrata.core.requests import Request
from kvstrata.core.slots import READY, RESERVED
from kvstrata.core.state import CoreState
from kvstrata.core.statistics import PromotionTag
from kvstrata.types import I8, I64, OffloadKey


class Placement(enum.Enum):
    """How an attempt to place a plan ended."""

    DONE = "done"
    NO_ROOM = "no_room"  # bytes or pins do not fit now
    STALE = "stale"  # a chunk left primary, or its tier cannot be read for it any more: resolve again


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The chunks of a plan, group after group, as columns."""

    slots: I64
    sources: I8
    counts: list[int]
    """How many chunks of each group."""

    def groups(self) -> I64:
        """The group of each chunk."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


class Grants:
    """The queue for room, and the transaction that places a plan."""

    def __init__(self, core: CoreState, promotions: Promotions) -> None:
        self._core = core
        self._promotions = promotions
        self._sizes = np.array(core.layout.chunk_bytes, np.int64)
        self._queue: list[tuple[int, str, Request]] = []

    # -- the queue

    @property
    def head(self) -> Request | None:
        """The request whose turn it is, or None."""
        return self._queue[0][2] if self._queue else None

    def __len__(self) -> int:
        return len(self._queue)

    def enqueue(self, request: Request) -> None:
        """Take the request's place by first poll."""
        bisect.insort(self._queue, (request.order, request.request_id, request))
        self._core.room |= self._queue[0][2] is request

    def dequeue(self, request: Request) -> None:
        """Leave the queue; the next head, if it is another one, gets its turn."""
        at = bisect.bisect_left(self._queue, (request.order, request.request_id))
        if at < len(self._queue) and self._queue[at][2] is request:
            del self._queue[at]
            self._core.room |= at == 0

    # -- placing

    def plan_bytes(self, request: Request) -> int:
        """Payload bytes of all chunks of the plan."""
        sizes = self._core.layout.chunk_bytes
        return sum((hi - lo) * size for (lo, hi), size in zip(request.ranges, sizes, strict=True))

    def room_by_bytes(self) -> int:
        """Bytes that a lone grant may take: capacity without the store reserve, jobs and quarantine."""
        core, residency = self._core, self._core.residency
        return residency.capacity_bytes - core.store_reserve - residency.stuck_bytes

    def place(
        self,
        request: Request,
        *,
        alone: bool = False,
        new_slots: bool = True,
        tag: PromotionTag = PromotionTag.NOT_TAKEN,
    ) -> Placement:
        """Hold every chunk of the plan, reserving the missing ones, in one transaction.

        What the request holds already and the plan still needs is kept, the rest is let go for the reason `tag`.
        `alone` lifts the share (no other grant is out); without `new_slots` a plan with a missing chunk finds no room.
        Nothing changes unless the answer is DONE.
        """
        chunks = self._chunks(request)
        here = chunks.slots >= 0
        count = any_of(here)
        missing = where(~here) if count < len(here) else NO_SLOTS
        if len(missing):
            if any_of(chunks.sources[missing] < 0) or self._spoiled(request, chunks, missing):
                return Placement.STALE
            if not new_slots:
                return Placement.NO_ROOM
        old, present = request.held, chunks.slots if count == len(here) else chunks.slots[here]
        groups = chunks.groups()[missing] if len(missing) else NO_SLOTS
        if not alone and not self._fits_share(old, present, int(self._sizes[groups].sum())):
            return Placement.NO_ROOM
        if len(missing):
            missing, groups = self._in_token_order(request, missing, groups)
            keys = self._keys(request, missing)
            reserved = self._core.residency.reserve(keys, groups, keep=present)
            if reserved is None:
                return Placement.NO_ROOM
            chunks.slots[missing] = reserved[0]
        self._commit(request, chunks, old, missing, tag)
        return Placement.DONE

    def place_ready(self, request: Request) -> bool:
        """Hold a plan all of whose chunks were just found in primary, for a request that holds nothing.

        False, and nothing changes, where anything has to be weighed (a share that may be exceeded, a chunk that is on
        its way): that is for `place`.
        """
        core, residency = self._core, self._core.residency
        if request.found is None or request.slots or request.key_slots:
            return False
        parts = request.found[1]
        slots = parts[0] if len(parts) == 1 else np.concatenate(parts)
        whole = core.byte_size(slots)
        limit = min(core.share_limit - core.overdue_bytes(), residency.capacity_bytes - core.store_reserve)
        if whole + residency.held_bytes > limit or not all_are(residency.state[slots], READY):
            return False
        residency.hold_ready(slots)
        request.found, request.slots, request.pending = None, parts, 0
        return True

    def _chunks(self, request: Request) -> _Chunks:
        """The chunks of the request's plan as columns; slots as primary has them now."""
        residency = self._core.residency
        if request.found is not None and request.found[0] == residency.index.version:
            slots = np.concatenate(request.found[1])  # nothing came or went since the plan was made
        else:
            slots = residency.find(self._keys(request))
        request.found = None
        return _Chunks(slots, np.concatenate(request.sources), [hi - lo for lo, hi in request.ranges])

    def _keys(self, request: Request, places: I64 | None = None) -> list[OffloadKey]:
        """The keys of the plan's chunks, group after group; or of those at these places only."""
        keys: list[OffloadKey] = []
        for group, (lo, hi) in zip(request.keys, request.ranges, strict=True):
            keys += group[lo:hi]
        if places is None or (len(places) == len(keys) and not any_of(places[1:] < places[:-1])):
            return keys
        return [keys[i] for i in places.tolist()]

    def _in_token_order(self, request: Request, missing: I64, groups: I64) -> tuple[I64, I64]:
        """Missing chunks and their groups by their first token; a group's own chunks are in that order already."""
        if groups[0] == groups[-1]:
            return missing, groups
        spans = zip(request.ranges, self._core.layout.tokens_per_chunk, strict=True)
        starts = np.concatenate([np.arange(lo, hi, dtype=np.int64) * tpc for (lo, hi), tpc in spans])[missing]
        order = np.lexsort((groups, starts))
        return missing[order], groups[order]

    def _spoiled(self, request: Request, chunks: _Chunks, missing: I64) -> bool:
        """Whether the tier of a missing chunk is not asked any more, or has failed to deliver it since."""
        core, sources = self._core, chunks.sources[missing]
        if not all(core.will_read(tier) for tier in core.tiers if count_of(sources, tier.index)):
            return True
        if not len(core.verdicts):
            return False
        places = zip(self._keys(request, missing), sources.tolist(), strict=True)
        return any(core.verdicts.blocks(tier, key, core.now) for key, tier in places)

    def must_fetch(self, request: Request) -> bool:
        """Whether the plan has a chunk that is neither in primary nor on its way there."""
        return bool(any_of(self._chunks(request).slots < 0))

    def _fits_share(self, old: I64, present: I64, missing_bytes: int) -> bool:
        """Whether held bytes stay within the share, after what this request lets go and what it adds."""
        core, residency = self._core, self._core.residency
        added = present[residency.holds[present] == 0]
        gone = 0
        if len(old):
            gone = core.byte_size(old[(residency.holds[old] == 1) & ~np.isin(old, present)])
        held = residency.held_bytes - gone + core.byte_size(added) + missing_bytes
        limit = min(core.share_limit - core.overdue_bytes(), residency.capacity_bytes - core.store_reserve)
        return held <= limit

    def _commit(self, request: Request, chunks: _Chunks, old: I64, fresh: I64, tag: PromotionTag) -> None:
        """Make the plan's slots the request's own; queue the reads of the `fresh` ones, in token order, by tier."""
        core, residency, slots = self._core, self._core.residency, chunks.slots
        added, gone = slots, NO_SLOTS
        if len(old):
            added, gone = slots[~np.isin(slots, old)], old[~np.isin(old, slots)]
        residency.hold(added)
        request.slots, at = [], 0
        for count in chunks.counts:
            request.slots.append(slots[at : at + count])
            at += count
        states = residency.state[slots]
        request.pending = count_of(states, RESERVED)
        if request.pending > len(fresh):
            reserved = states == RESERVED
            reserved[fresh] = False
            joined = slots[reserved]
            self._promotions.waiters.join(request, joined[~np.isin(joined, old)])
        sources = chunks.sources[fresh]
        for tier in core.tiers if len(fresh) else ():
            count = count_of(sources, tier.index)
            if count:
                mine = fresh if count == len(fresh) else fresh[sources == tier.index]
                self._promotions.start(request, tier.index, slots[mine])
        if len(gone):
            self._promotions.leave(request, gone, tag)

    def give_back(self, request: Request, tag: PromotionTag) -> None:
        """Let go of everything that the request holds."""
        held = request.held
        request.slots = []
        request.key_slots.clear()
        request.pending = 0
        if len(held):
            self._promotions.leave(request, held, tag)

    # -- turns

    def others_hold(self, request: Request) -> int:
        """Bytes that waiting requests other than this one hold."""
        residency, held = self._core.residency, request.held
        return residency.held_bytes - self._core.byte_size(held[residency.holds[held] == 1])

    def jobs_will_free(self, request: Request) -> bool:
        """Whether unfinished jobs that are not overdue keep slots that the plan could use when they end."""
        busy, could = self._moving()
        return busy > 0 and self.plan_bytes(request) <= could

    def jobs_hold_most(self) -> bool:
        """Whether such jobs hold more than half of what a lone grant could get without them."""
        busy, could = self._moving()
        return 2 * busy > could

    def _moving(self) -> tuple[int, int]:
        """Bytes under unfinished jobs, 0 if none of them moves; and what a lone grant could get without them."""
        core, residency = self._core, self._core.residency
        busy = residency.stuck_bytes - residency.quarantined_bytes
        could = residency.capacity_bytes - core.store_reserve - residency.quarantined_bytes
        return (busy if any(not job.overdue for job in core.ledger) else 0), could
