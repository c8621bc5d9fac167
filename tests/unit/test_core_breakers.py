"""Pacing, overdue jobs and the mark, breakers."""

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

from kvstrata.core.breakers import BreakerState
from kvstrata.core.messages import AnswerCause
from kvstrata.core.requests import RequestState
from kvstrata.testing import ScriptedTier
from kvstrata.testing.stack import CoreStack
from kvstrata.types import FailCause, JobEnded, KeysDone, LookupResult, Presence

PATIENT = {"stall_s": 1e5, "total_s": 1e5, "silence_s": 1e6}


def reads(stack: CoreStack, tier: int = 0) -> BreakerState:
    """The state of a tier's read breaker."""
    return core_of(stack).tiers[tier].reads.state


# -- pacing


def test_at_most_the_in_flight_share_of_one_tier_is_handed_over_and_the_rest_follows_in_token_order() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(32))
    keys = add_held(stack, tier, "a", 16 * TPC)
    stack.poll("a", 0, 16 * TPC)
    assert stack.core.residency.held_bytes == 16 * SIZE
    assert len(loaded_keys(tier)) == 8
    done = 0
    while tier.loads:
        (job, *_) = tier.loads
        job.progress(done=[next(i for i in range(len(job.job.keys)) if i not in job.reported)])
        done += 1
        if len(job.reported) == len(job.job.keys):
            job.end()
        stack.pump()
        assert len(loaded_keys(tier)) - done <= 8
    assert loaded_keys(tier) == keys[0]
    assert stack.poll("a", 0, 16 * TPC).hit == 16 * TPC
    assert statistics(stack).counters.failed == 0
    assert reads(stack) is BreakerState.CLOSED


def test_the_share_is_per_tier() -> None:
    first, second = sync_tier("first"), sync_tier("second")
    stack = stack_of(tiers=[first, second], config=settings(16))
    for name, tier in (("a", first), ("b", second)):
        add_held(stack, tier, name, 4 * TPC)
        stack.poll(name, 0, 4 * TPC)
    assert len(loaded_keys(first)) == len(loaded_keys(second)) == 4


def test_at_least_one_chunk_is_handed_over() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(4, inflight_share=0.0, promotion_share=1.0))
    keys = add_held(stack, tier, "a", 3 * TPC)
    stack.poll("a", 0, 3 * TPC)
    for i in range(3):
        assert loaded_keys(tier) == keys[0][: i + 1]
        tier.loads[0].finish()
        stack.pump()
    assert stack.poll("a", 0, 3 * TPC).hit == 3 * TPC


def test_a_paced_remainder_waits_until_a_read_is_worth_it() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(64))
    add_held(stack, tier, "a", 32 * TPC)
    stack.poll("a", 0, 32 * TPC)
    (job,) = tier.loads
    job.progress(done=range(3))
    stack.pump()
    assert len(tier.calls_of("submit_load")) == 1
    job.progress(done=[3])
    stack.pump()
    assert [len(call.keys) for call in tier.calls_of("submit_load")] == [16, 4]


# -- overdue


def hang_one(stack: CoreStack, tier: ScriptedTier, name: str, chunks: int) -> None:
    """A request whose load becomes overdue."""
    add_held(stack, tier, name, chunks * TPC)
    assert stack.poll(name, 0, chunks * TPC).hit is None
    stack.wait(10.5)
    assert stack.poll(name, 0, chunks * TPC).hit == 0
    stack.take(name, 0)


def test_an_overdue_load_lets_its_requests_go_and_quarantines_its_slots() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(16, **PATIENT))
    keys = add_held(stack, tier, "a", 4 * TPC)
    stack.poll("a", 0, 4 * TPC)
    stack.wait(10.5)
    assert stack.poll("a", 0, 4 * TPC).hit == 0
    assert stack.core.residency.quarantined_bytes == 4 * SIZE
    assert in_primary(stack, keys[0]) == [False] * 4
    assert reads(stack) is BreakerState.OPEN
    assert len(tier.calls_of("cancel")) == 1
    fill(stack, "q", 12 * TPC)
    assert stack.core.residency.free_bytes == 0
    tier.loads[0].finish()
    stack.pump()
    assert stack.core.residency.quarantined_bytes == 0
    assert statistics(stack).counters.late == 4
    assert in_primary(stack, keys[0]) == [False] * 4
    stack.take("a", 0)
    go_idle(stack)


def test_a_tier_with_an_overdue_load_is_asked_one_trial_at_a_time() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(32, **PATIENT))
    hang_one(stack, tier, "x", 2)
    stack.wait(1.0)
    assert reads(stack) is BreakerState.HALF_OPEN
    add_held(stack, tier, "a", 4 * TPC)
    assert stack.poll("a", 0, 4 * TPC).hit is None
    assert len(loaded_keys(tier)) == 3
    stack.add("b", 4 * TPC, seed="a")
    assert stack.poll("b", 0, 4 * TPC).hit is None
    for done in range(1, 5):
        assert len(loaded_keys(tier)) == 2 + done
        tier.loads[-1].finish()
        stack.pump()
    assert reads(stack) is BreakerState.CLOSED
    assert stack.poll("a", 0, 4 * TPC).hit == 4 * TPC
    assert stack.poll("b", 0, 4 * TPC).hit == 4 * TPC
    tier.loads[0].finish()
    stack.pump()
    add_held(stack, tier, "c", 4 * TPC)
    stack.poll("c", 0, 4 * TPC)
    assert len(tier.calls_of("submit_load")[-1].keys) == 4


def test_at_the_mark_every_tier_that_holds_overdue_slots_is_closed_until_they_come_back() -> None:
    first, second, clean = sync_tier("first"), sync_tier("second"), sync_tier("clean")
    stack = stack_of(tiers=[first, second, clean], config=settings(16, **PATIENT))
    hang_one(stack, first, "x", 2)
    hang_one(stack, second, "y", 2)
    stack.wait(100.0, step=1.0)
    assert core_of(stack).overdue_bytes() == 4 * SIZE
    for name, tier in (("a", first), ("b", second)):
        add_held(stack, tier, name, 2 * TPC)
        assert stack.poll(name, 0, 2 * TPC).hit == 0
        stack.take(name, 0)
        assert tier.keys_touched["submit_load"] == 2
    add_held(stack, clean, "c", 2 * TPC)
    assert stack.poll("c", 0, 2 * TPC).hit is None
    finish_loads(stack, clean)
    first.loads[0].finish()
    stack.pump()
    stack.add("d", 2 * TPC, seed="a")
    assert stack.poll("d", 0, 2 * TPC).hit is None
    assert first.keys_touched["submit_load"] == 4


def test_trials_of_two_tiers_do_not_pass_the_mark_together() -> None:
    first, second = sync_tier("first"), sync_tier("second")
    stack = stack_of(tiers=[first, second], config=settings(20, **PATIENT))
    hang_one(stack, first, "x", 2)
    hang_one(stack, second, "y", 2)
    stack.wait(5.0, step=1.0)
    for name, tier in (("a", first), ("b", second)):
        add_held(stack, tier, name, 2 * TPC)
        stack.poll(name, 0, 2 * TPC)
    stack.wait(11.0, step=1.0)
    assert core_of(stack).overdue_bytes() <= 5 * SIZE


def test_a_hung_tier_takes_no_more_than_the_share_however_many_ask() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(16))
    for i in range(60):
        add_held(stack, tier, f"r{i}", 2 * TPC)
        while stack.poll(f"r{i}", 0, 2 * TPC).hit is None:
            stack.wait(0.5)
        stack.take(f"r{i}", 0)
        stack.finish(f"r{i}")
        stack.wait(5.0, step=1.0)
        assert core_of(stack).overdue_bytes() <= 4 * SIZE
        assert stack.core.residency.quarantined_bytes <= 4 * SIZE
    for job in list(tier.loads):
        job.finish()
    stack.pump()
    stack.wait(61.0)
    assert stack.core.residency.quarantined_bytes == 0
    add_held(stack, tier, "good", 2 * TPC)
    stack.poll("good", 0, 2 * TPC)
    finish_loads(stack, tier)
    assert stack.poll("good", 0, 2 * TPC).hit == 2 * TPC


def test_an_overdue_job_whose_keys_all_came_is_a_fault_too() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(16, **PATIENT))
    add_held(stack, tier, "a", 2 * TPC)
    stack.poll("a", 0, 2 * TPC)
    tier.loads[0].progress(done=[0, 1])
    stack.pump()
    assert stack.poll("a", 0, 2 * TPC).hit == 2 * TPC
    stack.wait(10.5)
    assert statistics(stack).tiers["near"].overdue_jobs == 1
    assert core_of(stack).overdue_bytes() == 0
    tier.loads[0].end()
    stack.pump()
    assert core_of(stack).tiers[0].overdue_jobs == 0


def test_a_cancelled_load_counts_as_overdue_only_after_its_bound() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(16, **PATIENT))
    add_held(stack, tier, "a", 2 * TPC)
    stack.poll("a", 0, 2 * TPC)
    stack.finish("a")
    assert stack.core.residency.quarantined_bytes == 2 * SIZE
    stack.wait(9.0)
    assert core_of(stack).overdue_bytes() == 0
    assert reads(stack) is BreakerState.CLOSED
    stack.wait(2.0)
    assert core_of(stack).overdue_bytes() == 2 * SIZE
    tier.loads[0].fail(FailCause.CANCELLED)
    stack.pump()
    assert core_of(stack).overdue_bytes() == 0
    go_idle(stack)


# -- breakers


def test_consecutive_errors_open_the_breaker_and_open_means_not_asked() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    for i in range(3):
        add_held(stack, tier, f"r{i}", TPC)
        stack.poll(f"r{i}", 0, TPC)
        tier.loads[0].finish(failed={0: FailCause.IO_ERROR})
        stack.pump()
        assert stack.poll(f"r{i}", 0, TPC).hit == 0
    assert reads(stack) is BreakerState.OPEN
    probes = tier.keys_touched["probe"]
    add_held(stack, tier, "a", TPC)
    answer = stack.poll("a", 0, TPC)
    assert (answer.hit, answer.cause) == (0, AnswerCause.NOTHING_STORED)
    assert tier.keys_touched["probe"] == probes


def test_the_breaker_closes_by_a_trial() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    core_of(stack).tiers[0].reads.failure(stack.clock.monotonic(), at_once=True)
    stack.wait(1.0)
    add_held(stack, tier, "a", 4 * TPC)
    stack.poll("a", 0, 4 * TPC)
    assert [len(call.keys) for call in tier.calls_of("submit_load")] == [1]
    add_held(stack, tier, "b", TPC)
    assert stack.poll("b", 0, TPC).hit == 0
    tier.loads[0].finish()
    stack.pump()
    assert reads(stack) is BreakerState.CLOSED
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 4 * TPC).hit == 4 * TPC


def test_queued_promotions_of_a_tier_whose_breaker_opens_fail_at_once() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(16, inflight_share=0.0, promotion_share=1.0))
    for name in ("a", "b"):
        add_held(stack, tier, name, 4 * TPC)
        stack.poll(name, 0, 4 * TPC)
    core_of(stack).tiers[0].reads.failure(stack.clock.monotonic(), at_once=True)
    stack.core.advance(stack.clock.monotonic() + 0.01)
    tier.loads[0].finish()
    stack.pump()
    assert stack.poll("b", 0, 4 * TPC).hit == 0
    assert stack.poll("a", 0, 4 * TPC).hit in (0, TPC)
    assert len(loaded_keys(tier)) == 1
    assert stack.core.residency.reserved_bytes == 0


def test_a_trial_stays_within_the_share_of_what_is_in_flight() -> None:
    tier = sync_tier()
    stack = stack_of(
        tiers=[tier], config=settings(16, promotion_share=1.0, store_reserve=0.0, inflight_share=1 / 16, **PATIENT)
    )
    add_held(stack, tier, "a", TPC)
    stack.poll("a", 0, TPC)
    (slow,) = tier.loads  # not overdue for long
    core_of(stack).tiers[0].reads.failure(stack.clock.monotonic(), at_once=True)
    stack.wait(1.0)
    assert reads(stack) is BreakerState.HALF_OPEN
    add_held(stack, tier, "b", TPC)
    stack.poll("b", 0, TPC)
    assert tier.loads == [slow]
    slow.finish()
    stack.pump()
    finish_loads(stack, tier)
    assert stack.poll("b", 0, TPC).hit == TPC


def test_a_failed_trial_keeps_it_open_for_twice_as_long() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    core_of(stack).tiers[0].reads.failure(stack.clock.monotonic(), at_once=True)
    stack.wait(1.0)
    add_held(stack, tier, "a", TPC)
    stack.poll("a", 0, TPC)
    tier.loads[0].finish(failed={0: FailCause.IO_ERROR})
    stack.pump()
    assert reads(stack) is BreakerState.OPEN
    stack.wait(1.5)
    assert reads(stack) is BreakerState.OPEN
    stack.wait(0.6)
    assert reads(stack) is BreakerState.HALF_OPEN


def test_it_closes_with_time_whatever_the_traffic() -> None:
    stack = stack_of(tiers=[sync_tier()])
    core_of(stack).tiers[0].reads.failure(stack.clock.monotonic(), at_once=True)
    due = stack.core.next_deadline()
    assert due == stack.clock.monotonic() + 1.0
    stack.wait(1.0)
    assert reads(stack) is BreakerState.HALF_OPEN
    stack.wait(1.0)
    assert reads(stack) is BreakerState.CLOSED


def test_failed_probes_open_the_breaker_of_reads() -> None:
    tier = async_tier()
    stack = stack_of(tiers=[tier])
    for i in range(3):
        add_held(stack, tier, f"r{i}", TPC)
        stack.poll(f"r{i}", 0, TPC)
        tier.probes[0].finish(error=FailCause.IO_ERROR)
        stack.pump()
    assert reads(stack) is BreakerState.OPEN


def test_a_probe_may_be_the_trial() -> None:
    tier = async_tier()
    stack = stack_of(tiers=[tier])
    core_of(stack).tiers[0].reads.failure(stack.clock.monotonic(), at_once=True)
    stack.wait(1.0)
    add_held(stack, tier, "a", TPC)
    assert stack.poll("a", 0, TPC).hit is None
    add_held(stack, tier, "b", TPC)
    assert stack.poll("b", 0, TPC).hit == 0
    answer_probes(stack, tier)
    assert reads(stack) is BreakerState.CLOSED
    finish_loads(stack, tier)
    assert stack.poll("a", 0, TPC).hit == TPC


def test_content_faults_and_absence_are_no_errors_of_the_tier() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    for i in range(10):
        add_held(stack, tier, f"r{i}", TPC)
        stack.poll(f"r{i}", 0, TPC)
        tier.loads[0].finish(failed={0: FailCause.GONE if i % 2 else FailCause.CORRUPT})
        stack.pump()
    assert reads(stack) is BreakerState.CLOSED


@pytest.mark.parametrize("cause", [FailCause.CANCELLED, FailCause.GONE])
def test_a_trial_that_ends_without_an_error_does_not_shut_the_tier_for_ever(cause: FailCause) -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    core_of(stack).tiers[0].reads.failure(stack.clock.monotonic(), at_once=True)
    stack.wait(1.0)
    add_held(stack, tier, "a", TPC)
    stack.poll("a", 0, TPC)
    tier.loads[0].fail(cause)
    stack.pump()
    stack.wait(3.0, step=0.5)
    add_held(stack, tier, "b", TPC)
    stack.poll("b", 0, TPC)
    finish_loads(stack, tier)
    assert stack.poll("b", 0, TPC).hit == TPC


def test_a_cancelled_trial_gives_way_to_the_next() -> None:
    tier = sync_tier()
    tier.obeys_cancel = True
    stack = stack_of(tiers=[tier])
    core_of(stack).tiers[0].reads.failure(stack.clock.monotonic(), at_once=True)
    stack.wait(1.0)
    add_held(stack, tier, "a", TPC)
    stack.poll("a", 0, TPC)
    stack.finish("a")
    assert core_of(stack).tiers[0].reads.allows


def test_a_long_queue_is_no_breaker() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(64, cascade_queue=4))
    fill(stack, "p", 40 * TPC, cascade=True)
    core = core_of(stack).tiers[0]
    assert statistics(stack).tiers["near"].cascade_dropped > 0
    assert core.writes.state is BreakerState.CLOSED
    assert core.reads.state is BreakerState.CLOSED


def test_reads_and_writes_have_their_own_breakers() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    core = core_of(stack).tiers[0]
    core.writes.failure(stack.clock.monotonic(), at_once=True)
    add_held(stack, tier, "a", TPC)
    stack.poll("a", 0, TPC)
    finish_loads(stack, tier)
    assert stack.poll("a", 0, TPC).hit == TPC
    core.reads.failure(stack.clock.monotonic(), at_once=True)
    stack.wait(1.0)
    assert stack.lookup(stack.keys("z", TPC)[0][0], context("k")) is LookupResult.MISS


def test_a_slow_tier_costs_a_healthy_one_nothing() -> None:
    slow, fast = sync_tier("slow"), sync_tier("fast").auto()
    stack = stack_of(tiers=[slow, fast], config=settings(32))
    add_held(stack, slow, "x", 4 * TPC)
    stack.poll("x", 0, 4 * TPC)
    for i in range(10):
        add_held(stack, fast, f"r{i}", 4 * TPC)
        stack.poll(f"r{i}", 0, 4 * TPC)
        assert stack.poll(f"r{i}", 0, 4 * TPC).hit == 4 * TPC
        plan = stack.take(f"r{i}", 4 * TPC)
        assert plan is not None
        stack.complete_load(plan)
        stack.finish(f"r{i}")
    assert state(stack, "x") is RequestState.FETCHING


# -- what a tier must not do, and does


def test_reports_that_contradict_the_ledger_are_dropped_and_counted() -> None:
    first, second = sync_tier("first"), sync_tier("second")
    stack = stack_of(tiers=[first, second])
    add_held(stack, first, "a", 4 * TPC)
    stack.poll("a", 0, 4 * TPC)
    (job,) = first.loads
    job_id = job.job.job_id
    second.emit(KeysDone(job_id, [0, 1]))
    second.emit(JobEnded(job_id))
    first.emit(KeysDone(999, [0], [(1, FailCause.GONE)]))
    first.emit(JobEnded(999))
    stack.pump()
    assert statistics(stack).counters.late == 6
    assert state(stack, "a") is RequestState.FETCHING
    job.progress(done=[0, 1])
    first.emit(KeysDone(job_id, [0, 1], [(1, FailCause.CORRUPT)]))
    stack.pump()
    assert statistics(stack).counters.late == 9
    job.finish()
    first.emit(JobEnded(job_id))
    stack.pump()
    assert stack.poll("a", 0, 4 * TPC).hit == 4 * TPC


def test_keys_left_out_of_an_ended_job_failed_with_its_cause() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(64))
    add_held(stack, tier, "a", 4 * TPC)
    stack.poll("a", 0, 4 * TPC)
    tier.loads[0].progress(done=[0])
    tier.loads[0].fail(FailCause.TIMEOUT)
    stack.pump()
    assert stack.poll("a", 0, 4 * TPC).hit == TPC
    assert statistics(stack).tiers["near"].failed == {FailCause.TIMEOUT: 3}


def test_the_slots_of_failed_keys_are_not_used_before_the_job_has_ended() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(4))
    keys = add_held(stack, tier, "a", 4 * TPC)
    stack.poll("a", 0, 4 * TPC)
    tier.loads[0].progress(done=[0], failed={1: FailCause.GONE, 2: FailCause.GONE})
    stack.pump()
    assert stack.core.residency.quarantined_bytes == 2 * SIZE
    stack.take("a", 0)
    stack.finish("a")
    hold(stack, tier, keys)
    stack.add("s", 4 * TPC)
    plan = stack.prepare_store("s", [(0, i) for i in range(4)])
    assert plan is not None
    assert len(plan.slots) == 1
    tier.loads[0].end()
    stack.pump()
    assert stack.core.residency.quarantined_bytes == 0
    stack.complete_store(plan)
    go_idle(stack)


def test_a_tier_that_never_knows_is_not_waited_for_for_ever() -> None:
    tier = async_tier()
    tier.on_probe = lambda probe: probe.finish(dict.fromkeys(probe.keys, Presence.UNKNOWN))
    stack = stack_of(tiers=[tier])
    for i in range(3):
        assert reads(stack) is BreakerState.CLOSED
        stack.add(f"r{i}", TPC)
        while stack.poll(f"r{i}", 0, TPC).hit is None:
            stack.wait(0.1)
    assert reads(stack) is BreakerState.OPEN
