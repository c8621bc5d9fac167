"""One engine's share of kvstrata with real threads and real time: primary, tiers, core and driver.

For tests over real servers, directories and processes, where `CoreStack` (one thread, manual time) says too little.
Payloads follow from the keys, so that any two nodes know what the other one must have stored.

    with Node(layout, [FsTier(...)]) as node:
        node.store("a", tokens=64)      # all chunks of the prompt "a", as far as every tier
        node.forget()                   # primary is empty
        assert node.load("a", tokens=64) == 64
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvstrata.core.manager import Statistics, TieringOffloadingManager
from kvstrata.core.messages import RequestOptions
from kvstrata.core.settings import CoreConfig
from kvstrata.core.tail_room import share_tail_room
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds import FullAttention
from kvstrata.runtime.clock import SystemClock
from kvstrata.runtime.driver import Driver
from kvstrata.runtime.executor import Signal, ThreadExecutor
from kvstrata.runtime.guard import GuardedTier
from kvstrata.testing.stack import block_key
from kvstrata.testing.tier_harness import LAYOUT_TAG, NAMESPACE, payload_of
from kvstrata.tiers.base import Tier, TierContext
from kvstrata.types import OffloadKey, ResetReason

PAUSE_S = 0.002
YIELDING_THREADS = 2


def one_group(chunk_bytes: int = 4096, tokens: int = 16) -> Layout:
    """A layout of one full-attention group."""
    return Layout((Group(FullAttention(), tokens, chunk_bytes=chunk_bytes),))


class Node:
    """See the module. `config` sizes primary; by default it has room for `chunks` chunks of the largest group."""

    def __init__(
        self,
        layout: Layout,
        tiers: Sequence[Tier],
        *,
        chunks: int = 2048,
        config: CoreConfig | None = None,
        namespace: bytes = NAMESPACE,
        threads: int = 8,
    ) -> None:
        self.layout = layout
        self.config = config or CoreConfig(capacity_bytes=chunks * max(layout.chunk_bytes), cascade_queue=1 << 16)
        self.clock = SystemClock()
        self.region = np.zeros(self.config.capacity_bytes + 4096, np.uint8)
        start = -self.region.ctypes.data % 4096
        self.view = self.region.data[start : start + self.config.capacity_bytes]
        self.tiers = [GuardedTier(tier) for tier in tiers]
        self.driver: Driver[TieringOffloadingManager]
        self._namespace = namespace
        self._threads = threads
        self._executors: list[ThreadExecutor] = []
        self._requests = 0

    def open(self) -> Node:
        """Open the tiers and start the driver's thread. Raises what a tier's `open` raises."""
        self.config, shares = share_tail_room(self.config, self.layout.chunk_bytes, self.tiers)
        manager = TieringOffloadingManager(self.layout, self.config, self.tiers)
        self.driver = Driver(manager, self.tiers, self.clock, strict=True)
        for tier, tail_room in zip(self.tiers, shares, strict=True):
            executor = ThreadExecutor(f"node-{tier.name}", self._threads)
            self._executors.append(executor)
            context = TierContext(self.view, self._namespace, LAYOUT_TAG, self.clock, executor, self.driver.wake)
            yielding = ThreadExecutor(f"node-{tier.name}-yielding", YIELDING_THREADS, yielding=True)
            self._executors.append(yielding)
            tier.open(dataclasses.replace(context, tail_room=tail_room, yielding=yielding))
            if tier.open_error is not None:
                raise tier.open_error
        self.driver.start()
        return self

    def close(self, timeout: float = 5.0) -> None:
        """Stop the thread and close the tiers."""
        self.driver.close(timeout)
        for executor in self._executors:
            executor.close(0.1)

    def __enter__(self) -> Node:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    # what an engine does

    def keys(self, seed: str, tokens: int) -> list[list[OffloadKey]]:
        """Keys of the whole chunks of `tokens` tokens of the prompt `seed`, per group."""
        spans = self.layout.tokens_per_chunk
        return [[block_key(seed, end, g) for end in range(tpc, tokens + 1, tpc)] for g, tpc in enumerate(spans)]

    def _add(self, seed: str, tokens: int, options: RequestOptions | None) -> str:
        self._requests += 1
        request_id = f"{seed}-{self._requests}"
        keys = self.keys(seed, tokens)
        self.driver.call(lambda manager: manager.add_request(request_id, keys, options))
        return request_id

    def store(self, seed: str, tokens: int, options: RequestOptions | None = None, *, settle_s: float = 30.0) -> int:
        """Store all chunks of a prompt and wait until they are where they can be; returns how many had to be stored."""
        request_id = self._add(seed, tokens, options)
        chunks = [(g, i) for g, keys in enumerate(self.keys(seed, tokens)) for i in range(len(keys))]
        plan = self.driver.call(lambda manager: manager.prepare_store(request_id, chunks))
        count = 0
        if plan is not None:
            count = len(plan.chunks)
            for key, offset, length in zip(plan.keys, plan.offsets.tolist(), plan.lengths.tolist(), strict=True):
                self.view[offset : offset + length] = payload_of(key, length)
            job = plan.job_id
            self.driver.call(lambda manager: manager.complete_store(job))
        self.driver.call(lambda manager: manager.finish(request_id))
        if settle_s:
            self.settle(settle_s)
        return count

    def load(self, seed: str, tokens: int, options: RequestOptions | None = None, *, within_s: float = 30.0) -> int:
        """The hit of a prompt of which the engine has nothing; every byte is compared. Raises if it takes longer."""
        request_id = self._add(seed, tokens, options)
        hit: Any = self.wait_for(
            lambda: self.driver.call(lambda manager: manager.poll(request_id, 0, tokens)).hit, within_s, not_none=True
        )
        plan = self.driver.call(lambda manager: manager.take(request_id, hit))
        if plan is not None:
            for key, offset, length in zip(plan.keys, plan.offsets.tolist(), plan.lengths.tolist(), strict=True):
                if bytes(self.view[offset : offset + length]) != payload_of(key, length):
                    raise AssertionError(f"other bytes came under the key {key.hex()}")
            job = plan.job_id
            self.driver.call(lambda manager: manager.complete_load(job))
        self.driver.call(lambda manager: manager.finish(request_id))
        return int(hit)

    def forget(self) -> None:
        """Empty primary; the tiers keep what they have."""
        self.driver.call(lambda manager: manager.reset_cache(ResetReason.MEMORY_GOING_AWAY))

    # looking

    def wait_for(self, what: Callable[[], object], within_s: float, *, not_none: bool = False) -> object:
        """Ask until the answer is true (or not None); raises `TimeoutError` after `within_s` seconds."""
        end, pause = self.clock.monotonic() + within_s, Signal()
        while True:
            answer = what()
            if answer is not None if not_none else answer:
                return answer
            if self.clock.monotonic() > end:
                raise TimeoutError(f"not within {within_s} s")
            pause.wait(PAUSE_S)

    def settle(self, within_s: float = 30.0) -> None:
        """Wait until nothing is queued or under way."""
        self.wait_for(lambda: self.driver.call(lambda manager: manager.idle), within_s)

    def statistics(self) -> Statistics:
        """The core's snapshot."""
        return self.driver.call(lambda manager: manager.statistics())

    def reads_state(self, tier: int) -> str:
        """State of the breaker for reads of a tier: closed, open or half open."""
        return str(self.driver.call(lambda manager: manager._core.tiers[tier].reads.state.value))

    def check_idle(self) -> None:
        """Every invariant holds and nothing is pinned, held, reserved or in quarantine."""
        self.driver.call(lambda manager: manager.check())
        residency = self.driver.call(lambda manager: manager.residency)
        left = (residency.pinned_bytes, residency.held_bytes, residency.reserved_bytes, residency.quarantined_bytes)
        if any(left):
            raise AssertionError(f"an idle node has pinned, held, reserved or quarantined bytes: {left}")
