"""Scenarios about layouts, ranks and copies, and what is kept below primary."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from core_kit import (
    FULL,
    HYBRID,
    RECURRENT,
    S_RFC,
    SIZE,
    TPC,
    WINDOW,
    add_held,
    context,
    fill,
    go_idle,
    in_primary,
    loaded_keys,
    settings,
    stack_of,
    statistics,
    stored_keys,
    sync_tier,
    wide,
)

from kvstrata.core.messages import EventKind, LoadPlan, StorePlan
from kvstrata.core.settings import CoreConfig
from kvstrata.core.slots import READY
from kvstrata.core.statistics import UNSERVED_CHUNKS
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds import ChunkedLocal, FullAttention, RecurrentState, SlidingWindow
from kvstrata.layout.planner import resolve
from kvstrata.testing.stack import CoreStack
from kvstrata.types import FailCause, LookupResult, Presence

HIT, PENDING, MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS
MOE = Layout((Group(ChunkedLocal(4 * TPC), TPC, chunk_bytes=SIZE), Group(FullAttention(), TPC, chunk_bytes=SIZE)))
LAYOUTS = {"full": FULL, "window": WINDOW, "hybrid": HYBRID, "recurrent": RECURRENT, "rfc": S_RFC, "chunked": MOE}


# layouts


@pytest.mark.scenario_24
def test_the_hit_of_a_recurrent_group_ends_at_a_stored_state() -> None:
    layout = Layout((Group(FullAttention(), TPC, chunk_bytes=SIZE), Group(RecurrentState(), 4 * TPC, chunk_bytes=SIZE)))
    presence = [np.full(10, Presence.PRESENT, np.int8), np.array([Presence.PRESENT] * 2, np.int8)]  # states at 4 and 8
    decision = resolve(layout, presence, 0, 10 * TPC + 1)
    assert decision.boundary == 8 * TPC
    assert decision.ranges == ((0, 8), (1, 2)), "exactly the state at 8"


@pytest.mark.scenario_27
def test_groups_of_unlike_block_size_are_stored_each_by_itself() -> None:
    layout = Layout((Group(FullAttention(), 16, chunk_bytes=SIZE), Group(FullAttention(), 1056, chunk_bytes=SIZE)))
    tier = sync_tier().auto()
    stack = CoreStack(layout, [tier], config=wide(1000), checked=False)
    seen: list[list[float]] = []

    def note() -> None:
        every = statistics(stack)
        rows = [every.counters, *every.tiers.values()]
        names = [(row, name) for row in rows for name in row.__slots__]
        seen.append([value for row, name in names if isinstance(value := getattr(row, name), int | float)
                     and name != "promotions_open"])  # fmt: skip

    keys = stack.add("a", 3000)
    assert [len(group) for group in keys] == [3000 // 16, 3000 // 1056]
    plan = stack.store("a")
    assert plan is not None
    assert len(plan.keys) == 187 + 2
    for number in range(20):
        note()
        stack.finish("a" if not number else f"r{number - 1}")
        stack.core.residency.evict(np.flatnonzero(stack.core.residency.state == READY).astype(np.int32))
        stack.add(f"r{number}", 3000, seed="a")
        stack.poll(f"r{number}", 0, 3000)
        assert stack.poll(f"r{number}", 0, 3000).hit == 2112, "up to where both groups have whole chunks"
        stack.take(f"r{number}", 0)
    assert all((np.array(after) >= np.array(before)).all() for before, after in itertools.pairwise(seen))


@pytest.mark.scenario_90
def test_a_window_of_100_tokens_needs_two_chunks_of_64_or_three() -> None:
    counts = set()
    window = SlidingWindow(100, 0)
    for boundary in range(256, 513):
        lo, hi = window.consumed(np.array([boundary]), 0, 64)
        counts.add(int(hi[0] - lo[0]))
        assert int(lo[0]) * 64 <= boundary - 99, "nothing of the window is left out"
    assert counts == {2, 3}
    lo, hi = window.consumed(np.array([512]), 0, 64)
    assert int(hi[0] - lo[0]) == 2
    lo, hi = ChunkedLocal(100).consumed(np.array([199]), 0, 64)
    assert (int(lo[0]), int(hi[0])) == (1, 4), "all that overlap [100, 199)"


@pytest.mark.scenario_143
@pytest.mark.parametrize("name", LAYOUTS)
def test_turn_two_and_turn_three_after_an_eviction(name: str) -> None:
    layout = LAYOUTS[name]
    tier = sync_tier().auto()
    stack = CoreStack(layout, [tier], config=CoreConfig(capacity_bytes=200 * max(layout.chunk_bytes)))
    step = max(layout.tokens_per_chunk)
    reached = 0
    for number in (1, 2, 3):
        total = 4 * number * step + 1
        stack.add(f"turn{number}", total, seed="chat")
        hit = stack.poll_until_answered(f"turn{number}", 0, total)
        assert hit == reached
        plan = stack.take(f"turn{number}", hit)
        if plan is not None:
            assert plan.complete
            assert stack.complete_load(plan)
        stack.store(f"turn{number}")
        stack.finish(f"turn{number}")
        slots = np.flatnonzero(stack.core.residency.state == READY).astype(np.int32)
        stack.core.residency.evict(slots)  # forced
        reached = total - 1
        if layout.kind_step and not layout.all_full:
            assert reached % layout.kind_step == 0
    assert statistics(stack).counters.promoted == statistics(stack).counters.consumed > 0
    go_idle(stack)


@pytest.mark.scenario_50
def test_all_components_of_a_prefix_are_found_below() -> None:
    tier = sync_tier().auto()
    stack = stack_of(RECURRENT, tiers=[tier])
    keys = fill(stack, "p", 4 * TPC, cascade=True)
    stack.core.residency.evict(np.flatnonzero(stack.core.residency.state == READY).astype(np.int32))
    stack.add("again", 4 * TPC + 1, seed="p")
    assert stack.poll_until_answered("again", 0, 4 * TPC + 1) == 4 * TPC
    assert set(loaded_keys(tier)) == {*keys[0], keys[1][-1]}


@pytest.mark.scenario_50
@pytest.mark.scenario_108
def test_stores_without_a_single_load_raise_an_alarm() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], checked=False)
    for number in range(UNSERVED_CHUNKS // 50):
        assert statistics(stack).alarms == ()
        fill(stack, f"r{number}", 50 * TPC, cascade=True)
    (alarm,) = statistics(stack).alarms
    assert alarm.place == "near"
    assert "1000 chunks were stored in near, and none was ever served" in alarm.text
    stack.add("again", 2 * TPC, seed="r0")
    stack.poll_until_answered("again", 0, 2 * TPC)
    assert statistics(stack).alarms == ()


@pytest.mark.scenario_130
@pytest.mark.scenario_142
def test_the_oldest_unfinished_transfer_is_told() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 2 * TPC)
    stack.poll("a", 0, 2 * TPC)
    for second in range(70):
        assert statistics(stack).oldest_job_s == pytest.approx(second)
        assert bool(statistics(stack).alarms) == (second > 60)
        stack.wait(1.0)
    assert "the oldest unfinished job is 70 s old" in statistics(stack).alarms[0].text


@pytest.mark.scenario_130
def test_a_lost_completion_frees_its_request_and_quarantines_its_slots() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(16))
    add_held(stack, tier, "a", 2 * TPC)
    stack.poll("a", 0, 2 * TPC)
    (lost,) = tier.loads
    lost.lose()
    assert stack.poll_until_answered("a", 0, 2 * TPC) == 0
    stack.take("a", 0)
    stack.finish("a")
    stack.wait(11.0, step=1.0)
    residency = stack.core.residency
    assert residency.quarantined_bytes == 2 * SIZE, "a write may still land there"
    assert residency.pinned_bytes == residency.held_bytes == 0
    lost.finish()
    stack.pump()
    assert residency.quarantined_bytes == 0


# ranks and copies


@pytest.mark.scenario_44
def test_four_ranks_in_any_order_follow_one_decision() -> None:
    answers = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        stack = stack_of(ranks=4)
        plans: list[StorePlan] = []
        for name in ("a", "b", "c"):
            stack.add(name, 4 * TPC)
            plan = stack.prepare_store(name, [(0, i) for i in range(4)])
            assert plan is not None
            plans.append(plan)
        for _ in range(4):  # which rank is how far depends on the seed
            for index in rng.permutation(3):
                stack.complete_store(plans[int(index)])
        decided = []
        loads: list[LoadPlan] = []
        for name in ("a", "b", "c"):
            stack.add(f"{name}2", 4 * TPC, seed=name)
            decided.append(stack.poll(f"{name}2", 0, 4 * TPC).hit)
            plan = stack.take(f"{name}2", 4 * TPC)
            assert plan is not None
            loads.append(plan)
        done: list[bool | None] = []
        for _ in range(4):
            done += [stack.complete_load(loads[int(index)]) for index in rng.permutation(3)]
        assert sorted(map(str, done)) == ["None"] * 9 + ["True"] * 3
        answers.append(decided)
    assert answers == [[4 * TPC] * 3] * 8


@pytest.mark.scenario_47
def test_the_source_of_a_load_stays_until_it_is_acknowledged() -> None:
    stack = stack_of(config=wide(4))
    keys = fill(stack, "p", 4 * TPC)[0]
    stack.add("a", 4 * TPC, seed="p")
    stack.poll("a", 0, 4 * TPC)
    plan = stack.take("a", 4 * TPC)
    assert plan is not None
    stack.finish("a")
    fill(stack, "others", 4 * TPC)
    assert all(in_primary(stack, keys))
    stack.complete_load(plan)
    fill(stack, "more", 4 * TPC)
    assert not any(in_primary(stack, keys))


@pytest.mark.scenario_60
def test_of_four_transfers_one_that_fails_makes_the_load_fail() -> None:
    stack = stack_of(ranks=4)
    stack.add("p", 2 * TPC)
    plan = stack.prepare_store("p", [(0, 0), (0, 1)])
    assert plan is not None
    for _ in range(4):
        stack.complete_store(plan)
    stack.add("a", 2 * TPC, seed="p")
    stack.poll("a", 0, 2 * TPC)
    load = stack.take("a", 2 * TPC)
    assert load is not None
    assert [stack.complete_load(load, ok) for ok in (True, True, False, True)] == [None, None, None, False]


@pytest.mark.scenario_60
def test_of_four_promotions_one_that_fails_is_not_readable() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 4 * TPC)[0]
    stack.poll("a", 0, 4 * TPC)
    tier.loads[0].finish(failed={2: FailCause.IO_ERROR})
    stack.pump()
    assert [stack.lookup(key, context("x")) for key in keys] == [HIT, HIT, MISS, HIT]
    assert stack.poll("a", 0, 4 * TPC).hit == 2 * TPC


@pytest.mark.scenario_83
def test_a_chunk_without_one_rank_s_shard_is_a_miss_for_all() -> None:
    for second in (True, False):
        stack = stack_of(ranks=2)
        stack.add("p", TPC)
        plan = stack.prepare_store("p", [(0, 0)])
        assert plan is not None
        stack.complete_store(plan, True)
        stack.complete_store(plan, second)
        stack.add("a", TPC, seed="p")
        assert stack.poll("a", 0, TPC).hit == (TPC if second else 0)


# what is kept below


@pytest.mark.scenario_49
def test_what_the_lower_tier_did_not_take_is_lost_and_never_said_to_be_there() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(1), events=True)
    keys = fill(stack, "dirty", TPC, cascade=True)[0]
    tier.stores[0].fail(FailCause.NO_SPACE)  # full of what may not go
    stack.pump()
    fill(stack, "next", TPC)  # evicts it
    assert not any(in_primary(stack, keys))
    stored_below = [event for event in stack.core.take_events()
                    if event.kind is EventKind.STORED and event.place == "near"]  # fmt: skip
    assert stored_below == []
    counters = statistics(stack).tiers["near"]
    assert (counters.cascaded, counters.cascade_failed) == (0, 1)
    stack.add("again", TPC, seed="dirty")
    assert stack.poll("again", 0, TPC).hit == 0
    stack.wait(120.0, step=1.0)
    assert stored_keys(tier) == keys, "nor is it offered again"


@pytest.mark.scenario_49
def test_the_source_of_a_cascade_is_not_evicted_before_the_tier_has_it() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(1))
    keys = fill(stack, "dirty", TPC, cascade=True)[0]
    stack.add("next", TPC)
    assert stack.store("next") is None, "eviction fails"
    assert all(in_primary(stack, keys))
    tier.stores[0].finish()
    stack.pump()
    assert stack.store("next") is not None


@pytest.mark.scenario_118
def test_each_store_job_is_published_by_itself() -> None:
    stack = stack_of()
    keys = stack.add("a", 2 * TPC)[0]
    first = stack.prepare_store("a", [(0, 0)])
    second = stack.prepare_store("a", [(0, 1)])
    assert first is not None
    assert second is not None
    stack.complete_store(first)
    assert [stack.lookup(key, context("b")) for key in keys] == [HIT, PENDING]


@pytest.mark.scenario_122
def test_events_are_told_for_changes_only_and_removed_before_stored() -> None:
    stack = stack_of(config=wide(2), events=True)
    first = fill(stack, "a", 2 * TPC)[0]
    (event,) = stack.core.take_events()
    assert (event.kind, event.place, sorted(event.keys)) == (EventKind.STORED, "primary", sorted(first))
    fill(stack, "a", 2 * TPC)
    assert stack.core.take_events() == [], "nothing changed"
    second = fill(stack, "b", 2 * TPC)[0]
    events = stack.core.take_events()
    kinds = [event.kind for event in events]
    assert kinds == sorted(kinds, key=[EventKind.REMOVED, EventKind.STORED].index)
    assert {key for event in events if event.kind is EventKind.REMOVED for key in event.keys} == set(first)
    assert {key for event in events if event.kind is EventKind.STORED for key in event.keys} == set(second)
