"""The two-phase door while C and n move, and when several requests wait for one promotion."""

from __future__ import annotations

import pytest
from core_kit import (
    SIZE,
    add_held,
    answer_probes,
    async_tier,
    core_of,
    fill,
    finish_loads,
    go_idle,
    hold,
    in_primary,
    loaded_keys,
    record,
    settings,
    stack_of,
    state,
    statistics,
    sync_tier,
)

from kvstrata.core.messages import AnswerCause, RequestOptions, TierFilter
from kvstrata.core.requests import RequestState
from kvstrata.types import Medium

# -- C and n move


def test_c_shrinks_while_fetching() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 32, 64)
    assert loaded_keys(tier) == keys[0][2:]
    assert stack.poll("a", 0, 64).hit is None
    assert loaded_keys(tier) == keys[0][2:] + keys[0][:2]
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 64).hit == 64
    stack.take("a", 64)
    counters = statistics(stack).counters
    assert (counters.promoted, counters.consumed) == (4, 4)
    go_idle(stack)


def test_c_grows_while_fetching_and_drops_the_chunks_below_it() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    before = record(stack, "a").held.tolist()
    stack.poll("a", 40, 64)
    assert record(stack, "a").held.tolist() == before[2:]
    assert len(loaded_keys(tier)) == 4
    finish_loads(stack, tier)
    assert stack.poll("a", 40, 64).hit == 24
    plan = stack.take("a", 24)
    assert plan is not None
    assert plan.ranges == ((2, 4),)
    counters = statistics(stack).counters
    assert counters.consumed == 2
    go_idle(stack)
    assert core_of(stack).counters.not_taken == 2


def test_c_grows_past_t_while_fetching() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = stack.add("a", 128)
    hold(stack, tier, [keys[0][:4]])
    stack.poll("a", 0, 128)
    answer = stack.poll("a", 96, 128)
    assert (answer.hit, answer.cause) == (0, AnswerCause.NOTHING_STORED)
    assert len(record(stack, "a").held) == 0
    finish_loads(stack, tier)
    stack.take("a", 0)
    go_idle(stack)
    assert core_of(stack).counters.not_taken == 4


def test_c_grows_while_probes_are_out() -> None:
    tier = async_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    assert stack.poll("a", 32, 64).hit is None
    assert tier.keys_touched["probe"] == 4
    answer_probes(stack, tier)
    assert loaded_keys(tier) == keys[0][2:]


def test_a_ready_hit_follows_c() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 64).hit == 64
    assert stack.poll("a", 48, 64).hit == 16
    assert stack.poll("a", 48, 64).hit == 16
    assert stack.poll("a", 64, 64).hit == 0
    assert stack.poll("a", 0, 64).hit == 64
    assert len(loaded_keys(tier)) == 4


def test_n_grows_after_a_preemption() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    assert stack.poll("a", 0, 64).hit == 64
    plan = stack.take("a", 64)
    assert plan is not None
    stack.complete_load(plan)
    stack.core.extend_keys("a", [stack.keys("a", 96)[0][4:]])
    stack.store("a", [(0, 4), (0, 5)])
    stack.preempt("a")
    assert stack.poll("a", 0, 100).hit == 96
    assert statistics(stack).counters.promoted == 4


def test_n_grows_while_waiting() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 48)
    assert len(loaded_keys(tier)) == 3
    stack.poll("a", 0, 64)
    assert loaded_keys(tier) == keys[0]
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 64).hit == 64


def test_a_running_request_that_is_polled_again_starts_a_new_wait() -> None:
    stack = stack_of()
    fill(stack, "p", 64)
    stack.add("a", 64, seed="p")
    stack.poll("a", 0, 64)
    plan = stack.take("a", 64)
    assert plan is not None
    assert stack.poll("a", 0, 64).hit is None
    stack.complete_load(plan)
    assert stack.poll("a", 0, 64).hit == 64


# -- shared promotions


@pytest.mark.parametrize("handed_over", [True, False])
def test_the_owner_of_a_shared_promotion_aborts_and_the_second_waiter_still_gets_it(handed_over: bool) -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], auto=handed_over)
    hold(stack, tier, stack.add("a", 64, seed="p"))
    stack.add("b", 64, seed="p")
    stack.poll("a", 0, 64)
    stack.poll("b", 0, 64)
    stack.finish("a")
    stack.pump()
    finish_loads(stack, tier)
    assert stack.poll("b", 0, 64).hit == 64
    assert len(loaded_keys(tier)) == 4
    assert not tier.calls_of("cancel")
    stack.take("b", 64)
    assert statistics(stack).counters.consumed == 4


def test_a_queued_promotion_passes_to_the_oldest_remaining_waiter() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(16, promotion_share=1.0, inflight_share=0.0))
    hold(stack, tier, stack.add("a", 64, seed="p"))
    for name in ("b", "c"):
        stack.add(name, 64, seed="p")
    for name in ("a", "b", "c"):
        stack.poll(name, 0, 64)
    assert len(loaded_keys(tier)) == 1
    stack.finish("a")
    (batch,) = core_of(stack).tiers[0].queue
    assert batch.request.request_id == "b"
    finish_loads(stack, tier)
    for name in ("b", "c"):
        assert stack.poll(name, 0, 64).hit == 64


@pytest.mark.parametrize("handed_over", [True, False])
def test_a_tier_that_the_heir_refuses_is_not_read_for_it(handed_over: bool) -> None:
    tier = sync_tier("d", medium=Medium.NVME)
    config = settings(16, promotion_share=1.0, inflight_share=1.0 if handed_over else 0.0)
    stack = stack_of(tiers=[tier], config=config)
    hold(stack, tier, stack.add("a", 64, seed="p"))
    stack.add("b", 64, RequestOptions(load_tiers=TierFilter(media=frozenset({Medium.CPU}))), seed="p")
    stack.poll("a", 0, 64)
    stack.poll("b", 0, 64)
    assert state(stack, "b") is RequestState.FETCHING
    stack.finish("a")
    assert stack.poll("b", 0, 64).hit == 0
    assert len(tier.calls_of("cancel")) == 1
    finish_loads(stack, tier)
    assert stack.core.residency.statistics().keys == 0
    stack.take("b", 0)
    go_idle(stack)


def test_the_heir_of_an_heir_that_refuses_the_tier_is_not_served_from_it() -> None:
    tier = sync_tier("d", medium=Medium.NVME)
    stack = stack_of(tiers=[tier])
    hold(stack, tier, stack.add("a", 64, seed="p"))
    stack.add("b", 64, seed="p")
    stack.add("c", 64, RequestOptions(load_tiers=TierFilter(media=frozenset({Medium.CPU}))), seed="p")
    for name in ("a", "b", "c"):
        stack.poll(name, 0, 64)
    stack.finish("a")
    stack.finish("b")
    assert stack.poll("c", 0, 64).hit == 0
    assert len(tier.calls_of("cancel")) == 1


def test_an_abort_cancels_what_nobody_else_waits_for() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    stack.finish("a")
    assert len(tier.calls_of("cancel")) == 1
    assert in_primary(stack, keys[0]) == [False] * 4
    assert stack.core.residency.quarantined_bytes == 4 * SIZE
    assert core_of(stack).overdue_bytes() == 0
    tier.loads[0].finish()
    stack.pump()
    assert stack.core.residency.quarantined_bytes == 0
    counters = statistics(stack).counters
    assert (counters.cancelled, counters.late) == (4, 4)
    assert in_primary(stack, keys[0]) == [False] * 4


def test_an_abort_cancels_only_what_has_no_other_waiter() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    hold(stack, tier, stack.add("a", 64, seed="p"))
    stack.add("b", 32, seed="p")
    stack.poll("a", 0, 64)
    stack.poll("b", 0, 32)
    stack.finish("a")
    assert not tier.calls_of("cancel")
    assert stack.core.residency.quarantined_bytes == 2 * SIZE
    finish_loads(stack, tier)
    assert stack.poll("b", 0, 32).hit == 32
    assert statistics(stack).counters.cancelled == 2


def test_a_promotion_whose_last_waiter_was_preempted_lands_evictable() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    stack.preempt("a")
    assert not tier.calls_of("cancel")
    finish_loads(stack, tier)
    assert in_primary(stack, keys[0]) == [True] * 4
    assert stack.core.residency.pinned_bytes == 0
    assert stack.poll("a", 0, 64).hit == 64
    assert len(loaded_keys(tier)) == 4


def test_after_finish_no_tier_hears_of_the_request_again() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(16, promotion_share=1.0, inflight_share=0.0), auto=False)
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    stack.pump()
    stack.finish("a")
    stack.finish("a")
    stack.pump()
    calls = len(tier.calls)
    tier.loads[0].finish()
    stack.pump()
    stack.wait(100.0, step=1.0)
    stack.pump()
    assert len(tier.calls) == calls
