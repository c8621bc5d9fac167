"""What goes into the core and what comes out of it: options, answers, plans, commands, events. Frozen values only."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from kvstrata.types import (
    I8,
    I64,
    Capabilities,
    Locality,
    Medium,
    OffloadKey,
    TierJob,
)


class TierPort(Protocol):
    """The part of a tier that the core asks directly; everything else goes out as commands."""

    name: str
    medium: Medium
    locality: Locality
    capabilities: Capabilities

    def probe(self, keys: Sequence[OffloadKey]) -> I8 | int:
        """Presence of each key, or a ticket; must return at once and must not raise."""
        ...


@dataclass(frozen=True, slots=True)
class TierFilter:
    """Which secondary tiers a request may use; an empty filter accepts all. Primary always takes part."""

    names: frozenset[str] | None = None
    media: frozenset[Medium] | None = None
    localities: frozenset[Locality] | None = None

    def accepts(self, tier: TierPort) -> bool:
        """Whether every given part of the filter admits this tier."""
        return (
            (self.names is None or tier.name in self.names)
            and (self.media is None or tier.medium in self.media)
            and (self.localities is None or tier.locality in self.localities)
        )


ALL_TIERS = TierFilter()


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What one request allows. Clients can only narrow what the operator configured."""

    load_tiers: TierFilter = ALL_TIERS
    store_tiers: TierFilter = ALL_TIERS
    may_load: bool = True
    """False: must not read the prefix cache; answered 0 before any probe."""
    may_store: bool = True
    max_hit_tokens: int | None = None
    """Cap on loaded tokens."""
    stall_s: float | None = None
    total_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Who asks through the per-key door, and what it may read."""

    request_id: str
    load_tiers: TierFilter = ALL_TIERS
    exclude_tiers: frozenset[str] = frozenset()


class AnswerCause(enum.StrEnum):
    """Why a request got the answer it got."""

    WAITING = "waiting"
    HIT = "hit"
    NOTHING_STORED = "nothing_stored"  # no boundary is available anywhere
    NOT_ALLOWED = "not_allowed"  # the request must not read the cache
    CLOCK = "clock"  # a clock ran out; what was ready in primary is the answer
    ROUNDS = "rounds"  # too many fetch rounds failed; what was ready in primary is the answer
    NO_ROOM = "no_room"  # primary cannot take even the smallest plan


@dataclass(frozen=True, slots=True)
class Answer:
    """What a poll returns: `hit` is None while the request waits, else the external tokens (0: compute)."""

    hit: int | None
    cause: AnswerCause


WAIT = Answer(None, AnswerCause.WAITING)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A load handed to the ranks: for each group the chunk range [lo, hi), then the slots of all groups in order.

    `complete` is False when the engine took a length whose chunks are not all held (it took a part that needs an
    earlier window); the load must then be reported as failed and computed.
    """

    job_id: int
    request_id: str
    computed: int
    boundary: int
    ranges: tuple[tuple[int, int], ...]
    slots: I64
    offsets: I64
    lengths: I64
    keys: Sequence[OffloadKey]
    complete: bool = True


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Slots for the chunks (group, chunk index) that are to be copied into primary now."""

    job_id: int
    request_id: str
    chunks: Sequence[tuple[int, int]]
    slots: I64
    offsets: I64
    lengths: I64
    keys: Sequence[OffloadKey]


@dataclass(frozen=True, slots=True)
class SubmitLoad:
    """Hand `job` to tier number `tier` as a load (a promotion)."""

    tier: int
    job: TierJob


@dataclass(frozen=True, slots=True)
class SubmitStore:
    """Hand `job` to tier number `tier` as a store (a cascade)."""

    tier: int
    job: TierJob


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Ask the tier to skip what it can of a job; it still ends once."""

    tier: int
    job_id: int


@dataclass(frozen=True, slots=True)
class TouchKeys:
    """Tell a tier that keys were used above it."""

    tier: int
    keys: Sequence[OffloadKey]


@dataclass(frozen=True, slots=True)
class PurgeTier:
    """Drop everything of the namespace; the tier is not used until the core is told that it is durable."""

    tier: int


Command: TypeAlias = SubmitLoad | SubmitStore | CancelJob | TouchKeys | PurgeTier


class EventKind(enum.StrEnum):
    """What happened to a key at a place."""

    STORED = "stored"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """Keys that appeared at, or left, `place` ("primary" or the tier's name). Removed comes before stored."""

    kind: EventKind
    place: str
    keys: Sequence[OffloadKey] = field(default_factory=tuple)
