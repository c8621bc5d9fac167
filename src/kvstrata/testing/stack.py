"""The core with its tiers, driven by hand: no thread, no clock, every invariant checked after every step.

stack = CoreStack(layout, [ScriptedTier()], chunks=8)
stack.tiers[0].put(stack.keys("a", 4)[0], ...)
stack.add("a", tokens=64)
stack.poll("a", 0, 64)
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from kvstrata.core.manager import TieringOffloadingManager
from kvstrata.core.messages import (
    Answer,
    CancelJob,
    Command,
    LoadPlan,
    PurgeTier,
    RequestContext,
    RequestOptions,
    StorePlan,
    SubmitLoad,
    SubmitStore,
    TouchKeys,
)
from kvstrata.core.settings import CoreConfig
from kvstrata.layout.groups import Layout
from kvstrata.testing.clock import ManualClock
from kvstrata.testing.executor import InlineExecutor
from kvstrata.tiers.base import Tier, TierContext
from kvstrata.types import LookupResult, OffloadKey, make_key

NAMESPACE = b"core-stack-tests"


def carry_out(command: Command, tiers: Sequence[Tier], manager: TieringOffloadingManager) -> None:
    """Do one command of the core on its tier."""
    tier = tiers[command.tier]
    match command:
        case SubmitLoad():
            tier.submit_load(command.job)
        case SubmitStore():
            tier.submit_store(command.job)
        case CancelJob():
            tier.cancel(command.job_id)
        case TouchKeys():
            tier.touch(command.keys)
        case PurgeTier():
            manager.purge_submitted(command.tier, tier.purge(NAMESPACE))


class CoreStack:
    """A manager and its tiers. `auto` pumps after every call; without it the test pumps by hand."""

    def __init__(
        self,
        layout: Layout,
        tiers: Sequence[Tier] = (),
        *,
        chunks: int | None = None,
        config: CoreConfig | None = None,
        auto: bool = True,
        ranks: int = 1,
        events: bool = False,
        checked: bool = True,
    ) -> None:
        """`chunks` sizes primary in chunks of the largest group, unless `config` says how many bytes."""
        if config is None:
            config = CoreConfig(capacity_bytes=(64 if chunks is None else chunks) * max(layout.chunk_bytes))
        self.layout = layout
        self.tiers = list(tiers)
        self.clock = ManualClock()
        self.region = bytearray(config.capacity_bytes)
        context = TierContext(memoryview(self.region), NAMESPACE, 1, self.clock, InlineExecutor())
        for tier in self.tiers:
            tier.open(context)
        self.core = TieringOffloadingManager(layout, config, self.tiers, ranks=ranks, events=events)
        self.auto = auto
        self.checked = checked
        self.core.advance(self.clock.monotonic())

    # -- time and completions

    def pump(self, rounds: int = 100) -> None:
        """Carry events in and commands out until neither is left."""
        for _ in range(rounds):
            events = [(i, event) for i, tier in enumerate(self.tiers) for event in tier.poll()]
            for i, event in events:
                self.core.on_event(i, event)
                self.check()
            commands = self.core.take_commands()
            for command in commands:
                carry_out(command, self.tiers, self.core)
            if not events and not commands:
                return
        raise AssertionError("events and commands never came to an end")

    def wait(self, seconds: float, step: float | None = None) -> None:
        """Let time pass, in steps if asked."""
        left = seconds
        while left > 0:
            self.clock.advance(min(left, step or left))
            left -= step or left
            self.core.advance(self.clock.monotonic())
            self._after()

    def check(self) -> None:
        """Every invariant of the core."""
        if self.checked:
            self.core.check()

    def _after(self) -> None:
        if self.auto:
            self.pump()
        self.check()

    # -- requests

    def keys(self, seed: str, tokens: int, *, shared: str = "", shared_tokens: int = 0) -> list[list[OffloadKey]]:
        """Keys of the whole chunks of `tokens` tokens, per group.

        Prompts of one seed share their prefixes; with `shared`, the first `shared_tokens` are those of that seed.
        """
        out: list[list[OffloadKey]] = []
        for group, tpc in enumerate(self.layout.tokens_per_chunk):
            ends = range(tpc, tokens + 1, tpc)
            out.append([block_key(shared if end <= shared_tokens else seed, end, group) for end in ends])
        return out

    def add(
        self, request_id: str, tokens: int, options: RequestOptions | None = None, *, seed: str | None = None
    ) -> list[list[OffloadKey]]:
        """Add a request whose prompt is that of `seed` (default: its own id); returns its keys."""
        keys = self.keys(request_id if seed is None else seed, tokens)
        self.core.add_request(request_id, keys, options)
        self._after()
        return keys

    def poll(self, request_id: str, computed: int, total: int) -> Answer:
        """One poll of the two-phase door."""
        answer = self.core.poll(request_id, computed, total)
        self._after()
        return answer

    def poll_until_answered(self, request_id: str, computed: int, total: int, *, step: float = 0.02) -> int:
        """Poll, letting `step` seconds pass between polls, until the answer is definite."""
        for _ in range(10_000):
            answer = self.poll(request_id, computed, total)
            if answer.hit is not None:
                return answer.hit
            self.wait(step)
        raise AssertionError(f"request {request_id} was never answered")

    def take(self, request_id: str, tokens: int) -> LoadPlan | None:
        """The engine takes tokens of the hit."""
        plan = self.core.take(request_id, tokens)
        self._after()
        return plan

    def complete_load(self, plan: LoadPlan, ok: bool = True) -> bool | None:
        """One rank reports the load."""
        done = self.core.complete_load(plan.job_id, ok)
        self._after()
        return done

    def prepare_store(self, request_id: str, chunks: Sequence[tuple[int, int]]) -> StorePlan | None:
        """Slots for chunks of the request."""
        plan = self.core.prepare_store(request_id, chunks)
        self._after()
        return plan

    def complete_store(self, plan: StorePlan, ok: bool = True) -> None:
        """One rank reports the store."""
        self.core.complete_store(plan.job_id, ok)
        self._after()

    def store(self, request_id: str, chunks: Sequence[tuple[int, int]] | None = None) -> StorePlan | None:
        """Store chunks (default: all) and publish them."""
        if chunks is None:
            request_keys = self.core._core.requests.require(request_id).keys
            chunks = [(g, i) for g, group in enumerate(request_keys) for i in range(len(group))]
        plan = self.prepare_store(request_id, chunks)
        if plan is not None:
            self.complete_store(plan)
        return plan

    def preempt(self, request_id: str) -> None:
        """The engine takes the request's blocks away."""
        self.core.preempt(request_id)
        self._after()

    def finish(self, request_id: str) -> None:
        """The request is over."""
        self.core.finish(request_id)
        self._after()

    # -- the per-key door

    def lookup(self, key: OffloadKey, context: RequestContext) -> LookupResult:
        """One lookup; nothing is pumped before `end_step`."""
        answer = self.core.lookup(key, context)
        self.check()
        return answer

    def end_step(self) -> None:
        """The engine's step ends."""
        self.core.on_schedule_end()
        self._after()


def block_key(seed: str, end: int, group: int) -> OffloadKey:
    """The key of the chunk of `group` that ends at token `end` of the prompt of `seed`."""
    digest = xxhash.xxh3_128_digest(f"{seed}/{end}".encode())
    return make_key(digest + digest[::-1], group)
