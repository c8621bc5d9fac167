"""The per-key door: scans of windows, clocks, and the life of its requests."""

from __future__ import annotations

import pytest
from core_kit import (
    FULL,
    HIT,
    HYBRID,
    MISS,
    PENDING,
    RETRY,
    SIZE,
    TPC,
    answer_probes,
    async_tier,
    context,
    core_of,
    fill,
    finish_loads,
    go_idle,
    held_by,
    loaded_keys,
    look,
    settings,
    stack_of,
    state,
    statistics,
    step,
    sync_tier,
    wide,
    window_scan,
)

from kvstrata.core.requests import RequestState

# the window scan


def test_a_pending_window_at_the_right_end_makes_the_request_wait() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = held_by(tier, stack, "p", 8)
    assert window_scan(stack, "a", keys, 2) == (8, True)
    stack.end_step()
    assert loaded_keys(tier) == [keys[7], keys[6]]
    finish_loads(stack, tier)
    assert window_scan(stack, "a", keys, 2) == (8, False)


def test_a_miss_inside_the_window_lets_the_scan_find_the_next_one_to_the_left() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = held_by(tier, stack, "p", 8)
    del tier.held[keys[6]]
    assert window_scan(stack, "a", keys, 2) == (6, True)
    stack.end_step()
    finish_loads(stack, tier)
    assert window_scan(stack, "a", keys, 2) == (6, False)


@pytest.mark.scenario_12
def test_pending_counts_in_the_streak_and_retry_does_not() -> None:
    near, far = sync_tier("near"), async_tier("far")
    stack = stack_of(tiers=[near, far])
    keys = stack.keys("p", 3 * TPC)[0]
    fill(stack, "p", TPC)
    near.put(keys[1:2])
    near.put(keys[2:])
    assert window_scan(stack, "a", keys, 3) == (3, True)
    other = stack.keys("q", 3 * TPC)[0]
    near.put([other[0], other[2]])
    assert window_scan(stack, "b", other, 3) == (0, True)


# clocks of this door


@pytest.mark.parametrize("why", ["probe", "load", "store"])
def test_a_wait_that_nobody_ends_becomes_a_miss_within_the_bound(why: str) -> None:
    tier = async_tier() if why == "probe" else sync_tier()
    stack = stack_of(tiers=[tier])
    keys = stack.keys("p", TPC)[0]
    if why == "store":
        stack.add("s", TPC, seed="p")
        stack.prepare_store("s", [(0, 0)])
    elif why == "load":
        tier.put(keys)
    first = step(stack, "a", keys)
    assert first == [RETRY if why == "probe" else PENDING]
    for _ in range(22):
        stack.wait(0.1)
        answers = step(stack, "a", keys)
    assert answers == [MISS]
    assert statistics(stack).counters.clock_expired == 1
    stack.wait(50.0, step=1.0)
    assert step(stack, "a", keys) == [MISS]


def test_the_bytes_of_its_first_promotions_extend_the_total_once() -> None:
    tier = sync_tier()
    config = wide(64, stall_s=40.0, job_idle_s=50.0, min_rate_bytes_per_s=float(SIZE))
    stack = stack_of(tiers=[tier], config=config)
    keys = held_by(tier, stack, "p", 8)
    assert step(stack, "a", keys[:4]) == [PENDING] * 4
    assert step(stack, "a", keys) == [PENDING] * 8
    began = stack.clock.monotonic()
    while step(stack, "a", keys) != [MISS] * 8:
        stack.wait(0.25)
        assert stack.clock.monotonic() - began < 20.0
    assert stack.clock.monotonic() - began == pytest.approx(6.0, abs=0.3)


def test_waiting_for_budget_ends_within_the_bound_of_polls() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(8, stall_s=50.0, total_s=1.0, silence_s=1e6))
    look(stack, "a", held_by(tier, stack, "p", 6))
    keys = held_by(tier, stack, "q", 1)
    stack.end_step()
    finish_loads(stack, tier)
    assert step(stack, "b", keys) == [RETRY]
    stack.wait(20.0)
    assert step(stack, "b", keys) == [RETRY]
    polls = 0
    while step(stack, "b", keys) == [RETRY]:
        stack.wait(1.0)
        polls += 1
    assert 7 <= polls <= 11
    assert step(stack, "b", keys) == [MISS]


def test_after_the_time_out_what_is_readable_in_primary_still_hits() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = held_by(tier, stack, "p", 2)
    step(stack, "a", keys)
    tier.loads[0].progress(done=[0])
    stack.pump()
    stack.wait(2.5)
    assert step(stack, "a", keys) == [HIT, MISS]
    assert len(loaded_keys(tier)) == 2


# its life


def test_a_request_that_looks_up_again_after_its_load_starts_a_new_wait() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier])
    keys = held_by(tier, stack, "p", 3)
    step(stack, "a", keys[:2])
    plan = stack.core.prepare_load(keys[:2], context("a"))
    assert plan is not None
    assert state(stack, "a") is RequestState.LOADING
    assert step(stack, "a", keys) == [HIT, HIT, PENDING]
    stack.complete_load(plan)
    assert state(stack, "a") is RequestState.RESOLVING
    assert step(stack, "a", keys) == [HIT, HIT, HIT]
    again = stack.core.prepare_load(keys, context("a"))
    assert again is not None
    stack.complete_load(again)
    assert state(stack, "a") is RequestState.RUNNING
    stack.preempt("a")
    assert step(stack, "a", keys) == [HIT, HIT, HIT]
    stack.finish("a")
    go_idle(stack)


def test_two_loads_of_one_request_may_be_out_at_once() -> None:
    stack = stack_of(HYBRID)
    keys = fill(stack, "p", 64)
    plans = []
    for group in keys:
        assert look(stack, "a", group) == [HIT] * 4
        plans.append(stack.core.prepare_load(group, context("a")))
    for plan in plans:
        assert plan is not None
        assert stack.complete_load(plan) is True
    assert state(stack, "a") is RequestState.RUNNING
    go_idle(stack)


def test_prepare_load_of_a_key_that_is_not_readable_gives_none() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = held_by(tier, stack, "p", 2)
    step(stack, "a", keys)
    assert stack.core.prepare_load(keys, context("a")) is None
    assert stack.core.prepare_load(stack.keys("q", TPC)[0], context("a")) is None
    assert stack.core.residency.held_bytes == 2 * SIZE


def test_a_failed_load_makes_its_keys_a_miss_once_they_have_left_primary() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], config=settings(4))
    keys = held_by(tier, stack, "p", 1)
    step(stack, "a", keys)
    plan = stack.core.prepare_load(keys, context("a"))
    assert plan is not None
    assert stack.complete_load(plan, ok=False) is False
    fill(stack, "q", 64)
    assert step(stack, "a", keys) == [MISS]
    assert step(stack, "b", keys) == [PENDING]


def test_records_made_by_lookups_are_bounded_too() -> None:
    stack = stack_of(config=wide(8, max_requests=10))
    for i in range(50):
        stack.clock.advance(0.01)
        stack.core.advance(stack.clock.monotonic())
        stack.lookup(stack.keys("p", TPC)[0][0], context(f"r{i}"))
    assert statistics(stack).requests == 10
    assert core_of(stack).requests.get("r49") is not None
    assert core_of(stack).requests.get("r39") is None


def test_abort_and_preemption_are_legal_in_every_state_of_this_door() -> None:
    for leave in ("finish", "preempt"):
        for wanted in ("retry", "pending", "loading", "running"):
            tier = async_tier()
            stack = stack_of(FULL, [tier])
            keys = held_by(tier, stack, "p", 2)
            step(stack, "a", keys)
            if wanted != "retry":
                answer_probes(stack, tier)
                assert step(stack, "a", keys) == [PENDING, PENDING]
            if wanted in ("loading", "running"):
                finish_loads(stack, tier)
                plan = stack.core.prepare_load(keys, context("a"))
                assert plan is not None
                if wanted == "running":
                    stack.complete_load(plan)
            getattr(stack, leave)("a")
            answer_probes(stack, tier)
            finish_loads(stack, tier)
            stack.wait(40.0, step=1.0)
            go_idle(stack)
