"""Requests: their states, the legal moves between them, and the record that the core keeps of each."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvstrata.core.clocks import WaitClock
from kvstrata.core.messages import AnswerCause, RequestContext, RequestOptions, TierPort
from kvstrata.errors import InternalError, StateError
from kvstrata.types import I8, I64, LookupResult, OffloadKey, Presence


class RequestState(enum.Enum):
    """Where a request stands in the two-phase door."""

    NEW = "new"  # not asked yet, or silent, preempted or reset: its next poll resolves
    RESOLVING = "resolving"  # waits for answers of probes
    QUEUED = "queued"  # has a plan, waits for room
    FETCHING = "fetching"  # has its grant, waits for chunks to land
    READY = "ready"  # all that its hit needs is pinned in primary
    LOADING = "loading"  # a load was handed to the ranks
    RUNNING = "running"  # the engine computes
    FINISHED = "finished"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python call in every set look-up


S = RequestState
MOVES: dict[RequestState, frozenset[RequestState]] = {
    S.NEW: frozenset({S.RESOLVING, S.QUEUED, S.FETCHING, S.READY, S.RUNNING, S.FINISHED}),
    S.RESOLVING: frozenset({S.NEW, S.QUEUED, S.FETCHING, S.READY, S.RUNNING, S.FINISHED}),
    S.QUEUED: frozenset({S.NEW, S.RESOLVING, S.FETCHING, S.READY, S.RUNNING, S.FINISHED}),
    S.FETCHING: frozenset({S.NEW, S.RESOLVING, S.QUEUED, S.READY, S.RUNNING, S.FINISHED}),
    S.READY: frozenset({S.NEW, S.RESOLVING, S.QUEUED, S.FETCHING, S.LOADING, S.RUNNING, S.FINISHED}),
    S.LOADING: frozenset({S.NEW, S.RUNNING, S.FINISHED}),
    S.RUNNING: frozenset({S.NEW, S.FINISHED}),
    S.FINISHED: frozenset(),
}
"""Legal moves; every state may move to NEW (preempted, reset, silent) and to FINISHED (finish or abort)."""

WAITING = frozenset({S.RESOLVING, S.QUEUED, S.FETCHING})
"""States in which a poll answers "wait"."""

HOLDING = frozenset({S.FETCHING, S.READY})
"""States in which a request may hold slots: nobody waits for room while holding."""


class Door(enum.Enum):
    """The door that a request uses for its whole life."""

    UNDECIDED = "undecided"
    TWO_PHASE = "two_phase"
    PER_KEY = "per_key"


_NOWHERE: dict[RequestState, int] = dict.fromkeys(RequestState, 0)
"""The table of a record that is in none."""
_NO_SLOTS: I64 = np.empty(0, np.int64)


@dataclass(slots=True, eq=False)
class Request:
    """One request's record. Pins belong to it (`slots`), never to a key that is derived a second time."""

    request_id: str
    keys: list[list[OffloadKey]]
    options: RequestOptions
    last_poll: float
    context: RequestContext | None = None
    """Per-key door: who asked last, and what it may read."""
    loads: set[int] = field(default_factory=set)
    """Loads that the ranks have not reported yet."""
    load_job: int = 0
    """The one that was handed over last."""
    state: RequestState = RequestState.NEW
    door: Door = Door.UNDECIDED
    order: int = 0
    """Place by first poll; 0 while it has none."""
    clock: WaitClock | None = None
    computed: int = 0
    total: int = 0

    boundary: int = 0
    ranges: tuple[tuple[int, int], ...] = ()
    sources: list[I8] = field(default_factory=list)
    """Per group, for the chunks of `ranges`: the tier that has it, or -1 for primary."""
    found: tuple[int, list[I64]] | None = None
    """Per group, for the chunks of `ranges`: the slots that primary had, and the version of its index at that time."""
    slots: list[I64] = field(default_factory=list)
    """Per group, for the chunks of `ranges`: the slots held; empty while nothing is held."""
    key_slots: dict[int, None] = field(default_factory=dict)
    """Slots held through the per-key door."""
    moved: list[I64] = field(default_factory=list)
    """Per group, the slots of its last load or store, if that was all of it; they may be others' by now."""
    pending: int = 0
    """How many of the held slots have not landed yet."""
    cause: AnswerCause = AnswerCause.WAITING

    failed: set[OffloadKey] = field(default_factory=set)
    """Keys that are absent for this request because bringing them failed; in primary they count again."""
    unloadable: set[OffloadKey] = field(default_factory=set)
    """Keys whose load failed: absent for this request wherever they are."""
    plain: set[int] = field(default_factory=set)
    """Tiers that failed to deliver a chunk to this request: nothing is assumed of them any more."""
    round_failed: bool = False
    rounds: int = 0
    byte_limit: int | None = None
    primary_only: bool = False
    answers: dict[int, list[I8]] = field(default_factory=dict)
    """Per asynchronous tier and group: what its probes said; -1 not asked, -2 asked."""
    key_answers: dict[tuple[int, OffloadKey], int] = field(default_factory=dict)
    """The same for the per-key door, by tier and key."""
    asked: dict[int, list[bytearray]] = field(default_factory=dict)
    """Per tier and group: which keys were counted as probed."""
    probes_out: int = 0
    retry_at: float | None = None
    retry_s: float = 0.0
    episode: int = 0
    """Counts resolves that void outstanding probes."""
    timer: int = 0
    """Version of the timer entry that is valid."""
    step: int = -1
    """Per-key door: the step in which it asked last."""
    fetch_step: int = -1
    """Per-key door: the step of its first promotions, which stand for the first plan."""
    blocked: LookupResult | None = None
    """Per-key door: the answer of this step to keys that are not in primary, once room was missing."""
    retrying: bool = False
    """Per-key door: a key of this step is not known yet."""
    delays: dict[tuple[int, OffloadKey], float] = field(default_factory=dict)
    """Per-key door: since when a key has not been known, by tier."""
    anchors: dict[int, OffloadKey] = field(default_factory=dict)
    """Per group: key of the last chunk stored for this request."""
    population: dict[RequestState, int] = field(default_factory=lambda: _NOWHERE)
    """How many records of its table are in each state; shared by them all."""

    def move(self, state: RequestState) -> None:
        """Change state; an illegal move is a bug."""
        if state is self.state:
            return
        if state not in MOVES[self.state]:
            raise InternalError(f"request {self.request_id}: {self.state.value} -> {state.value} is not a legal move")
        self.population[self.state] -= 1
        self.population[state] += 1
        self.state = state

    def enter(self, door: Door) -> None:
        """Bind the request to a door; the other one is then an error by name."""
        if self.door is Door.UNDECIDED:
            self.door = door
        elif self.door is not door:
            raise StateError(
                f"request {self.request_id}: uses the {self.door.value} door and may not use the {door.value} door"
            )

    def admits(self, tier: TierPort) -> bool:
        """Whether this tier may be read for the request."""
        asked = self.context
        return self.options.load_tiers.accepts(tier) and (
            asked is None or (tier.name not in asked.exclude_tiers and asked.load_tiers.accepts(tier))
        )

    @property
    def held(self) -> I64:
        """All slots that this request holds."""
        if self.door is Door.PER_KEY:
            return np.array(list(self.key_slots), np.int64)
        return np.concatenate(self.slots) if self.slots else _NO_SLOTS

    def forget(self, slots: I64) -> None:
        """These slots are not held any more."""
        for slot in slots.tolist() if self.key_slots else ():
            self.key_slots.pop(slot, None)
        self.slots = [held[~np.isin(held, slots)] for held in self.slots]

    def mistaken(self, tier: int, group: int, key: OffloadKey) -> bool:
        """The tier lacks a chunk of the plan; if it was only assumed to have it, note that and return True."""
        if tier not in self.answers or group >= len(self.ranges):
            return False
        lo, hi = self.ranges[group]
        if key not in self.keys[group][lo:hi]:
            return False
        kept, index = self.answers[tier][group], self.keys[group].index(key, lo)
        if index >= len(kept) or kept[index] >= 0:
            return False
        kept[index] = Presence.ABSENT
        return True

    @property
    def hit(self) -> int:
        """External tokens of the current plan."""
        return self.boundary - self.computed


class RequestTable:
    """All records by id, at most `most`; the longest silent one is to go first."""

    __slots__ = ("_by_id", "_most", "_orders", "_silent", "get", "population")

    def __init__(self, most: int) -> None:
        self._by_id: dict[str, Request] = {}
        self.get: Callable[[str], Request | None] = self._by_id.get
        """The record of an id, or None. The dictionary's own method: every poll of a waiting request calls it."""
        self.population: dict[RequestState, int] = dict.fromkeys(RequestState, 0)
        """How many records are in each state."""
        self._most = most
        self._orders = 0
        self._silent: list[tuple[float, int, Request]] = []
        """Heap of (last contact when filed, a number, record); it may be out of date, towards earlier contacts."""

    def __len__(self) -> int:
        return len(self._by_id)

    def require(self, request_id: str) -> Request:
        """The record; a missing one is the caller's error."""
        request = self._by_id.get(request_id)
        if request is None:
            raise StateError(f"request {request_id}: unknown")
        return request

    def add(self, request: Request) -> None:
        """Enter a new record."""
        if request.request_id in self._by_id:
            raise StateError(f"request {request.request_id}: added twice")
        self._by_id[request.request_id] = request
        request.population = self.population
        self.population[request.state] += 1
        if len(self._silent) > 2 * len(self._by_id) + 64:
            self._silent = [entry for entry in self._silent if self._by_id.get(entry[2].request_id) is entry[2]]
            heapq.heapify(self._silent)
        self._file(request)

    def _file(self, request: Request) -> None:
        heapq.heappush(self._silent, (request.last_poll, self.next_order(), request))

    def remove(self, request: Request) -> None:
        """Strike out a record."""
        if self._by_id.pop(request.request_id, None) is not None:
            self.population[request.state] -= 1

    @property
    def waiting(self) -> int:
        """How many records wait for an answer."""
        return sum(self.population[state] for state in WAITING)

    def values(self) -> list[Request]:
        """All records."""
        return list(self._by_id.values())

    def next_order(self) -> int:
        """The next place in the queue by first poll."""
        self._orders += 1
        return self._orders

    def surplus(self) -> Request | None:
        """The longest silent record if there are more than allowed, else None.

        Contact does not reorder the heap (a poll stays O(1) and touches nothing else); a record that was in contact
        since it was filed is filed anew when it comes to the front.
        """
        while len(self._by_id) > self._most:
            filed, _, request = self._silent[0]
            if filed == request.last_poll and self._by_id.get(request.request_id) is request:
                return request
            heapq.heappop(self._silent)
            if self._by_id.get(request.request_id) is request:
                self._file(request)
        return None
