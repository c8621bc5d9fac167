"""Cascades: primary -> secondary, write-through behind bounded queues.

A queued cascade holds no pin: what has left primary before its turn is dropped and counted. Handed-over ones of a tier
pin at most the in-flight share. What a full queue or a failing tier refused is remembered (bounded) and offered again
when the tier has recovered.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from kvstrata.core.arrays import NO_SLOTS, all_are, any_of, where
from kvstrata.core.ledger import Job
from kvstrata.core.messages import EventKind, PurgeTier, SubmitStore, TierFilter
from kvstrata.core.presence import PresenceBook
from kvstrata.core.slots import READY
from kvstrata.core.state import CoreState, TierState
from kvstrata.types import I64, FailCause, JobKind, OffloadKey, Presence, TierJob

MISSED_MOST = 65_536
"""Most keys per tier that are remembered to be offered again, or to be offered for another request."""

BATCH = 64
"""Most chunks of one cascade job: what one header block of the disk tier describes."""

JOBS_OUT = 64
"""Most cascade jobs that a tier has at a time. With small chunks the share of bytes alone would hand over more than a
tier queues, and what it then refuses would count as an error: backlog is no breaker."""


class _Piece(NamedTuple):
    """What one store has published and one job can take, looked up once for all tiers."""

    version: int
    """Of primary's index: the rest is true as long as that does not move."""
    keys: Sequence[OffloadKey]
    slots: I64
    offsets: list[int]
    lengths: list[int]


def _drop(queue: deque[OffloadKey], count: int) -> None:
    """Takes the first entries out of a queue."""
    if count == len(queue):
        queue.clear()
        return
    for _ in range(count):
        queue.popleft()


class Cascades:
    """The bounded queues of all tiers and the store jobs that they hold."""

    def __init__(self, core: CoreState, presence: PresenceBook) -> None:
        self._core = core
        self._presence = presence
        self._fresh: dict[OffloadKey, _Piece] = {}
        """What was published last, by the first key of each piece."""

    def offer(
        self, keys: Sequence[OffloadKey], slots: I64, digests: Mapping[OffloadKey, bytes], admit: TierFilter
    ) -> None:
        """Queue freshly published keys, in chain order, for every tier that the request may store to."""
        self._note_fresh(keys, slots)
        for tier in self._core.tiers:
            if not tier.filled:
                continue
            if admit.accepts(tier.port):
                self._queue(tier, keys, digests)
            else:
                self._remember(tier.withheld, keys)

    def _note_fresh(self, keys: Sequence[OffloadKey], slots: I64) -> None:
        """Remember where what was just published lies, in the pieces in which it is handed over."""
        version = self._core.residency.index.version
        offsets, lengths = self._core.ranges_of(slots)
        self._fresh.clear()
        for at in range(0, len(keys), BATCH):
            part = slice(at, at + BATCH)
            self._fresh[keys[at]] = _Piece(
                version, keys[part], slots[part], offsets[part].tolist(), lengths[part].tolist()
            )

    def claim(self, keys: Sequence[OffloadKey], admit: TierFilter) -> None:
        """A request would store keys that primary has: tiers that were not to get them from others get them now."""
        for tier in self._core.tiers:
            claimed = [key for key in keys if key in tier.withheld] if tier.withheld else []
            if claimed and admit.accepts(tier.port):
                self._queue(tier, claimed, {})
                self._core.pump = True

    def _queue(self, tier: TierState, keys: Sequence[OffloadKey], digests: Mapping[OffloadKey, bytes]) -> None:
        for key in keys if tier.withheld else ():
            tier.withheld.pop(key, None)
        room = max(self._core.config.cascade_queue - len(tier.cascades), 0)
        if room < len(keys):
            tier.counters.cascade_dropped += len(keys) - room
            self._remember(tier.missed, keys[room:])
            keys = keys[:room]
        tier.cascades.extend(keys)
        if digests:
            tier.digests.update((key, digests[key]) for key in keys if key in digests)

    @staticmethod
    def _remember(memory: OrderedDict[OffloadKey, None], keys: Sequence[OffloadKey]) -> None:
        """Note keys; the oldest are forgotten."""
        for key in keys:
            memory[key] = None
            if len(memory) > MISSED_MOST:
                memory.popitem(last=False)

    def pump(self) -> None:
        """Hand over what the share, the breaker and waiting loads admit."""
        for tier in self._core.tiers:
            while True:
                if tier.missed and tier.offer_at is None and not tier.fenced and tier.writes.allows:
                    self._offer_again(tier)
                # A queue whose chunks have all left primary hands over nothing, but has room for what was missed.
                if not tier.cascades or (not self._hand_over(tier) and tier.cascades):
                    break

    def _offer_again(self, tier: TierState) -> None:
        """The tier takes stores again: what it missed and primary still has goes back into the queue."""
        room = self._core.config.cascade_queue - len(tier.cascades)
        if room < self._core.config.cascade_queue // 2 and tier.cascades:
            return
        again: OrderedDict[OffloadKey, None] = tier.missed
        residency = self._core.residency
        for _ in range(len(again)):
            if room <= 0:
                return
            key, _ = again.popitem(last=False)
            slot = residency.slot_of(key)
            if slot >= 0 and residency.state[slot] != READY:
                again[key] = None  # it is on its way into primary
            elif slot >= 0:
                tier.cascades.append(key)
                tier.counters.offered_again += 1
                room -= 1

    def _hand_over(self, tier: TierState) -> bool:
        """One job from the head of the tier's queue; False if nothing can be handed over now."""
        core = self._core
        if tier.fenced or not tier.writes.allows:
            return False
        one_at_a_time = tier.writes.is_trial
        if self._moving(tier) if one_at_a_time else tier.cascades_out >= JOBS_OUT:
            return False
        budget = core.inflight_limit - tier.cascading
        if tier.cascading and self._head_bytes(tier) > budget:
            return False
        most = 1 if one_at_a_time else min(BATCH, tier.port.capabilities.max_batch)
        piece = self._take_fresh(tier, budget, most)
        if piece is not None:
            _, keys, slots, offsets, lengths = piece
            digests = self._digests_of(tier, keys)
        else:
            slots, keys, digests = self._take(tier, budget, most)
            offsets, lengths = (column.tolist() for column in core.ranges_of(slots))
        if not keys:
            return False
        job = core.ledger.accept(JobKind.CASCADE, core.generation, slots, keys, "", core.now, tier=tier.index)
        core.residency.pin_ready(slots)
        tier.cascading += core.byte_size(slots)
        tier.cascades_out += 1
        tier.writes.asked()
        known = digests if len(digests) == len(keys) else None
        core.commands.append(SubmitStore(tier.index, TierJob(job.job_id, keys, offsets, lengths, known)))
        return True

    def _head_bytes(self, tier: TierState) -> int:
        """Bytes of the chunk that is first in the tier's queue; 0 if primary does not have it any more."""
        residency = self._core.residency
        slot = residency.slot_of(tier.cascades[0])
        return int(residency.length[slot]) if slot >= 0 and residency.state[slot] == READY else 0

    def _take_fresh(self, tier: TierState, budget: int, most: int) -> _Piece | None:
        """The head of the queue, if it is a piece that was published last and nothing has moved since."""
        queue = tier.cascades
        piece = self._fresh.get(queue[0])
        if piece is None or piece.version != self._core.residency.index.version or len(piece.keys) > most:
            return None
        if self._core.byte_size(piece.slots) > budget or list(islice(queue, len(piece.keys))) != piece.keys:
            return None
        _drop(queue, len(piece.keys))
        return piece

    def _take(self, tier: TierState, budget: int, most: int) -> tuple[I64, list[OffloadKey], list[bytes]]:
        """Leading queued chunks that primary still has, within `budget` bytes; at least one if none is out.

        All are READY, and none is named twice. With the digests that are known of them.
        """
        residency, queue = self._core.residency, tier.cascades
        while queue:
            entries = list(islice(queue, most))
            once = list(dict.fromkeys(entries))
            if len(once) < len(entries):  # evicted and stored again while it was queued
                tier.counters.cascade_lapsed += len(entries) - len(once)
                _drop(queue, len(entries))
                queue.extendleft(reversed(once))
                continue
            slots = residency.find(entries)
            states = residency.state[slots]
            if all_are(states, READY) and not any_of(slots < 0) and self._core.byte_size(slots) <= budget:
                _drop(queue, len(entries))
                return slots, entries, self._digests_of(tier, entries)
            ready = where((slots >= 0) & (states == READY))
            fit = int(np.searchsorted(np.cumsum(residency.length[slots[ready]]), budget, side="right"))
            if len(ready) and not fit and not tier.cascading:
                fit = 1
            through = int(ready[fit]) if fit < len(ready) else len(entries)
            _drop(queue, through)
            tier.counters.cascade_lapsed += through - fit
            digests = self._digests_of(tier, entries[:through])
            if len(ready):
                taken = ready[:fit]
                keys = [entries[i] for i in taken.tolist()]
                return slots[taken], keys, digests if through == fit else []
        return NO_SLOTS, [], []

    @staticmethod
    def _digests_of(tier: TierState, keys: Sequence[OffloadKey]) -> list[bytes]:
        """The digests of keys that leave the queue, as far as they are known."""
        known = [tier.digests.pop(key, None) for key in keys] if tier.digests else []
        return [digest for digest in known if digest is not None]

    def _moving(self, tier: TierState) -> bool:
        """Whether a store that is not overdue is out."""
        jobs = (job for job in self._core.ledger if job.kind is JobKind.CASCADE and job.tier == tier.index)
        return tier.cascades_out > 0 and any(not job.overdue for job in jobs)

    # -- outcomes

    def done(self, job: Job, index: I64) -> None:
        """The tier has these chunks."""
        core, tier = self._core, self._core.tiers[job.tier]
        tier.writes.success()
        if not tier.missed:
            tier.offer_s = 0.0
        tier.counters.cascaded += len(index)
        keys = job.keys_at(index)
        if job.generation != core.generation:
            core.counters.late += len(keys)
        else:
            core.verdicts.stored(tier.index, keys)
            self._presence.facts(tier.index, keys, Presence.PRESENT)
            core.emit(EventKind.STORED, tier.port.name, keys)
        self._unpin(job, index)

    def failed(self, job: Job, failures: Sequence[tuple[int, FailCause]]) -> None:
        """The tier did not take these chunks. Their slots stay pinned until the job has ended."""
        core, tier = self._core, self._core.tiers[job.tier]
        tier.counters.cascade_failed += len(failures)
        if any(cause is not FailCause.CANCELLED for _, cause in failures):
            tier.writes.failure(core.now)
        tier.offer_s = min(max(2 * tier.offer_s, core.config.backoff_s), core.config.backoff_max_s)
        tier.offer_at = core.now + tier.offer_s
        if job.generation == core.generation:
            self._remember(tier.missed, [job.keys[i] for i, _ in failures])

    def _unpin(self, job: Job, index: I64) -> None:
        """Chunks that the tier reads no more."""
        if len(index):
            slots = job.slots_at(index)
            self._core.tiers[job.tier].cascading -= self._core.byte_size(slots)
            self._core.unpin(slots, once=True)  # a job names no key twice
            job.unpinned[index] = True

    def ended(self, job: Job) -> None:
        """The tier reads the job's slots no more."""
        tier = self._core.tiers[job.tier]
        tier.cascades_out -= 1
        tier.writes.released()
        if any_of(job.unpinned) < len(job.unpinned):
            self._unpin(job, where(~job.unpinned))
        if job.generation < tier.purged_through and not self.stale(tier):
            self.purge(tier)

    def stale(self, tier: TierState) -> bool:
        """Whether the tier may still write chunks of a generation that its last purge ended."""
        return any(
            job.kind is JobKind.CASCADE and job.tier == tier.index and job.generation < tier.purged_through
            for job in self._core.ledger
        )

    def purge(self, tier: TierState) -> None:
        """Fence the tier until everything that it holds now is gone for good.

        What an older generation still has under way may be written, and be seen by a probe, after this purge: the
        fence stays, and the tier is purged once more, until the last of it has ended.
        """
        tier.fenced = True
        tier.purge_ticket = None
        self._core.commands.append(PurgeTier(tier.index))

    def overdue(self, job: Job) -> None:
        """A bound of the job has passed; its slots stay pinned (and readable) until it has ended."""
        tier = self._core.tiers[job.tier]
        failures = [(i, FailCause.TIMEOUT) for i in job.still_open().tolist()]
        job.open[:] = False
        self.failed(job, failures)
        tier.writes.failure(self._core.now, at_once=True)

    def drop_all(self, *, purged: bool) -> None:
        """A new generation: nothing is queued or remembered."""
        for tier in self._core.tiers:
            tier.offer_at, tier.offer_s = None, 0.0
            tier.counters.cascade_lapsed += len(tier.cascades)
            tier.cascades.clear()
            tier.digests.clear()
            tier.missed.clear()
            tier.withheld.clear()
            if purged:
                tier.purged_through = self._core.generation
