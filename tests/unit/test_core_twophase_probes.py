"""The two-phase door: who is probed for what, and what filters and options of a request leave out."""

from __future__ import annotations

import numpy as np
import pytest
from core_kit import (
    TPC,
    WINDOW,
    add_held,
    answer_probes,
    async_tier,
    fill,
    finish_loads,
    go_idle,
    hold,
    loaded_keys,
    stack_of,
    state,
    statistics,
    sync_tier,
)

from kvstrata.core.messages import AnswerCause, RequestContext, RequestOptions, TierFilter
from kvstrata.core.requests import RequestState
from kvstrata.errors import StateError
from kvstrata.types import FailCause, Medium, Presence

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
