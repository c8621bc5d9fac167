"""What the core counts, and the classes in which every promotion ends (promise P1)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from kvstrata.core.arrays import NO_SLOTS, any_of, count_of
from kvstrata.core.residency import Residency
from kvstrata.types import I64, FailCause


class PromotionTag(enum.IntEnum):
    """Values of the `tag` column: what is to be said of a promoted chunk that no load has used yet."""

    NONE = 0  # not promoted, or already counted
    OPEN = 1  # held, or on its way, for a request
    NOT_TAKEN = 2
    CANCELLED = 3
    EXPIRED = 4


@dataclass(slots=True)
class TierCounters:
    """Counts of one secondary tier; bytes are payload bytes."""

    probed: int = 0
    promoted: int = 0
    promoted_bytes: int = 0
    landed: int = 0
    failed: dict[FailCause, int] = field(default_factory=dict)
    cascaded: int = 0
    cascade_failed: int = 0
    cascade_dropped: int = 0
    """Dropped because the queue was full."""
    cascade_lapsed: int = 0
    """Dropped because the chunk had left primary before its turn."""
    offered_again: int = 0
    delays: int = 0
    delay_s: float = 0.0
    """Sum of the probe delays observed at the per-key door, one per (request, key)."""
    overdue_jobs: int = 0

    def copy(self) -> TierCounters:
        """A copy that does not change any more."""
        return replace(self, failed=dict(self.failed))


UNSERVED_CHUNKS = 1000
"""So many chunks stored in a tier that has never given one back are an alarm."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something an operator should look at: where, and one line for people."""

    place: str
    text: str


def alarms(tiers: Mapping[str, TierCounters], oldest_job_s: float, job_total_s: float) -> tuple[Alarm, ...]:
    """Tiers that are written and never serve, and a job that is older than any may be."""
    found = [
        Alarm(name, f"{counters.cascaded} chunks were stored in {name}, and none was ever served from it")
        for name, counters in tiers.items()
        if counters.cascaded >= UNSERVED_CHUNKS and not counters.landed
    ]
    if oldest_job_s > job_total_s:
        found.append(Alarm("jobs", f"the oldest unfinished job is {oldest_job_s:.0f} s old"))
    return tuple(found)


@dataclass(slots=True)
class Counters:
    """Counts of the core since it was made."""

    resolves: int = 0
    keys_gathered: int = 0
    """Keys whose presence was looked at by a resolve; a waiting poll adds nothing."""
    promoted: int = 0
    promoted_bytes: int = 0
    consumed: int = 0
    consumed_bytes: int = 0
    not_taken: int = 0
    cancelled: int = 0
    expired: int = 0
    failed: int = 0
    promotions_open: int = 0
    loads: int = 0
    loaded: int = 0
    """Chunks loaded, promoted ones or not."""
    load_failures: int = 0
    stored: int = 0
    stored_bytes: int = 0
    store_no_room: int = 0
    evicted: int = 0
    no_room: int = 0
    clock_expired: int = 0
    silences: int = 0
    resets: int = 0
    late: int = 0
    """Completions of an older generation, or of a probe that nobody waits for, that were dropped."""
    events_dropped: int = 0

    def copy(self) -> Counters:
        """A copy that does not change any more."""
        return replace(self)


_NONE, _OPEN = np.int8(PromotionTag.NONE), np.int8(PromotionTag.OPEN)


class PromotionAccount:
    """Puts every promotion into exactly one class."""

    def __init__(self, counters: Counters, residency: Residency) -> None:
        self._counters = counters
        self._residency = residency

    def started(self, slots: I64) -> int:
        """Promotions into these reserved slots begin; returns their bytes."""
        self._residency.tag[slots] = PromotionTag.OPEN
        size = self._residency.table.bytes_of(slots)
        self._counters.promoted += len(slots)
        self._counters.promotions_open += len(slots)
        self._counters.promoted_bytes += size
        return size

    def consumed(self, slots: I64) -> None:
        """A load uses these slots."""
        promoted = self._uncounted(slots)
        if len(promoted):
            self._counters.consumed += len(promoted)
            self._counters.consumed_bytes += self._residency.table.bytes_of(promoted)
            self._counters.promotions_open -= len(promoted)
            self._residency.tag[promoted] = PromotionTag.NONE

    def _uncounted(self, slots: I64) -> I64:
        """Promoted slots that are in no class yet."""
        tags = self._residency.tag[slots]
        count = any_of(tags)
        return slots if count == len(slots) else slots[tags != _NONE] if count else NO_SLOTS

    def released(self, slots: I64, tag: PromotionTag) -> None:
        """A request let go of these slots; what nobody else holds is now unused for that reason."""
        tags = self._residency.tag[slots]
        if count_of(tags, _OPEN):
            idle = slots[(tags == _OPEN) & (self._residency.holds[slots] == 0)]
            self._residency.tag[idle] = tag

    def failed(self, slots: I64) -> None:
        """The bytes did not come."""
        promoted = self._uncounted(slots)
        self._counters.failed += len(promoted)
        self._counters.promotions_open -= len(promoted)
        self._residency.tag[promoted] = PromotionTag.NONE

    def dropped(self, slots: I64) -> None:
        """These slots lose their content (evicted, cancelled, reset): their class is final."""
        tags = self._residency.tag[slots]
        if not any_of(tags):
            return
        counts = np.bincount(tags, minlength=len(PromotionTag))
        self._counters.not_taken += int(counts[PromotionTag.OPEN] + counts[PromotionTag.NOT_TAKEN])
        self._counters.cancelled += int(counts[PromotionTag.CANCELLED])
        self._counters.expired += int(counts[PromotionTag.EXPIRED])
        self._counters.promotions_open -= int(counts[1:].sum())
        self._residency.tag[slots] = PromotionTag.NONE
