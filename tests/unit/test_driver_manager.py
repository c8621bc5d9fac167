"""The driver with the real core, a real tier and real threads: bytes go down and come back without another step."""

from __future__ import annotations

import queue

import pytest

from kvstrata.core.manager import TieringOffloadingManager
from kvstrata.core.settings import CoreConfig
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds.full import FullAttention
from kvstrata.primary.region import AnonymousRegion
from kvstrata.runtime.clock import SystemClock
from kvstrata.runtime.driver import Driver
from kvstrata.runtime.executor import ThreadExecutor
from kvstrata.runtime.guard import GuardedTier
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.memory import MemoryTier
from kvstrata.types import JobEnded, ResetReason, TierEvent, make_key

LONG = 30.0
CHUNKS = 4
BYTES = 512
KEYS = [make_key(bytes([number]) * 32, 0) for number in range(CHUNKS)]


class Manager(TieringOffloadingManager):
    """The real core; tells the test when it has applied the end of a job."""

    def __init__(self, layout: Layout, config: CoreConfig, tiers: list[GuardedTier]) -> None:
        super().__init__(layout, config, tiers)
        self.ended: queue.SimpleQueue[TierEvent] = queue.SimpleQueue()

    def on_event(self, tier: int, event: TierEvent) -> None:
        super().on_event(tier, event)
        if isinstance(event, JobEnded):
            self.ended.put(event)


class Stack:
    """Primary, core, one tier and a driver with its thread."""

    def __init__(self) -> None:
        self.region = AnonymousRegion(64 * BYTES)
        self.executor = ThreadExecutor("tier")
        self.clock = SystemClock()
        self.tier = MemoryTier()
        self.guard = GuardedTier(self.tier)
        layout = Layout((Group(FullAttention(), 16, chunk_bytes=BYTES),))
        self.manager = Manager(layout, CoreConfig(capacity_bytes=64 * BYTES), [self.guard])
        self.driver: Driver[Manager] = Driver(self.manager, [self.guard], self.clock)

    def open(self) -> None:
        self.region.open()
        self.guard.open(
            TierContext(self.region.view, b"n" * 16, 1, self.clock, self.executor, self.driver.wake),
        )
        self.driver.start()

    def close(self) -> None:
        assert self.driver.close(LONG)
        assert self.executor.close(LONG)
        self.region.close()
        assert self.driver.statistics().last_faults == ()
        assert self.guard.statistics().faults == ()


@pytest.fixture
def stack() -> Stack:
    return Stack()


def store(stack: Stack, request: str, fill: int) -> None:
    with stack.driver.step() as manager:
        manager.add_request(request, [KEYS])
        assert manager.poll(request, 0, CHUNKS * 16).hit == 0
        assert manager.take(request, 0) is None
        plan = manager.prepare_store(request, [(0, index) for index in range(CHUNKS)])
        assert plan is not None
        for offset, length in zip(plan.offsets, plan.lengths, strict=True):
            stack.region.view[offset : offset + length] = bytes([fill]) * int(length)
        manager.complete_store(plan.job_id)
        manager.finish(request)


def test_what_was_stored_reaches_the_tier_and_comes_back(stack: Stack) -> None:
    stack.open()
    store(stack, "first", 7)
    stack.manager.ended.get(timeout=LONG)
    assert stack.guard.usage().keys == CHUNKS
    assert stack.driver.call(lambda manager: manager.statistics().jobs) == 0
    stack.driver.call(lambda manager: manager.reset_cache(ResetReason.MEMORY_GOING_AWAY))
    stack.region.view[:] = bytes(stack.region.size)

    hit = CHUNKS * 16  # full attention: all of the prompt
    stack.driver.call(lambda manager: manager.add_request("second", [KEYS]))
    assert stack.driver.call(lambda manager: manager.poll("second", 0, hit).hit) is None
    stack.manager.ended.get(timeout=LONG)
    assert stack.driver.call(lambda manager: manager.poll("second", 0, hit).hit) == hit
    with stack.driver.step() as manager:
        plan = manager.take("second", hit)
        assert plan is not None
        assert [bytes(stack.region.view[o : o + 4]) for o in plan.offsets] == [b"\x07" * 4] * CHUNKS
        manager.complete_load(plan.job_id)
        manager.finish("second")
        manager.check()
    stack.close()


def test_one_request_then_silence_and_everything_reaches_its_tier(stack: Stack) -> None:
    """Nobody calls the driver after the store: its thread alone brings the chunks down."""
    stack.open()
    store(stack, "only", 3)
    stack.manager.ended.get(timeout=LONG)
    assert stack.guard.usage().keys == CHUNKS
    stack.close()
