"""The product under the simulated engine: primary, manager, driver and one tier, with real bytes in them.

`Stack` plays the part of the engine's connector and of its copy workers. Bytes of a chunk are made from its key when
it is stored and compared with its key when it is loaded, so that nothing but the tiers stands between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from kvstrata.core.manager import TieringOffloadingManager
from kvstrata.core.messages import LoadPlan
from kvstrata.core.settings import CoreConfig
from kvstrata.errors import InternalError
from kvstrata.layout.groups import Layout
from kvstrata.primary.region import AnonymousRegion
from kvstrata.runtime.driver import Driver
from kvstrata.runtime.guard import GuardedTier
from kvstrata.sim.engine import Active, Load
from kvstrata.sim.payload import U8, Payloads
from kvstrata.sim.timed import TimedTier
from kvstrata.testing.clock import ManualClock
from kvstrata.testing.executor import ManualExecutor
from kvstrata.tiers.base import TierContext
from kvstrata.types import OffloadKey

PRIMARY = "primary"
MAX_DRAIN_ROUNDS = 1_000_000


@dataclass(slots=True)
class Delivery:
    """What was delivered to the engine."""

    verified: int = 0
    wrong: int = 0
    """Chunks with other bytes than their key's; a wrong copy in primary counts once, however often it is used."""
    wrong_deliveries: int = 0


class Stack:
    """Implements `engine.Cache` on the product. Constructors only store; `open` acquires, `close` releases."""

    def __init__(
        self,
        layout: Layout,
        real_bytes: Sequence[int],
        config: CoreConfig,
        tier: TimedTier,
        clock: ManualClock,
        executor: ManualExecutor,
        namespace: bytes,
        layout_tag: int,
    ) -> None:
        self._layout = layout
        self._real_bytes = tuple(real_bytes)
        self._config = config
        self._namespace = namespace
        self._layout_tag = layout_tag
        self.clock = clock
        self._executor = executor
        self._memory = AnonymousRegion(max(config.capacity_bytes, 1))
        self._view: U8 = np.empty(0, dtype=np.uint8)
        self._payloads = Payloads(max(layout.chunk_bytes))
        self._known_wrong: set[OffloadKey] = set()
        self.tier = tier
        self._guard = GuardedTier(tier)
        self.manager: TieringOffloadingManager
        self.driver: Driver[TieringOffloadingManager]
        self.delivery = Delivery()
        self.hit_tokens = {PRIMARY: 0, tier.name: 0}
        self.primary_peak = 0

    # life cycle

    def open(self) -> Self:
        """Back primary, open the tier, make the manager. A tier that does not open raises what it raised."""
        self._memory.open()
        self._view = np.frombuffer(self._memory.view, dtype=np.uint8)
        self.manager = TieringOffloadingManager(self._layout, self._config, [self._guard])
        self.driver = Driver(self.manager, [self._guard], self.clock, strict=True)
        self._guard.open(
            TierContext(
                self._memory.view, self._namespace, self._layout_tag, self.clock, self._executor, self.driver.wake
            )
        )
        if self._guard.open_error is not None:
            self._release()
            raise self._guard.open_error
        return self

    def close(self) -> None:
        """Close the tier and give primary back. Idempotent."""
        if len(self._view):
            self._executor.run_all()
            self._guard.close()
            self._executor.run_all()
            self._release()

    def _release(self) -> None:
        self._view = np.empty(0, dtype=np.uint8)
        self._memory.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # engine.Cache

    def arrive(self, active: Active) -> None:
        """Tell the manager of the request and its keys."""
        with self.driver.step() as manager:
            manager.add_request(active.name, active.keys)

    def poll(self, active: Active, computed: int) -> int | None:
        """The manager's answer for what the engine has at this moment."""
        with self.driver.step() as manager:
            return manager.poll(active.name, computed, active.request.prompt_tokens).hit

    def take(self, active: Active, tokens: int) -> Load | None:
        """Take the hit; the chunks stay pinned until the copy has ended."""
        with self.driver.step() as manager:
            plan = manager.take(active.name, tokens)
        if plan is None:
            return None
        size = sum((high - low) * self._real_bytes[group] for group, (low, high) in enumerate(plan.ranges))
        return Load(tuple(plan.ranges), plan.boundary, size, plan)

    def loaded(self, active: Active, load: Load) -> bool:
        """Compare every byte that was loaded with what its key says."""
        plan = load.handle
        if not isinstance(plan, LoadPlan):
            raise InternalError("a load without its plan")
        if plan.complete:
            self._compare(plan)
            self._attribute(plan, active.request.prompt_tokens)
        with self.driver.step() as manager:
            manager.complete_load(plan.job_id, ok=plan.complete)
        return plan.complete

    def store(self, active: Active, chunks: Sequence[tuple[int, int]]) -> None:
        """Copy chunks that primary lacks out of the accelerator: here, make their bytes and digests."""
        with self.driver.step() as manager:
            plan = manager.prepare_store(active.name, chunks)
            if plan is None:
                return
            digests = self._payloads.write(self._view, plan.keys, plan.offsets.tolist(), plan.lengths.tolist())
            self._known_wrong.difference_update(plan.keys)
            for key in plan.keys:
                self.tier.replaced(key)
            manager.complete_store(plan.job_id, ok=True, digests=digests)
            self._note_peak(manager)

    def finish(self, active: Active) -> None:
        """The request is done."""
        with self.driver.step() as manager:
            manager.finish(active.name)

    def settle(self) -> bool:
        """Run the tier's tasks and carry facts and jobs until nothing moves at this instant."""
        due = self.next_time()
        if not self._executor.pending and (due is None or due > self.clock.monotonic()):
            return False  # every step of the engine has carried what there was
        moved = False
        while self._executor.run_all() + self.driver.pump():
            moved = True
        if moved:
            self._note_peak(self.manager)
        return moved

    def next_time(self) -> float | None:
        """The next end of a piece of a job, or the core's next deadline."""
        times = [time for time in (self.tier.next_due(), self.manager.next_deadline()) if time is not None]
        return min(times, default=None)

    # after the last request

    def drain(self) -> None:
        """Let time pass, without any step of the engine, until the tier has done all it was offered."""
        for _ in range(MAX_DRAIN_ROUNDS):
            if self.settle():
                continue
            due = self.tier.next_due()
            if due is None:
                return
            self.clock.advance(max(due - self.clock.monotonic(), 0.0))
        raise InternalError("the tier does not come to an end of its work")

    def close_account(self) -> None:
        """Nothing more will be used: every promotion gets its class."""
        self.manager.close_account()

    # inside

    def _compare(self, plan: LoadPlan) -> None:
        offsets, lengths = plan.offsets.tolist(), plan.lengths.tolist()
        self.delivery.verified += len(plan.keys)
        for key in self._payloads.wrong(self._view, plan.keys, offsets, lengths):
            self.delivery.wrong_deliveries += 1
            if key in self.tier.arrived or key not in self._known_wrong:
                self.delivery.wrong += 1
            self._known_wrong.add(key)

    def _attribute(self, plan: LoadPlan, total: int) -> None:
        """Give each token of the hit to the place that its chunk came from.

        Groups may have got their chunks from different places; the group whose chunks cover most of the hit decides,
        and what its chunks do not cover goes with the first of them.
        """
        tokens = self._layout.tokens_per_chunk
        spans = [(high - low) * tokens[group] for group, (low, high) in enumerate(plan.ranges)]
        group = max(range(len(spans)), key=spans.__getitem__)
        start = sum(high - low for low, high in plan.ranges[:group])
        low, high = plan.ranges[group]
        at, end = plan.computed, min(plan.boundary, total - 1)
        arrived = self.tier.arrived
        for place, index in enumerate(range(low, high)):
            bound = min((index + 1) * tokens[group], end)
            source = arrived.get(plan.keys[start + place], PRIMARY)
            self.hit_tokens[source] += max(bound - at, 0)
            at = max(at, bound)
        for key in plan.keys:
            arrived.pop(key, None)

    def _note_peak(self, manager: TieringOffloadingManager) -> None:
        residency = manager.residency
        used = residency.resident_bytes + residency.reserved_bytes + residency.quarantined_bytes
        self.primary_peak = max(self.primary_peak, used)


def real_size(real_bytes: Sequence[int]) -> Callable[[OffloadKey], int]:
    """The size of a key's chunk before the payload scale."""
    sizes = tuple(real_bytes)
    return lambda key: sizes[int.from_bytes(key[-4:], "big")]
