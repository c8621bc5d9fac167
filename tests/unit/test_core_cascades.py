"""Cascades: write-through behind bounded queues, without pins while they wait."""

from __future__ import annotations

from collections import Counter

import pytest
from core_kit import (
    FULL,
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
    statistics,
    stored_keys,
    sync_tier,
    wide,
)

from kvstrata.core.breakers import BreakerState
from kvstrata.core.cascades import BATCH, JOBS_OUT, MISSED_MOST
from kvstrata.core.messages import EventKind, RequestOptions, TierFilter
from kvstrata.testing import ScriptedTier
from kvstrata.testing.stack import CoreStack
from kvstrata.types import Capabilities, FailCause, Medium, ResetReason


def finish_stores(stack: CoreStack, *tiers: ScriptedTier) -> None:
    """End every store of the tiers, also those that follow, as a healthy tier would."""
    while any(tier.stores for tier in tiers):
        for tier in tiers:
            for job in list(tier.stores):
                job.finish()
        stack.pump()
        stack.check()


def test_everything_stored_is_offered_to_every_tier_without_another_step() -> None:
    first, second = sync_tier("first"), sync_tier("second")
    stack = stack_of(tiers=[first, second], config=settings(40))
    keys = fill(stack, "p", 30 * TPC, cascade=True)
    finish_stores(stack, first, second)
    assert stored_keys(first) == stored_keys(second) == keys[0]
    assert statistics(stack).tiers["first"].cascaded == 30
    go_idle(stack)


def test_a_request_stores_only_where_it_may() -> None:
    disk, remote = sync_tier("disk", medium=Medium.NVME), sync_tier("remote", medium=Medium.OBJECT)
    stack = stack_of(tiers=[disk, remote])
    options = RequestOptions(store_tiers=TierFilter(media=frozenset({Medium.NVME})))
    keys = stack.add("a", 64, options)
    stack.store("a")
    assert stored_keys(disk) == keys[0]
    assert remote.total_keys_touched == 0


def test_handed_over_cascades_of_one_tier_pin_at_most_the_in_flight_share() -> None:
    slow, fast = sync_tier("slow"), sync_tier("fast")
    stack = stack_of(tiers=[slow, fast], config=settings(40))
    fill(stack, "p", 36 * TPC, cascade=True)
    assert len(stored_keys(slow)) == len(stored_keys(fast)) == 10
    assert stack.core.residency.pinned_bytes == 10 * SIZE
    finish_stores(stack, fast)
    assert len(stored_keys(fast)) == 36
    assert stack.core.residency.pinned_bytes == 10 * SIZE
    slow.stores[0].progress(done=range(4))
    stack.pump()
    assert stack.core.residency.pinned_bytes == 10 * SIZE
    assert len(stored_keys(slow)) == 14


def test_a_queued_cascade_holds_no_pin_and_what_was_evicted_meanwhile_is_dropped_and_counted() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(8))
    keys = fill(stack, "p", 8 * TPC, cascade=True)
    assert stored_keys(tier) == keys[0][:2]
    fill(stack, "q", 4 * TPC)
    gone = [key for key, there in zip(keys[0], in_primary(stack, keys[0]), strict=True) if not there]
    assert len(gone) == 4
    finish_stores(stack, tier)
    assert stored_keys(tier) == [key for key in keys[0] if key not in gone]
    assert statistics(stack).tiers["near"].cascade_lapsed == 4


def queued_twice() -> tuple[CoreStack, ScriptedTier]:
    """Three chunks were queued, evicted and stored again; a trial of one of them is out."""
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(8))
    core_of(stack).tiers[0].writes.failure(stack.clock.monotonic(), at_once=True)
    fill(stack, "p", 3 * TPC, cascade=True)
    fill(stack, "q", 8 * TPC)
    fill(stack, "p again", 3 * TPC, seed="p", cascade=True)
    stack.wait(1.0)
    assert len(tier.stores) == 1
    return stack, tier


def test_what_was_evicted_and_stored_again_while_it_was_queued_is_in_a_job_once() -> None:
    stack, tier = queued_twice()
    tier.stores[0].finish()
    stack.pump()
    (job,) = tier.stores
    assert len(job.job.keys) == len(set(job.job.keys)) == 3
    assert statistics(stack).tiers["near"].cascade_lapsed == 2
    finish_stores(stack, tier)
    go_idle(stack)


def test_a_reset_over_what_was_queued_twice_gives_every_slot_back() -> None:
    stack, tier = queued_twice()
    tier.stores[0].finish()
    stack.pump()
    stack.core.reset_cache(ResetReason.MEMORY_GOING_AWAY)
    finish_stores(stack, tier)
    go_idle(stack)


def test_at_least_one_chunk_is_handed_over_however_small_the_share() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(8, inflight_share=0.0))
    keys = fill(stack, "p", 4 * TPC, cascade=True)
    assert len(stored_keys(tier)) == 1
    finish_stores(stack, tier)
    assert stored_keys(tier) == keys[0]


def test_a_batch_is_no_larger_than_the_tier_takes() -> None:
    tier = ScriptedTier(name="t", capabilities=Capabilities(sync_probe=True, max_batch=3))
    stack = stack_of(tiers=[tier])
    fill(stack, "p", 8 * TPC, cascade=True)
    assert [len(call.keys) for call in tier.calls_of("submit_store")] == [3, 3, 2]


def test_small_chunks_are_not_handed_over_without_end() -> None:
    tier = sync_tier()
    stack = stack_of(FULL, [tier], wide(6000, cascade_queue=6000), checked=False)
    fill(stack, "a", 6000 * TPC, cascade=True)
    assert len(tier.stores) == JOBS_OUT
    assert sum(len(job.job.keys) for job in tier.stores) == JOBS_OUT * BATCH
    tier.stores[0].finish()
    stack.pump()
    assert len(tier.stores) == JOBS_OUT
    while tier.stores:
        tier.stores[0].finish()
        stack.pump()
    assert len(tier.held) == 6000


def test_the_source_stays_pinned_and_readable_until_the_tier_has_it() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(4))
    keys = fill(stack, "p", 4 * TPC, cascade=True)
    stack.add("s", 4 * TPC)
    assert stack.prepare_store("s", [(0, 0)]) is None
    assert statistics(stack).counters.store_no_room == 1
    stack.add("a", 4 * TPC, seed="p")
    assert stack.poll("a", 0, 4 * TPC).hit == 4 * TPC
    stack.take("a", 0)
    tier.stores[0].progress(done=[3])
    stack.pump()
    assert stack.prepare_store("s", [(0, 0)]) is not None
    assert in_primary(stack, keys[0]) == [True, True, True, False]
    assert tier.held.keys() == {keys[0][3]}


def test_a_full_queue_drops_counts_and_offers_again_when_the_tier_has_recovered() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(64, cascade_queue=8, inflight_share=0.0))
    keys = fill(stack, "p", 30 * TPC, cascade=True)
    counters = statistics(stack).tiers["near"]
    assert counters.cascade_dropped == 22
    assert len(core_of(stack).tiers[0].cascades) <= 8
    finish_stores(stack, tier)
    assert sorted(stored_keys(tier)) == sorted(keys[0])
    assert statistics(stack).tiers["near"].offered_again == 22
    assert core_of(stack).tiers[0].missed == {}


def test_what_a_tier_missed_while_its_breaker_was_open_is_offered_when_it_recovers() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(64, cascade_queue=4))
    core_of(stack).tiers[0].writes.failure(stack.clock.monotonic(), at_once=True)
    keys = fill(stack, "p", 10 * TPC, cascade=True)
    assert not tier.calls_of("submit_store")
    assert stack.core.residency.pinned_bytes == 0
    stack.wait(1.0)
    assert [len(call.keys) for call in tier.calls_of("submit_store")] == [1]
    finish_stores(stack, tier)
    assert set(tier.held) == set(keys[0])


def test_what_has_left_primary_is_not_offered_again() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(8, cascade_queue=2, inflight_share=0.0))
    fill(stack, "p", 8 * TPC, cascade=True)
    fill(stack, "q", 7 * TPC)
    finish_stores(stack, tier)
    assert statistics(stack).tiers["near"].offered_again <= 1
    assert len(stored_keys(tier)) == 1
    assert core_of(stack).tiers[0].missed == {}


def test_what_was_missed_is_offered_when_all_that_was_queued_has_left_primary() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(8, cascade_queue=1, inflight_share=0.0))
    first = fill(stack, "p", TPC, cascade=True)[0]
    queued = fill(stack, "q", TPC, cascade=True)[0]
    missed = fill(stack, "r", TPC, cascade=True)[0]
    residency = core_of(stack).residency
    residency.evict(residency.find(queued))
    finish_stores(stack, tier)
    assert stored_keys(tier) == [*first, *missed]
    go_idle(stack)


def test_what_is_remembered_is_bounded() -> None:
    stack = stack_of(tiers=[sync_tier()])
    tier = core_of(stack).tiers[0]
    stack.core._cascades._remember(tier.missed, [b"%d" % i for i in range(MISSED_MOST + 10)])
    assert len(tier.missed) == MISSED_MOST
    assert next(iter(tier.missed)) == b"10"


def test_loads_are_not_delayed_by_queued_cascades() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(64))
    fill(stack, "p", 40 * TPC, cascade=True)
    assert core_of(stack).tiers[0].cascades
    add_held(stack, tier, "a", 4 * TPC)
    stack.poll("a", 0, 4 * TPC)
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 4 * TPC).hit == 4 * TPC


def test_a_failed_cascade_is_offered_again_but_not_in_a_tight_circle() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    bad = stack.keys("p", 64)[0][0]

    def refuse(job) -> None:  # type: ignore[no-untyped-def]
        failed = {i: FailCause.NO_SPACE for i, key in enumerate(job.job.keys) if key == bad}
        job.finish(failed=failed)

    tier.on_store = refuse
    fill(stack, "p", 64, cascade=True)
    fill(stack, "q", 64, cascade=True)
    assert len(tier.held) == 7
    tries = stored_keys(tier).count(bad)
    assert tries <= 4
    stack.wait(20.0, step=0.1)
    assert stored_keys(tier).count(bad) <= tries + 25
    tier.on_store = lambda job: job.finish()
    stack.wait(70.0, step=1.0)
    assert bad in tier.held


def test_a_tier_that_cancels_of_itself_is_not_offered_the_same_in_a_tight_circle() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    tier.on_store = lambda job: job.fail(FailCause.CANCELLED)
    fill(stack, "p", 64, cascade=True)
    stack.wait(20.0, step=0.1)
    assert max(Counter(stored_keys(tier)).values()) <= 25


def test_consecutive_failures_open_the_breaker_of_writes_and_nothing_is_lost() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    tier.on_store = lambda job: job.fail(FailCause.IO_ERROR)
    keys = fill(stack, "p", 64, cascade=True)
    for i in range(3):
        fill(stack, f"q{i}", TPC, cascade=True)
    stack.wait(0.5, step=0.05)
    assert core_of(stack).tiers[0].writes.state is BreakerState.OPEN or tier.calls_of("submit_store")
    tier.on_store = lambda job: job.finish()
    stack.wait(200.0, step=0.5)
    assert set(keys[0]) <= set(tier.held)
    assert statistics(stack).tiers["near"].cascade_failed >= 4


def test_an_overdue_cascade_keeps_its_source_pinned_and_readable() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(8))
    keys = fill(stack, "p", 4 * TPC, cascade=True)
    stack.wait(10.5)
    assert core_of(stack).tiers[0].writes.state is BreakerState.OPEN
    assert len(tier.calls_of("cancel")) == 1
    assert stack.core.residency.pinned_bytes == 4 * SIZE
    assert stack.core.residency.quarantined_bytes == 0
    stack.add("a", 4 * TPC, seed="p")
    assert stack.poll("a", 0, 4 * TPC).hit == 4 * TPC
    stack.take("a", 0)
    fill(stack, "q", 8 * TPC)
    assert in_primary(stack, keys[0]) == [True] * 4
    tier.stores[0].fail(FailCause.TIMEOUT)
    stack.pump()
    assert stack.core.residency.pinned_bytes == 0


def test_a_tier_with_an_overdue_cascade_is_tried_again() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(32))
    fill(stack, "p", 2 * TPC, cascade=True)
    hung = tier.stores[0]
    stack.wait(10.5)
    fill(stack, "q", 4 * TPC, cascade=True)
    stack.wait(1.0)
    assert core_of(stack).tiers[0].writes.state is BreakerState.HALF_OPEN
    trials = [job for job in tier.stores if job is not hung]
    assert [len(job.job.keys) for job in trials] == [1]
    trials[0].finish()
    stack.pump()
    assert core_of(stack).tiers[0].writes.state is BreakerState.CLOSED


def test_a_hung_tier_pins_no_more_than_its_share_however_long() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(32))
    for i in range(30):
        fill(stack, f"p{i}", 4 * TPC, cascade=True)
        stack.wait(5.0, step=0.5)
        assert stack.core.residency.pinned_bytes <= 8 * SIZE
    hung = list(tier.stores)
    tier.auto()
    for job in hung:
        job.fail(FailCause.TIMEOUT)
    stack.pump()
    stack.wait(200.0, step=1.0)
    assert stack.core.residency.pinned_bytes == 0


def test_digests_that_were_made_at_the_store_go_with_it() -> None:
    tier = sync_tier()
    stack = stack_of(FULL, [tier], wide(16))
    keys = stack.add("a", 32)
    plan = stack.prepare_store("a", [(0, 0), (0, 1)])
    assert plan is not None
    digests = {key: bytes([i]) * 16 for i, key in enumerate(keys[0])}
    stack.core.complete_store(plan.job_id, True, digests)
    stack.pump()
    assert list(tier.stores[0].job.digests or ()) == list(digests.values())
    stack.add("b", 32)
    plan = stack.prepare_store("b", [(0, 0), (0, 1)])
    assert plan is not None
    stack.core.complete_store(plan.job_id, True, {plan.keys[0]: b"x" * 16})
    stack.pump()
    assert tier.stores[-1].job.digests is None


def test_events_replay_to_what_is_really_there() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], config=wide(8), events=True)
    there: dict[str, set[bytes]] = {"primary": set(), "near": set()}
    for i in range(5):
        fill(stack, f"p{i}", 4 * TPC, cascade=True)
        if i == 3:
            tier.lose_keys(list(tier.held)[:3])
            stack.pump()
        for event in stack.core.take_events():
            for key in event.keys:
                if event.kind is EventKind.STORED:
                    assert key not in there[event.place]
                    there[event.place].add(key)
                else:
                    there[event.place].remove(key)
        found = {key for key in there["primary"] if stack.core.residency.slot_of(key) >= 0}
        assert found == there["primary"]
        assert len(found) == stack.core.residency.statistics().keys
        assert there["near"] == set(tier.held)


def test_removed_comes_before_stored_when_one_displaces_the_other() -> None:
    stack = stack_of(config=wide(4), events=True)
    fill(stack, "p", 4 * TPC)
    stack.core.take_events()
    fill(stack, "q", 2 * TPC)
    assert [event.kind for event in stack.core.take_events()] == [EventKind.REMOVED, EventKind.STORED]


def test_events_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.core.state.MAX_EVENTS", 3)
    stack = stack_of(events=True)
    for i in range(5):
        fill(stack, f"p{i}", TPC)
    assert len(stack.core.take_events()) == 3
    assert statistics(stack).counters.events_dropped == 2
