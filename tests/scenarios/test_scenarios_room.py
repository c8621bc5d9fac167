"""Scenarios about room: promotions, stores and cascades that compete for primary, pins, queues, admission."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from core_kit import (
    FULL,
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
    statistics,
    stored_keys,
    sync_tier,
    wide,
)

from kvstrata.core.messages import LoadPlan
from kvstrata.core.settings import CoreConfig
from kvstrata.core.slots import READY
from kvstrata.policy.admission import ThresholdAdmission
from kvstrata.testing.stack import CoreStack
from kvstrata.testing.tier_harness import chunk_keys
from kvstrata.types import FailCause, LookupResult, ResetReason

HIT, PENDING, RETRY, MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.RETRY, LookupResult.MISS


def serve(stack: CoreStack, name: str, tokens: int, total: int) -> LoadPlan | None:
    """The engine admits a request that was answered: it loads, computes the rest, and ends."""
    plan = stack.take(name, tokens)
    if plan is not None:
        assert plan.complete
        assert stack.complete_load(plan)
    stack.finish(name)
    return plan


@pytest.mark.scenario_1
def test_ten_waiting_requests_promote_no_more_than_what_is_admitted() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], config=settings(8))
    names = [f"r{i}" for i in range(10)]
    for name in names:
        add_held(stack, tier, name, 6 * TPC)
    waiting, loaded, steps = list(names), {}, 0
    while waiting:
        steps += 1
        assert steps <= 200
        answers = {name: stack.poll(name, 0, 6 * TPC).hit for name in waiting}
        ready = [name for name in waiting if answers[name] is not None]
        if ready:  # one is admitted per step
            hit = answers[ready[0]]
            assert hit is not None
            plan = serve(stack, ready[0], hit, 6 * TPC)
            loaded[ready[0]] = 0 if plan is None else len(plan.slots)
            waiting.remove(ready[0])
        stack.wait(0.02)
    assert loaded == dict.fromkeys(names, 6)
    assert statistics(stack).counters.promoted == 60
    go_idle(stack)


@pytest.mark.scenario_2
@pytest.mark.parametrize("door", ["two phases", "per key"])
def test_a_store_in_the_step_of_a_promotion_keeps_its_room(door: str) -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(2, store_reserve=0.5, inflight_share=1.0))
    fill(stack, "old", TPC)
    stack.add("waits", TPC, seed="old")
    assert stack.poll("waits", 0, TPC).hit == TPC
    assert stack.core.residency.pinned_bytes == SIZE  # one of two chunks is pinned
    key = add_held(stack, tier, "wants", TPC)[0][0]
    if door == "two phases":
        stack.poll("wants", 0, TPC)
    else:
        assert stack.lookup(key, context("asks")) is not PENDING
    stack.add("runs", TPC)
    assert stack.prepare_store("runs", [(0, 0)]) is not None
    if door == "per key":
        stack.end_step()
    assert not tier.calls_of("submit_load")


@pytest.mark.scenario_2
@pytest.mark.parametrize("config", [settings(1), settings(1, store_reserve=0.5)])
def test_in_a_primary_of_one_chunk_a_promotion_still_succeeds(config: CoreConfig) -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=config)
    add_held(stack, tier, "a", TPC)
    stack.poll("a", 0, TPC)
    finish_loads(stack, tier)
    assert stack.poll("a", 0, TPC).hit == TPC


@pytest.mark.scenario_3
def test_what_landed_for_one_request_is_not_evicted_for_another() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(2))
    a, b = (add_held(stack, tier, name, 2 * TPC)[0] for name in ("a", "b"))
    stack.poll("a", 0, 2 * TPC)
    finish_loads(stack, tier)
    assert stack.poll("b", 0, 2 * TPC).hit is None, "no room: it waits"
    assert [stack.lookup(key, context("c")) for key in b] == [MISS, MISS], "no room: it goes on without"
    assert in_primary(stack, a) == [True, True]
    assert loaded_keys(tier) == a
    stack.finish("a")  # without reading
    finish_loads(stack, tier)
    assert stack.poll("b", 0, 2 * TPC).hit == 2 * TPC
    go_idle(stack)


@pytest.mark.scenario_15
def test_a_slow_tier_pins_a_bounded_part_of_primary_and_loads_overtake_stores() -> None:
    fast, slow = sync_tier("fast").auto(), sync_tier("slow")
    stack = stack_of(tiers=[fast, slow], config=CoreConfig(capacity_bytes=200 * SIZE, cascade_queue=16))
    keys = fill(stack, "p", 100 * TPC, cascade=True)[0]
    assert stored_keys(fast) == keys, "all of it went to the fast tier at once"
    share = stack.core.residency.capacity_bytes // 4
    done = 0
    for second in range(30):  # one job a second
        assert stack.core.residency.pinned_bytes <= share
        if second == 5:
            add_held(stack, slow, "urgent", TPC)
            stack.poll("urgent", 0, TPC)
            assert slow.stores, "stores are still queued"
            assert len(slow.loads) == 1, "and the load was handed over before them"
            slow.loads[0].finish()
            stack.pump()
            assert stack.poll("urgent", 0, TPC).hit == TPC
        if slow.stores:
            slow.stores[0].finish()
            done += 1
        stack.wait(1.0)
    counters = statistics(stack).tiers["slow"]
    assert counters.cascade_dropped > 0
    assert done >= 1
    assert stack.core.residency.pinned_bytes == core_of(stack).residency.held_bytes


@pytest.mark.scenario_42
@pytest.mark.parametrize("seed", range(6))
def test_pins_are_owned_and_an_idle_system_has_none(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(8))
    names: list[str] = []
    plans: list[LoadPlan] = []
    for number in range(250):
        match int(rng.integers(8)):
            case 0 | 1:
                names.append(f"r{number}")
                tokens = int(rng.integers(1, 7)) * TPC
                keys = stack.add(names[-1], tokens, seed=f"p{rng.integers(6)}")
                if rng.random() < 0.7:
                    hold(stack, tier, keys)
            case 2 | 3 if names:  # lookup, load, partial load
                name = names[int(rng.integers(len(names)))]
                total = TPC * len(core_of(stack).requests.require(name).keys[0])
                hit = stack.poll(name, int(rng.integers(3)) * TPC, total).hit
                if hit is not None:
                    taken = int(rng.choice([0, hit, hit // TPC // 2 * TPC]))
                    plan = stack.take(name, taken)
                    plans += [plan] if plan is not None else []
            case 4 if names:  # cancel, and a second finish
                name = names.pop(int(rng.integers(len(names))))
                stack.finish(name)
                stack.finish(name)
            case 5 if plans:  # a load ends, well or not
                stack.complete_load(plans.pop(int(rng.integers(len(plans)))), bool(rng.random() < 0.7))
            case 6 if tier.loads:
                job = tier.loads[int(rng.integers(len(tier.loads)))]
                bad = {i: FailCause.GONE for i in range(len(job.job.keys)) if rng.random() < 0.3}
                job.finish(failed=bad)
                stack.pump()
            case _:
                stack.wait(0.05)
    go_idle(stack)
    residency = stack.core.residency
    assert residency.free_bytes == residency.capacity_bytes - residency.resident_bytes
    slots = np.flatnonzero(residency.state == READY).astype(np.int32)
    assert len(residency.evict(slots)) == len(slots), "every resident chunk is evictable"


def early_ends() -> dict[str, Callable[[CoreStack, object], None]]:
    """Every way in which a promotion may end before its request has used it."""
    return {
        "finish": lambda stack, tier: stack.finish("a"),
        "preempt": lambda stack, tier: stack.preempt("a"),
        "gone": lambda stack, tier: tier.loads[0].fail(FailCause.GONE),  # type: ignore[attr-defined]
        "corrupt": lambda stack, tier: tier.loads[0].fail(FailCause.CORRUPT),  # type: ignore[attr-defined]
        "io error": lambda stack, tier: tier.loads[0].fail(),  # type: ignore[attr-defined]
        "partial": lambda stack, tier: tier.loads[0].finish(done=[0]),  # type: ignore[attr-defined]
        "clock": lambda stack, tier: stack.wait(3.0, step=0.1),
        "silence": lambda stack, tier: stack.wait(40.0),
        "not taken": lambda stack, tier: tier.loads[0].finish(),  # type: ignore[attr-defined]
        "reset": lambda stack, tier: stack.core.reset_cache(ResetReason.CONTENT_INVALID),
        "going away": lambda stack, tier: stack.core.reset_cache(ResetReason.MEMORY_GOING_AWAY),
        "removed": lambda stack, tier: tier.lose_keys(list(tier.held)),  # type: ignore[attr-defined]
    }


@pytest.mark.scenario_51
@pytest.mark.parametrize("way", early_ends())
def test_whatever_ends_a_promotion_early_gives_its_credit_back(way: str) -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(8, inflight_share=1.0))
    add_held(stack, tier, "a", 4 * TPC)  # takes all of the promotion budget
    assert stack.poll("a", 0, 4 * TPC).hit is None
    assert stack.core.residency.held_bytes == 4 * SIZE
    early_ends()[way](stack, tier)
    stack.pump()
    answer = stack.poll("a", 0, 4 * TPC) if way != "finish" else None
    if answer is not None and answer.hit is not None:
        stack.take("a", 0)
    stack.finish("a")
    while tier.loads:
        tier.loads[0].finish()
        stack.pump()
    stack.wait(61.0)  # what a failure has put off is over
    assert stack.core.residency.held_bytes == stack.core.residency.reserved_bytes == 0
    add_held(stack, tier, "b", 4 * TPC)
    stack.poll("b", 0, 4 * TPC)
    finish_loads(stack, tier)
    assert stack.poll("b", 0, 4 * TPC).hit == 4 * TPC, "all of the budget is there again"
    go_idle(stack)


@pytest.mark.scenario_52
def test_a_pinned_child_keeps_its_parent_and_nothing_breaks() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(3))
    keys = fill(stack, "p", 2 * TPC)[0]  # parent, child
    stack.add("reader", 2 * TPC, seed="p")
    stack.poll("reader", TPC, 2 * TPC)
    plan = stack.take("reader", TPC)  # the child is pinned, the parent is not
    assert plan is not None
    assert list(plan.keys) == keys[1:]
    stack.add("new", 3 * TPC)
    stored = stack.store("new")
    assert stored is not None
    assert len(stored.slots) <= 2
    assert in_primary(stack, keys)[1], "the child stays"
    stack.complete_load(plan)
    stack.check()


@pytest.mark.scenario_65
def test_after_ten_concurrent_loads_stores_succeed_again() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(8))
    for i in range(10):
        add_held(stack, tier, f"r{i}", 2 * TPC)
        stack.poll(f"r{i}", 0, 2 * TPC)
    served = set()
    for _ in range(200):
        for i in range(10):
            name = f"r{i}"
            if name not in served and (hit := stack.poll(name, 0, 2 * TPC).hit) is not None:
                serve(stack, name, hit, 2 * TPC)
                served.add(name)
        for job in list(tier.loads):
            job.finish()
        stack.pump()
        stack.wait(0.01)
    assert len(served) == 10
    stack.add("new", 8 * TPC)
    plan = stack.store("new")
    assert plan is not None
    assert len(plan.slots) == 8
    assert statistics(stack).counters.store_no_room == 0


@pytest.mark.scenario_109
def test_a_gap_in_a_batch_ends_the_prefix_and_frees_what_lies_behind_it() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 3 * TPC)[0]
    stack.poll("a", 0, 3 * TPC)
    (job,) = tier.loads
    del tier.held[keys[1]]
    seen = []
    for index in range(3):  # a reader that polls progress sees only what is filled
        if index == 1:
            job.progress(failed={1: FailCause.GONE})
        else:
            job.progress([index])
        stack.pump()
        found = stack.core.residency.find(keys)
        seen.append([bool(slot >= 0 and stack.core.residency.state[slot] == READY) for slot in found])
    job.end()
    stack.pump()
    assert seen == [[True, False, False], [True, False, False], [True, False, True]]
    assert stack.poll("a", 0, 3 * TPC).hit == TPC
    residency = stack.core.residency
    assert residency.slot_of(keys[1]) < 0, "its buffer is free"
    third = residency.slot_of(keys[2])
    assert residency.pins[third] == 0, "evictable"
    assert residency.held_bytes == SIZE


@pytest.mark.scenario_110
@pytest.mark.parametrize("chunks", [3_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_the_index_of_primary_is_bounded_by_what_is_held(chunks: int) -> None:
    capacity = 10_000 if chunks > 100_000 else 100
    stack = stack_of(config=wide(capacity), checked=False)
    core = core_of(stack)
    for number in range(0, chunks, 50):
        fill(stack, f"r{number}", 50 * TPC)
        assert core.residency.statistics().keys <= capacity
    assert len(core.requests) == len(core.ledger) == len(core.verdicts) == 0


@pytest.mark.scenario_111
def test_a_producer_that_is_faster_than_a_tier_fills_a_bounded_queue() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=CoreConfig(capacity_bytes=64 * SIZE, cascade_queue=32), checked=False)
    core = core_of(stack)
    for second in range(10):
        for part in range(20):  # 1000 chunks a second
            fill(stack, f"r{second}.{part}", 50 * TPC, cascade=True)
            assert len(core.tiers[0].cascades) <= 32
            assert len(core.tiers[0].missed) <= 65_536
            stack.wait(0.05)
        if tier.stores:  # one job a second
            tier.stores[0].finish()
            stack.pump()
    stack.core.check()
    counters = statistics(stack).tiers["near"]
    assert counters.cascade_dropped + counters.cascade_lapsed > 9000
    assert core.residency.pinned_bytes <= core.inflight_limit


@pytest.mark.scenario_113
def test_a_chunk_is_admitted_at_its_second_sight_and_a_scan_flushes_nothing() -> None:
    admission = ThresholdAdmission(2, capacity=20_000)
    hot = chunk_keys(100)
    assert not admission.admit(hot).any(), "the first sight is not stored below"
    assert admission.admit(hot).all(), "the second is"
    below = dict.fromkeys(hot)
    for start in range(0, 10_000, 100):
        scan = chunk_keys(100, start=1000 + start)
        for key, admitted in zip(scan, admission.admit(scan).tolist(), strict=True):
            if admitted:
                below[key] = None
                below.pop(next(iter(below)))
    assert list(below) == hot
    assert admission.statistics().rejected == 100 + 10_000


@pytest.mark.scenario_113
def test_a_scan_does_not_flush_what_is_used_from_primary() -> None:
    stack = stack_of(config=wide(400, policy="s3fifo"), checked=False)
    hot = fill(stack, "hot", 100 * TPC)[0]
    for turn in range(3):
        stack.add(f"again{turn}", 100 * TPC, seed="hot")
        assert stack.poll(f"again{turn}", 0, 100 * TPC).hit == 100 * TPC
        serve(stack, f"again{turn}", 100 * TPC, 100 * TPC)
    for number in range(1000):  # 10^4 chunks, each seen once
        fill(stack, f"scan{number}", 10 * TPC)
    assert all(in_primary(stack, hot))


@pytest.mark.scenario_128
def test_a_primary_full_of_unpinned_chunks_takes_a_load_and_a_locked_one_answers_at_once() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(4))
    fill(stack, "old", 4 * TPC)
    add_held(stack, tier, "a", 2 * TPC)
    stack.poll("a", 0, 2 * TPC)
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 2 * TPC).hit == 2 * TPC, "evicted for it"
    serve(stack, "a", 2 * TPC, 2 * TPC)
    fill(stack, "full", 4 * TPC)
    stack.add("reader", 4 * TPC, seed="full")
    stack.poll("reader", 0, 4 * TPC)
    assert stack.take("reader", 4 * TPC) is not None
    before = len(tier.calls)
    key = add_held(stack, tier, "b", TPC)[0][0]
    assert stack.lookup(key, context("x")) is MISS
    assert [call.method for call in tier.calls[before:]].count("submit_load") == 0


@pytest.mark.scenario_131
def test_by_default_a_single_request_is_stored_below() -> None:
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], config=settings(8))
    keys = fill(stack, "once", 4 * TPC, cascade=True)
    fill(stack, "others", 8 * TPC)
    assert not any(in_primary(stack, keys[0]))
    stack.add("again", 4 * TPC, seed="once")
    stack.poll("again", 0, 4 * TPC)
    assert stack.poll("again", 0, 4 * TPC).hit == 4 * TPC
    assert statistics(stack).tiers["near"].landed == 4


@pytest.mark.scenario_131
def test_with_a_threshold_of_two_rejections_are_counted() -> None:
    admission = ThresholdAdmission(2)
    keys = chunk_keys(4)
    admission.admit(keys)
    assert (admission.statistics().admitted, admission.statistics().rejected) == (0, 4)
    assert ThresholdAdmission().admit(keys).all(), "off by default"


@pytest.mark.scenario_141
def test_100_reads_of_a_cold_key_are_one_promotion() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    key = stack.keys("p", TPC)[0][0]
    tier.put([key])
    for i in range(50):
        stack.add(f"r{i}", TPC, seed="p")
        assert stack.poll(f"r{i}", 0, TPC).hit is None
    for i in range(50):
        assert stack.lookup(key, context(f"k{i}")) is PENDING
    stack.end_step()
    assert len(tier.calls_of("submit_load")) == 1
    assert statistics(stack).counters.promoted == 1
    finish_loads(stack, tier)
    assert all(stack.poll(f"r{i}", 0, TPC).hit == TPC for i in range(50))
    assert all(stack.lookup(key, context(f"k{i}")) is HIT for i in range(50))
    go_idle(stack)


@pytest.mark.scenario_141
def test_above_the_mark_of_promotions_nothing_is_promoted_and_a_lost_source_is_a_clean_failure() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(8, inflight_share=0.25))
    add_held(stack, tier, "a", 4 * TPC)  # takes the budget of half of primary; two chunks are handed over, two queue
    stack.poll("a", 0, 4 * TPC)
    assert [len(job.job.keys) for job in tier.loads] == [2]
    key = stack.keys("q", TPC)[0][0]
    tier.put([key])
    assert stack.lookup(key, context("x")) is RETRY
    stack.end_step()
    assert key not in loaded_keys(tier)
    tier.lose_keys([stack.keys("a", 4 * TPC)[0][3]])  # evicted below while its read is queued
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 4 * TPC).hit == 3 * TPC
    go_idle(stack)


@pytest.mark.scenario_137
def test_of_ten_hits_the_engine_loads_six_and_the_rest_is_let_go_at_once() -> None:
    stack = stack_of()
    fill(stack, "p", 10 * TPC)
    stack.add("a", 10 * TPC, seed="p")
    assert stack.poll("a", 0, 10 * TPC).hit == 10 * TPC
    assert stack.core.residency.pinned_bytes == 10 * SIZE
    assert stack.poll("a", 4 * TPC, 10 * TPC).hit == 6 * TPC, "the engine found four of them by itself"
    plan = stack.take("a", 6 * TPC)
    assert plan is not None
    assert plan.ranges == ((4, 10),)
    assert stack.core.residency.pinned_bytes == 6 * SIZE
    stack.complete_load(plan)
    assert stack.core.residency.pinned_bytes == 0


@pytest.mark.scenario_137
@pytest.mark.parametrize("lookups", [2_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_lookups_without_a_hit_leave_nothing(lookups: int) -> None:
    tier = async_tier().auto()
    stack = stack_of(tiers=[tier], checked=False)
    core = core_of(stack)
    sizes = set()
    for number in range(lookups):
        stack.add(f"r{number}", 2 * TPC)
        stack.poll(f"r{number}", 0, 2 * TPC)
        answer_probes(stack, tier)
        assert stack.poll(f"r{number}", 0, 2 * TPC).hit == 0
        stack.take(f"r{number}", 0)
        stack.finish(f"r{number}")
        if number % 100 == 99:
            sizes.add((len(core.requests), len(core.ledger), len(core.verdicts), len(stack.core._presence.probes)))
    assert sizes == {(0, 0, 0, 0)}


@pytest.mark.scenario_34
def test_the_gauges_equal_a_recount() -> None:
    tier = sync_tier(limit=4 * SIZE).auto()
    stack = stack_of(FULL, tiers=[tier], config=wide(7))
    for number in range(10):  # 10 stores into room for 7: 3 evictions
        fill(stack, f"r{number}", TPC)
    stack.add("reader", TPC, seed="r9")
    stack.poll("reader", 0, TPC)
    assert stack.take("reader", TPC) is not None
    stack.add("writer", TPC)
    assert stack.prepare_store("writer", [(0, 0)]) is not None
    snapshot, residency = statistics(stack), stack.core.residency
    assert snapshot.counters.stored == 10
    assert snapshot.counters.evicted == 4
    states = residency.state
    assert snapshot.primary.capacity_bytes == 7 * SIZE
    assert snapshot.primary.resident_bytes == int((states == READY).sum()) * SIZE == 6 * SIZE
    assert snapshot.primary.pinned_bytes == int((residency.pins > 0).sum()) * SIZE == SIZE
    assert snapshot.primary.reserved_bytes == SIZE
    usage = tier.usage()
    assert usage.bytes_held == sum(map(len, tier.held.values()))


@pytest.mark.scenario_35
def test_residency_and_pins_are_two_gauges() -> None:
    stack = stack_of(config=wide(100), tiers=[sync_tier().auto()])
    fill(stack, "p", 100 * TPC, cascade=True)
    primary = statistics(stack).primary
    assert primary.keys == 100
    assert primary.resident_bytes == 100 * SIZE
    assert primary.pinned_bytes == 0
