"""The per-key door without room: rule 5."""

from __future__ import annotations

import pytest
from core_kit import (
    HIT,
    MISS,
    PENDING,
    RETRY,
    SIZE,
    TPC,
    context,
    core_of,
    fill,
    finish_loads,
    go_idle,
    held_by,
    in_primary,
    look,
    record,
    settings,
    stack_of,
    statistics,
    step,
    sync_tier,
    wide,
)

# rule 5


@pytest.mark.scenario_14
def test_primary_full_of_pinned_chunks_is_a_miss_and_nothing_is_queued() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(4))
    fill(stack, "p", 64)
    stack.add("r", 64, seed="p")
    assert stack.core.lookup(stack.keys("p", 64)[0][0], context("r")) is HIT
    plan = stack.core.prepare_load(stack.keys("p", 64)[0], context("r"))
    assert plan is not None
    keys = held_by(tier, stack, "q", 2)
    probes = tier.keys_touched["probe"]
    assert step(stack, "a", keys) == [MISS, MISS]
    assert tier.keys_touched["probe"] == probes + 1
    assert not tier.calls_of("submit_load")
    assert statistics(stack).counters.no_room == 1
    assert record(stack, "a").key_slots == {}
    stack.complete_load(plan)
    assert step(stack, "a", keys) == [PENDING, PENDING]


def test_primary_full_of_evictable_chunks_promotes() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(4))
    old = fill(stack, "p", 64)[0]
    keys = held_by(tier, stack, "q", 2)
    assert step(stack, "a", keys) == [PENDING, PENDING]
    finish_loads(stack, tier)
    assert step(stack, "a", keys) == [HIT, HIT]
    assert sum(in_primary(stack, old)) == 2


def test_without_budget_who_holds_part_of_it_misses_and_who_holds_none_retries() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(8))
    first, second = held_by(tier, stack, "p", 6), held_by(tier, stack, "q", 3)
    assert look(stack, "a", first) == [PENDING] * 4 + [MISS] * 2
    probes = tier.keys_touched["probe"]
    assert look(stack, "b", second) == [RETRY] * 3
    assert tier.keys_touched["probe"] == probes + 1
    stack.end_step()
    stack.wait(1.0, step=0.1)
    assert statistics(stack).tiers["near"].delays == 0
    assert statistics(stack).counters.no_room == 0
    finish_loads(stack, tier)
    stack.finish("a")
    assert step(stack, "b", second) == [PENDING] * 3
    assert statistics(stack).tiers["near"].delays == 0


def test_the_answer_without_room_spares_keys_that_are_in_primary() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(8))
    there = fill(stack, "r", 16)[0]
    look(stack, "a", held_by(tier, stack, "p", 6))
    assert look(stack, "b", held_by(tier, stack, "q", 1)) == [RETRY]
    assert look(stack, "b", there) == [HIT]


def test_fifty_requests_with_a_budget_for_two_at_most_a_few_recompute() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], config=settings(16))
    stack.checked = False
    names = [f"r{i}" for i in range(50)]
    keys = {name: held_by(tier, stack, name, 4) for name in names}
    recomputed, hits, left = 0, 0, list(names)
    for _ in range(400):
        stack.pump()
        for name in list(left):
            answers = []
            for key in keys[name]:
                answers.append(stack.lookup(key, context(name)))
                if answers[-1] is MISS:
                    break
            if PENDING in answers or RETRY in answers:
                continue
            left.remove(name)
            whole = answers == [HIT] * 4
            hits, recomputed = hits + whole, recomputed + (not whole)
            if whole:
                plan = stack.core.prepare_load(keys[name], context(name))
                assert plan is not None
                stack.complete_load(plan)
            stack.finish(name)
        stack.end_step()
        stack.wait(0.01)
        stack.core.check()
        if not left:
            break
    assert not left
    assert recomputed <= 3
    assert statistics(stack).counters.promoted <= 50 * 4
    go_idle(stack)


def test_what_was_promoted_stays_pinned_until_it_is_loaded() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(8))
    keys = held_by(tier, stack, "p", 3)
    step(stack, "a", keys)
    finish_loads(stack, tier)
    fill(stack, "q", 8 * TPC)
    assert step(stack, "a", keys) == [HIT] * 3
    plan = stack.core.prepare_load(keys[:2], context("a"))
    assert plan is not None
    assert plan.keys == keys[:2]
    assert stack.core.residency.held_bytes == 0
    assert stack.core.residency.pinned_bytes == 2 * SIZE
    stack.complete_load(plan)
    assert stack.core.residency.pinned_bytes == 0
    go_idle(stack)
    assert core_of(stack).counters.not_taken == 1


def test_what_was_promoted_is_let_go_at_finish_time_out_and_silence() -> None:
    for end in ("finish", "time_out", "silence"):
        tier = sync_tier()
        config = wide(8, silence_s=5.0, stall_s=2.0 if end == "time_out" else 50.0, total_s=50.0)
        stack = stack_of(tiers=[tier], config=config)
        keys = held_by(tier, stack, "p", 2)
        step(stack, "a", keys)
        tier.loads[0].progress(done=[0])
        stack.pump()
        assert stack.core.residency.held_bytes == 2 * SIZE
        if end == "finish":
            stack.finish("a")
        else:
            stack.wait(2.5 if end == "time_out" else 6.0, step=0.5)
        assert stack.core.residency.held_bytes == 0
        assert stack.core.residency.pinned_bytes == 0
        counters = statistics(stack).counters
        assert (counters.clock_expired, counters.silences) == (int(end == "time_out"), int(end == "silence"))
        finish_loads(stack, tier)
        go_idle(stack)
        assert core_of(stack).counters.cancelled == 2 * (end == "finish")


def test_a_silent_request_that_holds_what_has_landed_lets_it_go() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier])
    keys = held_by(tier, stack, "p", 2)
    step(stack, "a", keys)
    for _ in range(5):
        stack.wait(10.0)
        assert step(stack, "a", keys) == [HIT, HIT]
    assert stack.core.residency.held_bytes == 2 * SIZE
    stack.wait(31.0)
    assert stack.core.residency.held_bytes == 0
    assert step(stack, "a", keys) == [HIT, HIT]
