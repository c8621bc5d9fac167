"""Reset: a new generation; late completions publish nothing and only return their slots."""

from __future__ import annotations

import pytest
from core_kit import (
    SIZE,
    TPC,
    add_held,
    answer_probes,
    async_tier,
    context,
    core_of,
    fill,
    finish_loads,
    flat,
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
    wide,
)

from kvstrata.core.messages import EventKind, PurgeTier
from kvstrata.core.requests import RequestState
from kvstrata.testing import ScriptedTier
from kvstrata.testing.stack import CoreStack
from kvstrata.types import FailCause, Flushed, LookupResult, ResetReason

INVALID, GOING = ResetReason.CONTENT_INVALID, ResetReason.MEMORY_GOING_AWAY
BOTH = pytest.mark.parametrize("reason", [INVALID, GOING])


def reset(stack: CoreStack, reason: ResetReason = INVALID) -> None:
    """One reset, as the driver does it."""
    stack.core.reset_cache(reason)
    stack.check()
    if stack.auto:
        stack.pump()
    stack.check()


@BOTH
def test_reset_drops_primary(reason: ResetReason) -> None:
    stack = stack_of()
    keys = fill(stack, "p", 64)
    reset(stack, reason)
    assert in_primary(stack, keys[0]) == [False] * 4
    stack.add("a", 64, seed="p")
    assert stack.poll("a", 0, 64).hit == 0
    assert statistics(stack).counters.resets == 1


def test_memory_going_away_keeps_lower_tiers() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier])
    fill(stack, "p", 64, cascade=True)
    reset(stack, GOING)
    assert not tier.calls_of("purge")
    stack.add("a", 64, seed="p")
    assert stack.poll("a", 0, 64).hit is None
    assert stack.poll("a", 0, 64).hit == 64


def test_content_invalid_fences_every_tier_until_its_purge_is_durable() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], auto=False)
    add_held(stack, tier, "p", 64)
    reset(stack, INVALID)
    commands = stack.core.take_commands()
    assert commands == [PurgeTier(0)]
    assert stack.poll("p", 0, 64).hit == 0
    assert tier.keys_touched["probe"] == 0
    stack.take("p", 0)
    stack.core.purge_submitted(0, 7)
    stack.core.on_event(0, Flushed(6))
    assert core_of(stack).tiers[0].fenced
    stack.core.on_event(0, Flushed(7, ok=False))
    assert stack.core.take_commands() == [PurgeTier(0)]
    stack.core.purge_submitted(0, 8)
    stack.core.on_event(0, Flushed(8))
    assert not core_of(stack).tiers[0].fenced
    stack.core.on_event(0, Flushed(8))


@BOTH
@pytest.mark.parametrize("wanted", ["resolving", "queued", "fetching", "ready", "handed_over"])
def test_waiting_requests_in_every_state_go_back_to_resolving(wanted: str, reason: ResetReason) -> None:
    tier: ScriptedTier = async_tier() if wanted == "resolving" else sync_tier()
    stack = stack_of(tiers=[tier], config=settings(16))
    if wanted == "queued":
        add_held(stack, tier, "other", 6 * TPC)
        stack.poll("other", 0, 6 * TPC)
    keys = add_held(stack, tier, "a", 4 * TPC)
    stack.poll("a", 0, 4 * TPC)
    if wanted == "ready":
        finish_loads(stack, tier)
        assert stack.poll("a", 0, 4 * TPC).hit == 4 * TPC
    reset(stack, reason)
    if reason is INVALID:
        hold(stack, tier, keys)
    answer_probes(stack, tier)
    finish_loads(stack, tier)
    stack.wait(0.5, step=0.1)
    answer_probes(stack, tier)
    finish_loads(stack, tier)
    if wanted == "queued":
        stack.finish("other")
        finish_loads(stack, tier)
    assert stack.poll("a", 0, 4 * TPC).hit == (0 if reason is INVALID else 4 * TPC)
    go_idle(stack)


@BOTH
def test_reset_clears_queued_promotions_and_late_completions_publish_nothing(reason: ResetReason) -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(16, promotion_share=1.0, inflight_share=0.125))
    keys = add_held(stack, tier, "a", 8 * TPC)
    stack.poll("a", 0, 8 * TPC)
    assert len(loaded_keys(tier)) == 2
    assert len(core_of(stack).tiers[0].queue) == 1
    (late,) = tier.loads
    tier.held.clear()
    reset(stack, reason)
    assert not core_of(stack).tiers[0].queue
    assert len(tier.calls_of("cancel")) == 1
    residency = stack.core.residency
    assert residency.quarantined_bytes == 2 * SIZE
    assert residency.reserved_bytes == residency.held_bytes == 0
    assert stack.poll("a", 0, 8 * TPC).hit == 0
    hold(stack, tier, keys)
    late.finish()
    stack.pump()
    assert residency.quarantined_bytes == 0
    assert in_primary(stack, keys[0]) == [False] * 8
    assert statistics(stack).counters.late == 2
    assert statistics(stack).counters.cancelled == 8
    assert len(loaded_keys(tier)) == 2


@BOTH
def test_slots_under_a_hung_load_stay_quarantined_without_opening_a_breaker(reason: ResetReason) -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(16))
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    reset(stack, reason)
    assert stack.core.residency.quarantined_bytes == 4 * SIZE
    stack.wait(9.0, step=1.0)
    assert core_of(stack).tiers[0].reads.allows
    assert core_of(stack).overdue_bytes() == 0
    tier.loads[0].fail(FailCause.IO_ERROR)
    stack.pump()
    assert core_of(stack).tiers[0].reads.allows
    assert len(core_of(stack).verdicts) == 0
    assert stack.core.residency.quarantined_bytes == 0


def test_late_failures_of_the_old_generation_change_no_verdict() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    (late,) = tier.loads
    reset(stack, GOING)
    late.finish(failed=dict.fromkeys(range(4), FailCause.CORRUPT))
    stack.pump()
    assert len(core_of(stack).verdicts) == 0
    finish_loads(stack, tier)
    stack.add("b", 64, seed="a")
    hold(stack, tier, keys)
    stack.poll("b", 0, 64)
    finish_loads(stack, tier)
    assert stack.poll("b", 0, 64).hit == 64


def test_a_content_verdict_outlives_memory_going_away() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    tier.loads[0].finish(failed={0: FailCause.CORRUPT})
    stack.pump()
    reset(stack, GOING)
    stack.add("b", 64, seed="a")
    assert stack.poll("b", 0, 64).hit == 0
    reset(stack, INVALID)
    stack.add("c", 64, seed="a")
    hold(stack, tier, stack.keys("a", 64))
    assert stack.poll("c", 0, 64).hit is None


@BOTH
def test_reset_while_loads_are_handed_over(reason: ResetReason) -> None:
    stack = stack_of(config=wide(8))
    fill(stack, "p", 64)
    stack.add("a", 64, seed="p")
    stack.poll("a", 0, 64)
    plan = stack.take("a", 64)
    assert plan is not None
    before = bytes(stack.region)
    reset(stack, reason)
    assert stack.core.residency.quarantined_bytes == 4 * SIZE
    stack.add("s", 8 * TPC)
    store = stack.prepare_store("s", [(0, i) for i in range(8)])
    assert store is not None
    assert len(store.slots) == 4
    assert not set(store.slots.tolist()) & set(plan.slots.tolist())
    assert bytes(stack.region) == before
    assert state(stack, "a") is RequestState.LOADING
    assert stack.complete_load(plan) is (reason is GOING)
    assert stack.core.residency.quarantined_bytes == 0
    assert state(stack, "a") is RequestState.RUNNING
    stack.complete_store(store)
    go_idle(stack)


@BOTH
def test_a_store_in_flight_is_dropped_and_never_published(reason: ResetReason) -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier])
    keys = stack.add("s", 64)
    plan = stack.prepare_store("s", [(0, i) for i in range(4)])
    assert plan is not None
    reset(stack, reason)
    reset(stack, reason)
    assert stack.core.residency.quarantined_bytes == 4 * SIZE
    again = stack.prepare_store("s", [(0, i) for i in range(4)])
    assert again is not None
    assert not set(again.slots.tolist()) & set(plan.slots.tolist())
    stack.complete_store(plan)
    assert in_primary(stack, keys[0]) == [True] * 4
    assert stack.core.residency.quarantined_bytes == 0
    assert statistics(stack).counters.stored == 0
    assert not tier.calls_of("submit_store")
    stack.complete_store(again)
    assert statistics(stack).counters.stored == 4
    assert len(tier.calls_of("submit_store")) == 1


def test_a_request_that_waited_for_a_store_goes_on_after_a_reset() -> None:
    stack = stack_of()
    stack.add("s", 64)
    plan = stack.prepare_store("s", [(0, i) for i in range(4)])
    assert plan is not None
    stack.add("a", 64, seed="s")
    assert stack.poll("a", 0, 64).hit is None
    reset(stack)
    assert stack.poll("a", 0, 64).hit == 0
    stack.complete_store(plan, ok=False)
    go_idle(stack)


@BOTH
def test_reset_while_a_cascade_is_out(reason: ResetReason) -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(16))
    fill(stack, "p", 64, cascade=True)
    (late,) = tier.stores
    reset(stack, reason)
    assert stack.core.residency.quarantined_bytes == 4 * SIZE
    assert len(tier.calls_of("cancel")) == (reason is INVALID)
    late.finish()
    stack.pump()
    assert stack.core.residency.quarantined_bytes == 0
    assert statistics(stack).counters.late == 4
    stack.add("a", 64, seed="p")
    if reason is GOING:
        assert stack.poll("a", 0, 64).hit is None
    else:
        assert not tier.held
        assert stack.poll("a", 0, 64).hit == 0


def test_what_was_stored_late_is_removed_also_after_a_second_reset_of_the_other_kind() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    fill(stack, "p", 64, cascade=True)
    (late,) = tier.stores
    reset(stack, INVALID)
    reset(stack, GOING)
    late.finish()
    stack.pump()
    assert not tier.held
    assert not core_of(stack).tiers[0].fenced


def test_a_purged_tier_is_not_read_before_its_old_stores_have_ended() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    fill(stack, "p", 64, cascade=True)
    (late,) = tier.stores
    reset(stack, INVALID)
    assert tier.calls_of("purge")
    tier.put(stack.keys("p", 64)[0])
    stack.add("a", 64, seed="p")
    assert stack.poll("a", 0, 64).hit == 0
    assert tier.keys_touched["probe"] == 0
    stack.take("a", 0)
    late.finish()
    stack.pump()
    assert not core_of(stack).tiers[0].fenced
    assert not tier.held


def test_what_the_new_generation_stored_under_the_same_key_reaches_the_tier() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = fill(stack, "p", 64, cascade=True)
    (late,) = tier.stores
    reset(stack, INVALID)
    fill(stack, "p", 64, cascade=True)
    late.finish()
    stack.pump()
    for job in list(tier.stores):
        job.finish()
    stack.pump()
    for job in list(tier.stores):
        job.finish()
    stack.pump()
    assert set(tier.held) == set(keys[0])


def test_queued_cascades_of_the_old_generation_are_dropped() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(16))
    fill(stack, "p", 8 * TPC, cascade=True)
    assert core_of(stack).tiers[0].cascades
    reset(stack, GOING)
    assert not core_of(stack).tiers[0].cascades
    assert statistics(stack).tiers["near"].cascade_lapsed == 4


@pytest.mark.scenario_144
@BOTH
def test_reset_returns_within_one_call_while_a_tier_hangs_in_everything(reason: ResetReason) -> None:
    tier = async_tier()
    stack = stack_of(tiers=[tier], config=settings(32))
    fill(stack, "p", 64, cascade=True)
    add_held(stack, tier, "a", 64)
    add_held(stack, tier, "b", 64)
    stack.poll("a", 0, 64)
    answer_probes(stack, tier)
    stack.poll("b", 0, 64)
    before = stack.clock.monotonic()
    for _ in range(3):
        reset(stack, reason)
    assert stack.clock.monotonic() == before
    assert stack.core.residency.statistics().keys == 0
    stack.wait(100.0, step=0.5)
    for name in ("a", "b"):
        assert stack.poll(name, 0, 64).hit == 0
        stack.take(name, 0)
    fill(stack, "q", 64)
    stack.add("c", 64, seed="q")
    assert stack.poll("c", 0, 64).hit == 64
    for job in [*tier.loads, *tier.stores]:
        job.fail()
    answer_probes(stack, tier)
    stack.pump()
    go_idle(stack)


def test_a_cancel_is_sent_once_however_often_is_reset() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    for _ in range(3):
        reset(stack, GOING)
        tier.held.clear()
    jobs = [call.job_id for call in tier.calls_of("cancel")]
    assert len(jobs) == len(set(jobs))


def test_a_reported_hit_that_a_reset_took_back_loads_nothing() -> None:
    stack = stack_of()
    fill(stack, "p", 64)
    stack.add("a", 64, seed="p")
    assert stack.poll("a", 0, 64).hit == 64
    reset(stack)
    plan = stack.take("a", 64)
    assert plan is not None
    assert not plan.complete
    stack.complete_load(plan, ok=False)
    go_idle(stack)


def test_waiters_go_on_with_what_is_left_of_their_clocks() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    stack.wait(1.5)
    reset(stack, GOING)
    assert state(stack, "a") is RequestState.FETCHING
    assert record(stack, "a").pending == 4
    stack.wait(0.4)
    assert stack.poll("a", 0, 64).hit is None
    stack.wait(0.2)
    assert stack.poll("a", 0, 64).hit == 0


@BOTH
def test_reset_through_the_per_key_door(reason: ResetReason) -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = flat(stack.keys("p", 64))
    tier.put(keys)
    sent = [stack.lookup(key, context("a")) for key in keys[:2]]
    stack.end_step()
    assert sent == [stack.lookup(key, context("a")) for key in keys[:2]]
    assert stack.lookup(keys[2], context("a")) is LookupResult.HIT_PENDING
    tier.held.clear()
    reset(stack, reason)
    assert stack.core.residency.held_bytes == stack.core.residency.reserved_bytes == 0
    stack.end_step()
    assert len(loaded_keys(tier)) == 2
    assert [stack.lookup(key, context("a")) for key in keys] == [LookupResult.MISS] * 4
    stack.end_step()
    finish_loads(stack, tier)
    assert in_primary(stack, keys) == [False] * 4
    stack.finish("a")
    go_idle(stack)


def test_the_events_of_a_reset_replay_to_an_empty_primary() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], events=True)
    fill(stack, "p", 64)
    stack.add("a", 32, seed="p")
    stack.poll("a", 0, 32)
    stack.take("a", 32)
    reset(stack, GOING)
    there: set[bytes] = set()
    for event in stack.core.take_events():
        if event.place == "primary":
            there = there | set(event.keys) if event.kind is EventKind.STORED else there - set(event.keys)
    assert there == set()
    assert stack.core.take_events() == []
