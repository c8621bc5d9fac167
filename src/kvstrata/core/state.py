"""What the parts of the core share: the facts, each with one owner, and the outbox.

The parts (presence, promotions, grants, doors, stores, cascades) are small objects over one `CoreState`. None of them
keeps a fact that is kept elsewhere.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstrata.core.arrays import count_of
from kvstrata.core.breakers import Breaker, BreakerState
from kvstrata.core.galloping import gallops
from kvstrata.core.ledger import Ledger
from kvstrata.core.messages import CacheEvent, Command, EventKind, TierPort
from kvstrata.core.requests import Request, RequestTable
from kvstrata.core.residency import Residency
from kvstrata.core.settings import CoreConfig
from kvstrata.core.slots import QUARANTINED
from kvstrata.core.statistics import Counters, PromotionAccount, TierCounters
from kvstrata.core.verdicts import Verdicts
from kvstrata.layout.groups import Layout
from kvstrata.types import I64, OffloadKey

PRIMARY = "primary"
MAX_EVENTS = 1_000_000
"""Most cache events that wait to be taken; the oldest are dropped and counted."""


@dataclass(slots=True, eq=False)
class Batch:
    """Queued promotions of one request from one tier, in token order; `at` is the next one to hand over."""

    batch_id: int
    request: Request
    slots: I64
    at: int = 0


@dataclass(slots=True, eq=False)
class TierState:
    """What the core knows of one secondary tier."""

    index: int
    port: TierPort
    reads: Breaker
    writes: Breaker
    filled: bool = True
    """Stored chunks are cascaded to it; otherwise it is only read."""
    gallops: bool = False
    """Its probes cost a round trip: few keys are asked, the rest is inferred."""
    counters: TierCounters = field(default_factory=TierCounters)
    queue: deque[Batch] = field(default_factory=deque)
    """Promotions that keep their slots and wait for their turn."""
    inflight: int = 0
    """Bytes handed over in loads and not reported yet."""
    loads_out: int = 0
    """Unfinished promotion jobs."""
    overdue: int = 0
    """Bytes of slots under overdue promotion jobs."""
    overdue_jobs: int = 0
    cascades: deque[OffloadKey] = field(default_factory=deque)
    """Keys that wait for their store."""
    digests: dict[OffloadKey, bytes] = field(default_factory=dict)
    """Digests that came with some of them."""
    cascading: int = 0
    """Bytes pinned by handed-over cascades."""
    cascades_out: int = 0
    missed: OrderedDict[OffloadKey, None] = field(default_factory=OrderedDict)
    """Keys whose cascade was dropped or failed, to be offered again when the tier has recovered; bounded."""
    withheld: OrderedDict[OffloadKey, None] = field(default_factory=OrderedDict)
    """Keys that were stored by requests which may not store to this tier, for another that may; bounded."""
    offer_at: float | None = None
    """A store has failed: nothing that was missed is offered again before then."""
    offer_s: float = 0.0
    """How long that was put off last; doubles."""
    purged_through: int = 0
    """The generation that the last purge of this tier began; what older ones store late is purged once more."""
    purge_ticket: int | None = None
    fenced: bool = False
    """A purge is not durable yet, or stores of an older generation are unfinished; neither read nor written."""


class CoreState:
    """Facts shared by the parts of the core."""

    def __init__(
        self, layout: Layout, config: CoreConfig, ports: Sequence[TierPort], residency: Residency, ranks: int
    ) -> None:
        self.layout = layout
        self.config = config
        self.ranks = ranks
        self.now = 0.0
        self.step = 0
        self.generation = 0
        self.residency = residency
        self.ledger = Ledger(config.job_idle_s, config.job_total_s)
        self.requests = RequestTable(config.max_requests)
        self.verdicts = Verdicts(config.max_verdicts, config.backoff_s, config.backoff_max_s)
        self.counters = Counters()
        self.account = PromotionAccount(self.counters, residency)
        self.tiers = [
            TierState(
                i,
                port,
                self._breaker(),
                self._breaker(),
                filled=port.name not in config.no_cascade,
                gallops=gallops(port.capabilities),
            )
            for i, port in enumerate(ports)
        ]
        self.commands: list[Command] = []
        self.events: deque[CacheEvent] = deque()
        self.events_on = False
        self.dirty: dict[Request, None] = {}
        """Requests whose plan an event has voided, in order."""
        self.room = False
        """Something was given back since the queue was last tried."""
        self.pump = False
        """Jobs may have become ready to be handed over."""
        self.bounds: dict[tuple[float | int | None, ...], tuple[float, float]] = {}
        """Stall and total of a wait, by a request's own ones and the tiers that it waits for."""
        self.timers: list[tuple[float, int, int, Request]] = []
        self._timer_seq = 0
        largest = max(layout.chunk_bytes)
        capacity = residency.capacity_bytes
        self.share_limit = min(capacity, -(-int(config.promotion_share * capacity) // largest) * largest)
        self.store_reserve = int(config.store_reserve * capacity) // largest * largest
        self.inflight_limit = max(largest, int(config.inflight_share * capacity))

    def _breaker(self) -> Breaker:
        return Breaker(self.config.breaker_errors, self.config.breaker_open_s, self.config.breaker_open_max_s)

    def set_timer(self, request: Request, at: float) -> None:
        """The request's one timer; an earlier entry becomes void."""
        request.timer += 1
        self._timer_seq += 1
        heapq.heappush(self.timers, (at, self._timer_seq, request.timer, request))

    def overdue_bytes(self) -> int:
        """Bytes of primary under overdue promotions of all tiers."""
        return sum(tier.overdue for tier in self.tiers)

    def readable(self, tier: TierState) -> bool:
        """Whether a tier may be asked for keys now (breaker, overdue mark, fence)."""
        if tier.fenced or not tier.reads.allows:
            return False
        return not tier.overdue_jobs or (tier.loads_out == tier.overdue_jobs and self._below_mark(self._trials()))

    def will_read(self, tier: TierState) -> bool:
        """Whether what is queued for the tier may still be read soon; otherwise it fails at once."""
        if tier.fenced or tier.reads.state is BreakerState.OPEN:
            return False
        return not tier.overdue_jobs or self._below_mark()

    def _below_mark(self, trials: int = 0) -> bool:
        """All tiers together hold less than the in-flight share overdue, with room for one more trial."""
        return self.overdue_bytes() + trials + max(self.layout.chunk_bytes) <= self.inflight_limit

    def _trials(self) -> int:
        """Bytes that tiers with overdue jobs are being tried with: they may become overdue too."""
        return sum(tier.inflight for tier in self.tiers if tier.overdue_jobs)

    def byte_size(self, slots: I64) -> int:
        """Payload bytes of these slots."""
        return self.residency.table.bytes_of(slots)

    def unpin(self, slots: I64, *, once: bool = False) -> None:
        """A job lets go of slots; one that a reset put into quarantine is returned when its last pin is gone.

        `once`: no slot is named twice.
        """
        residency = self.residency
        residency.unpin(slots, once=once)
        states = residency.state[slots]
        if count_of(states, QUARANTINED):
            free = slots[(states == QUARANTINED) & (residency.pins[slots] == 0)]
            if len(free):
                residency.requite(free)
        self.room = True

    def emit(self, kind: EventKind, place: str, keys: Sequence[OffloadKey]) -> None:
        """Note a cache event if anybody listens."""
        if self.events_on and keys:
            self.events.append(CacheEvent(kind, place, tuple(keys)))
            if len(self.events) > MAX_EVENTS:
                self.events.popleft()
                self.counters.events_dropped += 1

    def ranges_of(self, slots: I64) -> tuple[I64, I64]:
        """Offsets and lengths in primary of these slots."""
        return self.residency.offset[slots], self.residency.length[slots]
