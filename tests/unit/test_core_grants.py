"""Grants: share, reserve, the head of the queue, byte limit, halving by shape; nobody waits while holding."""

from __future__ import annotations

import pytest
from core_kit import (
    FULL,
    HYBRID,
    RECURRENT,
    SIZE,
    TPC,
    WINDOW,
    add_held,
    context,
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

from kvstrata.core.messages import AnswerCause
from kvstrata.core.requests import RequestState
from kvstrata.core.settings import CoreConfig
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds import FullAttention
from kvstrata.testing.stack import CoreStack
from kvstrata.types import FailCause, LookupResult

FETCHING, QUEUED, READY = RequestState.FETCHING, RequestState.QUEUED, RequestState.READY


def serve_all(stack: CoreStack, tokens: dict[str, int], *, steps: int = 2000) -> dict[str, int]:
    """An engine that polls everybody each step and admits one request a step; the hits of all."""
    hits: dict[str, int] = {}
    stack.checked = False
    for _ in range(steps):
        stack.core.check()
        admitted = False
        for name, total in tokens.items():
            if name in hits:
                continue
            answer = stack.poll(name, 0, total)
            if answer.hit is None or admitted:
                continue
            admitted = True
            hits[name] = answer.hit
            plan = stack.take(name, answer.hit)
            if plan is not None:
                stack.complete_load(plan)
            stack.finish(name)
        stack.wait(0.01)
        if len(hits) == len(tokens):
            return hits
    raise AssertionError(f"only {sorted(hits)} of {len(tokens)} requests were answered")


def test_two_requests_that_together_need_more_than_primary_both_finish() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], config=settings(8))
    for name in ("a", "b"):
        add_held(stack, tier, name, 6 * TPC)
    assert serve_all(stack, {"a": 6 * TPC, "b": 6 * TPC}) == {"a": 6 * TPC, "b": 6 * TPC}
    counters = statistics(stack).counters
    assert counters.promoted == counters.consumed == 12
    go_idle(stack)


def test_fifty_waiting_requests_against_a_primary_that_holds_two() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], config=settings(8))
    names = [f"r{i}" for i in range(50)]
    for name in names:
        add_held(stack, tier, name, 4 * TPC)
    hits = serve_all(stack, dict.fromkeys(names, 4 * TPC))
    assert set(hits.values()) == {4 * TPC}
    assert list(hits) == names
    loaded = loaded_keys(tier)
    assert len(loaded) == len(set(loaded)) == 200
    counters = statistics(stack).counters
    assert counters.promoted == counters.consumed == 200
    assert (counters.not_taken, counters.cancelled, counters.expired, counters.failed) == (0, 0, 0, 0)
    go_idle(stack)


@pytest.mark.scenario_1
def test_a_waiting_queue_promotes_no_more_than_what_can_be_admitted() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], config=settings(8, silence_s=1e6))
    for i in range(50):
        add_held(stack, tier, f"r{i}", 2 * TPC)
    stack.checked = False
    for _ in range(20):
        for i in range(50):
            stack.poll(f"r{i}", 0, 2 * TPC)
        stack.wait(0.05)
        stack.core.check()
    assert statistics(stack).counters.promoted == 4
    assert statistics(stack).queued == 48
    assert stack.core.residency.held_bytes == 4 * SIZE


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", [FULL, WINDOW, HYBRID, RECURRENT])
def test_primaries_of_1_to_4_slots_make_progress(layout: Layout, slots: int) -> None:
    tier = sync_tier().auto()
    stack = stack_of(layout, [tier], settings(slots))
    for name in ("a", "b", "c"):
        add_held(stack, tier, name, 6 * TPC)
    hits = serve_all(stack, dict.fromkeys(("a", "b", "c"), 6 * TPC + 1))
    if slots >= len(layout.groups) and layout is not WINDOW and layout is not HYBRID:
        assert all(hit >= TPC for hit in hits.values())
    if layout is WINDOW and slots >= 2:
        assert set(hits.values()) == {6 * TPC}
    counters = statistics(stack).counters
    assert counters.promoted == counters.consumed
    stack.add("s", 16)
    assert stack.prepare_store("s", [(0, 0)]) is not None
    go_idle(stack)


def test_a_held_slot_counts_once_however_many_hold_it() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], config=settings(8))
    hold(stack, tier, stack.keys("p", 4 * TPC))
    for i in range(10):
        stack.add(f"r{i}", 4 * TPC, seed="p")
        stack.poll(f"r{i}", 0, 4 * TPC)
    assert all(state(stack, f"r{i}") is READY for i in range(10))
    assert stack.core.residency.held_bytes == 4 * SIZE


def test_all_or_none_and_if_one_chunk_cannot_be_placed_nothing_is_evicted() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(8, promotion_share=1.0, store_reserve=0.0))
    old = fill(stack, "old", 4 * TPC)[0]
    fill(stack, "busy", 4 * TPC)
    stack.add("run", 4 * TPC, seed="busy")
    assert stack.poll("run", 0, 4 * TPC).hit == 4 * TPC
    plan = stack.take("run", 4 * TPC)
    assert plan is not None
    add_held(stack, tier, "a", 5 * TPC)
    assert stack.poll("a", 0, 5 * TPC).hit is None
    assert state(stack, "a") is QUEUED
    assert in_primary(stack, old) == [True] * 4
    assert stack.core.residency.held_bytes == 0
    stack.complete_load(plan)
    assert state(stack, "a") is FETCHING
    assert stack.core.residency.held_bytes == 5 * SIZE


def test_while_the_head_waits_no_younger_request_gets_a_new_slot() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(8))
    for name, chunks in (("a", 3), ("head", 4), ("small", 1)):
        add_held(stack, tier, name, chunks * TPC)
        stack.poll(name, 0, chunks * TPC)
    assert [state(stack, name) for name in ("a", "head", "small")] == [FETCHING, QUEUED, QUEUED]
    finish_loads(stack, tier)
    assert state(stack, "small") is QUEUED
    stack.take("a", 3 * TPC)
    assert state(stack, "head") is FETCHING
    assert state(stack, "small") is QUEUED
    finish_loads(stack, tier)
    stack.take("head", 4 * TPC)
    assert state(stack, "small") is FETCHING


def test_the_head_is_served_while_younger_ones_keep_arriving() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], config=settings(8))
    add_held(stack, tier, "first", 2 * TPC)
    stack.poll("first", 0, 2 * TPC)
    add_held(stack, tier, "head", 4 * TPC)
    stack.poll("head", 0, 4 * TPC)
    assert state(stack, "head") is QUEUED
    for i in range(30):
        add_held(stack, tier, f"y{i}", TPC)
        assert stack.poll(f"y{i}", 0, TPC).hit is None
        stack.poll("head", 0, 4 * TPC)
        stack.wait(0.01)
    stack.take("first", 2 * TPC)
    assert stack.poll("head", 0, 4 * TPC).hit == 4 * TPC


def test_a_younger_one_whose_whole_plan_is_in_primary_may_pass_if_its_pins_fit() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], config=settings(8))
    fill(stack, "p", 2 * TPC)
    add_held(stack, tier, "first", 2 * TPC)
    stack.poll("first", 0, 2 * TPC)
    add_held(stack, tier, "head", 4 * TPC)
    stack.poll("head", 0, 4 * TPC)
    stack.add("passes", 2 * TPC, seed="p")
    assert stack.poll("passes", 0, 2 * TPC).hit == 2 * TPC
    stack.add("too", 3 * TPC, seed="q")
    fill(stack, "q", 1 * TPC)
    assert stack.poll("too", 0, 3 * TPC).hit is None
    assert state(stack, "too") is QUEUED
    assert stack.core.residency.held_bytes == 4 * SIZE


def test_nobody_waits_for_room_while_holding() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], config=settings(8))
    for name in ("a", "b"):
        add_held(stack, tier, name, 2 * TPC)
        stack.poll(name, 0, 2 * TPC)
    keys = stack.keys("a", 4 * TPC)
    stack.core.extend_keys("a", [keys[0][2:]])
    hold(stack, tier, keys)
    assert stack.poll("a", 0, 4 * TPC).hit is None
    assert state(stack, "a") is QUEUED
    assert len(record(stack, "a").held) == 0
    assert in_primary(stack, keys[0]) == [True, True, False, False]
    add_held(stack, tier, "c", TPC)
    stack.poll("c", 0, TPC)
    assert state(stack, "c") is QUEUED
    stack.take("b", 2 * TPC)
    assert stack.poll("a", 0, 4 * TPC).hit == 4 * TPC
    assert len(loaded_keys(tier)) == 2 + 2 + 2


def test_the_grant_is_changed_in_place_when_the_difference_can_be_placed_at_once() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(16))
    add_held(stack, tier, "a", 4 * TPC)
    stack.poll("a", 0, 3 * TPC)
    slots = record(stack, "a").held.tolist()
    stack.poll("a", 0, 4 * TPC)
    assert record(stack, "a").held.tolist()[:3] == slots
    assert state(stack, "a") is FETCHING
    assert not tier.calls_of("cancel")
    assert statistics(stack).counters.promoted == 4


def test_a_head_that_needs_more_than_the_share_is_served_alone() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(20))
    add_held(stack, tier, "a", 2 * TPC)
    stack.poll("a", 0, 2 * TPC)
    add_held(stack, tier, "large", 15 * TPC)
    stack.poll("large", 0, 15 * TPC)
    assert state(stack, "large") is QUEUED
    finish_loads(stack, tier)
    stack.take("a", 2 * TPC)
    assert state(stack, "large") is FETCHING
    assert stack.core.residency.held_bytes == 15 * SIZE
    add_held(stack, tier, "b", TPC)
    stack.poll("b", 0, TPC)
    assert state(stack, "b") is QUEUED


def test_a_head_larger_than_primary_gets_what_primary_can_hold() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], config=settings(20))
    add_held(stack, tier, "a", 100 * TPC)
    assert stack.poll_until_answered("a", 0, 100 * TPC) == 18 * TPC
    assert statistics(stack).counters.promoted == 18


def test_a_large_head_waits_for_moving_jobs_that_hold_most_of_what_it_could_get() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(20))
    fill(stack, "p", 15 * TPC)
    stack.add("run", 15 * TPC, seed="p")
    stack.poll("run", 0, 15 * TPC)
    plan = stack.take("run", 15 * TPC)
    assert plan is not None
    for chunks, name in ((16, "sixteen"), (100, "hundred")):
        add_held(stack, tier, name, chunks * TPC)
        stack.poll(name, 0, chunks * TPC)
        assert state(stack, name) is QUEUED
    stack.complete_load(plan)
    assert state(stack, "sixteen") is FETCHING
    finish_loads(stack, tier)
    stack.take("sixteen", 16 * TPC)
    stack.finish("sixteen")


def test_a_large_head_takes_what_is_left_beside_moving_jobs_that_hold_little() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(20))
    fill(stack, "p", 4 * TPC)
    stack.add("run", 4 * TPC, seed="p")
    stack.poll("run", 0, 4 * TPC)
    assert stack.take("run", 4 * TPC) is not None
    add_held(stack, tier, "a", 100 * TPC)
    stack.poll("a", 0, 100 * TPC)
    assert state(stack, "a") is FETCHING
    assert stack.core.residency.held_bytes == 14 * SIZE


def test_the_store_reserve_stays_free_for_running_requests() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], config=settings(8, promotion_share=1.0, store_reserve=0.25))
    for i in range(8):
        add_held(stack, tier, f"r{i}", 2 * TPC)
        stack.poll(f"r{i}", 0, 2 * TPC)
    assert stack.core.residency.held_bytes == 6 * SIZE
    stack.add("run", 4 * TPC)
    plan = stack.prepare_store("run", [(0, i) for i in range(4)])
    assert plan is not None
    assert len(plan.slots) == 2


@pytest.mark.parametrize(("reserve", "share"), [(0.9, 1.0), (1.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_extreme_shares_and_reserves_give_definite_answers(reserve: float, share: float) -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], config=settings(10, promotion_share=share, store_reserve=reserve))
    for name in ("a", "b"):
        add_held(stack, tier, name, 6 * TPC)
    hits = serve_all(stack, {"a": 6 * TPC, "b": 6 * TPC})
    if reserve == 0.9:
        assert set(hits.values()) == {TPC}
    if reserve == 0.0:
        assert set(hits.values()) == {6 * TPC}
    go_idle(stack)


def test_overdue_slots_count_in_the_share() -> None:
    hung, good = sync_tier("hung"), sync_tier("good")
    stack = stack_of(tiers=[hung, good], config=settings(16, silence_s=1e6))
    add_held(stack, hung, "x", 4 * TPC)
    stack.poll("x", 0, 4 * TPC)
    stack.wait(11.0, step=1.0)
    assert core_of(stack).overdue_bytes() == 4 * SIZE
    for name in ("a", "b"):
        add_held(stack, good, name, 3 * TPC)
        stack.poll(name, 0, 3 * TPC)
    assert (state(stack, "a"), state(stack, "b")) == (FETCHING, QUEUED)
    hung.loads[0].finish()
    stack.pump()
    assert state(stack, "b") is FETCHING


# -- shape

UNLIKE = Layout(
    (Group(FullAttention(), TPC, chunk_bytes=100), Group(FullAttention(), TPC, chunk_bytes=1900)),
)


def stick_one_small_slot_per_page(stack: CoreStack, pages: int) -> None:
    """Leave one small slot that never comes back in each of so many pages; all else is free."""
    residency = stack.core.residency
    per_page = residency.geometry.classes[0].per_page
    count = pages * per_page
    keys = [b"stuck-%024d-" % i + bytes(4) for i in range(count)]
    reserved = residency.reserve(keys, [0] * count)
    assert reserved is not None
    slots = reserved[0]
    first = {}
    for slot, page in zip(slots.tolist(), residency.table.page_of(slots).tolist(), strict=True):
        first.setdefault(page, slot)
    assert len(first) == pages
    residency.release([s for s in slots.tolist() if s not in first.values()])
    residency.quarantine(list(first.values()))


def test_a_grant_that_fits_by_bytes_but_not_by_shape_is_resolved_for_half() -> None:
    tier = sync_tier().auto()
    config = CoreConfig(capacity_bytes=8000, promotion_share=1.0, store_reserve=0.0)
    stack = CoreStack(UNLIKE, [tier], config=config, checked=False)
    pages = stack.core.residency.geometry.pages
    assert pages >= 4
    stick_one_small_slot_per_page(stack, pages - 1)
    add_held(stack, tier, "a", 3 * TPC)
    assert stack.core.residency.free_bytes > 3 * 2000
    assert stack.poll_until_answered("a", 0, 3 * TPC) == TPC
    assert statistics(stack).counters.no_room == 0


def test_below_one_chunk_per_group_the_answer_is_what_primary_has_and_counts_as_no_room() -> None:
    tier = sync_tier().auto()
    config = CoreConfig(capacity_bytes=8000, promotion_share=1.0, store_reserve=0.0)
    stack = CoreStack(UNLIKE, [tier], config=config, checked=False)
    stick_one_small_slot_per_page(stack, stack.core.residency.geometry.pages)
    add_held(stack, tier, "a", 3 * TPC)
    answer = stack.poll("a", 0, 3 * TPC)
    assert (answer.hit, answer.cause) == (0, AnswerCause.NO_ROOM)
    assert statistics(stack).counters.no_room == 1
    assert loaded_keys(tier) == []


def test_unlike_chunks_share_primary_without_padding() -> None:
    layout = Layout(
        (Group(FullAttention(), TPC, chunk_bytes=100), Group(FullAttention(), TPC, chunk_bytes=1900)),
    )
    stack = CoreStack(layout, config=CoreConfig(capacity_bytes=2_060_000), checked=False)
    stack.add("a", 1000 * TPC)
    plan = stack.prepare_store("a", [(g, i) for i in range(1000) for g in (0, 1)])
    assert plan is not None
    assert len(plan.slots) == 2000


# -- plans that have gone stale


def test_what_left_primary_while_the_request_was_queued_is_resolved_again() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(4, promotion_share=1.0, store_reserve=0.0))
    fill(stack, "p", 2 * TPC)
    add_held(stack, tier, "a", 4 * TPC)
    fill(stack, "p", 2 * TPC, seed="p")
    stack.add("b", 2 * TPC, seed="p")
    assert stack.poll("a", 0, 4 * TPC).hit is None
    assert stack.poll("b", 0, 2 * TPC).hit == 0
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 4 * TPC).hit == 4 * TPC


def test_a_queued_plan_whose_chunks_were_evicted_is_resolved_again_at_its_turn() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(8))
    keys = fill(stack, "p", 2 * TPC)
    add_held(stack, tier, "a", 4 * TPC)
    stack.poll("a", 0, 4 * TPC)
    more = stack.add("b", 4 * TPC, seed="p")
    hold(stack, tier, [more[0][2:]])
    stack.poll("b", 0, 4 * TPC)
    assert state(stack, "b") is QUEUED
    fill(stack, "q", 4 * TPC)
    assert in_primary(stack, keys[0]) == [False, False]
    finish_loads(stack, tier)
    stack.take("a", 4 * TPC)
    assert stack.poll("b", 0, 4 * TPC).hit == 0
    go_idle(stack)


@pytest.mark.parametrize("cause", [FailCause.CORRUPT, FailCause.IO_ERROR])
def test_a_queued_plan_does_not_read_a_key_that_failed_meanwhile(cause: FailCause) -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(8))
    keys = stack.keys("p", 5 * TPC)
    hold(stack, tier, keys)
    stack.add("a", 3 * TPC, seed="p")
    stack.add("b", 5 * TPC, seed="p")
    stack.poll("a", 0, 2 * TPC)
    stack.poll("b", 0, 5 * TPC)
    assert state(stack, "b") is QUEUED
    finish_loads(stack, tier)
    stack.poll("a", 0, 3 * TPC)
    bad = tier.loads[-1]
    assert list(bad.job.keys) == keys[0][2:3]
    bad.finish(failed={0: cause})
    stack.pump()
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 3 * TPC).hit == 2 * TPC
    stack.take("a", 2 * TPC)
    finish_loads(stack, tier)
    assert stack.poll("b", 0, 5 * TPC).hit == 2 * TPC
    assert loaded_keys(tier).count(keys[0][2]) == 1


def test_a_queued_plan_does_not_wait_for_a_tier_that_is_not_asked_any_more() -> None:
    sick, good = sync_tier("sick"), sync_tier("good")
    stack = stack_of(tiers=[sick, good], config=settings(8))
    add_held(stack, good, "a", 4 * TPC)
    stack.poll("a", 0, 4 * TPC)
    keys = stack.add("b", 4 * TPC)
    hold(stack, sick, keys)
    hold(stack, good, keys)
    stack.poll("b", 0, 4 * TPC)
    assert state(stack, "b") is QUEUED
    core_of(stack).tiers[0].reads.failure(stack.clock.monotonic(), at_once=True)
    finish_loads(stack, good)
    stack.take("a", 4 * TPC)
    finish_loads(stack, good)
    assert stack.poll("b", 0, 4 * TPC).hit == 4 * TPC
    assert loaded_keys(sick) == []


def test_the_two_doors_share_one_budget() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(8))
    keys = stack.keys("p", 3 * TPC)
    hold(stack, tier, keys)
    for key in keys[0]:
        assert stack.lookup(key, context("k")) is LookupResult.HIT_PENDING
    stack.end_step()
    add_held(stack, tier, "a", 2 * TPC)
    stack.poll("a", 0, 2 * TPC)
    assert state(stack, "a") is QUEUED
    stack.finish("k")
    assert state(stack, "a") is FETCHING
