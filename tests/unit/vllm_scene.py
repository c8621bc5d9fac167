"""An engine's scheduler side with a clock by hand and one tier that does as its mood is; no thread runs."""

from __future__ import annotations

from typing import Any

import vllm_kit as kit

from kvstrata.config import config_from_dict
from kvstrata.core.slots import SlotState
from kvstrata.integrations.vllm.metadata import JobReport, StepReport
from kvstrata.integrations.vllm.records import Story
from kvstrata.integrations.vllm.scheduler import SchedulerSide
from kvstrata.integrations.vllm.settings import VllmSettings
from kvstrata.integrations.vllm.stack import Stack
from kvstrata.testing.clock import ManualClock
from kvstrata.tiers.memory import MemoryTier
from kvstrata.types import I8, FailCause, JobEnded, KeysDone, TierJob, make_key

SHAPE = kit.shape_of(kit.group(kit.full()))
TOKENS = list(range(70))


class MoodyTier(MemoryTier):
    """Does as its mood is: "good", "unsure" (does not know yet), "slow" (never brings), or a cause to fail with."""

    mood = "good"

    def probe(self, keys: Any) -> I8:
        answers = super().probe(keys)
        return (answers > 0).astype(answers.dtype) if self.mood == "unsure" else answers

    def submit_load(self, job: TierJob) -> None:
        if self.mood == "slow":
            return
        if self.mood in ("good", "unsure"):
            super().submit_load(job)
            return
        count = len(job.keys)
        self._events += [KeysDone(job.job_id, (), [(i, FailCause(self.mood)) for i in range(count)])]
        self._events += [JobEnded(job.job_id)]


class Scene:
    """An engine whose first request stored TOKENS; they are in primary and on the tier."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        config = config_from_dict({"primary": {"size": 1 << 20}, "tiers": [{"type": "memory", "name": "disk"}]})
        settings = VllmSettings(config)
        self.tier = MoodyTier(name="disk")
        stack = Stack(
            SHAPE.layout(), settings, bytes(16), clock=self.clock, make=lambda entry, layout: self.tier
        ).open()
        self.side = SchedulerSide(SHAPE, settings, stack, lambda request: b"")
        first = self.request("first")
        self.side.matched(first, 0)
        self.side.allocated(first, [[]], 0)
        self.compute(first)
        self.side.finished(first, ([1, 2, 3, 4],))
        stack.driver.settle()

    def request(self, name: str = "r", tokens: list[int] = TOKENS, **fields: Any) -> kit.FakeRequest:
        made = kit.FakeRequest(name, list(tokens), **fields)
        self.side.new_request(made)
        return made

    def compute(self, request: kit.FakeRequest) -> None:
        rest = request.num_tokens - request.num_computed_tokens
        work = self.side.build_work(kit.output({request.request_id: rest}, {request.request_id: ([1, 2, 3, 4],)}))
        self.side.update(StepReport(stores=[JobReport(job.job_id, True) for job in work.stores]))

    def evict(self, last: int = 4) -> None:
        """Drop the last chunks from primary."""
        residency = self.side.stack.manager.residency
        slots = residency.find([make_key(hashed, 0) for hashed in kit.FakeRequest("x", TOKENS).block_hashes])
        slots = slots[slots >= 0][-last:]
        residency.evict(slots[(residency.states(slots) == SlotState.READY) & (residency.pins[slots] == 0)])

    def advance(self, seconds: float) -> None:
        """Let time pass, also for a clock that raises."""
        ManualClock.advance(self.clock, seconds)

    def ask(self, request: kit.FakeRequest) -> int | None:
        hit, _ = self.side.matched(request, 0)
        self.side.stack.driver.settle()
        return hit if hit is not None else self.side.matched(request, 0)[0]

    def take(self, request: kit.FakeRequest, tokens: int, ok: bool = True) -> None:
        self.side.allocated(request, [kit.blocks(9, 8, 7, 6, 5)], tokens)
        work = self.side.build_work(kit.output({}, {}))
        self.side.update(StepReport(loads=[JobReport(job.job_id, ok and job.valid) for job in work.loads]))

    def end(self, request: kit.FakeRequest) -> Story:
        self.side.finished(request, ([],))
        story = self.side.archive.last(request.request_id)
        assert story is not None
        return story
