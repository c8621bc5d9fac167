"""Scenarios about the life of requests and generations in the core, and what is counted of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from core_kit import (
    FULL,
    HYBRID,
    TPC,
    add_held,
    context,
    core_of,
    fill,
    finish_loads,
    go_idle,
    hold,
    in_primary,
    settings,
    stack_of,
    statistics,
    stored_keys,
    sync_tier,
    wide,
)

from kvstrata.core.breakers import BreakerState
from kvstrata.core.messages import LoadPlan, RequestOptions, StorePlan, TierFilter
from kvstrata.core.settings import CoreConfig
from kvstrata.core.slots import READY
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds import FullAttention
from kvstrata.testing import ScriptedTier
from kvstrata.testing.stack import CoreStack
from kvstrata.tiers.fs import FsTier
from kvstrata.types import LookupResult, ResetReason

# counters


@pytest.mark.scenario_63
def test_each_direction_has_its_counter() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier])
    fill(stack, "p", 5 * TPC, cascade=True)
    stack.core.residency.evict(np.flatnonzero(stack.core.residency.state == READY).astype(np.int32))
    stack.add("again", 5 * TPC, seed="p")
    hit = stack.poll_until_answered("again", 0, 5 * TPC)
    plan = stack.take("again", hit)
    assert plan is not None
    stack.complete_load(plan)
    every = statistics(stack)
    assert (every.counters.stored, every.counters.loaded) == (5, 5)
    assert (every.tiers["near"].cascaded, every.tiers["near"].landed) == (5, 5)


@pytest.mark.scenario_95
def test_tokens_saved_are_the_tokens_that_were_loaded_and_not_computed() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier])
    fill(stack, "p", 8 * TPC, cascade=True)
    saved = loaded = 0
    for number, (computed, taken) in enumerate([(0, 8), (2 * TPC, 6), (0, 3), (0, 0), (8 * TPC, 0)]):
        name = f"r{number}"
        stack.add(name, 8 * TPC, seed="p")
        hit = stack.poll_until_answered(name, computed, 8 * TPC)
        assert hit == 8 * TPC - computed
        plan = stack.take(name, taken * TPC)
        if plan is not None:
            assert stack.complete_load(plan)
            saved += plan.boundary - plan.computed
            loaded += len(plan.keys) * TPC
        stack.finish(name)
    assert saved == loaded == (8 + 6 + 3) * TPC
    assert statistics(stack).counters.loaded * TPC == saved


# the order of things


@pytest.mark.scenario_89
def test_a_promotion_of_a_step_in_which_its_request_ends_is_never_handed_over() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    key = stack.keys("p", TPC)[0][0]
    tier.put([key])
    assert stack.lookup(key, context("a")) is LookupResult.HIT_PENDING
    stack.finish("a")
    stack.end_step()
    stack.finish("a")
    assert not tier.calls_of("submit_load")
    stack.add("b", TPC, seed="p")
    stack.poll("b", 0, TPC)
    stack.core.reset_cache(ResetReason.MEMORY_GOING_AWAY)
    stack.finish("b")
    stack.pump()
    after = len(tier.calls_of("submit_load"))
    for job in list(tier.loads):
        job.finish()
    stack.wait(5.0)
    assert len(tier.calls_of("submit_load")) == after
    go_idle(stack)


@pytest.mark.scenario_98
def test_a_request_that_may_read_and_not_write_is_stored_nowhere() -> None:
    tiers = [sync_tier("near").auto(), sync_tier("far").auto()]
    stack = stack_of(tiers=tiers)
    keys = stack.keys("p", 4 * TPC)
    hold(stack, tiers[1], [keys[0][:2]])
    stack.add("a", 4 * TPC, RequestOptions(may_store=False), seed="p")
    assert stack.poll_until_answered("a", 0, 4 * TPC) == 2 * TPC
    plan = stack.take("a", 2 * TPC)
    assert plan is not None
    assert stack.complete_load(plan)
    assert stack.prepare_store("a", [(0, i) for i in range(4)]) is None
    stack.finish("a")
    assert statistics(stack).counters.stored == 0
    assert not any(stored_keys(tier) for tier in tiers)


@pytest.mark.scenario_116
def test_a_request_that_was_preempted_while_it_is_stored_is_admitted_again() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    stack.add("a", 4 * TPC)
    stack.poll("a", 0, 4 * TPC)
    stack.take("a", 0)
    store = stack.prepare_store("a", [(0, i) for i in range(4)])
    assert store is not None
    stack.preempt("a")
    assert stack.poll("a", 0, 4 * TPC).hit is None, "later"
    stack.complete_store(store)
    assert stack.poll("a", 0, 4 * TPC).hit == 4 * TPC
    go_idle(stack)


@pytest.mark.scenario_116
@pytest.mark.parametrize("steps", [1_500, pytest.param(10_000, marks=pytest.mark.soak)])
def test_random_interleavings_of_stores_preemptions_and_admissions_raise_nothing(steps: int) -> None:
    rng = np.random.default_rng(7)
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(12))
    names = [f"r{i}" for i in range(5)]
    stores: list[StorePlan] = []
    loads: list[LoadPlan] = []
    for name in names:
        stack.add(name, 6 * TPC, seed=f"p{name[-1:]}")
    for _ in range(steps):
        name = names[int(rng.integers(len(names)))]
        match int(rng.integers(7)):
            case 0:
                stack.preempt(name)
            case 1 | 2:
                hit = stack.poll(name, int(rng.integers(3)) * TPC, 6 * TPC).hit
                if hit is not None:
                    plan = stack.take(name, hit)
                    loads += [plan] if plan is not None else []
            case 3:
                store = stack.prepare_store(name, [(0, int(i)) for i in range(int(rng.integers(1, 7)))])
                stores += [store] if store is not None else []
            case 4 if stores:
                stack.complete_store(stores.pop(int(rng.integers(len(stores)))), bool(rng.random() < 0.8))
            case 5 if loads:
                stack.complete_load(loads.pop(int(rng.integers(len(loads)))), bool(rng.random() < 0.8))
            case _:
                for job in [*tier.loads[:1], *tier.stores[:1]]:
                    job.finish()
                stack.pump()
                stack.wait(0.05)
    go_idle(stack)


def life() -> list[str]:
    """The points of a request's life, in order."""
    return ["new", "looked up", "fetching", "ready", "allocated", "running", "storing", "preempted", "again"]


def live(stack: CoreStack, tier: ScriptedTier, name: str, until: str) -> list[StorePlan | LoadPlan]:
    """Live a request up to a point of its life; returns the jobs that the ranks still have."""
    order, jobs = life().index(until), []
    keys = stack.add(name, 4 * TPC)
    tier.put(keys[0][:2])
    if order >= 1:
        for key in keys[0] if order == 1 else ():
            stack.lookup(key, context(name))
    if order >= 2:
        stack.poll(name, 0, 4 * TPC)
    if order >= 3:
        finish_loads(stack, tier)
        assert stack.poll(name, 0, 4 * TPC).hit == 2 * TPC
    if order >= 4:
        plan = stack.take(name, 2 * TPC)
        assert plan is not None
        if order == 4:
            jobs.append(plan)
        else:
            stack.complete_load(plan)
    if order >= 6:
        store = stack.prepare_store(name, [(0, 2), (0, 3)])
        assert store is not None
        jobs.append(store)
    if order >= 7:
        stack.preempt(name)
    if order >= 8:
        stack.poll(name, 0, 4 * TPC)
    return jobs


@pytest.mark.scenario_117
@pytest.mark.parametrize("point", life())
def test_an_abort_at_any_point_leaves_nothing_and_new_work_succeeds(point: str) -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(16))
    jobs = live(stack, tier, "a", point)
    stack.finish("a")
    stack.finish("a")
    for job in jobs:
        if isinstance(job, StorePlan):
            stack.complete_store(job)
        else:
            stack.complete_load(job)
    for pending in [*tier.loads, *tier.stores]:
        pending.finish()
    stack.pump()
    assert stack.core.residency.pinned_bytes == 0
    tier.auto()
    add_held(stack, tier, "new", 4 * TPC)
    assert stack.poll_until_answered("new", 0, 4 * TPC) == 4 * TPC
    go_idle(stack)


@pytest.mark.scenario_117
def test_mass_disconnects_of_requests_at_every_point() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(40))
    jobs = []
    for number in range(60):
        jobs += live(stack, tier, f"r{number}", life()[number % 3] if number % 7 else "new")
    for number in range(60):
        stack.finish(f"r{number}")
    assert jobs == []
    go_idle(stack)


# generations


@pytest.mark.scenario_91
@pytest.mark.scenario_78
def test_a_reset_covers_every_tier_and_what_is_in_flight() -> None:
    tiers = [sync_tier("near"), sync_tier("far")]
    stack = stack_of(tiers=tiers)
    keys = fill(stack, "p", 2 * TPC, cascade=True)[0]
    for tier in tiers:
        for job in list(tier.stores):
            job.finish()
    stack.pump()
    for tier in tiers:
        hold(stack, tier, stack.keys("q", 2 * TPC))
    stack.add("late", 2 * TPC, seed="q")
    stack.poll("late", 0, 2 * TPC)
    (in_flight,) = tiers[0].loads
    stack.core.reset_cache(ResetReason.CONTENT_INVALID)
    stack.pump()
    in_flight.finish(done=[0, 1])  # started before the epoch changed
    stack.pump()
    assert not any(in_primary(stack, [*keys, *stack.keys("q", 2 * TPC)[0]]))
    for tier in tiers:
        assert not tier.held
    for seed in ("p", "q"):
        stack.add(f"after {seed}", 2 * TPC, seed=seed)
        assert stack.poll_until_answered(f"after {seed}", 0, 2 * TPC) == 0
    go_idle(stack)


@pytest.mark.scenario_144
def test_invalid_content_is_gone_from_files_too(tmp_path: Path) -> None:
    tier = FsTier(str(tmp_path / "place"))
    stack = CoreStack(FULL, [tier], config=wide(16))
    fill(stack, "p", 3 * TPC, cascade=True)
    stack.core.reset_cache(ResetReason.MEMORY_GOING_AWAY)
    stack.pump()
    stack.add("kept", 3 * TPC, seed="p")
    assert stack.poll_until_answered("kept", 0, 3 * TPC) == 3 * TPC
    stack.finish("kept")
    stack.core.reset_cache(ResetReason.CONTENT_INVALID)
    stack.pump()
    stack.add("gone", 3 * TPC, seed="p")
    assert stack.poll_until_answered("gone", 0, 3 * TPC) == 0


@pytest.mark.scenario_144
def test_a_reset_does_not_wait_for_a_transfer_that_never_ends() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(4))
    add_held(stack, tier, "a", 2 * TPC)
    stack.poll("a", 0, 2 * TPC)
    (hung,) = tier.loads
    now = stack.clock.monotonic()
    stack.core.reset_cache(ResetReason.CONTENT_INVALID)
    stack.pump()
    assert stack.clock.monotonic() == now
    used = set(hung.job.offsets)
    here_only = RequestOptions(store_tiers=TierFilter(names=frozenset()))
    for number in range(20):
        stack.add(f"s{number}", 4 * TPC, here_only)
        plan = stack.store(f"s{number}")
        assert plan is not None
        assert not used & set(plan.offsets.tolist()), "not used again before the transfer is acknowledged"
        stack.finish(f"s{number}")
    assert core_of(stack).tiers[0].reads.state is BreakerState.CLOSED
    hung.finish()
    stack.pump()
    stack.add("last", 4 * TPC, here_only)
    plan = stack.store("last")
    assert plan is not None
    assert used <= set(plan.offsets.tolist())


@pytest.mark.scenario_26
def test_configured_but_empty_tiers_change_no_answer() -> None:
    everywhere = []
    for tiers in ([], [sync_tier().auto()], [sync_tier("a").auto(), sync_tier("b").auto()]):
        rng = np.random.default_rng(11)
        stack = stack_of(HYBRID, tiers=tiers, config=settings(12))
        answers = []
        for number in range(120):
            name, seed = f"r{number}", f"p{rng.integers(5)}"
            tokens = int(rng.integers(1, 9)) * TPC
            stack.add(name, tokens, RequestOptions(store_tiers=TierFilter(names=frozenset())), seed=seed)
            hit = stack.poll(name, int(rng.integers(2)) * TPC, tokens + 1).hit
            answers.append(hit)
            assert hit is not None, "nothing has to be waited for"
            plan = stack.take(name, hit)
            if plan is not None:
                answers.append(plan.ranges)
                stack.complete_load(plan)
            if rng.random() < 0.6:
                stack.store(name)
            stack.finish(name)
        everywhere.append(answers)
    assert everywhere[0] == everywhere[1] == everywhere[2]
    assert any(isinstance(answer, int) and answer > 0 for answer in everywhere[0])


@pytest.mark.scenario_107
def test_1000_chunks_of_100_and_1900_bytes_take_two_million_bytes() -> None:
    layout = Layout((Group(FullAttention(), TPC, chunk_bytes=100), Group(FullAttention(), TPC, chunk_bytes=1900)))
    stack = CoreStack(layout, config=CoreConfig(capacity_bytes=2_060_000), checked=False)
    stack.add("a", 1000 * TPC)
    plan = stack.store("a", [(g, i) for i in range(1000) for g in (0, 1)])
    assert plan is not None
    assert len(plan.slots) == 2000
    primary = statistics(stack).primary
    assert primary.resident_bytes == 2_000_000
    assert primary.resident_bytes + primary.waste_bytes <= 2_060_000
