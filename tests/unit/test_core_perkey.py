"""The per-key door: its rules about answers, promotions and failures."""

from __future__ import annotations

import pytest
from core_kit import (
    HIT,
    MISS,
    PENDING,
    RETRY,
    SIZE,
    TPC,
    answer_probes,
    async_tier,
    context,
    core_of,
    fill,
    finish_loads,
    held_by,
    in_primary,
    loaded_keys,
    look,
    stack_of,
    statistics,
    step,
    sync_tier,
    wide,
)

from kvstrata.core.messages import RequestOptions, TierFilter
from kvstrata.types import FailCause, Medium

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
