"""The two-phase door: rounds of fetching, and what becomes of a hit that was reported."""

from __future__ import annotations

from core_kit import (
    RECURRENT,
    SIZE,
    TPC,
    WINDOW,
    add_held,
    core_of,
    fill,
    finish_loads,
    go_idle,
    hold,
    in_primary,
    loaded_keys,
    stack_of,
    state,
    sync_tier,
)

from kvstrata.core.messages import AnswerCause
from kvstrata.core.requests import RequestState
from kvstrata.types import FailCause

# -- rounds


def test_a_request_has_at_most_three_fetch_rounds() -> None:
    tier = sync_tier()
    stack = stack_of(WINDOW, [tier])
    keys = add_held(stack, tier, "a", 40 * TPC)
    stack.poll("a", 0, 40 * TPC + 1)
    for _ in range(3):
        (job,) = tier.loads
        job.finish(failed=dict.fromkeys(range(len(job.job.keys)), FailCause.GONE))
        stack.pump()
    answer = stack.poll("a", 0, 40 * TPC + 1)
    assert (answer.hit, answer.cause) == (0, AnswerCause.ROUNDS)
    assert len(tier.calls_of("submit_load")) == 3
    assert loaded_keys(tier) == keys[0][38:40] + keys[0][36:38] + keys[0][34:36]


def test_after_the_third_round_the_answer_is_what_is_ready_in_primary() -> None:
    tier = sync_tier()
    stack = stack_of(WINDOW, [tier])
    fill(stack, "early", 4 * TPC, seed="p")
    keys = stack.add("a", 40 * TPC, seed="p")
    hold(stack, tier, [keys[0][10:]])
    stack.poll("a", 0, 40 * TPC + 1)
    for _ in range(3):
        (job,) = tier.loads
        job.finish(failed=dict.fromkeys(range(len(job.job.keys)), FailCause.GONE))
        stack.pump()
    assert stack.poll("a", 0, 40 * TPC + 1).hit == 4 * TPC


def test_a_plan_that_only_gets_shorter_is_no_new_fetch_round() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 10 * TPC)
    stack.poll("a", 0, 10 * TPC)
    (job,) = tier.loads
    for index in range(9, 2, -1):
        job.progress(failed={index: FailCause.IO_ERROR})
        stack.pump()
    assert state(stack, "a") is RequestState.FETCHING
    job.finish()
    stack.pump()
    assert stack.poll("a", 0, 10 * TPC).hit == 3 * TPC
    assert len(tier.calls_of("submit_load")) == 1


def test_a_failed_key_stays_absent_for_the_request() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    tier.loads[0].finish(failed={1: FailCause.GONE})
    stack.pump()
    assert stack.poll("a", 0, 64).hit == 16
    assert stack.poll("a", 16, 64).hit == 0
    assert stack.poll("a", 0, 65).hit == 16
    assert loaded_keys(tier) == keys[0]


# -- taking


def test_the_engine_takes_only_part_of_a_hit() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    finish_loads(stack, tier)
    plan = stack.take("a", 20)
    assert plan is not None
    assert plan.complete
    assert (plan.computed, plan.boundary, plan.ranges) == (0, 20, ((0, 2),))
    assert list(plan.keys) == keys[0][:2]
    assert stack.core.residency.pinned_bytes == 2 * SIZE
    assert stack.core.residency.held_bytes == 0
    stack.complete_load(plan)
    assert stack.core.residency.pinned_bytes == 0
    stack.finish("a")
    go_idle(stack)
    counters = core_of(stack).counters
    assert (counters.consumed, counters.not_taken) == (2, 2)


def test_the_engine_takes_none_of_a_hit() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    finish_loads(stack, tier)
    assert stack.take("a", 0) is None
    assert stack.core.residency.pinned_bytes == 0
    assert in_primary(stack, keys[0]) == [True] * 4
    go_idle(stack)
    assert core_of(stack).counters.not_taken == 4


def test_what_was_not_taken_is_consumed_by_a_later_request_while_it_stays() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    hold(stack, tier, stack.add("a", 64, seed="p"))
    stack.poll("a", 0, 64)
    finish_loads(stack, tier)
    stack.take("a", 0)
    stack.finish("a")
    stack.add("b", 64, seed="p")
    assert stack.poll("b", 0, 64).hit == 64
    stack.take("b", 64)
    go_idle(stack)
    counters = core_of(stack).counters
    assert (counters.consumed, counters.not_taken) == (4, 0)


def test_a_part_that_needs_another_window_loads_nothing() -> None:
    stack = stack_of(WINDOW)
    fill(stack, "p", 10 * TPC)
    stack.add("a", 10 * TPC, seed="p")
    assert stack.poll("a", 0, 10 * TPC + 1).hit == 10 * TPC
    plan = stack.take("a", 4 * TPC)
    assert plan is not None
    assert not plan.complete
    assert len(plan.slots) == 0
    assert stack.complete_load(plan, ok=False) is False
    go_idle(stack)


def test_a_part_where_no_state_ends_loads_nothing() -> None:
    stack = stack_of(RECURRENT)
    fill(stack, "p", 64)
    stack.add("a", 64, seed="p")
    assert stack.poll("a", 48, 65).hit == 16
    plan = stack.take("a", 8)
    assert plan is not None
    assert not plan.complete
    stack.complete_load(plan, ok=False)


def test_a_hit_that_is_not_held_any_more_loads_nothing() -> None:
    stack = stack_of()
    fill(stack, "p", 64)
    stack.add("a", 64, seed="p")
    assert stack.poll("a", 0, 64).hit == 64
    stack.wait(31.0)
    plan = stack.take("a", 64)
    assert plan is not None
    assert not plan.complete
    assert state(stack, "a") is RequestState.LOADING
    assert stack.complete_load(plan, ok=False) is False
    assert state(stack, "a") is RequestState.RUNNING
    go_idle(stack)


def test_more_than_the_hit_loads_nothing() -> None:
    stack = stack_of()
    fill(stack, "p", 64)
    stack.add("a", 80, seed="p")
    assert stack.poll("a", 0, 80).hit == 64
    plan = stack.take("a", 80)
    assert plan is not None
    assert not plan.complete
