"""The per-key door: its nine rules."""

from __future__ import annotations

import pytest
from core_kit import (
    FULL,
    HYBRID,
    SIZE,
    TPC,
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

from kvstrata.core.messages import RequestOptions, TierFilter
from kvstrata.core.requests import RequestState
from kvstrata.testing import ScriptedTier
from kvstrata.testing.stack import CoreStack
from kvstrata.types import FailCause, LookupResult, Medium, OffloadKey

MISS, HIT, PENDING, RETRY = LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.RETRY


def look(stack: CoreStack, name: str, keys: list[OffloadKey]) -> list[LookupResult]:
    """All answers of one step; the step does not end."""
    return [stack.lookup(key, context(name)) for key in keys]


def step(stack: CoreStack, name: str, keys: list[OffloadKey]) -> list[LookupResult]:
    """One scheduler step of one request."""
    stack.pump()
    answers = look(stack, name, keys)
    stack.end_step()
    return answers


def held_by(tier: ScriptedTier, stack: CoreStack, seed: str, chunks: int) -> list[OffloadKey]:
    """Keys of a prompt that the tier has."""
    keys = stack.keys(seed, chunks * TPC)
    hold(stack, tier, keys)
    return flat(keys)


def window_scan(stack: CoreStack, name: str, keys: list[OffloadKey], window: int) -> tuple[int, bool]:
    """An engine's scan from the right: (end of the found window or 0, whether it has to wait)."""
    streak, pending, deferred = 0, False, False
    for i in range(len(keys) - 1, -1, -1):
        answer = stack.lookup(keys[i], context(name))
        if answer in (HIT, PENDING):
            streak, pending = streak + 1, pending or answer is PENDING
            if streak == window:
                return i + window, deferred or pending
        else:
            deferred |= answer is RETRY
            streak, pending = 0, False
    return 0, deferred


# rule 1


def test_what_completed_between_two_steps_does_not_look_pending() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = held_by(tier, stack, "p", 2)
    assert step(stack, "a", keys) == [PENDING, PENDING]
    tier.loads[0].finish()
    assert step(stack, "a", keys) == [HIT, HIT]


# rule 2


def test_primary_is_asked_first_and_its_answers_end_the_call() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = fill(stack, "p", 32)[0]
    stack.add("s", 64, seed="p")
    plan = stack.prepare_store("s", [(0, 2), (0, 3)])
    assert plan is not None
    assert step(stack, "a", keys + list(plan.keys)) == [HIT, HIT, PENDING, PENDING]
    assert tier.keys_touched["probe"] == 0


# rule 3


@pytest.mark.scenario_114
def test_the_tier_filter_lets_a_matching_tier_through_and_gives_others_no_probe() -> None:
    disk, store = sync_tier("disk", medium=Medium.NVME), sync_tier("store", medium=Medium.OBJECT)
    stack = stack_of(tiers=[store, disk])
    keys = held_by(disk, stack, "p", 1)
    store.put(keys)
    only = TierFilter(media=frozenset({Medium.NVME}))
    assert stack.lookup(keys[0], context("a", load_tiers=only)) is PENDING
    stack.end_step()
    assert store.total_keys_touched == 0
    assert loaded_keys(disk) == keys


def test_excluded_tiers_and_tiers_with_an_open_breaker_are_not_asked() -> None:
    first, second = sync_tier("first"), sync_tier("second")
    stack = stack_of(tiers=[first, second])
    keys = held_by(first, stack, "p", 1)
    assert stack.lookup(keys[0], context("a", exclude_tiers=frozenset({"first"}))) is MISS
    assert first.keys_touched["probe"] == 0
    core_of(stack).tiers[0].reads.failure(stack.clock.monotonic(), at_once=True)
    assert stack.lookup(keys[0], context("b")) is MISS
    assert first.keys_touched["probe"] == 0


def test_options_of_the_request_narrow_what_its_context_allows() -> None:
    tier = sync_tier("disk", medium=Medium.NVME)
    stack = stack_of(tiers=[tier])
    keys = held_by(tier, stack, "p", 1)
    stack.add("a", 16, RequestOptions(load_tiers=TierFilter(names=frozenset())))
    assert stack.lookup(keys[0], context("a")) is MISS
    assert tier.keys_touched["probe"] == 0


def test_a_request_that_must_not_read_the_cache_misses_before_any_probe() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    fill(stack, "p", 16)
    keys = held_by(tier, stack, "p", 2)
    stack.add("a", 32, RequestOptions(may_load=False), seed="p")
    assert step(stack, "a", keys) == [MISS, MISS]
    assert tier.keys_touched["probe"] == 0


# rule 4


def test_a_lookup_that_starts_a_promotion_is_hit_pending_and_adds_nothing_to_the_probe_delay() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = held_by(tier, stack, "p", 1)
    assert step(stack, "a", keys) == [PENDING]
    stack.wait(1.0)
    assert step(stack, "a", keys) == [PENDING]
    finish_loads(stack, tier)
    assert step(stack, "a", keys) == [HIT]
    assert statistics(stack).tiers["near"].delays == 0


def test_one_submit_load_per_tier_and_request_at_the_end_of_the_step() -> None:
    near, far = sync_tier("near"), sync_tier("far")
    stack = stack_of(tiers=[near, far])
    mine, yours = held_by(near, stack, "p", 3), held_by(far, stack, "q", 3)
    for key, other in zip(mine, yours, strict=True):
        assert look(stack, "a", [key, other]) == [PENDING, PENDING]
        assert look(stack, "b", [key]) == [PENDING]
    stack.pump()
    assert not near.calls_of("submit_load")
    stack.end_step()
    assert [list(call.keys) for call in near.calls_of("submit_load")] == [mine]
    assert [list(call.keys) for call in far.calls_of("submit_load")] == [yours]


def test_two_requests_that_look_up_one_chunk_in_the_same_step_cause_one_promotion_under_the_first() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = held_by(tier, stack, "p", 1)
    assert look(stack, "a", keys) == [PENDING]
    assert look(stack, "b", keys) == [PENDING]
    stack.end_step()
    assert loaded_keys(tier) == keys
    (job,) = list(core_of(stack).ledger)
    assert job.request_id == "a"
    stack.finish("a")
    finish_loads(stack, tier)
    assert step(stack, "b", keys) == [HIT]


def test_a_nearer_tier_that_does_not_know_yet_does_not_delay_a_farther_one_that_has_it() -> None:
    near, far = async_tier("near"), sync_tier("far")
    stack = stack_of(tiers=[near, far])
    keys = held_by(far, stack, "p", 1)
    assert step(stack, "a", keys) == [PENDING]
    assert loaded_keys(far) == keys


def test_the_first_tier_in_order_is_read() -> None:
    near, far = sync_tier("near"), sync_tier("far")
    stack = stack_of(tiers=[near, far])
    keys = held_by(far, stack, "p", 1)
    near.put(keys)
    assert step(stack, "a", keys) == [PENDING]
    assert loaded_keys(near) == keys
    assert far.keys_touched["probe"] == 0


def test_a_promotion_that_is_not_handed_over_yet_passes_to_the_second_request_in_the_same_step() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = held_by(tier, stack, "p", 3)
    look(stack, "a", keys[:2])
    look(stack, "b", keys)
    stack.finish("a")
    assert not tier.calls_of("submit_load")
    stack.end_step()
    assert len(tier.calls_of("submit_load")) == 1
    finish_loads(stack, tier)
    assert step(stack, "b", keys) == [HIT, HIT, HIT]


def test_an_heir_that_excludes_the_tier_is_not_served_from_it() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = held_by(tier, stack, "p", 1)
    look(stack, "a", keys)
    assert stack.lookup(keys[0], context("b", exclude_tiers=frozenset({"near"}))) is PENDING
    stack.finish("a")
    stack.end_step()
    assert not tier.calls_of("submit_load")
    assert stack.lookup(keys[0], context("b", exclude_tiers=frozenset({"near"}))) is MISS


def test_a_request_that_joins_an_abandoned_read_holds_what_lands() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(8, silence_s=1.0, stall_s=5.0))
    keys = held_by(tier, stack, "p", 1)
    step(stack, "a", keys)
    stack.wait(1.5)
    assert stack.core.residency.held_bytes == 0
    assert step(stack, "b", keys) == [PENDING]
    assert stack.core.residency.held_bytes == SIZE
    finish_loads(stack, tier)
    assert stack.core.residency.held_bytes == SIZE
    assert step(stack, "b", keys) == [HIT]


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


# rule 6


def test_retry_only_while_some_tier_does_not_know_and_none_has_it() -> None:
    first, second = async_tier("first"), async_tier("second")
    stack = stack_of(tiers=[first, second])
    keys = stack.keys("p", TPC)[0]
    assert step(stack, "a", keys) == [RETRY]
    answer_probes(stack, first)
    assert step(stack, "a", keys) == [RETRY]
    answer_probes(stack, second)
    assert step(stack, "a", keys) == [MISS]
    assert len(first.calls_of("probe")) == len(second.calls_of("probe")) == 1


@pytest.mark.parametrize("make", [sync_tier, async_tier])
def test_being_written_counts_as_not_knowing_and_is_asked_again(make) -> None:  # type: ignore[no-untyped-def]
    tier = make("t")
    stack = stack_of(tiers=[tier])
    keys = stack.keys("p", TPC)[0]
    tier.writing.update(keys)
    for _ in range(4):
        assert step(stack, "a", keys) == [RETRY]
        answer_probes(stack, tier)
        stack.wait(0.01)
    tier.writing.clear()
    tier.put(keys)
    step(stack, "a", keys)
    answer_probes(stack, tier)
    assert step(stack, "a", keys) == [PENDING]


def test_probes_of_one_step_go_out_in_one_batch_per_tier() -> None:
    tier = async_tier()
    stack = stack_of(tiers=[tier])
    keys = held_by(tier, stack, "p", 4)
    assert step(stack, "a", [*keys, keys[0]]) == [RETRY] * 5
    assert [list(call.keys) for call in tier.calls_of("probe")] == [keys]
    assert step(stack, "a", keys) == [RETRY] * 4
    assert len(tier.calls_of("probe")) == 1


@pytest.mark.scenario_89
def test_after_finish_no_tier_is_probed_for_the_request() -> None:
    tier = async_tier()
    stack = stack_of(tiers=[tier])
    look(stack, "a", held_by(tier, stack, "p", 4))
    stack.finish("a")
    stack.end_step()
    assert tier.keys_touched["probe"] == 0


@pytest.mark.scenario_89
def test_after_finish_no_tier_is_read_for_the_request() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = held_by(tier, stack, "p", 4)
    look(stack, "a", keys)
    stack.finish("a")
    stack.end_step()
    assert not tier.calls_of("submit_load")
    assert in_primary(stack, keys) == [False] * 4
    assert statistics(stack).counters.cancelled == 4


# rule 7


def test_a_promotion_that_fails_in_part_keeps_the_chunks_that_came() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = held_by(tier, stack, "p", 4)
    step(stack, "a", keys)
    look(stack, "b", keys)
    tier.loads[0].finish(failed={1: FailCause.CORRUPT})
    stack.pump()
    expected = [HIT, MISS, HIT, HIT]
    assert step(stack, "a", keys) == expected
    assert step(stack, "b", keys) == expected
    assert step(stack, "later", keys) == expected
    assert loaded_keys(tier) == keys


def test_gone_is_plain_absence_and_later_requests_probe_again() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = held_by(tier, stack, "p", 1)
    step(stack, "a", keys)
    tier.loads[0].finish(failed={0: FailCause.GONE})
    stack.pump()
    assert step(stack, "a", keys) == [MISS]
    assert step(stack, "b", keys) == [PENDING]


# rule 8


def test_a_deferred_lookup_that_resolves_reports_its_delay_once() -> None:
    tier = async_tier()
    stack = stack_of(tiers=[tier])
    keys = held_by(tier, stack, "p", 1)
    assert step(stack, "a", keys) == [RETRY]
    stack.wait(0.5)
    assert step(stack, "a", keys) == [RETRY]
    stack.wait(0.25)
    answer_probes(stack, tier)
    assert step(stack, "a", keys) == [PENDING]
    stack.wait(0.5)
    step(stack, "a", keys)
    finish_loads(stack, tier)
    assert step(stack, "a", keys) == [HIT]
    counters = statistics(stack).tiers["far"]
    assert counters.delays == 1
    assert counters.delay_s == pytest.approx(0.75)


def test_the_delay_runs_per_request_tier_and_key() -> None:
    first, second = async_tier("first"), async_tier("second")
    stack = stack_of(tiers=[first, second])
    keys = stack.keys("p", 32)[0]
    for name in ("a", "b"):
        step(stack, name, keys)
    answer_probes(stack, first, second)
    for name in ("a", "b"):
        assert step(stack, name, keys) == [MISS, MISS]
    assert statistics(stack).tiers["first"].delays == statistics(stack).tiers["second"].delays == 4


# the window scan


def test_a_pending_window_at_the_right_end_makes_the_request_wait() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = held_by(tier, stack, "p", 8)
    assert window_scan(stack, "a", keys, 2) == (8, True)
    stack.end_step()
    assert loaded_keys(tier) == [keys[7], keys[6]]
    finish_loads(stack, tier)
    assert window_scan(stack, "a", keys, 2) == (8, False)


def test_a_miss_inside_the_window_lets_the_scan_find_the_next_one_to_the_left() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = held_by(tier, stack, "p", 8)
    del tier.held[keys[6]]
    assert window_scan(stack, "a", keys, 2) == (6, True)
    stack.end_step()
    finish_loads(stack, tier)
    assert window_scan(stack, "a", keys, 2) == (6, False)


@pytest.mark.scenario_12
def test_pending_counts_in_the_streak_and_retry_does_not() -> None:
    near, far = sync_tier("near"), async_tier("far")
    stack = stack_of(tiers=[near, far])
    keys = stack.keys("p", 3 * TPC)[0]
    fill(stack, "p", TPC)
    near.put(keys[1:2])
    near.put(keys[2:])
    assert window_scan(stack, "a", keys, 3) == (3, True)
    other = stack.keys("q", 3 * TPC)[0]
    near.put([other[0], other[2]])
    assert window_scan(stack, "b", other, 3) == (0, True)


# clocks of this door


@pytest.mark.parametrize("why", ["probe", "load", "store"])
def test_a_wait_that_nobody_ends_becomes_a_miss_within_the_bound(why: str) -> None:
    tier = async_tier() if why == "probe" else sync_tier()
    stack = stack_of(tiers=[tier])
    keys = stack.keys("p", TPC)[0]
    if why == "store":
        stack.add("s", TPC, seed="p")
        stack.prepare_store("s", [(0, 0)])
    elif why == "load":
        tier.put(keys)
    first = step(stack, "a", keys)
    assert first == [RETRY if why == "probe" else PENDING]
    for _ in range(22):
        stack.wait(0.1)
        answers = step(stack, "a", keys)
    assert answers == [MISS]
    assert statistics(stack).counters.clock_expired == 1
    stack.wait(50.0, step=1.0)
    assert step(stack, "a", keys) == [MISS]


def test_the_bytes_of_its_first_promotions_extend_the_total_once() -> None:
    tier = sync_tier()
    config = wide(64, stall_s=40.0, job_idle_s=50.0, min_rate_bytes_per_s=float(SIZE))
    stack = stack_of(tiers=[tier], config=config)
    keys = held_by(tier, stack, "p", 8)
    assert step(stack, "a", keys[:4]) == [PENDING] * 4
    assert step(stack, "a", keys) == [PENDING] * 8
    began = stack.clock.monotonic()
    while step(stack, "a", keys) != [MISS] * 8:
        stack.wait(0.25)
        assert stack.clock.monotonic() - began < 20.0
    assert stack.clock.monotonic() - began == pytest.approx(6.0, abs=0.3)


def test_waiting_for_budget_ends_within_the_bound_of_polls() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(8, stall_s=50.0, total_s=1.0, silence_s=1e6))
    look(stack, "a", held_by(tier, stack, "p", 6))
    keys = held_by(tier, stack, "q", 1)
    stack.end_step()
    finish_loads(stack, tier)
    assert step(stack, "b", keys) == [RETRY]
    stack.wait(20.0)
    assert step(stack, "b", keys) == [RETRY]
    polls = 0
    while step(stack, "b", keys) == [RETRY]:
        stack.wait(1.0)
        polls += 1
    assert 7 <= polls <= 11
    assert step(stack, "b", keys) == [MISS]


def test_after_the_time_out_what_is_readable_in_primary_still_hits() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = held_by(tier, stack, "p", 2)
    step(stack, "a", keys)
    tier.loads[0].progress(done=[0])
    stack.pump()
    stack.wait(2.5)
    assert step(stack, "a", keys) == [HIT, MISS]
    assert len(loaded_keys(tier)) == 2


# its life


def test_a_request_that_looks_up_again_after_its_load_starts_a_new_wait() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier])
    keys = held_by(tier, stack, "p", 3)
    step(stack, "a", keys[:2])
    plan = stack.core.prepare_load(keys[:2], context("a"))
    assert plan is not None
    assert state(stack, "a") is RequestState.LOADING
    assert step(stack, "a", keys) == [HIT, HIT, PENDING]
    stack.complete_load(plan)
    assert state(stack, "a") is RequestState.RESOLVING
    assert step(stack, "a", keys) == [HIT, HIT, HIT]
    again = stack.core.prepare_load(keys, context("a"))
    assert again is not None
    stack.complete_load(again)
    assert state(stack, "a") is RequestState.RUNNING
    stack.preempt("a")
    assert step(stack, "a", keys) == [HIT, HIT, HIT]
    stack.finish("a")
    go_idle(stack)


def test_two_loads_of_one_request_may_be_out_at_once() -> None:
    stack = stack_of(HYBRID)
    keys = fill(stack, "p", 64)
    plans = []
    for group in keys:
        assert look(stack, "a", group) == [HIT] * 4
        plans.append(stack.core.prepare_load(group, context("a")))
    for plan in plans:
        assert plan is not None
        assert stack.complete_load(plan) is True
    assert state(stack, "a") is RequestState.RUNNING
    go_idle(stack)


def test_prepare_load_of_a_key_that_is_not_readable_gives_none() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = held_by(tier, stack, "p", 2)
    step(stack, "a", keys)
    assert stack.core.prepare_load(keys, context("a")) is None
    assert stack.core.prepare_load(stack.keys("q", TPC)[0], context("a")) is None
    assert stack.core.residency.held_bytes == 2 * SIZE


def test_a_failed_load_makes_its_keys_a_miss_once_they_have_left_primary() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], config=settings(4))
    keys = held_by(tier, stack, "p", 1)
    step(stack, "a", keys)
    plan = stack.core.prepare_load(keys, context("a"))
    assert plan is not None
    assert stack.complete_load(plan, ok=False) is False
    fill(stack, "q", 64)
    assert step(stack, "a", keys) == [MISS]
    assert step(stack, "b", keys) == [PENDING]


def test_records_made_by_lookups_are_bounded_too() -> None:
    stack = stack_of(config=wide(8, max_requests=10))
    for i in range(50):
        stack.clock.advance(0.01)
        stack.core.advance(stack.clock.monotonic())
        stack.lookup(stack.keys("p", TPC)[0][0], context(f"r{i}"))
    assert statistics(stack).requests == 10
    assert core_of(stack).requests.get("r49") is not None
    assert core_of(stack).requests.get("r39") is None


def test_abort_and_preemption_are_legal_in_every_state_of_this_door() -> None:
    for leave in ("finish", "preempt"):
        for wanted in ("retry", "pending", "loading", "running"):
            tier = async_tier()
            stack = stack_of(FULL, [tier])
            keys = held_by(tier, stack, "p", 2)
            step(stack, "a", keys)
            if wanted != "retry":
                answer_probes(stack, tier)
                assert step(stack, "a", keys) == [PENDING, PENDING]
            if wanted in ("loading", "running"):
                finish_loads(stack, tier)
                plan = stack.core.prepare_load(keys, context("a"))
                assert plan is not None
                if wanted == "running":
                    stack.complete_load(plan)
            getattr(stack, leave)("a")
            answer_probes(stack, tier)
            finish_loads(stack, tier)
            stack.wait(40.0, step=1.0)
            go_idle(stack)
