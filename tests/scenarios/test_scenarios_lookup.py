"""Scenarios about lookups: what is asked, what is answered, how long it may take. Numbers are those of the docs."""

from __future__ import annotations

import pytest
from core_kit import (
    FULL,
    HYBRID,
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
    hold,
    loaded_keys,
    settings,
    stack_of,
    statistics,
    stored_keys,
    sync_tier,
    wide,
)

from kvstrata.core.messages import AnswerCause, RequestOptions, TierFilter
from kvstrata.testing.stack import CoreStack
from kvstrata.types import FailCause, Locality, LookupResult, Medium, Presence

HIT, PENDING, RETRY, MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.RETRY, LookupResult.MISS


@pytest.mark.scenario_7
def test_a_job_that_never_ends_holds_nobody_beyond_the_deadline() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = stack.add("owner", 4 * TPC, seed="p")
    stack.add("second", 4 * TPC, seed="p")
    hold(stack, tier, keys)
    begun = stack.clock.monotonic()
    assert stack.poll("owner", 0, 4 * TPC).hit is None
    (job,) = tier.loads
    assert stack.poll("second", 0, 4 * TPC).hit is None
    bound = core_of(stack).config.total_s + 4 * SIZE / core_of(stack).config.min_rate_bytes_per_s
    for name in ("second", "owner"):
        assert stack.poll_until_answered(name, 0, 4 * TPC) == 0
        assert stack.clock.monotonic() - begun <= bound + 0.02
        assert stack.take(name, 0) is None
        stack.finish(name)
    job.finish()  # late: what came is accepted, and nothing is left of it
    stack.pump()
    stack.add("third", 4 * TPC, seed="p")
    assert stack.poll("third", 0, 4 * TPC).hit == 4 * TPC
    go_idle(stack)


@pytest.mark.scenario_8
def test_the_deadline_is_not_restarted_by_failed_rounds() -> None:
    tier = sync_tier()
    bound = 5.0
    config = wide(64, stall_s=bound, total_s=bound, max_fetch_rounds=1000, breaker_errors=1000)
    stack = stack_of(tiers=[tier], config=config)
    add_held(stack, tier, "a", 4 * TPC)
    begun = stack.clock.monotonic()
    answers = []
    for _ in range(20):  # miss -> promote -> pending for 3 s -> the write fails
        answers.append(stack.poll("a", 0, 4 * TPC).hit)
        if answers[-1] is not None:
            break
        for _ in range(30):
            stack.wait(0.1)
            answers.append(stack.poll("a", 0, 4 * TPC).hit)
            if answers[-1] is not None:
                break
        for job in list(tier.loads):
            job.fail(FailCause.GONE)  # plain absence: the tier may be asked for the same key again
        stack.pump()
    assert answers[-1] == 0
    assert stack.clock.monotonic() - begun <= bound + 0.1
    go_idle(stack)


@pytest.mark.scenario_9
def test_a_deadline_costs_a_recompute_and_never_the_chunk() -> None:
    slow = sync_tier("slow")
    stack = stack_of(tiers=[slow], config=wide(64, tier_stall_s={"slow": 5.0}, tier_total_s={"slow": 5.0}))
    add_held(stack, slow, "a", TPC)
    assert stack.poll("a", 0, TPC).hit is None
    stack.wait(4.9, step=0.1)
    assert stack.poll("a", 0, TPC).hit is None
    stack.wait(0.2)
    answer = stack.poll("a", 0, TPC)
    assert (answer.hit, answer.cause) == (0, AnswerCause.CLOCK)
    assert statistics(stack).counters.clock_expired == 1
    stack.take("a", 0)
    stack.wait(2.9)
    slow.loads[0].finish()  # at 8 s
    stack.pump()
    stack.add("b", TPC, seed="a")
    assert stack.poll("b", 0, TPC).hit == TPC
    assert len(slow.calls_of("submit_load")) == 1


@pytest.mark.scenario_9
def test_a_deadline_of_zero_is_off() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(64, stall_s=0.0, total_s=0.0))
    add_held(stack, tier, "a", TPC)
    for _ in range(8):
        assert stack.poll("a", 0, TPC).hit is None
        stack.wait(1.0)
    finish_loads(stack, tier)
    assert stack.poll("a", 0, TPC).hit == TPC


def scan_window(stack: CoreStack, name: str, keys: list[bytes], window: int) -> tuple[int, bool]:
    """Scan from the right as an engine does; (keys of the found prefix, whether to wait)."""
    streak, pending = 0, False
    for index in range(len(keys) - 1, -1, -1):
        match stack.lookup(keys[index], context(name)):
            case LookupResult.HIT:
                streak += 1
            case LookupResult.HIT_PENDING:
                streak, pending = streak + 1, True
            case _:
                streak, pending = 0, False
        if streak == window:
            return index + window, pending
    return streak, pending


@pytest.mark.scenario_12
def test_a_pending_key_counts_in_the_streak_of_a_window() -> None:
    stack = stack_of()
    keys = stack.add("writer", 3 * TPC)[0]
    stack.store("writer", [(0, 0), (0, 2)])
    writing = stack.prepare_store("writer", [(0, 1)])  # [hit, pending, hit]
    assert writing is not None
    assert [stack.lookup(key, context("reader")) for key in keys] == [HIT, PENDING, HIT]
    assert scan_window(stack, "reader", keys, window=3) == (3, True)
    stack.complete_store(writing)
    assert scan_window(stack, "reader", keys, window=3) == (3, False)


@pytest.mark.scenario_12
def test_the_two_phase_door_waits_for_a_window_that_is_being_written() -> None:
    stack = stack_of(WINDOW)
    keys = stack.add("writer", 3 * TPC)
    writing = stack.prepare_store("writer", [(0, 0), (0, 1), (0, 2)])
    assert writing is not None
    stack.add("reader", 3 * TPC + 1, seed="writer")
    assert stack.poll("reader", 0, 3 * TPC + 1).hit is None
    stack.complete_store(writing)
    assert stack.poll("reader", 0, 3 * TPC + 1).hit == len(keys[0]) * TPC


@pytest.mark.scenario_13
def test_what_is_stored_nowhere_is_released_within_the_limit_of_a_lookup() -> None:
    tier = async_tier()  # its probes take 2 s
    stack = stack_of(tiers=[tier], config=wide(200))
    stack.add("a", 100 * TPC, RequestOptions(total_s=0.1))
    begun = stack.clock.monotonic()
    assert stack.poll_until_answered("a", 0, 100 * TPC, step=0.01) == 0
    assert stack.clock.monotonic() - begun <= 0.1 + 0.011
    answer_probes(stack, tier)  # the probe went on; nothing is left of it
    go_idle(stack)


@pytest.mark.scenario_13
def test_an_early_absent_of_the_first_key_resolves_the_whole_prefix() -> None:
    tier = async_tier(max_batch=1)
    stack = stack_of(tiers=[tier], config=wide(200))
    keys = stack.add("a", 100 * TPC)[0]
    assert stack.poll("a", 0, 100 * TPC).hit is None
    first = next(probe for probe in tier.probes if keys[0] in probe.keys)
    first.finish()
    stack.pump()
    assert tier.probes, "the others are still open"
    assert stack.poll("a", 0, 100 * TPC).hit == 0


@pytest.mark.scenario_14
def test_no_room_is_a_miss_in_the_same_call() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(4))
    fill(stack, "old", 4 * TPC)
    stack.add("reader", 4 * TPC, seed="old")
    assert stack.poll("reader", 0, 4 * TPC).hit == 4 * TPC
    assert stack.take("reader", 4 * TPC) is not None  # all of primary is pinned
    key = stack.keys("new", TPC)[0][0]
    tier.put([key])
    assert stack.lookup(key, context("x")) is MISS
    stack.end_step()
    assert not tier.calls_of("submit_load")
    assert statistics(stack).counters.promoted == 0
    assert statistics(stack).counters.no_room == 1


@pytest.mark.scenario_36
def test_the_same_keys_polled_in_ten_steps_count_once() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = stack.keys("p", 4 * TPC)[0]
    tier.put(keys)
    for _ in range(10):
        for key in keys:
            assert stack.lookup(key, context()) in (PENDING, HIT)
        stack.end_step()
    counters = statistics(stack).tiers["near"]
    assert counters.probed == 4
    assert counters.promoted == 4
    finish_loads(stack, tier)
    for _ in range(10):
        assert [stack.lookup(key, context()) for key in keys] == [HIT] * 4
        stack.end_step()
    assert statistics(stack).tiers["near"].landed == 4
    assert tier.keys_touched["probe"] == 4


@pytest.mark.scenario_36
def test_waiting_polls_of_the_two_phase_door_count_nothing() -> None:
    tier = async_tier()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 4 * TPC)
    for _ in range(10):
        stack.poll("a", 0, 4 * TPC)
    assert statistics(stack).tiers["far"].probed == 4
    assert statistics(stack).counters.keys_gathered == 4


@pytest.mark.scenario_37
def test_what_completes_between_two_steps_is_a_hit_in_the_next() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(2))
    keys = stack.keys("p", 2 * TPC)[0]
    tier.put(keys)
    assert [stack.lookup(key, context()) for key in keys] == [PENDING] * 2
    stack.end_step()
    tier.loads[0].finish()
    stack.pump()  # the next step begins by applying what has arrived
    assert [stack.lookup(key, context()) for key in keys] == [HIT] * 2


@pytest.mark.scenario_37
@pytest.mark.parametrize("locked", [False, True])
def test_a_full_primary_is_fine_and_a_locked_one_is_not(locked: bool) -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(2))
    fill(stack, "old", 2 * TPC)
    if locked:
        stack.add("reader", 2 * TPC, seed="old")
        stack.poll("reader", 0, 2 * TPC)
        stack.take("reader", 2 * TPC)
    key = stack.keys("new", TPC)[0][0]
    tier.put([key])
    assert stack.lookup(key, context()) is (MISS if locked else PENDING)


@pytest.mark.scenario_38
def test_lower_tiers_are_asked_on_every_request() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", 3 * TPC)  # the engine is empty, primary is empty and has all the room in the world
    assert stack.poll("a", 0, 3 * TPC).hit is None
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 3 * TPC).hit == 3 * TPC


@pytest.mark.scenario_43
def test_a_local_match_that_is_longer_than_the_external_one_needs_nothing() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = stack.add("a", 20 * TPC)
    tier.put(keys[0][:6])
    answer = stack.poll("a", 10 * TPC, 20 * TPC)
    assert answer.hit == 0
    assert not tier.calls_of("submit_load")
    residency = stack.core.residency
    assert residency.pinned_bytes == residency.held_bytes == 0
    assert stack.take("a", 0) is None


@pytest.mark.scenario_75
@pytest.mark.parametrize("way", ["store", "store per job", "promotion", "cascade", "appears in the tier"])
def test_whatever_puts_a_key_ends_the_memory_of_its_absence(way: str) -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = stack.keys("p", 2 * TPC)
    assert [stack.lookup(key, context("a")) for key in keys[0]] == [MISS, MISS]
    stack.end_step()
    match way:
        case "store":
            fill(stack, "p", 2 * TPC)
        case "store per job":
            stack.add("p", 2 * TPC)
            for index in (0, 1):
                stack.store("p", [(0, index)])
        case "promotion":
            hold(stack, tier, keys)
            stack.add("b", 2 * TPC, seed="p")
            stack.poll("b", 0, 2 * TPC)
            finish_loads(stack, tier)
        case "cascade":
            fill(stack, "p", 2 * TPC, cascade=True)
            tier.stores[0].finish()
            stack.pump()
            stack.core.residency.evict(stack.core.residency.find(keys[0]))
        case "appears in the tier":
            hold(stack, tier, keys)
    assert MISS not in [stack.lookup(key, context("c")) for key in keys[0]]
    if way in ("store", "store per job", "promotion", "cascade"):
        assert MISS not in [stack.lookup(key, context("a")) for key in keys[0]], "the one who heard of absence"


@pytest.mark.scenario_86
def test_500_keys_are_asked_in_batches_and_a_step_never_waits() -> None:
    tier = async_tier(max_batch=64)
    stack = stack_of(tiers=[tier], config=wide(600))
    add_held(stack, tier, "a", 500 * TPC)
    assert stack.poll("a", 0, 500 * TPC).hit is None  # returns although no probe was answered
    calls = tier.calls_of("probe")
    assert 1 <= len(calls) <= 8
    assert max(len(call.keys) for call in calls) <= 64
    answer_probes(stack, tier)
    assert len(tier.calls_of("probe")) <= 8
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 500 * TPC).hit == 500 * TPC


@pytest.mark.scenario_86
def test_the_first_miss_ends_the_need_for_later_keys() -> None:
    tier = async_tier(max_batch=64)
    stack = stack_of(tiers=[tier], config=wide(600))
    keys = stack.add("a", 500 * TPC)[0]
    tier.put(keys[:10])
    stack.poll("a", 0, 500 * TPC)
    tier.probes[0].finish()
    stack.pump()
    assert stack.poll("a", 0, 500 * TPC).hit is None
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 500 * TPC).hit == 10 * TPC
    assert loaded_keys(tier) == keys[:10]


@pytest.mark.scenario_88
def test_a_window_of_two_chunks_promotes_two_of_32() -> None:
    tier = sync_tier()
    stack = stack_of(WINDOW, tiers=[tier])
    keys = add_held(stack, tier, "a", 32 * TPC)
    stack.poll("a", 0, 32 * TPC + 1)
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 32 * TPC + 1).hit == 32 * TPC
    assert loaded_keys(tier) == keys[0][-2:]


@pytest.mark.scenario_88
def test_through_the_per_key_door_the_scan_stops_when_the_window_is_covered() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = stack.keys("a", 32 * TPC)[0]
    tier.put(keys)
    assert scan_window(stack, "a", keys, window=2) == (32, True)
    stack.end_step()
    assert sorted(loaded_keys(tier)) == sorted(keys[-2:])


@pytest.mark.scenario_88
def test_nothing_is_promoted_beyond_the_length_that_all_groups_agree_on() -> None:
    tier = sync_tier()
    stack = stack_of(HYBRID, tiers=[tier])
    keys = stack.add("a", 32 * TPC)
    tier.put(keys[0])  # group A has all of it
    tier.put(keys[1][:8])  # group B a shorter prefix
    stack.poll("a", 0, 32 * TPC)
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 32 * TPC).hit == 8 * TPC
    beyond = set(keys[0][8:])
    assert not beyond & set(loaded_keys(tier))
    assert len(loaded_keys(tier)) == 8 + 2


@pytest.mark.scenario_96
def test_the_end_of_one_of_two_promotions_of_a_request_is_credited_to_that_one() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = stack.keys("p", 2 * TPC)[0]
    tier.put(keys)
    for key in keys:  # two steps, two jobs
        assert stack.lookup(key, context()) is PENDING
        stack.end_step()
    first, second = tier.loads
    first.finish()
    stack.pump()
    assert [stack.lookup(key, context()) for key in keys] == [HIT, PENDING]
    second.finish()
    stack.pump()
    assert [stack.lookup(key, context()) for key in keys] == [HIT, HIT]
    stack.finish("a")
    go_idle(stack)


@pytest.mark.scenario_114
@pytest.mark.parametrize("door", ["two phases", "per key"])
def test_a_request_that_loads_from_local_storage_only_sends_no_probe_elsewhere(door: str) -> None:
    bucket = async_tier("bucket", medium=Medium.OBJECT, locality=Locality.SHARED)
    local = sync_tier("local", medium=Medium.NVME)
    stack = stack_of(tiers=[bucket, local])
    keys = stack.keys("p", 3 * TPC)
    for tier in (bucket, local):
        hold(stack, tier, keys)
    only = TierFilter(media=frozenset({Medium.NVME}), localities=frozenset({Locality.LOCAL}))
    if door == "two phases":
        stack.add("a", 3 * TPC, RequestOptions(load_tiers=only), seed="p")
        stack.poll("a", 0, 3 * TPC)
        finish_loads(stack, local)
        assert stack.poll("a", 0, 3 * TPC).hit == 3 * TPC
    else:
        for key in keys[0]:
            assert stack.lookup(key, context(load_tiers=only)) is PENDING
        stack.end_step()
    assert not bucket.calls_of("probe")
    assert loaded_keys(local) == keys[0]


@pytest.mark.scenario_139
def test_a_long_fetch_keeps_nobody_else_waiting() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(64, stall_s=10.0, total_s=10.0))
    add_held(stack, tier, "slow", 4 * TPC)
    assert stack.poll("slow", 0, 4 * TPC).hit is None
    stack.wait(4.0)  # the fetch takes 5 s and is in flight
    now = stack.clock.monotonic()
    fill(stack, "other", 4 * TPC)
    stack.add("reader", 4 * TPC, seed="other")
    assert stack.poll("reader", 0, 4 * TPC).hit == 4 * TPC
    plan = stack.take("reader", 4 * TPC)
    assert plan is not None
    assert stack.complete_load(plan)
    stack.finish("reader")
    assert stack.clock.monotonic() == now, "not a moment had to pass"
    stack.wait(1.0)
    finish_loads(stack, tier)
    assert stack.poll("slow", 0, 4 * TPC).hit == 4 * TPC


@pytest.mark.scenario_10
@pytest.mark.parametrize("ok", [True, False])
def test_what_another_request_is_storing_reaches_the_tier_that_only_this_one_stores_to(ok: bool) -> None:
    peer = sync_tier("peer")
    stack = stack_of(tiers=[peer])
    nowhere = RequestOptions(store_tiers=TierFilter(names=frozenset()))
    keys = stack.add("a", TPC, nowhere, seed="p")
    stack.add("b", TPC, seed="p")  # may store to every tier
    storing = stack.prepare_store("a", [(0, 0)])
    assert storing is not None
    assert stack.prepare_store("b", [(0, 0)]) is None, "already on its way into primary"
    assert not peer.stores
    stack.complete_store(storing, ok)
    assert stored_keys(peer) == (keys[0] if ok else [])
    for job in list(peer.stores):
        job.finish()
    stack.pump()
    for name in ("a", "b"):
        stack.finish(name)
    assert stored_keys(peer) == (keys[0] if ok else []), "exactly once"
    go_idle(stack)


@pytest.mark.scenario_10
def test_what_another_request_has_stored_reaches_the_tier_that_only_this_one_stores_to() -> None:
    peer = sync_tier("peer").auto()
    stack = stack_of(tiers=[peer])
    keys = fill(stack, "p", 3 * TPC)  # to no tier
    assert not stored_keys(peer)
    for name in ("b", "c"):
        stack.add(name, 3 * TPC, seed="p")
        assert stack.prepare_store(name, [(0, 0), (0, 1), (0, 2)]) is None
        stack.finish(name)
    assert stored_keys(peer) == keys[0], "exactly once"
    go_idle(stack)


@pytest.mark.scenario_81
def test_an_answer_is_used_up_and_a_new_schedule_asks_again() -> None:
    producer = async_tier("producer")
    stack = stack_of(tiers=[producer])
    keys = add_held(stack, producer, "a", TPC)
    for _ in range(2):
        assert stack.poll("a", 0, TPC).hit is None
        probe = producer.probes[0]
        assert probe.keys == tuple(keys[0])
        answer_probes(stack, producer)
        if keys[0][0] in producer.held:
            finish_loads(stack, producer)
            assert stack.poll("a", 0, TPC).hit == TPC
            plan = stack.take("a", TPC)
            assert plan is not None
            stack.complete_load(plan)
            producer.held.clear()  # the producer evicts it, without a word
            stack.preempt("a")
            stack.core.residency.evict(stack.core.residency.find(keys[0]))
    assert stack.poll("a", 0, TPC).hit == 0
    assert len(producer.calls_of("probe")) == 2


@pytest.mark.scenario_6
def test_a_late_probe_does_not_overwrite_a_newer_fact() -> None:
    for stored in (True, False):
        tier = async_tier()
        stack = stack_of(FULL, tiers=[tier], config=settings(64))
        key = stack.keys("p", TPC)[0][0]
        if not stored:
            tier.put([key])
        assert stack.lookup(key, context("a")) is RETRY
        stack.end_step()
        (probe,) = tier.probes  # held
        if stored:
            fill(stack, "p", TPC, cascade=True)
            tier.stores[0].finish()
            stack.pump()
            stack.core.residency.evict(stack.core.residency.find([key]))
        else:
            tier.lose_keys([key])
            stack.pump()
        probe.finish({key: Presence.ABSENT if stored else Presence.PRESENT})
        stack.pump()
        assert stack.lookup(key, context("a")) is (PENDING if stored else MISS)
