"""The two-phase door: resolve first, fetch exactly that, report when all of it is pinned."""

from __future__ import annotations

import pytest
from core_kit import (
    FULL,
    HYBRID,
    RECURRENT,
    S_RFC,
    SIZE,
    TPC,
    add_held,
    answer_probes,
    async_tier,
    fill,
    finish_loads,
    flat,
    go_idle,
    hold,
    in_primary,
    loaded_keys,
    settings,
    stack_of,
    state,
    statistics,
    sync_tier,
    wide,
)

from kvstrata.core.messages import AnswerCause
from kvstrata.core.requests import RequestState
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds import FullAttention, SlidingWindow
from kvstrata.types import FailCause

# -- fetching


def test_batched_promotion_from_a_secondary_tier() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    assert stack.poll("a", 0, 64).hit is None
    assert [list(job.job.keys) for job in tier.loads] == [keys[0]]
    assert state(stack, "a") is RequestState.FETCHING
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 64).hit == 64
    plan = stack.take("a", 64)
    assert plan is not None
    assert plan.complete
    assert list(plan.keys) == keys[0]
    for key, offset, length in zip(plan.keys, plan.offsets, plan.lengths, strict=True):
        assert bytes(stack.region[offset : offset + length]) == tier.held[key]
    assert stack.complete_load(plan) is True
    assert state(stack, "a") is RequestState.RUNNING
    counters = statistics(stack).counters
    assert (counters.promoted, counters.consumed) == (4, 4)
    go_idle(stack)


def test_a_partly_failed_promotion_keeps_only_the_chunks_that_came() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    tier.loads[0].finish(failed={2: FailCause.IO_ERROR})
    stack.pump()
    assert stack.poll("a", 0, 64).hit == 32
    assert in_primary(stack, keys[0]) == [True, True, False, True]
    counters = statistics(stack).counters
    assert counters.failed == 1
    assert len(tier.calls_of("submit_load")) == 1
    go_idle(stack)


def test_one_submit_load_per_tier_request_and_step() -> None:
    near, far = sync_tier("near"), sync_tier("far")
    stack = stack_of(HYBRID, [near, far], wide(64))
    for name in ("a", "b"):
        keys = stack.add(name, 64)
        hold(stack, near, [keys[0][:2], []])
        hold(stack, far, keys)
        stack.poll(name, 0, 65)
    for tier in (near, far):
        assert len(tier.calls_of("submit_load")) == 2
    assert len(loaded_keys(near)) == 4
    assert len(loaded_keys(far)) == 8


def test_two_requests_that_want_one_chunk_cause_one_promotion() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    hold(stack, tier, stack.add("a", 64, seed="p"))
    stack.add("b", 64, seed="p")
    stack.poll("a", 0, 64)
    stack.poll("b", 0, 64)
    assert len(loaded_keys(tier)) == 4
    finish_loads(stack, tier)
    for name in ("a", "b"):
        assert stack.poll(name, 0, 64).hit == 64
        stack.take(name, 64)
    assert statistics(stack).counters.consumed == 4


def test_chunks_are_promoted_in_token_order_over_all_groups() -> None:
    layout = Layout(
        (
            Group(FullAttention(), 32, chunk_bytes=SIZE),
            Group(FullAttention(), 16, chunk_bytes=SIZE),
        )
    )
    tier = sync_tier()
    stack = stack_of(layout, [tier], settings(32, promotion_share=1.0, inflight_share=0.0))
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    finish_loads(stack, tier)
    (big, small) = keys
    assert loaded_keys(tier) == [big[0], small[0], small[1], big[1], small[2], small[3]]


def test_what_primary_has_is_not_promoted_again() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = fill(stack, "first", 32, seed="p")
    more = add_held(stack, tier, "p", 64)
    stack.poll("p", 0, 64)
    assert loaded_keys(tier) == more[0][2:]
    assert more[0][:2] == keys[0]
    finish_loads(stack, tier)
    assert stack.poll("p", 0, 64).hit == 64


def test_scenario_s_rfc_promotes_8_of_68_keys() -> None:
    tier = sync_tier()
    stack = stack_of(S_RFC, [tier])
    keys = add_held(stack, tier, "a", 512)
    assert len(flat(keys)) == 68
    assert stack.poll("a", 0, 513).hit is None
    assert tier.keys_touched["probe"] <= 68
    assert statistics(stack).tiers["near"].probed <= 68
    finish_loads(stack, tier)
    assert sorted(loaded_keys(tier)) == sorted(keys[0] + keys[1][-2:] + keys[2][-2:])
    assert stack.poll("a", 0, 513).hit == 512
    stack.take("a", 512)
    counters = statistics(stack).counters
    assert (counters.promoted, counters.consumed) == (8, 8)


def test_scenario_s_rfc_hits_the_same_as_if_all_were_in_primary() -> None:
    tier = sync_tier()
    stack = stack_of(S_RFC, [tier])
    fill(stack, "a", 512)
    stack.add("b", 512, seed="a")
    assert stack.poll("b", 0, 513).hit == 512
    assert tier.keys_touched["probe"] == 0


@pytest.mark.parametrize("broken", range(8))
def test_scenario_s_rfc_goes_on_when_one_of_the_8_reads_fails(broken: int) -> None:
    tier = sync_tier()
    stack = stack_of(S_RFC, [tier])
    keys = add_held(stack, tier, "a", 512)
    stack.poll("a", 0, 513)
    (job,) = tier.loads
    bad = job.job.keys[broken]
    job.finish(failed={broken: FailCause.CORRUPT})
    stack.pump()
    for later in list(tier.loads):
        assert bad not in later.job.keys
    finish_loads(stack, tier)
    hit = stack.poll("a", 0, 513).hit
    assert hit is not None
    if bad in keys[0]:
        assert hit == 128 * keys[0].index(bad)
    else:
        group = 1 if bad in keys[1] else 2
        assert hit == 16 * keys[group].index(bad)
    go_idle(stack)


def test_holes_in_a_window_promote_nothing_for_a_hit_that_never_comes() -> None:
    tier = sync_tier()
    layout = Layout(
        (Group(FullAttention(), TPC, chunk_bytes=SIZE), Group(SlidingWindow(3 * TPC), TPC, chunk_bytes=SIZE))
    )
    stack = stack_of(layout, [tier])
    keys = stack.add("a", 25 * TPC)
    hold(stack, tier, [keys[0], [key for i, key in enumerate(keys[1]) if i % 3]])
    answer = stack.poll("a", 0, 25 * TPC + 1)
    assert answer.hit is not None
    assert statistics(stack).counters.promoted == answer.hit // TPC * 0
    assert loaded_keys(tier) == []


def test_a_window_present_only_early_promotes_only_up_to_there() -> None:
    tier = sync_tier()
    stack = stack_of(HYBRID, [tier])
    keys = stack.add("a", 40 * TPC)
    hold(stack, tier, [keys[0], keys[1][:8]])
    stack.poll("a", 0, 40 * TPC + 1)
    assert len(loaded_keys(tier)) == 8 + 2
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 40 * TPC + 1).hit == 8 * TPC


def test_a_drafter_needs_the_next_chunk_and_does_not_load_it() -> None:
    layout = Layout((Group(FullAttention(), TPC, drafter=True, chunk_bytes=SIZE),))
    tier = sync_tier()
    stack = stack_of(layout, [tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 64).hit == 48
    assert loaded_keys(tier) == keys[0][:3]


def test_nothing_stored_is_answered_at_once() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    stack.add("a", 64)
    answer = stack.poll("a", 0, 64)
    assert (answer.hit, answer.cause) == (0, AnswerCause.NOTHING_STORED)
    assert stack.take("a", 0) is None
    assert state(stack, "a") is RequestState.RUNNING


# -- hybrid layouts


def test_recurrent_state_hits_end_on_a_stored_state() -> None:
    stack = stack_of(RECURRENT)
    keys = stack.add("p", 10 * TPC)
    stack.store("p", [(0, i) for i in range(10)] + [(1, 3), (1, 7)])
    stack.finish("p")
    stack.add("a", 10 * TPC, seed="p")
    assert stack.poll("a", 0, 10 * TPC).hit == 8 * TPC
    plan = stack.take("a", 8 * TPC)
    assert plan is not None
    assert plan.ranges == ((0, 8), (7, 8))
    assert plan.keys[-1] == keys[1][7]


def test_a_hybrid_hit_leaves_the_last_token_to_compute() -> None:
    stack = stack_of(HYBRID)
    fill(stack, "p", 64)
    stack.add("a", 64, seed="p")
    assert stack.poll("a", 0, 64).hit == 63
    stack.add("f", 64, seed="p")
    full = stack_of(FULL)
    fill(full, "p", 64)
    full.add("a", 64, seed="p")
    assert full.poll("a", 0, 64).hit == 64


def test_preemption_and_abort_are_legal_in_every_state() -> None:
    for leave in ("preempt", "finish"):
        for wanted in RequestState:
            if wanted is RequestState.FINISHED:
                continue
            tier = async_tier()
            stack = stack_of(tiers=[tier], config=settings(8))
            hold(stack, tier, stack.add("x", 64))
            bring_to(stack, tier, wanted)
            getattr(stack, leave)("a")
            answer_probes(stack, tier)
            finish_loads(stack, tier)
            stack.wait(5.0, step=0.1)
            go_idle(stack)


def bring_to(stack, tier, wanted: RequestState) -> None:  # type: ignore[no-untyped-def]
    """Request "a" in this state; "x" may be in its way."""
    if wanted is RequestState.QUEUED:
        stack.poll("x", 0, 64)
        answer_probes(stack, tier)
    add_held(stack, tier, "a", 64)
    if wanted is RequestState.NEW:
        return
    stack.poll("a", 0, 64)
    if wanted is not RequestState.RESOLVING:
        answer_probes(stack, tier)
    if wanted not in (RequestState.RESOLVING, RequestState.FETCHING, RequestState.QUEUED):
        finish_loads(stack, tier)
    if wanted in (RequestState.LOADING, RequestState.RUNNING):
        assert stack.poll("a", 0, 64).hit == 64
        stack.take("a", 64 if wanted is RequestState.LOADING else 0)
    assert state(stack, "a") is wanted
