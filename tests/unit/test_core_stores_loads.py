"""Stores and loads: only what is not present; per job; all ranks; pinned until acknowledged."""

from __future__ import annotations

import pytest
from core_kit import (
    FULL,
    HYBRID,
    SIZE,
    TPC,
    add_held,
    core_of,
    fill,
    finish_loads,
    go_idle,
    in_primary,
    settings,
    stack_of,
    state,
    statistics,
    sync_tier,
    wide,
)

from kvstrata.core.messages import RequestOptions
from kvstrata.core.requests import RequestState
from kvstrata.errors import StateError


def test_only_keys_that_are_not_present_are_stored() -> None:
    stack = stack_of()
    fill(stack, "p", 32)
    keys = stack.add("a", 64, seed="p")
    plan = stack.prepare_store("a", [(0, i) for i in range(4)])
    assert plan is not None
    assert list(plan.chunks) == [(0, 2), (0, 3)]
    assert list(plan.keys) == keys[0][2:]
    stack.add("b", 64, seed="p")
    assert stack.prepare_store("b", [(0, i) for i in range(4)]) is None
    stack.complete_store(plan)
    assert stack.prepare_store("b", [(0, i) for i in range(4)]) is None
    assert statistics(stack).counters.store_no_room == 0


def test_no_room_is_an_answer_and_the_head_of_the_chain_is_kept() -> None:
    stack = stack_of(config=wide(4))
    stack.add("a", 10 * TPC)
    plan = stack.prepare_store("a", [(0, i) for i in range(10)])
    assert plan is not None
    assert list(plan.chunks) == [(0, i) for i in range(4)]
    assert statistics(stack).counters.store_no_room == 6
    assert stack.prepare_store("a", [(0, 4)]) is None
    assert statistics(stack).counters.store_no_room == 7
    assert stack.prepare_store("a", []) is None
    stack.complete_store(plan)
    assert stack.prepare_store("a", [(0, 4)]) is not None


def test_a_request_that_must_not_store_stores_nothing() -> None:
    stack = stack_of()
    stack.add("a", 64, RequestOptions(may_store=False))
    assert stack.prepare_store("a", [(0, 0)]) is None


def test_a_chunk_named_twice_is_stored_once() -> None:
    stack = stack_of()
    stack.add("a", 64)
    plan = stack.prepare_store("a", [(0, 0), (0, 0), (0, 1)])
    assert plan is not None
    assert list(plan.chunks) == [(0, 0), (0, 1)]


@pytest.mark.scenario_118
def test_a_store_is_published_per_job_and_not_per_request() -> None:
    stack = stack_of()
    stack.add("a", 64)
    first = stack.prepare_store("a", [(0, 0), (0, 1)])
    second = stack.prepare_store("a", [(0, 2), (0, 3)])
    assert first is not None
    assert second is not None
    stack.complete_store(first)
    stack.add("b", 64, seed="a")
    assert stack.poll("b", 0, 32).hit == 32
    assert stack.poll("b", 0, 64).hit is None
    stack.complete_store(second)
    assert stack.poll("b", 0, 64).hit == 64


@pytest.mark.scenario_83
def test_a_store_is_published_when_all_ranks_have_reported() -> None:
    stack = stack_of(ranks=3)
    stack.add("a", 64)
    plan = stack.prepare_store("a", [(0, i) for i in range(4)])
    assert plan is not None
    stack.add("b", 64, seed="a")
    for _ in range(2):
        stack.complete_store(plan)
        assert stack.poll("b", 0, 64).hit is None
    stack.complete_store(plan)
    assert stack.poll("b", 0, 64).hit == 64
    stack.core.complete_store(plan.job_id)
    assert statistics(stack).counters.stored == 4


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_failing_rank_gives_the_store_up(bad: int) -> None:
    stack = stack_of(ranks=3)
    keys = stack.add("a", 64)
    plan = stack.prepare_store("a", [(0, i) for i in range(4)])
    assert plan is not None
    for rank in range(3):
        stack.complete_store(plan, ok=rank != bad)
    assert in_primary(stack, keys[0]) == [False] * 4
    assert stack.core.residency.reserved_bytes == 0
    assert statistics(stack).counters.stored == 0


def test_a_failed_store_lets_those_who_waited_for_it_go_on() -> None:
    stack = stack_of()
    stack.add("a", 64)
    first = stack.prepare_store("a", [(0, 0), (0, 1)])
    second = stack.prepare_store("a", [(0, 2), (0, 3)])
    assert first is not None
    assert second is not None
    stack.add("b", 64, seed="a")
    assert stack.poll("b", 0, 64).hit is None
    stack.complete_store(second, ok=False)
    assert stack.poll("b", 0, 64).hit is None
    stack.complete_store(first)
    assert stack.poll("b", 0, 64).hit == 32


def test_a_request_that_waits_for_a_store_may_leave() -> None:
    stack = stack_of()
    stack.add("a", 64)
    plan = stack.prepare_store("a", [(0, i) for i in range(4)])
    assert plan is not None
    for leave in ("finish", "preempt"):
        stack.add(leave, 64, seed="a")
        assert stack.poll(leave, 0, 64).hit is None
        getattr(stack, leave)(leave)
    stack.finish("a")
    stack.complete_store(plan)
    stack.add("later", 64, seed="a")
    assert stack.poll("later", 0, 64).hit == 64
    go_idle(stack)


def test_the_policy_evicts_the_tail_of_a_chain_before_its_head() -> None:
    stack = stack_of(config=wide(8))
    keys = stack.add("a", 8 * TPC)
    for i in range(0, 8, 2):
        stack.store("a", [(0, i), (0, i + 1)])
    stack.finish("a")
    fill(stack, "b", 3 * TPC)
    assert in_primary(stack, keys[0]) == [True] * 5 + [False] * 3


def test_the_tail_goes_first_in_every_group() -> None:
    stack = stack_of(HYBRID, config=wide(8))
    keys = fill(stack, "a", 4 * TPC)
    stack.add("b", 2 * TPC)
    plan = stack.prepare_store("b", [(0, 0), (1, 0)])
    assert plan is not None
    left = [in_primary(stack, group) for group in keys]
    assert all(flags == sorted(flags, reverse=True) for flags in left)


@pytest.mark.scenario_47
def test_a_load_pins_its_source_until_every_rank_has_acknowledged() -> None:
    stack = stack_of(config=wide(4), ranks=2)
    keys = fill_ranks(stack)
    stack.add("a", 64, seed="p")
    assert stack.poll("a", 0, 64).hit == 64
    plan = stack.take("a", 64)
    assert plan is not None
    stack.add("s", 64)
    assert stack.prepare_store("s", [(0, 0)]) is None
    assert stack.complete_load(plan) is None
    assert stack.prepare_store("s", [(0, 0)]) is None
    assert stack.complete_load(plan) is True
    assert stack.core.complete_load(plan.job_id) is None
    assert in_primary(stack, keys[0]) == [True] * 4
    assert stack.prepare_store("s", [(0, 0)]) is not None


def fill_ranks(stack):  # type: ignore[no-untyped-def]
    """Store a prompt over all ranks."""
    keys = stack.add("p", 64)
    plan = stack.prepare_store("p", [(0, i) for i in range(4)])
    for _ in range(core_of(stack).ranks):
        stack.complete_store(plan)
    stack.finish("p")
    return keys


@pytest.mark.parametrize("bad", [0, 1])
def test_a_load_worked_only_if_it_worked_on_every_rank(bad: int) -> None:
    stack = stack_of(ranks=2)
    fill_ranks(stack)
    stack.add("a", 64, seed="p")
    stack.poll("a", 0, 64)
    plan = stack.take("a", 64)
    assert plan is not None
    answers = [stack.complete_load(plan, ok=rank != bad) for rank in range(2)]
    assert answers == [None, False]
    assert statistics(stack).counters.load_failures == 1


def test_after_a_failed_load_the_request_gets_no_hit_from_those_chunks() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    assert stack.poll("a", 0, 64).hit == 64
    plan = stack.take("a", 64)
    assert plan is not None
    assert stack.complete_load(plan, ok=False) is False
    stack.preempt("a")
    assert stack.poll("a", 0, 64).hit == 0
    stack.add("b", 64, seed="a")
    assert stack.poll("b", 0, 64).hit == 64


def test_a_load_touches_what_it_used_in_every_tier() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    stack.poll("a", 0, 64)
    plan = stack.take("a", 64)
    assert plan is not None
    stack.complete_load(plan)
    assert [list(call.keys) for call in tier.calls_of("touch")] == keys


def test_preemption_and_finish_while_loading_leave_the_load_alone() -> None:
    for leave in ("preempt", "finish"):
        stack = stack_of()
        fill(stack, "p", 64)
        stack.add("a", 64, seed="p")
        stack.poll("a", 0, 64)
        plan = stack.take("a", 64)
        assert plan is not None
        getattr(stack, leave)("a")
        assert stack.core.residency.pinned_bytes == 4 * SIZE
        assert stack.complete_load(plan) is True
        assert stack.core.residency.pinned_bytes == 0
        go_idle(stack)


def test_an_old_load_does_not_end_the_new_one_of_its_request() -> None:
    stack = stack_of()
    fill(stack, "p", 64)
    stack.add("a", 64, seed="p")
    stack.poll("a", 0, 64)
    old = stack.take("a", 64)
    stack.preempt("a")
    assert stack.poll("a", 0, 64).hit == 64
    new = stack.take("a", 64)
    assert old is not None
    assert new is not None
    stack.complete_load(old)
    assert state(stack, "a") is RequestState.LOADING
    stack.complete_load(new)
    assert state(stack, "a") is RequestState.RUNNING


def test_a_finished_request_id_may_be_used_again_while_its_load_is_out() -> None:
    stack = stack_of()
    fill(stack, "p", 64)
    stack.add("a", 64, seed="p")
    stack.poll("a", 0, 64)
    old = stack.take("a", 64)
    assert old is not None
    stack.finish("a")
    stack.add("a", 64, seed="p")
    assert stack.poll("a", 0, 64).hit == 64
    stack.complete_load(old, ok=False)
    assert stack.poll("a", 0, 64).hit == 64


def test_a_job_is_completed_through_its_own_call() -> None:
    stack = stack_of()
    fill(stack, "p", 64)
    stack.add("a", 64, seed="p")
    stack.poll("a", 0, 64)
    load = stack.take("a", 64)
    stack.add("s", 64)
    store = stack.prepare_store("s", [(0, 0)])
    assert load is not None
    assert store is not None
    with pytest.raises(StateError, match="is a load, not a store"):
        stack.core.complete_store(load.job_id)
    with pytest.raises(StateError, match="is a store, not a load"):
        stack.core.complete_load(store.job_id)
    assert stack.core.complete_load(12345) is None


def test_an_engine_that_never_says_finish_leaks_nothing_but_a_bounded_record() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], config=wide(8, max_requests=20))
    for i in range(100):
        add_held(stack, tier, f"r{i}", 2 * TPC)
        stack.poll(f"r{i}", 0, 2 * TPC)
        assert stack.poll(f"r{i}", 0, 2 * TPC).hit == 2 * TPC
        if i % 2:
            plan = stack.take(f"r{i}", 2 * TPC)
            assert plan is not None
            stack.complete_load(plan)
        stack.wait(5.0)
    assert statistics(stack).requests == 20
    stack.wait(100.0)
    assert stack.core.residency.held_bytes == stack.core.residency.pinned_bytes == 0


def test_the_longest_silent_record_goes_first_and_gives_up_what_it_holds() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], config=wide(8, max_requests=2))
    add_held(stack, tier, "a", 2 * TPC)
    stack.poll("a", 0, 2 * TPC)
    stack.wait(1.0)
    stack.add("b", 2 * TPC)
    stack.wait(1.0)
    stack.poll("a", 0, 2 * TPC)
    stack.wait(1.0)
    stack.add("c", 2 * TPC)
    assert core_of(stack).requests.get("b") is None
    assert stack.core.residency.held_bytes == 2 * SIZE
    stack.wait(1.0)
    stack.poll("c", 0, 2 * TPC)
    stack.add("d", 2 * TPC)
    assert core_of(stack).requests.get("a") is None
    assert stack.core.residency.held_bytes == 0


def test_a_finished_request_leaves_its_chunks_newest_with_the_tail_first_to_go() -> None:
    stack = stack_of(config=wide(8))
    old = stack.add("old", 4 * TPC)
    stack.store("old")
    fill(stack, "other", 4 * TPC)
    stack.finish("old")
    fill(stack, "new", 4 * TPC)
    assert in_primary(stack, old[0]) == [True] * 4
    fill(stack, "newer", 2 * TPC)
    assert in_primary(stack, old[0]) == [True, True, False, False]


def test_configured_but_empty_it_is_a_no_op_for_all_decisions() -> None:
    for tiers in ([], [sync_tier()]):
        stack = stack_of(tiers=tiers, config=settings(4))
        stack.add("a", 64)
        assert stack.poll("a", 0, 64).hit == 0
        assert stack.take("a", 0) is None
        stack.finish("a")
        go_idle(stack)


def test_statistics_are_snapshots_that_add_up() -> None:
    tier = sync_tier().auto()
    stack = stack_of(FULL, [tier])
    before = statistics(stack)
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    finish_loads(stack, tier)
    after = statistics(stack)
    assert before.counters.promoted == 0
    assert before.tiers["near"].promoted == 0
    assert (after.counters.promoted, after.counters.promoted_bytes) == (4, 4 * SIZE)
    near = after.tiers["near"]
    assert (near.probed, near.promoted, near.promoted_bytes, near.landed) == (4, 4, 4 * SIZE, 4)
    primary = after.primary
    used = primary.free_bytes + primary.reserved_bytes + primary.resident_bytes + primary.quarantined_bytes
    assert used + primary.waste_bytes == primary.capacity_bytes
    assert stack.core.idle
    assert stack.core.layout is FULL
