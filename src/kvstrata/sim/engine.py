"""The simulated engine: admits requests, asks the cache, prefills in steps, decodes, and keeps its own prefix cache.

One event loop in simulated time. The accelerator prefills one step at a time, first come first served; decodes run
beside each other; copies between primary and accelerator take the time of their bytes. A request that waits for the
cache is asked about at every event, with what the engine's own cache has of it at that very moment: nothing is
referred to before the request is admitted, so that number may shrink or grow between two polls.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvstrata.errors import InternalError
from kvstrata.layout.groups import Layout
from kvstrata.sim.accelerator import Accelerator, BlockTable, Computed, Ranges
from kvstrata.sim.cost import CostModel
from kvstrata.sim.traces import Request
from kvstrata.types import OffloadKey

MAX_IDLE_ROUNDS = 100_000
"""Rounds of the loop without any progress after which it is taken for stuck."""


class SimClock(Protocol):
    """A clock that the engine moves."""

    def monotonic(self) -> float:
        """Now."""
        ...

    def advance(self, seconds: float) -> float:
        """Move forward; returns the new time."""
        ...


@dataclass(slots=True, eq=False)
class Active:
    """One request in the engine."""

    request: Request
    name: str
    keys: Sequence[Sequence[OffloadKey]]
    kept: Sequence[Sequence[int]]
    """Per group the chunk indices that are worth keeping, in order: what is stored, and what stays cached here."""
    table: BlockTable
    arrived_s: float
    computed: Computed | None = None
    seen_version: int = -1
    least_computed: int = -1
    """Fewest tokens that the engine's own cache had at any poll; -1 before the first."""
    most_computed: int = 0
    last_computed: int = 0
    external: int = 0
    """Tokens brought by the cache."""
    done_tokens: int = 0
    """Prompt tokens that are in accelerator memory."""
    offered: list[int] = field(default_factory=list)
    """Per group how many of `kept` were offered to the cache."""


@dataclass(frozen=True, slots=True)
class Load:
    """Chunks on their way from primary into accelerator memory."""

    ranges: Ranges
    boundary: int
    real_bytes: int
    handle: object


class Cache(Protocol):
    """What the engine needs of what lies below accelerator memory."""

    def arrive(self, active: Active) -> None:
        """A new request."""
        ...

    def poll(self, active: Active, computed: int) -> int | None:
        """External tokens beyond `computed`, 0 for none, None while the answer is open."""
        ...

    def take(self, active: Active, tokens: int) -> Load | None:
        """The engine takes `tokens` of the hit."""
        ...

    def loaded(self, active: Active, load: Load) -> bool:
        """The copy has ended; False if its bytes may not be used."""
        ...

    def store(self, active: Active, chunks: Sequence[tuple[int, int]]) -> None:
        """These (group, chunk index) are whole in accelerator memory now and may be copied out."""
        ...

    def finish(self, active: Active) -> None:
        """The request is done."""
        ...

    def settle(self) -> bool:
        """Carry everything that has happened by now; whether anything had."""
        ...

    def next_time(self) -> float | None:
        """When something happens by itself."""
        ...


class NoCache:
    """Nothing below accelerator memory: the other half of the comparison."""

    def arrive(self, active: Active) -> None:
        """Nothing to note."""

    def poll(self, active: Active, computed: int) -> int | None:
        """Never a hit."""
        return 0

    def take(self, active: Active, tokens: int) -> Load | None:
        """Nothing to take."""
        return None

    def loaded(self, active: Active, load: Load) -> bool:
        """Never called."""
        return False

    def store(self, active: Active, chunks: Sequence[tuple[int, int]]) -> None:
        """Nothing is kept."""

    def finish(self, active: Active) -> None:
        """Nothing to forget."""

    def settle(self) -> bool:
        """Nothing happens by itself."""
        return False

    def next_time(self) -> float | None:
        """Nothing happens by itself."""
        return None


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one request."""

    index: int
    prompt_tokens: int
    computed_tokens: int
    """Prompt tokens found in accelerator memory."""
    external_tokens: int
    """Prompt tokens brought by the cache; the last token of a prompt is always computed."""
    least_computed: int
    """Fewest that were found there at any poll of the request."""
    most_computed: int
    """Most that were found there at any poll."""
    ttft_s: float

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.computed_tokens + self.external_tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """How requests become work: their keys and what is kept of them."""

    layout: Layout
    """With the real bytes per chunk, whatever the payload scale."""
    keys: Callable[[Request], Sequence[Sequence[OffloadKey]]]
    kept: Callable[[Request], Sequence[Sequence[int]]]


class SimulatedEngine:
    """Runs requests against a cache; at most `concurrency` are in the engine at a time."""

    def __init__(
        self, plan: Plan, costs: CostModel, cache: Cache, clock: SimClock, accelerator: Accelerator, concurrency: int
    ) -> None:
        self._plan = plan
        self._costs = costs
        self._cache = cache
        self._clock = clock
        self._concurrency = concurrency
        self._tokens = plan.layout.tokens_per_chunk
        self.accelerator = accelerator
        self._queue: deque[Request] = deque()
        self._waiting: list[Active] = []
        self._prefills: deque[Active] = deque()
        self._prefilling = False
        self._active = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._event_count = 0
        self.served: list[Served] = []
        self.polls = 0

    def run(self, requests: Sequence[Request], progress: Callable[[int], None] | None = None) -> list[Served]:
        """Serve `requests` in order; `progress` is told how many are done."""
        self._queue.extend(requests)
        idle = 0
        while self._queue or self._active:
            done = len(self.served)
            if self._round():
                idle = 0
            else:
                idle += 1
                self._move_on()
                if idle > MAX_IDLE_ROUNDS:
                    raise InternalError(f"the replay is stuck with {self._active} requests in the engine")
            if progress is not None and len(self.served) != done:
                progress(len(self.served))
        return self.served

    def _round(self) -> bool:
        """Everything that can happen at this instant; whether anything did."""
        moved = self._admit()
        moved |= self._cache.settle()
        moved |= self._poll_waiting()
        return self._start_prefill() or moved

    def _move_on(self) -> None:
        """Go to the next instant at which something happens, and let it."""
        now = self._clock.monotonic()
        times = [self._events[0][0]] if self._events else []
        by_itself = self._cache.next_time()
        if by_itself is not None:
            times.append(by_itself)
        if not times:
            raise InternalError(f"nothing is left to happen, with {self._active} requests in the engine")
        self._clock.advance(max(min(times) - now, 0.0) or 1e-6)
        now = self._clock.monotonic()
        while self._events and self._events[0][0] <= now:
            heapq.heappop(self._events)[2]()

    def _at(self, delay: float, action: Callable[[], None]) -> None:
        self._event_count += 1
        heapq.heappush(self._events, (self._clock.monotonic() + delay, self._event_count, action))

    # the life of a request

    def _admit(self) -> bool:
        admitted = False
        while self._queue and self._active < self._concurrency:
            request = self._queue.popleft()
            keys, kept = self._plan.keys(request), self._plan.kept(request)
            table = BlockTable(keys, kept, request.prompt_tokens, request.output_tokens)
            active = Active(
                request, f"r{request.index}", keys, kept, table, self._clock.monotonic(), offered=[0] * len(keys)
            )
            self._active += 1
            self._waiting.append(active)
            self._cache.arrive(active)
            admitted = True
        return admitted

    def _poll_waiting(self) -> bool:
        """Ask the cache about each request that waits, first come first; admit those with an answer."""
        admitted = False
        room = True
        for active in list(self._waiting):
            computed = self._computed(active)
            self.polls += 1
            hit = self._cache.poll(active, computed.tokens)
            if hit is None:
                continue
            # One that does not fit keeps its place: nobody who came later is admitted before it.
            room = room and self.accelerator.admit(active.table, computed)
            if room:
                self._waiting.remove(active)
                self._begin(active, computed, hit)
                admitted = True
        return admitted

    def _computed(self, active: Active) -> Computed:
        """What the engine's own cache has of the request now."""
        if active.computed is None or active.seen_version != self.accelerator.version:
            active.computed = self.accelerator.computed(active.table)
            active.seen_version = self.accelerator.version
        found = active.computed.tokens
        active.least_computed = found if active.least_computed < 0 else min(active.least_computed, found)
        active.most_computed = max(active.most_computed, found)
        return active.computed

    def _begin(self, active: Active, computed: Computed, hit: int) -> None:
        """The request has its blocks: load what was hit, then compute the rest."""
        active.last_computed = computed.tokens
        active.done_tokens = computed.tokens
        load = self._cache.take(active, hit)
        if load is None:
            self._prefills.append(active)
            return
        self._at(self._costs.copy_s(load.real_bytes), lambda: self._end_load(active, load))

    def _end_load(self, active: Active, load: Load) -> None:
        if self._cache.loaded(active, load):
            # The last token is computed again for its logits, whatever was loaded.
            active.done_tokens = min(load.boundary, active.request.prompt_tokens - 1)
            active.external = active.done_tokens - active.last_computed
            loaded = ((g, index) for g, (low, high) in enumerate(load.ranges) for index in range(low, high))
            self.accelerator.fill(active.table, loaded)
        self._prefills.append(active)

    def _start_prefill(self) -> bool:
        if self._prefilling or not self._prefills:
            return False
        active = self._prefills.popleft()
        tokens = min(active.request.prompt_tokens - active.done_tokens, self._costs.prefill_step_tokens)
        self._prefilling = True
        self._at(self._costs.prefill_s(tokens), lambda: self._end_prefill(active, tokens))
        return True

    def _end_prefill(self, active: Active, tokens: int) -> None:
        self._prefilling = False
        active.done_tokens += tokens
        self._keep(active)
        if active.done_tokens < active.request.prompt_tokens:
            self._prefills.append(active)
            return
        self._note_first_token(active)
        self._at(self._costs.decode_s(active.request.output_tokens), lambda: self._end(active))

    def _keep(self, active: Active) -> None:
        """Cache what became whole, and offer what is kept of it to the cache below, each chunk once."""
        whole = [min(active.done_tokens // tokens, len(active.keys[g])) for g, tokens in enumerate(self._tokens)]
        chunks: list[tuple[int, int]] = []
        for group, bound in enumerate(whole):
            kept = active.kept[group]
            at = active.offered[group]
            while at < len(kept) and kept[at] < bound:
                if self._has(active, group, kept[at]):
                    chunks.append((group, kept[at]))
                at += 1
            active.offered[group] = at
        if chunks:
            chunks.sort(key=lambda chunk: (chunk[1] + 1) * self._tokens[chunk[0]])  # what does not fit is the tail
            self.accelerator.fill(active.table, chunks)
            self._cache.store(active, chunks)

    def _has(self, active: Active, group: int, index: int) -> bool:
        """Whether the chunk's blocks hold its tokens: computed or loaded by this request, or found cached."""
        begins = index * self._tokens[group]
        known = active.last_computed + active.external
        return begins >= known or active.keys[group][index] in active.table.held

    def _note_first_token(self, active: Active) -> None:
        self.served.append(
            Served(
                index=active.request.index,
                prompt_tokens=active.request.prompt_tokens,
                computed_tokens=active.last_computed,
                external_tokens=active.external,
                least_computed=active.least_computed,
                most_computed=active.most_computed,
                ttft_s=self._clock.monotonic() - active.arrived_s,
            )
        )

    def _end(self, active: Active) -> None:
        self._cache.finish(active)
        self.accelerator.release(active.table)
        self._active -= 1
