"""Clocks of waiting requests and jobs, and silence."""

from __future__ import annotations

import pytest
from core_kit import (
    SIZE,
    TPC,
    WINDOW,
    add_held,
    answer_probes,
    async_tier,
    context,
    core_of,
    fill,
    finish_loads,
    go_idle,
    in_primary,
    loaded_keys,
    settings,
    stack_of,
    state,
    statistics,
    sync_tier,
    wide,
)

from kvstrata.core.messages import AnswerCause, RequestOptions, TierFilter
from kvstrata.core.requests import RequestState
from kvstrata.errors import ConfigError
from kvstrata.testing import ScriptedTier
from kvstrata.testing.stack import CoreStack
from kvstrata.types import FailCause


def answered_after(stack: CoreStack, name: str, tokens: int, *, step: float = 0.1, most: float = 100.0) -> float:
    """Poll every `step` seconds until the answer is definite; how long that took."""
    began = stack.clock.monotonic()
    while stack.poll(name, 0, tokens).hit is None:
        stack.wait(step)
        assert stack.clock.monotonic() - began < most, "never answered"
    return stack.clock.monotonic() - began


@pytest.mark.parametrize("clocks", ["default", "zero"])
@pytest.mark.parametrize("hang", ["probe", "load", "store"])
def test_a_hung_probe_load_or_store_is_answered_within_the_bound(hang: str, clocks: str) -> None:
    tier: ScriptedTier = async_tier() if hang == "probe" else sync_tier()
    config = wide(64) if clocks == "default" else wide(64, stall_s=0.0, total_s=0.0)
    stack = stack_of(tiers=[tier], config=config)
    if hang == "store":
        stack.add("s", 64, seed="a")
        stack.prepare_store("s", [(0, i) for i in range(4)])
        stack.add("a", 64)
    else:
        add_held(stack, tier, "a", 64)
    took = answered_after(stack, "a", 64)
    assert took == pytest.approx(2.0 if clocks == "default" else 10.0, abs=0.11)
    assert stack.poll("a", 0, 64).hit == 0
    stack.take("a", 0)


def test_a_tier_that_never_answers_at_all_costs_every_request_one_bound_at_most() -> None:
    tier = async_tier()
    stack = stack_of(tiers=[tier])
    for i in range(5):
        add_held(stack, tier, f"r{i}", 64)
        assert answered_after(stack, f"r{i}", 64) <= 2.1
        stack.take(f"r{i}", 0)
        stack.wait(1.0)


def test_zero_in_the_options_of_one_request_means_the_job_bounds_for_it() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = stack.add("a", 64, RequestOptions(stall_s=0.0, total_s=0.0))
    tier.put(keys[0])
    assert answered_after(stack, "a", 64) == pytest.approx(10.0, abs=0.11)


def test_clocks_are_adjustable_per_request() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = stack.add("a", 64, RequestOptions(stall_s=0.5, total_s=9.0))
    tier.put(keys[0])
    assert answered_after(stack, "a", 64) == pytest.approx(0.5, abs=0.11)


@pytest.mark.parametrize(
    ("hang", "bounds", "expected"),
    [
        ("slow", {"tier_stall_s": {"slow": 5.0}, "tier_total_s": {"slow": 6.0}}, 5.0),
        ("slow", {"tier_stall_s": {"slow": 0.0}, "tier_total_s": {"slow": 0.0}}, 10.0),
        ("slow", {"tier_stall_s": {"slow": 0.5}}, 0.5),
        ("plain", {"tier_stall_s": {"slow": 5.0}, "tier_total_s": {"slow": 6.0}}, 2.0),
    ],
)
def test_clocks_are_adjustable_per_tier(hang: str, bounds: dict[str, dict[str, float]], expected: float) -> None:
    plain, slow = sync_tier("plain"), sync_tier("slow")
    stack = stack_of(tiers=[plain, slow], config=wide(64, **bounds))
    add_held(stack, plain if hang == "plain" else slow, "a", 64)
    assert answered_after(stack, "a", 64) == pytest.approx(expected, abs=0.11)


def test_a_slow_tier_that_has_not_answered_its_probes_has_its_own_bound_too() -> None:
    plain, slow = async_tier("plain"), async_tier("slow")
    stack = stack_of(tiers=[plain, slow], config=wide(64, tier_stall_s={"slow": 5.0}, tier_total_s={"slow": 9.0}))
    add_held(stack, slow, "a", 64)
    assert answered_after(stack, "a", 64) == pytest.approx(5.0, abs=0.11)
    keys = stack.add("b", 64, RequestOptions(load_tiers=TierFilter(names=frozenset({"plain"}))))
    plain.put(keys[0])
    assert answered_after(stack, "b", 64) == pytest.approx(2.0, abs=0.11)


@pytest.mark.parametrize("value", [{"near": -1.0}, {"near": "long"}, 5.0])
def test_impossible_clocks_of_a_tier_are_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match="tier_stall_s"):
        settings(4, tier_stall_s=value)


def test_every_landed_chunk_restarts_the_stall_but_not_the_total() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(64, total_s=5.0))
    add_held(stack, tier, "a", 10 * TPC)
    stack.poll("a", 0, 10 * TPC)
    (job,) = tier.loads
    for index in range(4):
        stack.wait(1.5, step=0.1)
        if index < 3:
            assert stack.poll("a", 0, 10 * TPC).hit is None
            job.progress(done=[index])
            stack.pump()
    answer = stack.poll("a", 0, 10 * TPC)
    assert (answer.hit, answer.cause) == (3 * TPC, AnswerCause.CLOCK)


def test_every_answered_probe_restarts_the_stall() -> None:
    tier = async_tier()
    stack = stack_of(WINDOW, [tier], wide(64, total_s=10.0))
    stack.add("a", 10 * TPC)
    stack.poll("a", 0, 10 * TPC + 1)
    for _ in range(4):
        stack.wait(1.5, step=0.1)
        assert stack.poll("a", 0, 10 * TPC + 1).hit is None
        tier.probes[0].finish()
        stack.pump()
    assert stack.poll("a", 0, 10 * TPC + 1).hit is None
    stack.wait(2.0, step=0.1)
    assert stack.poll("a", 0, 10 * TPC + 1).hit == 0


def test_the_bytes_of_the_first_plan_extend_the_total_at_the_least_rate() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(64, min_rate_bytes_per_s=float(SIZE), stall_s=100.0, job_idle_s=50.0))
    add_held(stack, tier, "a", 10 * TPC)
    assert answered_after(stack, "a", 10 * TPC) == pytest.approx(12.0, abs=0.11)


def test_the_total_is_never_restarted_by_a_failed_round_or_a_new_plan() -> None:
    tier = sync_tier()
    stack = stack_of(WINDOW, [tier], wide(64, max_fetch_rounds=100, stall_s=100.0, total_s=5.0))
    add_held(stack, tier, "a", 60 * TPC)
    began = stack.clock.monotonic()
    while stack.poll("a", 0, 60 * TPC + 1).hit is None:
        stack.wait(0.5, step=0.1)
        for job in list(tier.loads):
            job.finish(failed={0: FailCause.GONE, 1: FailCause.GONE})
        stack.pump()
        assert stack.clock.monotonic() - began < 7.0
    assert stack.clock.monotonic() - began == pytest.approx(5.0, abs=0.6)


def test_changes_of_c_do_not_restart_the_clocks() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 64)
    for i in range(21):
        stack.poll("a", 16 * (i % 2), 64)
        stack.wait(0.1)
    assert stack.poll("a", 0, 64).hit == 0


def test_when_a_clock_runs_out_the_answer_is_what_is_ready_at_that_moment() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    tier.loads[0].progress(done=[0, 1, 3])
    stack.pump()
    stack.wait(2.5)
    answer = stack.poll("a", 0, 64)
    assert (answer.hit, answer.cause) == (32, AnswerCause.CLOCK)
    assert statistics(stack).counters.clock_expired == 1
    assert stack.core.residency.held_bytes == 2 * SIZE
    plan = stack.take("a", 32)
    assert plan is not None
    assert plan.complete
    stack.complete_load(plan)
    tier.loads[0].finish()
    stack.pump()
    assert in_primary(stack, keys[0]) == [True] * 4
    go_idle(stack)
    counters = core_of(stack).counters
    assert (counters.consumed, counters.expired) == (2, 2)


def test_the_answer_of_a_clock_is_the_largest_ready_boundary_also_above_the_share() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(20))
    add_held(stack, tier, "a", 18 * TPC)
    stack.poll("a", 0, 18 * TPC)
    while len(tier.calls_of("submit_load")) < 4:
        tier.loads[0].finish()
        stack.pump()
    stack.wait(2.5)
    hit = stack.poll("a", 0, 18 * TPC).hit
    assert hit is not None
    assert hit > 10 * TPC


def test_without_other_holders_the_answer_of_a_clock_is_not_bounded_by_the_share() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(20))
    fill(stack, "p", 15 * TPC)
    stack.add("run", 15 * TPC, seed="p")
    stack.poll("run", 0, 15 * TPC)
    assert stack.take("run", 15 * TPC) is not None
    keys = stack.add("a", 16 * TPC, seed="p")
    tier.put(keys[0])
    assert stack.poll("a", 0, 16 * TPC).hit is None
    assert state(stack, "a") is RequestState.QUEUED
    assert answered_after(stack, "a", 16 * TPC) <= 2.2
    assert stack.poll("a", 0, 16 * TPC).hit == 15 * TPC


def test_what_lands_late_is_a_hit_for_the_next_request() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    stack.wait(5.0, step=0.5)
    assert stack.poll("a", 0, 64).hit == 0
    assert not tier.calls_of("cancel")
    finish_loads(stack, tier)
    stack.add("b", 64, seed="a")
    assert stack.poll("b", 0, 64).hit == 64
    stack.take("b", 64)
    assert statistics(stack).counters.consumed == 4


def test_an_answer_of_a_clock_stays_definite() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    stack.wait(2.5)
    assert stack.poll("a", 0, 64).hit == 0
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 64).hit == 0
    assert stack.poll("a", 16, 64).hit == 48
    assert len(loaded_keys(tier)) == 4


def test_the_clocks_stand_still_while_everything_is_ready() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    stack.wait(1.5)
    finish_loads(stack, tier)
    for _ in range(20):
        stack.wait(10.0)
        assert stack.poll("a", 0, 64).hit == 64
    tier.held.clear()
    keys = stack.keys("a", 80)[0]
    tier.put(keys)
    stack.core.extend_keys("a", [keys[4:]])
    assert stack.poll("a", 0, 80).hit is None
    stack.wait(0.4)
    assert stack.poll("a", 0, 80).hit is None
    stack.wait(0.2)
    assert stack.poll("a", 0, 80).hit == 64


def test_the_gap_between_two_polls_counts_as_a_tenth_of_a_second_while_waiting_for_room() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], config=settings(8, silence_s=1e6))
    add_held(stack, tier, "first", 4 * TPC)
    stack.poll("first", 0, 4 * TPC)
    add_held(stack, tier, "a", 4 * TPC)
    polls = 0
    while stack.poll("a", 0, 4 * TPC).hit is None:
        assert state(stack, "a") is RequestState.QUEUED
        stack.wait(5.0)
        polls += 1
        assert polls < 30
    assert 20 <= polls <= 21
    answer = stack.poll("a", 0, 4 * TPC)
    assert (answer.hit, answer.cause) == (0, AnswerCause.CLOCK)


def test_a_waiting_head_gets_its_answer_by_time_when_less_than_a_gap_is_left() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], config=settings(8, silence_s=1e6))
    add_held(stack, tier, "first", 4 * TPC)
    stack.poll("first", 0, 4 * TPC)
    add_held(stack, tier, "a", 4 * TPC)
    for _ in range(20):
        assert stack.poll("a", 0, 4 * TPC).hit is None
        stack.wait(0.099)
    stack.poll("a", 0, 4 * TPC)
    stack.wait(0.1)
    assert state(stack, "a") is RequestState.READY


def test_a_queued_request_that_expires_takes_what_primary_has_if_the_share_has_room() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], config=settings(16, silence_s=1e6))
    fill(stack, "p", 2 * TPC)
    add_held(stack, tier, "first", 6 * TPC)
    stack.poll("first", 0, 6 * TPC)
    keys = stack.add("p", 4 * TPC)
    tier.put(keys[0])
    assert answered_after(stack, "p", 4 * TPC) == pytest.approx(2.0, abs=0.2)
    assert stack.poll("p", 0, 4 * TPC).hit == 2 * TPC


# -- silence


@pytest.mark.parametrize("door", ["two phases", "per key"])
def test_at_the_very_instant_of_a_deadline_what_is_due_happens(door: str) -> None:
    # 1021.66 + 30 is 1051.6599999999999, and that less 1021.66 is less than 30.
    last, silence = 1021.66, 30.0
    assert (last + silence) - last < silence
    tier = async_tier()
    config = settings(16, stall_s=100.0, total_s=100.0, job_idle_s=silence, job_total_s=silence, silence_s=silence)
    stack = stack_of(tiers=[tier], config=config)
    (keys,) = stack.add("a", 4 * TPC)
    stack.core.advance(last)
    if door == "two phases":
        stack.poll("a", 0, 4 * TPC)
    else:
        stack.lookup(keys[0], context("a"))
        stack.core.on_schedule_end()
    assert core_of(stack).requests.waiting == 1
    stack.core.advance(last + silence)
    counters = statistics(stack).counters
    assert counters.silences == 1
    assert core_of(stack).tiers[0].reads.opened == 1, "the probe is overdue at the same instant"


@pytest.mark.parametrize("wanted", ["resolving", "queued", "fetching", "ready"])
def test_a_request_never_polled_again_gives_everything_back(wanted: str) -> None:
    tier = async_tier() if wanted == "resolving" else sync_tier()
    config = settings(16, stall_s=100.0, total_s=100.0, job_idle_s=1e3, job_total_s=1e3)
    stack = stack_of(tiers=[tier], config=config)
    if wanted == "queued":
        add_held(stack, tier, "other", 6 * TPC)
        stack.poll("other", 0, 6 * TPC)
    add_held(stack, tier, "a", 4 * TPC)
    stack.poll("a", 0, 4 * TPC)
    if wanted == "ready":
        finish_loads(stack, tier)
    assert state(stack, "a").value == wanted
    for _ in range(29):
        stack.wait(1.0)
        if wanted == "queued":
            stack.poll("other", 0, 6 * TPC)
    assert state(stack, "a").value == wanted
    stack.wait(1.5)
    assert state(stack, "a") is RequestState.NEW
    assert statistics(stack).counters.silences == 1
    assert statistics(stack).queued == 0
    assert stack.core.residency.held_bytes == (6 * SIZE if wanted == "queued" else 0)
    if wanted == "fetching":
        finish_loads(stack, tier)
        assert stack.core.residency.pinned_bytes == 0


def test_polls_keep_silence_away() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    fill(stack, "p", 64)
    stack.add("a", 64, seed="p")
    for _ in range(10):
        assert stack.poll("a", 0, 64).hit == 64
        stack.wait(29.0)
    assert statistics(stack).counters.silences == 0


def test_after_silence_the_next_poll_resolves_anew_on_what_is_left_of_the_clocks() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(64, silence_s=1.0))
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    stack.wait(1.2)
    assert state(stack, "a") is RequestState.NEW
    assert stack.poll("a", 0, 64).hit is None
    assert len(loaded_keys(tier)) == 4
    stack.wait(0.6)
    stack.poll("a", 0, 64)
    stack.wait(0.5)
    assert stack.poll("a", 0, 64).hit == 0


def test_a_request_that_comes_back_with_nothing_left_is_answered_at_once() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    stack.wait(40.0)
    finish_loads(stack, tier)
    tier.put(keys[0])
    calls = len(tier.calls)
    answer = stack.poll("a", 0, 64)
    assert answer.hit is not None
    assert len(tier.calls) == calls


def test_silence_does_not_touch_running_requests_or_loads() -> None:
    stack = stack_of()
    fill(stack, "p", 64)
    stack.add("a", 64, seed="p")
    stack.poll("a", 0, 64)
    plan = stack.take("a", 64)
    assert plan is not None
    stack.wait(1000.0, step=10.0)
    assert state(stack, "a") is RequestState.LOADING
    assert stack.core.residency.pinned_bytes == 4 * SIZE
    assert statistics(stack).oldest_job_s == pytest.approx(1000.0)
    assert statistics(stack).counters.silences == 0
    assert stack.complete_load(plan) is True


# -- jobs and probes


def test_a_job_without_a_finished_key_for_ten_seconds_is_overdue() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(64, stall_s=100.0, total_s=100.0))
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    stack.wait(9.0)
    tier.loads[0].progress(done=[0])
    stack.pump()
    stack.wait(9.9)
    stack.poll("a", 0, 64)
    assert stack.core.residency.quarantined_bytes == 0
    stack.wait(0.2)
    assert stack.core.residency.quarantined_bytes == 3 * SIZE
    assert stack.poll("a", 0, 64).hit == 16
    assert statistics(stack).tiers["near"].overdue_jobs == 1
    assert len(tier.calls_of("cancel")) == 1
    tier.loads[0].finish()
    stack.pump()
    assert stack.core.residency.quarantined_bytes == 0
    assert in_primary(stack, keys[0]) == [True, False, False, False]
    assert statistics(stack).counters.failed == 3


def test_a_job_that_takes_sixty_seconds_in_all_is_overdue() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(64, stall_s=100.0, total_s=100.0))
    add_held(stack, tier, "a", 20 * TPC)
    stack.poll("a", 0, 20 * TPC)
    for index in range(12):
        stack.wait(4.9)
        stack.poll("a", 0, 20 * TPC)
        tier.loads[0].progress(done=[index])
        stack.pump()
    assert statistics(stack).tiers["near"].overdue_jobs == 0
    stack.wait(1.5)
    assert statistics(stack).tiers["near"].overdue_jobs == 1
    assert stack.core.residency.quarantined_bytes == 8 * SIZE


def test_a_probe_that_is_not_answered_for_ten_seconds_counts_as_absent() -> None:
    tier = async_tier()
    stack = stack_of(tiers=[tier], config=wide(64, stall_s=100.0, total_s=100.0))
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    stack.wait(9.9)
    assert stack.poll("a", 0, 64).hit is None
    stack.wait(0.2)
    assert stack.poll("a", 0, 64).hit == 0
    assert not core_of(stack).tiers[0].reads.allows
    answer_probes(stack, tier)
    assert stack.poll("a", 0, 64).hit == 0
    assert statistics(stack).counters.late == 1


def test_an_engine_that_does_not_step_is_served_by_deadlines_alone() -> None:
    tier = async_tier()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    deadlines = []
    for _ in range(50):
        due = stack.core.next_deadline()
        if due is None:
            break
        assert due >= stack.clock.monotonic()
        deadlines.append(due)
        stack.wait(max(due - stack.clock.monotonic(), 1e-6))
    assert stack.core.next_deadline() is None
    assert deadlines[0] == pytest.approx(1002.0)
    assert state(stack, "a") is RequestState.NEW
    go_idle(stack)


def test_nothing_to_do_has_no_deadline() -> None:
    stack = stack_of()
    assert stack.core.next_deadline() is None
    assert stack.core.idle
    stack.core.advance(0.0)
    assert core_of(stack).now == stack.clock.monotonic()


def test_the_bounds_of_a_job_run_from_when_its_tier_is_told() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], auto=False)
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    stack.wait(30.0)  # the process was stopped before it could hand the read over
    assert not any(job.overdue for job in core_of(stack).ledger)
    stack.pump()
    stack.wait(9.0)
    assert not any(job.overdue for job in core_of(stack).ledger)
    stack.wait(1.5)
    assert all(job.overdue for job in core_of(stack).ledger)


def test_a_queued_request_waits_within_its_bound_though_every_poll_finds_other_computed_tokens() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(8, promotion_share=1.0, store_reserve=0.0))
    add_held(stack, tier, "a", 8 * TPC)
    stack.poll("a", 0, 8 * TPC)
    finish_loads(stack, tier)
    add_held(stack, tier, "b", 8 * TPC)
    for i in range(40):
        answer = stack.poll("b", i % 2 * TPC, 8 * TPC)
        assert stack.poll("a", 0, 8 * TPC).hit
        if answer.hit is not None:
            break
        stack.wait(0.1)
    assert answer.hit == 0
    assert i <= 21
