"""Short scenes with one right outcome, for what random runs reach too seldom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstrata.core.settings import CoreConfig
from kvstrata.integrations.vllm.metadata import CopyJob, GroupCopy, StepWork
from kvstrata.integrations.vllm.shapes import EngineGroup, EngineShape, LayerPage
from kvstrata.integrations.vllm.worker import WorkerSide
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds import FullAttention
from kvstrata.testing.scripted import ScriptedTier
from kvstrata.testing.stack import CoreStack
from kvstrata.testing.world_checks import demand
from kvstrata.transfer.pieces import Done, Piece
from kvstrata.types import ResetReason

SIZE = 64
LAYOUT = Layout((Group(FullAttention(), 4, chunk_bytes=SIZE),))


def golden_scenes() -> None:
    """All of them."""
    purge_waits()
    one_trial_beside_an_overdue_load()
    a_trial_fits_under_the_share()
    silence_to_the_instant()
    reserve_is_kept()
    given_back_blocks_are_copied_first()


def purge_waits() -> None:
    """What an older generation was still writing when its content became invalid is purged, too."""
    tier = ScriptedTier()
    stack = CoreStack(LAYOUT, [tier], chunks=8)
    stack.add("a", 16)
    stack.store("a")
    demand(len(tier.stores) == 1, "a store does not cascade")
    stack.core.reset_cache(ResetReason.CONTENT_INVALID)
    stack.pump()
    asked = tier.keys_touched["probe"]
    stack.add("b", 16)
    stack.poll("b", 0, 16)
    demand(tier.keys_touched["probe"] == asked, "a tier that may still write invalid content is asked")
    job = tier.stores[0] if tier.stores else None
    if job is not None:
        job.finish()
    stack.pump()
    demand(not tier.held, "a tier has chunks of invalid content after its last job of then has ended")


def one_trial_beside_an_overdue_load() -> None:
    """A tier that holds an overdue load gets one chunk at a time, whatever its breaker says."""
    tier = ScriptedTier()
    config = CoreConfig(capacity_bytes=64 * SIZE, promotion_share=1.0, store_reserve=0.0, inflight_share=1.0)
    stack = CoreStack(LAYOUT, [tier], config=config)
    tier.put(stack.add("a", 4)[0], length=SIZE)
    stack.poll("a", 0, 4)
    tier.loads[0].lose()
    stack.wait(80.0, 1.0)  # overdue, and the breaker has had its time
    tier.put(stack.add("b", 32)[0], length=SIZE)
    stack.poll("b", 0, 32)
    demand(bool(tier.loads), "a tier whose breaker has had its time is not tried")
    for job in tier.loads:
        demand(len(job.job.keys) == 1, "a tier with an overdue load gets more than one chunk")


def a_trial_fits_under_the_share() -> None:
    """A trial waits while a load that is under way takes the whole share of its tier."""
    tier = ScriptedTier()
    config = CoreConfig(
        capacity_bytes=16 * SIZE,
        promotion_share=1.0,
        store_reserve=0.0,
        inflight_share=1 / 16,
        stall_s=50.0,
        total_s=50.0,
    )
    stack = CoreStack(LAYOUT, [tier], config=config)
    for name in ("a", "b"):
        tier.put(stack.add(name, 4)[0], length=SIZE)
    stack.poll("a", 0, 4)
    stack.core._core.tiers[0].reads.failure(stack.clock.monotonic(), at_once=True)
    stack.wait(1.0)
    stack.poll("b", 0, 4)
    demand(len(tier.loads) == 1, f"{len(tier.loads)} loads are out, the share has room for one")


def silence_to_the_instant() -> None:
    """A request that has been silent for exactly as long as it may be is let go, whatever the rounding of its times."""
    last, silence = 1021.66, 30.0
    tier = ScriptedTier()
    config = CoreConfig(
        capacity_bytes=16 * SIZE, stall_s=100.0, total_s=100.0, silence_s=silence, job_idle_s=200.0, job_total_s=200.0
    )
    stack = CoreStack(LAYOUT, [tier], config=config)
    tier.put(stack.add("a", 4)[0], length=SIZE)
    stack.core.advance(last)
    stack.poll("a", 0, 4)
    stack.core.advance(last + silence)
    demand(stack.core.statistics().counters.silences == 1, "a request that is silent for as long as it may be is kept")


def reserve_is_kept() -> None:
    """What is reserved for stores is not held by waiting requests."""
    tier = ScriptedTier().auto()
    config = CoreConfig(capacity_bytes=10 * SIZE, promotion_share=1.0, store_reserve=0.3, inflight_share=1.0)
    stack = CoreStack(LAYOUT, [tier], config=config)
    for name, tokens in (("a", 20), ("b", 16)):
        tier.put(stack.add(name, tokens)[0], length=SIZE)
        stack.poll(name, 0, tokens)
    held = stack.core.residency.held_bytes
    demand(held == 5 * SIZE, f"waiting requests hold {held} bytes, the reserve leaves {7 * SIZE}")


class _NotingCopier:
    """A copier that only notes what it is asked to wait for."""

    def __init__(self) -> None:
        self.waited: set[int] = set()

    def load(self, job_id: int, pieces: Sequence[Piece]) -> None:
        """Nothing moves."""

    def store(self, job_id: int, pieces: Sequence[Piece]) -> None:
        """Nothing moves."""

    def finished(self) -> list[Done]:
        """Nothing ends."""
        return []

    def wait(self, job_ids: Iterable[int]) -> None:
        """Note them."""
        self.waited.update(job_ids)

    def close(self) -> None:
        """Nothing to give back."""


def given_back_blocks_are_copied_first() -> None:
    """A store from blocks without an owner is ordered before anything that the step writes."""
    group = EngineGroup(0, FullAttention(), 4, (LayerPage("layer", 16),), False, False, "")
    worker = WorkerSide(EngineShape((group,), 1, 1, 1, None), 0, "golden", canary=False)
    copier = _NotingCopier()
    worker._copier, worker._trouble = copier, ""
    worker.before_forward(StepWork(early=[CopyJob(7, "r", [GroupCopy(0, [1], [0], [0])])], fences=[3]))
    demand(copier.waited == {3, 7}, f"before a step it waits for {sorted(copier.waited)}, not for 3 and 7")
