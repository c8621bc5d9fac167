"""Galloping probes: counts and rounds of what is asked, what is assumed, and what proves it."""

from __future__ import annotations

import numpy as np
import pytest
from core_kit import (
    FULL,
    HYBRID,
    TPC,
    async_tier,
    finish_loads,
    go_idle,
    hold,
    loaded_keys,
    record,
    settings,
    stack_of,
    sync_tier,
    wide,
)

from kvstrata.core.galloping import ASKED, NOT_ASKED, inferred, next_round, reach
from kvstrata.core.messages import RequestOptions, TierFilter
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds import FullAttention, RecurrentState, SlidingWindow
from kvstrata.testing import ScriptedTier
from kvstrata.testing.stack import CoreStack
from kvstrata.types import Capabilities, FailCause, KeysDone, Presence

A, U, P, X = Presence.ABSENT, Presence.UNKNOWN, Presence.PRESENT, Presence.ASSUMED
N, Q = NOT_ASKED, ASKED


def remote(name: str = "remote", *, max_batch: int = 1024) -> ScriptedTier:
    """A tier whose probes cost a round trip."""
    capabilities = Capabilities(sync_probe=False, probe_cost_s=0.02, max_batch=max_batch, shared=True)
    return ScriptedTier(name=name, capabilities=capabilities)


def i8(*values: int) -> np.ndarray:
    return np.array(values, np.int8)


def answer_in_rounds(stack: CoreStack, *tiers: ScriptedTier) -> int:
    """Answer probes, all that are out at a time, until none follows; how many sequential round trips that were."""
    rounds = 0
    while any(tier.probes for tier in tiers):
        rounds += 1
        for tier in tiers:
            for probe in list(tier.probes):
                probe.finish()
        stack.pump()
    return rounds


def probed(tier: ScriptedTier) -> int:
    return tier.keys_touched["probe"]


# the pure part


def test_left_of_a_present_chunk_everything_is_assumed() -> None:
    assert inferred(i8(N, N, P, N, Q, P, N)).tolist() == [X, X, P, X, X, P, N]


def test_left_of_an_absent_chunk_nothing_is_assumed() -> None:
    assert inferred(i8(N, P, N, A, N, N)).tolist() == [X, P, N, A, N, N]
    assert inferred(i8(N, A, N, P)).tolist() == [N, A, X, P]


def test_a_chunk_that_the_tier_is_still_writing_stays_unknown() -> None:
    assert inferred(i8(N, U, N, P)).tolist() == [X, U, X, P]


def test_nothing_told_nothing_assumed() -> None:
    assert inferred(i8(N, Q, N)).tolist() == [N, Q, N]
    assert inferred(i8()).tolist() == []


def test_the_first_round_asks_both_ends() -> None:
    kept = np.full(2048, N, np.int8)
    first = next_round(kept, np.arange(2048))
    assert (first[0], first[-1], len(first)) == (0, 2047, 14)
    assert len(set(first.tolist())) == 14


@pytest.mark.parametrize("open_chunks", [1, 2, 12, 13, 14, 15, 157, 158, 2048, 100_000])
def test_a_later_round_leaves_at_most_a_thirteenth_open_between_points(open_chunks: int) -> None:
    kept = np.full(open_chunks + 1, N, np.int8)
    kept[-1] = A
    points = next_round(kept, np.arange(open_chunks))
    assert len(points) == len(set(points.tolist())) <= 12
    gaps = np.diff(np.concatenate([[-1], points, [open_chunks]])) - 1
    assert gaps.max() <= (0 if open_chunks <= 12 else -(-(open_chunks + 1) // 13) - 1)


def test_while_a_round_is_out_nothing_more_is_asked() -> None:
    kept = i8(N, N, Q, N)
    assert next_round(kept, np.arange(4)).tolist() == []
    assert next_round(kept, np.arange(2)).tolist() == [0, 1]  # what is out does not concern these


def test_other_groups_reach_further_only_after_absent_answers() -> None:
    unknown = i8(*[U] * 10)
    assert reach(i8(*[N] * 10), np.array([8, 9]), unknown, 0).tolist() == [8, 9]
    assert reach(i8(N, N, N, N, N, N, N, N, N, A), np.array([8]), unknown, 0).tolist() == [8]
    assert reach(i8(N, N, N, N, N, N, N, A, A, A), np.array([6]), unknown, 0).tolist() == [4, 5, 6]
    assert reach(i8(N, N, N, N, N, N, N, A, A, A), np.array([6]), unknown, 5).tolist() == [5, 6]


# counts


def cut_at(stack: CoreStack, tier: ScriptedTier, keys: list[list[bytes]], cut: int) -> None:
    """The tier has the chunks of the first `cut` tokens."""
    hold(stack, tier, [group[: cut // tpc] for group, tpc in zip(keys, stack.layout.tokens_per_chunk, strict=True)])


@pytest.mark.parametrize("cut", [0, 1, 2, 157, 158, 159, 1000, 1023, 1024, 1025, 2046, 2047, 2048])
def test_2048_chunks_take_at_most_40_keys_and_few_rounds(cut: int) -> None:
    tier = remote()
    stack = stack_of(FULL, [tier], wide(2048), checked=False)
    keys = stack.add("a", 2048 * TPC)
    cut_at(stack, tier, keys, cut * TPC)
    answer = stack.poll("a", 0, 2048 * TPC)
    rounds = answer_in_rounds(stack, tier)
    assert probed(tier) <= 40
    assert rounds <= 4
    assert loaded_keys(tier) == keys[0][:cut]
    assert answer.hit is None
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 2048 * TPC).hit == cut * TPC


def test_cuts_anywhere_keep_to_the_counts() -> None:
    rng = np.random.default_rng(7)
    for cut in rng.integers(0, 2049, size=60).tolist():
        tier = remote(max_batch=5)  # a round in several probes is still one round
        stack = stack_of(FULL, [tier], wide(2048), checked=False)
        cut_at(stack, tier, stack.add("a", 2048 * TPC), cut * TPC)
        stack.poll("a", 0, 2048 * TPC)
        assert answer_in_rounds(stack, tier) <= 4
        assert probed(tier) <= 40
        assert record(stack, "a").boundary == cut * TPC


@pytest.mark.parametrize("small", [16, 32, 128])
def test_two_windowed_groups_cost_two_windows_more(small: int) -> None:
    window = 8 * small
    layout = Layout(
        (
            Group(FullAttention(), TPC, chunk_bytes=8),
            Group(SlidingWindow(window), small, chunk_bytes=8),
            Group(SlidingWindow(window), small, chunk_bytes=8),
        )
    )
    rng = np.random.default_rng(small)
    for cut in rng.integers(small, 2048 * TPC, size=25).tolist():
        tier = remote()
        stack = stack_of(layout, [tier], wide(8192, 8), checked=False)
        cut_at(stack, tier, stack.add("a", 2048 * TPC), cut)
        stack.poll("a", 0, 2048 * TPC)
        rounds = answer_in_rounds(stack, tier)
        assert probed(tier) <= 40 + 2 * (8 + 2)
        assert rounds <= 14
        assert record(stack, "a").boundary > 0


def test_windows_kept_far_before_the_end_are_found_in_few_rounds() -> None:
    tier = remote()
    layout = Layout((Group(FullAttention(), TPC, chunk_bytes=8), Group(RecurrentState(), TPC, chunk_bytes=8)))
    stack = stack_of(layout, [tier], wide(8192, 8), checked=False)
    keys = stack.add("a", 2048 * TPC)
    hold(stack, tier, [keys[0], [keys[1][63]]])
    stack.poll("a", 0, 2048 * TPC)
    assert answer_in_rounds(stack, tier) <= 15
    assert record(stack, "a").boundary == 64 * TPC


# assumptions


def test_what_was_assumed_is_marked_and_fetched() -> None:
    tier = remote()
    stack = stack_of(FULL, [tier], wide(256))
    keys = stack.add("a", 200 * TPC)
    hold(stack, tier, keys)
    stack.poll("a", 0, 200 * TPC)
    answer_in_rounds(stack, tier)
    book = stack.core._presence
    gathered = book.gather(record(stack, "a"), 0, 200 * TPC)
    asked = {key for call in tier.calls_of("probe") for key in call.keys}
    assert len(asked) == 14
    assert set(gathered.presence[0].tolist()) == {P}  # on their way into primary, so no longer assumed
    assert stack.poll("a", 0, 200 * TPC).hit is None  # nothing is reported before it is there
    assert set(loaded_keys(tier)) == set(keys[0])
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 200 * TPC).hit == 200 * TPC
    go_idle(stack)


def test_a_hole_shortens_the_hit_and_the_tier_is_asked_plainly_afterwards() -> None:
    tier = remote()
    stack = stack_of(HYBRID, [tier], wide(512))
    keys = stack.add("a", 200 * TPC)
    hold(stack, tier, keys)
    hole = 101
    del tier.held[keys[0][hole]]
    stack.poll("a", 0, 200 * TPC + 1)
    answer_in_rounds(stack, tier)
    before = probed(tier)
    for job in list(tier.loads):
        job.finish()
    stack.pump()
    assert record(stack, "a").plain == {0}
    answer_in_rounds(stack, tier)
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 200 * TPC + 1).hit == hole * TPC
    assert record(stack, "a").rounds <= 3
    assert probed(tier) - before <= 4  # the window at the new end; the chain below the hole has landed
    go_idle(stack)


def test_after_a_failure_the_rest_of_the_chain_is_known_not_assumed() -> None:
    tier = remote()
    stack = stack_of(
        FULL, [tier], settings(64, promotion_share=1.0, store_reserve=0.0, inflight_share=0.05)
    )  # three chunks at a time
    keys = stack.add("a", 60 * TPC)
    hold(stack, tier, keys)
    for hole in (1, 30):
        del tier.held[keys[0][hole]]
    stack.poll("a", 0, 60 * TPC)
    answer_in_rounds(stack, tier)
    assert len(tier.loads) == 1
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 60 * TPC).hit == TPC
    go_idle(stack)


def test_a_drafter_s_next_chunk_is_asked_not_assumed() -> None:
    layout = Layout((Group(FullAttention(), TPC, drafter=True, chunk_bytes=8), Group(RecurrentState(), TPC, False, 8)))
    for present in (True, False):
        tier = remote()
        stack = stack_of(layout, [tier], wide(512, 8))
        keys = stack.add("a", 200 * TPC)
        hold(stack, tier, [keys[0], keys[1][39:50:10]])  # states end at 40 and 50
        if not present:
            del tier.held[keys[0][50]]
        stack.poll("a", 0, 200 * TPC)
        answer_in_rounds(stack, tier)
        finish_loads(stack, tier)
        assert stack.poll("a", 0, 200 * TPC).hit == (50 if present else 40) * TPC
        assert any(keys[0][50] in call.keys for call in tier.calls_of("probe"))
        assert keys[0][50] not in loaded_keys(tier)
        go_idle(stack)


# ladders


def test_known_in_a_near_tier_beats_assumed_in_a_far_one_whatever_the_order() -> None:
    for order in ("near first", "far first"):
        near, far = sync_tier(), remote()
        stack = stack_of(FULL, [near, far] if order == "near first" else [far, near], wide(256))
        keys = stack.add("a", 200 * TPC)
        hold(stack, near, [keys[0][:50]])
        hold(stack, far, keys)
        stack.poll("a", 0, 200 * TPC)
        answer_in_rounds(stack, far)
        finish_loads(stack, near, far)
        assert stack.poll("a", 0, 200 * TPC).hit == 200 * TPC
        asked = {key for call in far.calls_of("probe") for key in call.keys}
        assert asked.isdisjoint(keys[0][:50])
        assert set(loaded_keys(near)) == set(keys[0][:50])
        assert set(loaded_keys(far)) == set(keys[0][50:])
        go_idle(stack)


def test_two_remote_tiers_are_asked_at_once_and_the_nearest_that_has_it_is_read() -> None:
    first, second = remote("first"), remote("second")
    stack = stack_of(FULL, [first, second], wide(256))
    keys = stack.add("a", 200 * TPC)
    hold(stack, first, [keys[0][:80]])
    hold(stack, second, [keys[0][:150]])
    stack.poll("a", 0, 200 * TPC)
    assert first.probes
    assert second.probes
    assert answer_in_rounds(stack, first, second) <= 5
    finish_loads(stack, first, second)
    assert stack.poll("a", 0, 200 * TPC).hit == 150 * TPC
    assert len(loaded_keys(first)) + len(loaded_keys(second)) == 150
    assert set(loaded_keys(second)) >= set(keys[0][80:150])
    assert len(loaded_keys(first)) >= 70
    go_idle(stack)


def test_what_one_remote_tier_lacks_another_one_gives() -> None:
    first, second = remote("first"), remote("second")
    stack = stack_of(FULL, [first, second], wide(256))
    keys = stack.add("a", 200 * TPC)
    hold(stack, first, [keys[0][::2]])
    hold(stack, second, [keys[0][1::2]])
    stack.poll("a", 0, 200 * TPC)
    for _ in range(6):
        answer_in_rounds(stack, first, second)
        finish_loads(stack, first, second)
    assert stack.poll("a", 0, 200 * TPC).hit == 200 * TPC
    assert record(stack, "a").rounds <= 3
    go_idle(stack)


def test_a_filter_keeps_a_remote_tier_unasked() -> None:
    near, far = async_tier("near"), remote("far")
    stack = stack_of(FULL, [near, far], wide(256))
    keys = stack.add("a", 20 * TPC, RequestOptions(load_tiers=TierFilter(names=frozenset({"near"}))))
    hold(stack, far, keys)
    stack.poll("a", 0, 20 * TPC)
    answer_in_rounds(stack, near, far)
    assert stack.poll("a", 0, 20 * TPC).hit == 0
    assert probed(far) == 0
    assert probed(near) == 20  # asked plainly: its probes cost nothing


def test_a_probe_that_fails_is_absence_and_costs_no_further_round() -> None:
    tier = remote()
    stack = stack_of(FULL, [tier], wide(64))
    keys = stack.add("a", 60 * TPC)
    hold(stack, tier, keys)
    stack.poll("a", 0, 60 * TPC)
    for probe in list(tier.probes):
        probe.finish(error=FailCause.TIMEOUT)
    stack.pump()
    assert stack.poll("a", 0, 60 * TPC).hit == 0
    assert probed(tier) == 14
    go_idle(stack)


def test_a_failure_that_another_request_met_makes_this_one_ask_plainly_too() -> None:
    tier = remote()
    stack = stack_of(FULL, [tier], wide(64))
    keys = stack.add("a", 40 * TPC)
    stack.add("b", 40 * TPC, seed="a")
    hold(stack, tier, keys)
    for request_id in ("a", "b"):
        stack.poll(request_id, 0, 40 * TPC)
    answer_in_rounds(stack, tier)
    job = tier.loads[0]
    tier.emit(KeysDone(job.job.job_id, (), [(20, FailCause.GONE)]))
    job.reported.add(20)
    stack.pump()
    assert record(stack, "a").plain == record(stack, "b").plain == {0}
    finish_loads(stack, tier)
    for request_id in ("a", "b"):
        assert stack.poll(request_id, 0, 40 * TPC).hit == 20 * TPC
    go_idle(stack)
