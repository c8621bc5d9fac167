"""The two-phase door: resolve first, fetch exactly that, report when all of it is pinned."""

from __future__ import annotations

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
    answer_probes,
    async_tier,
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

from kvstrata.core.messages import AnswerCause, RequestContext, RequestOptions, TierFilter
from kvstrata.core.requests import RequestState
from kvstrata.errors import StateError
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds import FullAttention, SlidingWindow
from kvstrata.types import FailCause, Medium, Presence

# -- fetching


def test_batched_promotion_from_a_secondary_tier() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    assert stack.poll("a", 0, 64).hit is None
    assert [list(job.job.keys) for job in tier.loads] == [keys[0]]
    assert state(stack, "a") is RequestState.FETCHING
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 64).hit == 64
    plan = stack.take("a", 64)
    assert plan is not None
    assert plan.complete
    assert list(plan.keys) == keys[0]
    for key, offset, length in zip(plan.keys, plan.offsets, plan.lengths, strict=True):
        assert bytes(stack.region[offset : offset + length]) == tier.held[key]
    assert stack.complete_load(plan) is True
    assert state(stack, "a") is RequestState.RUNNING
    counters = statistics(stack).counters
    assert (counters.promoted, counters.consumed) == (4, 4)
    go_idle(stack)


def test_a_partly_failed_promotion_keeps_only_the_chunks_that_came() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    tier.loads[0].finish(failed={2: FailCause.IO_ERROR})
    stack.pump()
    assert stack.poll("a", 0, 64).hit == 32
    assert in_primary(stack, keys[0]) == [True, True, False, True]
    counters = statistics(stack).counters
    assert counters.failed == 1
    assert len(tier.calls_of("submit_load")) == 1
    go_idle(stack)


def test_one_submit_load_per_tier_request_and_step() -> None:
    near, far = sync_tier("near"), sync_tier("far")
    stack = stack_of(HYBRID, [near, far], wide(64))
    for name in ("a", "b"):
        keys = stack.add(name, 64)
        hold(stack, near, [keys[0][:2], []])
        hold(stack, far, keys)
        stack.poll(name, 0, 65)
    for tier in (near, far):
        assert len(tier.calls_of("submit_load")) == 2
    assert len(loaded_keys(near)) == 4
    assert len(loaded_keys(far)) == 8


def test_two_requests_that_want_one_chunk_cause_one_promotion() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    hold(stack, tier, stack.add("a", 64, seed="p"))
    stack.add("b", 64, seed="p")
    stack.poll("a", 0, 64)
    stack.poll("b", 0, 64)
    assert len(loaded_keys(tier)) == 4
    finish_loads(stack, tier)
    for name in ("a", "b"):
        assert stack.poll(name, 0, 64).hit == 64
        stack.take(name, 64)
    assert statistics(stack).counters.consumed == 4


def test_chunks_are_promoted_in_token_order_over_all_groups() -> None:
    layout = Layout(
        (
            Group(FullAttention(), 32, chunk_bytes=SIZE),
            Group(FullAttention(), 16, chunk_bytes=SIZE),
        )
    )
    tier = sync_tier()
    stack = stack_of(layout, [tier], settings(32, promotion_share=1.0, inflight_share=0.0))
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    finish_loads(stack, tier)
    (big, small) = keys
    assert loaded_keys(tier) == [big[0], small[0], small[1], big[1], small[2], small[3]]


def test_what_primary_has_is_not_promoted_again() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = fill(stack, "first", 32, seed="p")
    more = add_held(stack, tier, "p", 64)
    stack.poll("p", 0, 64)
    assert loaded_keys(tier) == more[0][2:]
    assert more[0][:2] == keys[0]
    finish_loads(stack, tier)
    assert stack.poll("p", 0, 64).hit == 64


def test_scenario_s_rfc_promotes_8_of_68_keys() -> None:
    tier = sync_tier()
    stack = stack_of(S_RFC, [tier])
    keys = add_held(stack, tier, "a", 512)
    assert len(flat(keys)) == 68
    assert stack.poll("a", 0, 513).hit is None
    assert tier.keys_touched["probe"] <= 68
    assert statistics(stack).tiers["near"].probed <= 68
    finish_loads(stack, tier)
    assert sorted(loaded_keys(tier)) == sorted(keys[0] + keys[1][-2:] + keys[2][-2:])
    assert stack.poll("a", 0, 513).hit == 512
    stack.take("a", 512)
    counters = statistics(stack).counters
    assert (counters.promoted, counters.consumed) == (8, 8)


def test_scenario_s_rfc_hits_the_same_as_if_all_were_in_primary() -> None:
    tier = sync_tier()
    stack = stack_of(S_RFC, [tier])
    fill(stack, "a", 512)
    stack.add("b", 512, seed="a")
    assert stack.poll("b", 0, 513).hit == 512
    assert tier.keys_touched["probe"] == 0


@pytest.mark.parametrize("broken", range(8))
def test_scenario_s_rfc_goes_on_when_one_of_the_8_reads_fails(broken: int) -> None:
    tier = sync_tier()
    stack = stack_of(S_RFC, [tier])
    keys = add_held(stack, tier, "a", 512)
    stack.poll("a", 0, 513)
    (job,) = tier.loads
    bad = job.job.keys[broken]
    job.finish(failed={broken: FailCause.CORRUPT})
    stack.pump()
    for later in list(tier.loads):
        assert bad not in later.job.keys
    finish_loads(stack, tier)
    hit = stack.poll("a", 0, 513).hit
    assert hit is not None
    if bad in keys[0]:
        assert hit == 128 * keys[0].index(bad)
    else:
        group = 1 if bad in keys[1] else 2
        assert hit == 16 * keys[group].index(bad)
    go_idle(stack)


def test_holes_in_a_window_promote_nothing_for_a_hit_that_never_comes() -> None:
    tier = sync_tier()
    layout = Layout(
        (Group(FullAttention(), TPC, chunk_bytes=SIZE), Group(SlidingWindow(3 * TPC), TPC, chunk_bytes=SIZE))
    )
    stack = stack_of(layout, [tier])
    keys = stack.add("a", 25 * TPC)
    hold(stack, tier, [keys[0], [key for i, key in enumerate(keys[1]) if i % 3]])
    answer = stack.poll("a", 0, 25 * TPC + 1)
    assert answer.hit is not None
    assert statistics(stack).counters.promoted == answer.hit // TPC * 0
    assert loaded_keys(tier) == []


def test_a_window_present_only_early_promotes_only_up_to_there() -> None:
    tier = sync_tier()
    stack = stack_of(HYBRID, [tier])
    keys = stack.add("a", 40 * TPC)
    hold(stack, tier, [keys[0], keys[1][:8]])
    stack.poll("a", 0, 40 * TPC + 1)
    assert len(loaded_keys(tier)) == 8 + 2
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 40 * TPC + 1).hit == 8 * TPC


def test_a_drafter_needs_the_next_chunk_and_does_not_load_it() -> None:
    layout = Layout((Group(FullAttention(), TPC, drafter=True, chunk_bytes=SIZE),))
    tier = sync_tier()
    stack = stack_of(layout, [tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 64).hit == 48
    assert loaded_keys(tier) == keys[0][:3]


def test_nothing_stored_is_answered_at_once() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    stack.add("a", 64)
    answer = stack.poll("a", 0, 64)
    assert (answer.hit, answer.cause) == (0, AnswerCause.NOTHING_STORED)
    assert stack.take("a", 0) is None
    assert state(stack, "a") is RequestState.RUNNING


# -- probes


def test_an_undecided_request_probes_only_what_its_best_boundary_needs() -> None:
    tier = async_tier()
    stack = stack_of(WINDOW, [tier])
    keys = add_held(stack, tier, "a", 20 * TPC)
    stack.poll("a", 0, 20 * TPC + 1)
    assert [set(probe.keys) for probe in tier.probes] == [set(keys[0][-2:])]
    assert state(stack, "a") is RequestState.RESOLVING


def test_refuted_boundaries_are_probed_one_after_the_other() -> None:
    tier = async_tier()
    stack = stack_of(WINDOW, [tier])
    keys = stack.add("a", 6 * TPC)
    hold(stack, tier, [keys[0][:3]])
    stack.poll("a", 0, 6 * TPC + 1)
    answer_probes(stack, tier)
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 6 * TPC + 1).hit == 3 * TPC
    assert tier.keys_touched["probe"] <= 6
    assert loaded_keys(tier) == keys[0][1:3]


def test_a_full_attention_prefix_is_probed_in_one_round() -> None:
    tier = async_tier()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    assert len(tier.probes) == 1
    assert stack.poll("a", 0, 64).hit is None
    answer_probes(stack, tier)
    assert len(tier.loads) == 1
    assert statistics(stack).tiers["far"].probed == 4


def test_probes_respect_the_largest_batch_of_the_tier() -> None:
    tier = async_tier(max_batch=3)
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 8 * TPC)
    stack.poll("a", 0, 8 * TPC)
    assert [len(probe.keys) for probe in tier.probes] == [3, 3, 2]
    answer_probes(stack, tier)
    finish_loads(stack, tier)
    assert all(len(call.keys) <= 3 for call in tier.calls_of("submit_load"))
    assert stack.poll("a", 0, 8 * TPC).hit == 8 * TPC


def test_a_tier_that_does_not_know_yet_does_not_delay_one_that_has_the_chunks() -> None:
    slow, fast = async_tier("slow"), async_tier("fast")
    stack = stack_of(tiers=[slow, fast])
    keys = add_held(stack, fast, "a", 64)
    stack.poll("a", 0, 64)
    assert len(slow.probes) == len(fast.probes) == 1
    answer_probes(stack, fast)
    assert loaded_keys(fast) == keys[0]
    finish_loads(stack, fast)
    assert stack.poll("a", 0, 64).hit == 64


def test_it_decides_as_soon_as_the_unknown_cannot_change_the_outcome() -> None:
    tier = async_tier(max_batch=1)
    stack = stack_of(tiers=[tier])
    stack.add("a", 64)
    stack.poll("a", 0, 64)
    assert len(tier.probes) == 4
    tier.probes[0].finish()
    stack.pump()
    answer = stack.poll("a", 0, 64)
    assert (answer.hit, answer.cause) == (0, AnswerCause.NOTHING_STORED)


def test_a_late_answer_of_a_decided_request_changes_nothing() -> None:
    slow, fast = async_tier("slow"), async_tier("fast")
    stack = stack_of(tiers=[slow, fast])
    add_held(stack, fast, "a", 64)
    stack.poll("a", 0, 64)
    answer_probes(stack, fast)
    finish_loads(stack, fast)
    answer_probes(stack, slow)
    assert stack.poll("a", 0, 64).hit == 64
    stack.take("a", 64)
    go_idle(stack)


def test_a_synchronous_tier_that_is_being_written_is_asked_again() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = stack.add("a", 64)
    tier.writing.update(keys[0])
    assert stack.poll("a", 0, 64).hit is None
    assert state(stack, "a") is RequestState.RESOLVING
    stack.wait(0.05, step=0.005)
    tier.writing.clear()
    hold(stack, tier, keys)
    stack.wait(0.2, step=0.01)
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 64).hit == 64


def test_an_asynchronous_tier_that_is_being_written_is_asked_again() -> None:
    tier = async_tier()
    stack = stack_of(tiers=[tier])
    keys = stack.add("a", 64)
    tier.writing.update(keys[0])
    stack.poll("a", 0, 64)
    answer_probes(stack, tier)
    assert state(stack, "a") is RequestState.RESOLVING
    tier.writing.clear()
    hold(stack, tier, keys)
    stack.wait(0.2, step=0.01)
    answer_probes(stack, tier)
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 64).hit == 64


def test_a_failed_probe_counts_as_absent() -> None:
    tier = async_tier()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    tier.probes[0].finish(error=FailCause.IO_ERROR)
    stack.pump()
    assert stack.poll("a", 0, 64).hit == 0


def test_a_probe_answered_with_the_wrong_number_of_keys_counts_as_absent() -> None:
    tier = async_tier()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    from kvstrata.types import ProbeDone

    tier.emit(ProbeDone(tier.probes[0].ticket, np.ones(2, np.int8)))
    stack.pump()
    assert stack.poll("a", 0, 64).hit == 0


def test_a_tier_that_answers_a_probe_at_once_is_taken_at_its_word() -> None:
    class Eager(type(async_tier())):  # type: ignore[misc]
        """Says that it is asynchronous, and answers at once."""

        def probe(self, keys):  # type: ignore[no-untyped-def]
            self._note("probe", keys)
            return self.presence_of(keys)

    tier = Eager(name="eager", capabilities=async_tier().capabilities)
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 64).hit == 64


def test_a_synchronous_tier_that_answers_nonsense_has_nothing() -> None:
    class Broken(type(sync_tier())):  # type: ignore[misc]
        """Answers for one key, whatever it is asked."""

        def probe(self, keys):  # type: ignore[no-untyped-def]
            return np.full(1, Presence.PRESENT, np.int8)

    stack = stack_of(tiers=[Broken(name="b")])
    stack.add("a", 64)
    assert stack.poll("a", 0, 64).hit == 0


# -- filters and options


def test_a_tier_filter_lets_a_matching_tier_through_and_gives_others_no_probe() -> None:
    disk = sync_tier("disk", medium=Medium.NVME)
    store = sync_tier("store", medium=Medium.OBJECT)
    remote = async_tier("remote", medium=Medium.OBJECT)
    stack = stack_of(tiers=[disk, store, remote])
    options = RequestOptions(load_tiers=TierFilter(media=frozenset({Medium.NVME})))
    keys = stack.add("a", 64, options)
    for tier in (disk, store, remote):
        hold(stack, tier, keys)
    stack.poll("a", 0, 64)
    finish_loads(stack, disk)
    assert stack.poll("a", 0, 64).hit == 64
    assert store.total_keys_touched == remote.total_keys_touched == 0


def test_a_request_that_must_not_read_the_cache_is_answered_0_before_any_probe() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    fill(stack, "p", 64)
    keys = stack.add("a", 64, RequestOptions(may_load=False), seed="p")
    hold(stack, tier, keys)
    answer = stack.poll("a", 0, 64)
    assert (answer.hit, answer.cause) == (0, AnswerCause.NOT_ALLOWED)
    assert tier.keys_touched["probe"] == 0
    stack.take("a", 0)


def test_the_cap_on_loaded_tokens_bounds_the_hit() -> None:
    stack = stack_of()
    fill(stack, "p", 64)
    stack.add("a", 64, RequestOptions(max_hit_tokens=40), seed="p")
    assert stack.poll("a", 16, 64).hit == 40
    stack.add("b", 64, RequestOptions(max_hit_tokens=0), seed="p")
    assert stack.poll("b", 16, 64).hit == 0


def test_one_request_uses_one_door_for_its_whole_life() -> None:
    stack = stack_of()
    keys = stack.add("a", 64)
    stack.poll("a", 0, 64)
    with pytest.raises(StateError, match="request a: uses the two_phase door and may not use the per_key door"):
        stack.lookup(keys[0][0], RequestContext("a"))
    stack.add("b", 64)
    stack.lookup(keys[0][0], RequestContext("b"))
    with pytest.raises(StateError, match="request b: uses the per_key door and may not use the two_phase door"):
        stack.poll("b", 0, 64)


def test_wrong_calls_are_errors_by_name() -> None:
    stack = stack_of()
    with pytest.raises(StateError, match="request x: unknown"):
        stack.poll("x", 0, 64)
    with pytest.raises(StateError, match="2 key lists for 1 groups"):
        stack.core.add_request("a", [[], []])
    stack.finish("never added")


# -- C and n move


def test_c_shrinks_while_fetching() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 32, 64)
    assert loaded_keys(tier) == keys[0][2:]
    assert stack.poll("a", 0, 64).hit is None
    assert loaded_keys(tier) == keys[0][2:] + keys[0][:2]
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 64).hit == 64
    stack.take("a", 64)
    counters = statistics(stack).counters
    assert (counters.promoted, counters.consumed) == (4, 4)
    go_idle(stack)


def test_c_grows_while_fetching_and_drops_the_chunks_below_it() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    before = record(stack, "a").held.tolist()
    stack.poll("a", 40, 64)
    assert record(stack, "a").held.tolist() == before[2:]
    assert len(loaded_keys(tier)) == 4
    finish_loads(stack, tier)
    assert stack.poll("a", 40, 64).hit == 24
    plan = stack.take("a", 24)
    assert plan is not None
    assert plan.ranges == ((2, 4),)
    counters = statistics(stack).counters
    assert counters.consumed == 2
    go_idle(stack)
    assert core_of(stack).counters.not_taken == 2


def test_c_grows_past_t_while_fetching() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = stack.add("a", 128)
    hold(stack, tier, [keys[0][:4]])
    stack.poll("a", 0, 128)
    answer = stack.poll("a", 96, 128)
    assert (answer.hit, answer.cause) == (0, AnswerCause.NOTHING_STORED)
    assert len(record(stack, "a").held) == 0
    finish_loads(stack, tier)
    stack.take("a", 0)
    go_idle(stack)
    assert core_of(stack).counters.not_taken == 4


def test_c_grows_while_probes_are_out() -> None:
    tier = async_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    assert stack.poll("a", 32, 64).hit is None
    assert tier.keys_touched["probe"] == 4
    answer_probes(stack, tier)
    assert loaded_keys(tier) == keys[0][2:]


def test_a_ready_hit_follows_c() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 64).hit == 64
    assert stack.poll("a", 48, 64).hit == 16
    assert stack.poll("a", 48, 64).hit == 16
    assert stack.poll("a", 64, 64).hit == 0
    assert stack.poll("a", 0, 64).hit == 64
    assert len(loaded_keys(tier)) == 4


def test_n_grows_after_a_preemption() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    assert stack.poll("a", 0, 64).hit == 64
    plan = stack.take("a", 64)
    assert plan is not None
    stack.complete_load(plan)
    stack.core.extend_keys("a", [stack.keys("a", 96)[0][4:]])
    stack.store("a", [(0, 4), (0, 5)])
    stack.preempt("a")
    assert stack.poll("a", 0, 100).hit == 96
    assert statistics(stack).counters.promoted == 4


def test_n_grows_while_waiting() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 48)
    assert len(loaded_keys(tier)) == 3
    stack.poll("a", 0, 64)
    assert loaded_keys(tier) == keys[0]
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 64).hit == 64


def test_a_running_request_that_is_polled_again_starts_a_new_wait() -> None:
    stack = stack_of()
    fill(stack, "p", 64)
    stack.add("a", 64, seed="p")
    stack.poll("a", 0, 64)
    plan = stack.take("a", 64)
    assert plan is not None
    assert stack.poll("a", 0, 64).hit is None
    stack.complete_load(plan)
    assert stack.poll("a", 0, 64).hit == 64


# -- shared promotions


@pytest.mark.parametrize("handed_over", [True, False])
def test_the_owner_of_a_shared_promotion_aborts_and_the_second_waiter_still_gets_it(handed_over: bool) -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], auto=handed_over)
    hold(stack, tier, stack.add("a", 64, seed="p"))
    stack.add("b", 64, seed="p")
    stack.poll("a", 0, 64)
    stack.poll("b", 0, 64)
    stack.finish("a")
    stack.pump()
    finish_loads(stack, tier)
    assert stack.poll("b", 0, 64).hit == 64
    assert len(loaded_keys(tier)) == 4
    assert not tier.calls_of("cancel")
    stack.take("b", 64)
    assert statistics(stack).counters.consumed == 4


def test_a_queued_promotion_passes_to_the_oldest_remaining_waiter() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(16, promotion_share=1.0, inflight_share=0.0))
    hold(stack, tier, stack.add("a", 64, seed="p"))
    for name in ("b", "c"):
        stack.add(name, 64, seed="p")
    for name in ("a", "b", "c"):
        stack.poll(name, 0, 64)
    assert len(loaded_keys(tier)) == 1
    stack.finish("a")
    (batch,) = core_of(stack).tiers[0].queue
    assert batch.request.request_id == "b"
    finish_loads(stack, tier)
    for name in ("b", "c"):
        assert stack.poll(name, 0, 64).hit == 64


@pytest.mark.parametrize("handed_over", [True, False])
def test_a_tier_that_the_heir_refuses_is_not_read_for_it(handed_over: bool) -> None:
    tier = sync_tier("d", medium=Medium.NVME)
    config = settings(16, promotion_share=1.0, inflight_share=1.0 if handed_over else 0.0)
    stack = stack_of(tiers=[tier], config=config)
    hold(stack, tier, stack.add("a", 64, seed="p"))
    stack.add("b", 64, RequestOptions(load_tiers=TierFilter(media=frozenset({Medium.CPU}))), seed="p")
    stack.poll("a", 0, 64)
    stack.poll("b", 0, 64)
    assert state(stack, "b") is RequestState.FETCHING
    stack.finish("a")
    assert stack.poll("b", 0, 64).hit == 0
    assert len(tier.calls_of("cancel")) == 1
    finish_loads(stack, tier)
    assert stack.core.residency.statistics().keys == 0
    stack.take("b", 0)
    go_idle(stack)


def test_the_heir_of_an_heir_that_refuses_the_tier_is_not_served_from_it() -> None:
    tier = sync_tier("d", medium=Medium.NVME)
    stack = stack_of(tiers=[tier])
    hold(stack, tier, stack.add("a", 64, seed="p"))
    stack.add("b", 64, seed="p")
    stack.add("c", 64, RequestOptions(load_tiers=TierFilter(media=frozenset({Medium.CPU}))), seed="p")
    for name in ("a", "b", "c"):
        stack.poll(name, 0, 64)
    stack.finish("a")
    stack.finish("b")
    assert stack.poll("c", 0, 64).hit == 0
    assert len(tier.calls_of("cancel")) == 1


def test_an_abort_cancels_what_nobody_else_waits_for() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    stack.finish("a")
    assert len(tier.calls_of("cancel")) == 1
    assert in_primary(stack, keys[0]) == [False] * 4
    assert stack.core.residency.quarantined_bytes == 4 * SIZE
    assert core_of(stack).overdue_bytes() == 0
    tier.loads[0].finish()
    stack.pump()
    assert stack.core.residency.quarantined_bytes == 0
    counters = statistics(stack).counters
    assert (counters.cancelled, counters.late) == (4, 4)
    assert in_primary(stack, keys[0]) == [False] * 4


def test_an_abort_cancels_only_what_has_no_other_waiter() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    hold(stack, tier, stack.add("a", 64, seed="p"))
    stack.add("b", 32, seed="p")
    stack.poll("a", 0, 64)
    stack.poll("b", 0, 32)
    stack.finish("a")
    assert not tier.calls_of("cancel")
    assert stack.core.residency.quarantined_bytes == 2 * SIZE
    finish_loads(stack, tier)
    assert stack.poll("b", 0, 32).hit == 32
    assert statistics(stack).counters.cancelled == 2


def test_a_promotion_whose_last_waiter_was_preempted_lands_evictable() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    stack.preempt("a")
    assert not tier.calls_of("cancel")
    finish_loads(stack, tier)
    assert in_primary(stack, keys[0]) == [True] * 4
    assert stack.core.residency.pinned_bytes == 0
    assert stack.poll("a", 0, 64).hit == 64
    assert len(loaded_keys(tier)) == 4


def test_after_finish_no_tier_hears_of_the_request_again() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(16, promotion_share=1.0, inflight_share=0.0), auto=False)
    add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    stack.pump()
    stack.finish("a")
    stack.finish("a")
    stack.pump()
    calls = len(tier.calls)
    tier.loads[0].finish()
    stack.pump()
    stack.wait(100.0, step=1.0)
    stack.pump()
    assert len(tier.calls) == calls


# -- rounds


def test_a_request_has_at_most_three_fetch_rounds() -> None:
    tier = sync_tier()
    stack = stack_of(WINDOW, [tier])
    keys = add_held(stack, tier, "a", 40 * TPC)
    stack.poll("a", 0, 40 * TPC + 1)
    for _ in range(3):
        (job,) = tier.loads
        job.finish(failed=dict.fromkeys(range(len(job.job.keys)), FailCause.GONE))
        stack.pump()
    answer = stack.poll("a", 0, 40 * TPC + 1)
    assert (answer.hit, answer.cause) == (0, AnswerCause.ROUNDS)
    assert len(tier.calls_of("submit_load")) == 3
    assert loaded_keys(tier) == keys[0][38:40] + keys[0][36:38] + keys[0][34:36]


def test_after_the_third_round_the_answer_is_what_is_ready_in_primary() -> None:
    tier = sync_tier()
    stack = stack_of(WINDOW, [tier])
    fill(stack, "early", 4 * TPC, seed="p")
    keys = stack.add("a", 40 * TPC, seed="p")
    hold(stack, tier, [keys[0][10:]])
    stack.poll("a", 0, 40 * TPC + 1)
    for _ in range(3):
        (job,) = tier.loads
        job.finish(failed=dict.fromkeys(range(len(job.job.keys)), FailCause.GONE))
        stack.pump()
    assert stack.poll("a", 0, 40 * TPC + 1).hit == 4 * TPC


def test_a_plan_that_only_gets_shorter_is_no_new_fetch_round() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 10 * TPC)
    stack.poll("a", 0, 10 * TPC)
    (job,) = tier.loads
    for index in range(9, 2, -1):
        job.progress(failed={index: FailCause.IO_ERROR})
        stack.pump()
    assert state(stack, "a") is RequestState.FETCHING
    job.finish()
    stack.pump()
    assert stack.poll("a", 0, 10 * TPC).hit == 3 * TPC
    assert len(tier.calls_of("submit_load")) == 1


def test_a_failed_key_stays_absent_for_the_request() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    tier.loads[0].finish(failed={1: FailCause.GONE})
    stack.pump()
    assert stack.poll("a", 0, 64).hit == 16
    assert stack.poll("a", 16, 64).hit == 0
    assert stack.poll("a", 0, 65).hit == 16
    assert loaded_keys(tier) == keys[0]


# -- taking


def test_the_engine_takes_only_part_of_a_hit() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    finish_loads(stack, tier)
    plan = stack.take("a", 20)
    assert plan is not None
    assert plan.complete
    assert (plan.computed, plan.boundary, plan.ranges) == (0, 20, ((0, 2),))
    assert list(plan.keys) == keys[0][:2]
    assert stack.core.residency.pinned_bytes == 2 * SIZE
    assert stack.core.residency.held_bytes == 0
    stack.complete_load(plan)
    assert stack.core.residency.pinned_bytes == 0
    stack.finish("a")
    go_idle(stack)
    counters = core_of(stack).counters
    assert (counters.consumed, counters.not_taken) == (2, 2)


def test_the_engine_takes_none_of_a_hit() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 64)
    stack.poll("a", 0, 64)
    finish_loads(stack, tier)
    assert stack.take("a", 0) is None
    assert stack.core.residency.pinned_bytes == 0
    assert in_primary(stack, keys[0]) == [True] * 4
    go_idle(stack)
    assert core_of(stack).counters.not_taken == 4


def test_what_was_not_taken_is_consumed_by_a_later_request_while_it_stays() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    hold(stack, tier, stack.add("a", 64, seed="p"))
    stack.poll("a", 0, 64)
    finish_loads(stack, tier)
    stack.take("a", 0)
    stack.finish("a")
    stack.add("b", 64, seed="p")
    assert stack.poll("b", 0, 64).hit == 64
    stack.take("b", 64)
    go_idle(stack)
    counters = core_of(stack).counters
    assert (counters.consumed, counters.not_taken) == (4, 0)


def test_a_part_that_needs_another_window_loads_nothing() -> None:
    stack = stack_of(WINDOW)
    fill(stack, "p", 10 * TPC)
    stack.add("a", 10 * TPC, seed="p")
    assert stack.poll("a", 0, 10 * TPC + 1).hit == 10 * TPC
    plan = stack.take("a", 4 * TPC)
    assert plan is not None
    assert not plan.complete
    assert len(plan.slots) == 0
    assert stack.complete_load(plan, ok=False) is False
    go_idle(stack)


def test_a_part_where_no_state_ends_loads_nothing() -> None:
    stack = stack_of(RECURRENT)
    fill(stack, "p", 64)
    stack.add("a", 64, seed="p")
    assert stack.poll("a", 48, 65).hit == 16
    plan = stack.take("a", 8)
    assert plan is not None
    assert not plan.complete
    stack.complete_load(plan, ok=False)


def test_a_hit_that_is_not_held_any_more_loads_nothing() -> None:
    stack = stack_of()
    fill(stack, "p", 64)
    stack.add("a", 64, seed="p")
    assert stack.poll("a", 0, 64).hit == 64
    stack.wait(31.0)
    plan = stack.take("a", 64)
    assert plan is not None
    assert not plan.complete
    assert state(stack, "a") is RequestState.LOADING
    assert stack.complete_load(plan, ok=False) is False
    assert state(stack, "a") is RequestState.RUNNING
    go_idle(stack)


def test_more_than_the_hit_loads_nothing() -> None:
    stack = stack_of()
    fill(stack, "p", 64)
    stack.add("a", 80, seed="p")
    assert stack.poll("a", 0, 80).hit == 64
    plan = stack.take("a", 80)
    assert plan is not None
    assert not plan.complete


# -- hybrid layouts


def test_recurrent_state_hits_end_on_a_stored_state() -> None:
    stack = stack_of(RECURRENT)
    keys = stack.add("p", 10 * TPC)
    stack.store("p", [(0, i) for i in range(10)] + [(1, 3), (1, 7)])
    stack.finish("p")
    stack.add("a", 10 * TPC, seed="p")
    assert stack.poll("a", 0, 10 * TPC).hit == 8 * TPC
    plan = stack.take("a", 8 * TPC)
    assert plan is not None
    assert plan.ranges == ((0, 8), (7, 8))
    assert plan.keys[-1] == keys[1][7]


def test_a_hybrid_hit_leaves_the_last_token_to_compute() -> None:
    stack = stack_of(HYBRID)
    fill(stack, "p", 64)
    stack.add("a", 64, seed="p")
    assert stack.poll("a", 0, 64).hit == 63
    stack.add("f", 64, seed="p")
    full = stack_of(FULL)
    fill(full, "p", 64)
    full.add("a", 64, seed="p")
    assert full.poll("a", 0, 64).hit == 64


def test_preemption_and_abort_are_legal_in_every_state() -> None:
    for leave in ("preempt", "finish"):
        for wanted in RequestState:
            if wanted is RequestState.FINISHED:
                continue
            tier = async_tier()
            stack = stack_of(tiers=[tier], config=settings(8))
            hold(stack, tier, stack.add("x", 64))
            bring_to(stack, tier, wanted)
            getattr(stack, leave)("a")
            answer_probes(stack, tier)
            finish_loads(stack, tier)
            stack.wait(5.0, step=0.1)
            go_idle(stack)


def bring_to(stack, tier, wanted: RequestState) -> None:  # type: ignore[no-untyped-def]
    """Request "a" in this state; "x" may be in its way."""
    if wanted is RequestState.QUEUED:
        stack.poll("x", 0, 64)
        answer_probes(stack, tier)
    add_held(stack, tier, "a", 64)
    if wanted is RequestState.NEW:
        return
    stack.poll("a", 0, 64)
    if wanted is not RequestState.RESOLVING:
        answer_probes(stack, tier)
    if wanted not in (RequestState.RESOLVING, RequestState.FETCHING, RequestState.QUEUED):
        finish_loads(stack, tier)
    if wanted in (RequestState.LOADING, RequestState.RUNNING):
        assert stack.poll("a", 0, 64).hit == 64
        stack.take("a", 64 if wanted is RequestState.LOADING else 0)
    assert state(stack, "a") is wanted
