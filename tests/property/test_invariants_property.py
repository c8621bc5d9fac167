"""Invariants of docs/invariants.md that no other property test names: each over histories that Hypothesis draws."""

from __future__ import annotations

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
    go_idle,
    in_primary,
    settings,
    stack_of,
    statistics,
    sync_tier,
    wide,
)
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from kvstrata.core.messages import EventKind, LoadPlan, RequestOptions, StorePlan, TierFilter
from kvstrata.core.statistics import UNSERVED_CHUNKS, TierCounters, alarms
from kvstrata.testing import ScriptedTier
from kvstrata.testing.simfs import SimDisk, SimFiles
from kvstrata.testing.stack import CoreStack
from kvstrata.testing.tier_harness import NAMESPACE, TierHarness, chunk_keys
from kvstrata.tiers.base import Tier
from kvstrata.tiers.disk import DiskTier
from kvstrata.tiers.memory import MemoryTier
from kvstrata.types import FailCause, LookupResult, Presence

EXAMPLES = 100 if examples.default is None else examples.default.max_examples
FEW = examples(max_examples=max(EXAMPLES // 3, 10))
HIT, PENDING, RETRY, MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.RETRY, LookupResult.MISS
NOWHERE = RequestOptions(store_tiers=TierFilter(names=frozenset()))


def flip(stack: CoreStack, tier: ScriptedTier, key: bytes, there: bool) -> None:
    """The tier loses the key, or is given it by a store; primary does not keep it."""
    if there:
        tier.lose_keys([key])
    else:
        fill(stack, "p", TPC, cascade=True)
        for job in list(tier.stores):
            job.finish()
    stack.pump()
    if stack.core.residency.slot_of(key) >= 0:
        stack.core.residency.evict(stack.core.residency.find([key]))


@FEW
@given(st.lists(st.sampled_from(["ask", "fail", "store", "remove", "late yes", "late no"]), min_size=1, max_size=25))
def test_the_newest_fact_about_a_key_decides(history: list[str]) -> None:
    """6: a failed load is a miss for all, a store makes it a hit again, a late probe never overwrites a newer fact."""
    tier = async_tier()
    stack = stack_of(tiers=[tier], config=wide(16, backoff_s=1000.0, backoff_max_s=1000.0, breaker_errors=1000))
    key = stack.keys("p", TPC)[0][0]
    fact: bool | None = None  # what is known; None: nothing yet, a probe decides
    truth = False
    for number, what in enumerate(history):
        name = f"r{number}"
        if what in ("store", "remove"):
            flip(stack, tier, key, there=what == "remove")
            fact = truth = what == "store"
        elif what in ("late yes", "late no"):  # a probe that began before what comes now, and is answered after it
            stack.lookup(key, context(name))
            stack.end_step()
            late = list(tier.probes)
            if late:
                flip(stack, tier, key, truth)
                fact = truth = not truth
                for probe in late:
                    probe.finish({key: Presence.PRESENT if what == "late yes" else Presence.ABSENT})
                stack.pump()
                answer = stack.lookup(key, context(name))
                assert answer is (PENDING if truth else MISS), "the newer fact, not the older probe"
                stack.end_step()
        else:
            stack.lookup(key, context(name))
            stack.end_step()
            answer_probes(stack, tier)
            answer = stack.lookup(key, context(name))
            stack.end_step()
            if what == "fail" and answer is PENDING:
                for job in list(tier.loads):
                    job.fail(FailCause.CORRUPT)
                stack.pump()
                assert stack.lookup(key, context(name)) is MISS
                assert stack.lookup(key, context(f"{name}, another")) is MISS
                stack.finish(f"{name}, another")
                fact = False
            elif fact is not None:
                assert (answer is not MISS) == fact, (what, answer)
        for job in list(tier.loads):
            job.finish()
        stack.pump()
        stack.finish(name)
        if (slot := stack.core.residency.slot_of(key)) >= 0 and not stack.core.residency.pins[slot]:
            stack.core.residency.evict(stack.core.residency.find([key]))
    go_idle(stack)


@FEW
@given(st.data())
def test_a_slot_is_not_used_again_before_whoever_copies_has_let_go(data: st.DataObject) -> None:
    """8: of sources and targets of copies in flight none is given to another chunk."""
    tier = sync_tier()
    stack = stack_of(FULL, tiers=[tier], config=settings(10, inflight_share=1.0), ranks=2)
    busy: dict[int, tuple[LoadPlan | StorePlan, set[int]]] = {}
    for number in range(40):
        name = f"r{number}"
        match data.draw(st.sampled_from(["store", "load", "promote", "end", "finish", "wait"])):
            case "store":
                stack.add(name, 2 * TPC)
                plan = stack.prepare_store(name, [(0, 0), (0, 1)])
                if plan is not None:
                    taken = set(plan.slots.tolist())
                    held = {slot for _, slots in busy.values() for slot in slots}
                    assert not taken & held, "given to a store while somebody copies"
                    busy[id(plan)] = (plan, taken)
            case "load":
                stack.add(name, 2 * TPC, seed=f"r{data.draw(st.integers(0, number))}")
                hit = stack.poll(name, 0, 2 * TPC).hit
                load = stack.take(name, hit) if hit else None
                if load is not None:
                    busy[id(load)] = (load, set(load.slots.tolist()))
            case "promote":
                tier.put(stack.keys(f"below{number}", 2 * TPC)[0])
                stack.add(name, 2 * TPC, seed=f"below{number}")
                stack.poll(name, 0, 2 * TPC)
            case "end" if busy:
                job = data.draw(st.sampled_from([job for job, _ in busy.values()]))
                if isinstance(job, LoadPlan):
                    stack.complete_load(job)
                else:
                    stack.complete_store(job)
                if core_of(stack).ledger.get(job.job_id) is None:
                    del busy[id(job)]
            case "finish":
                stack.finish(f"r{data.draw(st.integers(0, number))}")
            case _:
                for pending in [*tier.loads[:1], *tier.stores[:1]]:
                    pending.finish()
                stack.pump()
                stack.wait(1.0)
        in_flight = [
            slot
            for job in core_of(stack).ledger
            for slot, key in zip(job.slots.tolist(), job.keys, strict=True)
            if stack.core.residency.key_of(slot) not in (key, None)
        ]
        assert in_flight == [], "a slot under an unfinished job has another key"
    go_idle(stack)


@FEW
@given(st.integers(2, 4), st.randoms(use_true_random=False))
def test_what_ranks_report_in_any_order_is_one_decision(ranks: int, order: object) -> None:
    """11: a chunk is there only when every rank's shard is, whichever reports first; all see the same answers."""
    stack = stack_of(ranks=ranks, checked=False)
    plans = {}
    for number in range(6):
        stack.add(f"w{number}", TPC)
        plans[number] = stack.prepare_store(f"w{number}", [(0, 0)])
    reports = [(number, rank) for number in plans for rank in range(ranks)]
    bad = {(number, number % ranks) for number in (1, 4)}
    order.shuffle(reports)  # type: ignore[attr-defined]
    told = dict.fromkeys(plans, 0)
    for at, (number, rank) in enumerate(reports):
        plan = plans[number]
        assert plan is not None
        stack.complete_store(plan, (number, rank) not in bad)
        told[number] += 1
        there = told[number] == ranks and number not in (1, 4)
        stack.add(f"a{at}", TPC, seed=f"w{number}")
        assert (stack.poll(f"a{at}", 0, TPC).hit == TPC) == there
        stack.finish(f"a{at}")
    go_idle(stack)


def answers_of(stack: CoreStack, requests: list[tuple[int, int, int, bool]]) -> list[object]:
    """What a history of requests is answered."""
    found: list[object] = []
    for number, (seed, chunks, computed, store) in enumerate(requests):
        name, total = f"r{number}", chunks * TPC + 1
        stack.add(name, chunks * TPC, NOWHERE, seed=f"p{seed}")
        hit = stack.poll(name, min(computed * TPC, total - 1), total).hit
        plan = None if hit is None else stack.take(name, hit)
        found.append((hit, None if plan is None else (plan.ranges, plan.boundary)))
        if plan is not None:
            stack.complete_load(plan)
        if store:
            stored = stack.store(name)
            found.append(None if stored is None else list(stored.chunks))
        stack.finish(name)
    return found


@FEW
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8), st.integers(0, 4), st.booleans()), max_size=40),
    st.sampled_from(["full", "hybrid"]),
)
def test_tiers_that_have_nothing_change_no_decision(requests: list[tuple[int, int, int, bool]], kind: str) -> None:
    """16: configured but empty tiers are a no-op for all decisions."""
    layout = FULL if kind == "full" else HYBRID
    runs = [
        answers_of(stack_of(layout, tiers=tiers, config=settings(12)), requests)
        for tiers in ([], [sync_tier()], [sync_tier("a"), sync_tier("b")])
    ]
    assert runs[0] == runs[1] == runs[2]


@given(st.integers(0, 3000), st.integers(0, 2), st.floats(0.0, 200.0))
def test_alarms_are_told_exactly_when_they_are_due(cascaded: int, landed: int, oldest: float) -> None:
    """17: "stored, but nothing served" and the age of the oldest job are visible."""
    counters = TierCounters(cascaded=cascaded, landed=landed)
    places = [alarm.place for alarm in alarms({"disk": counters}, oldest, 60.0)]
    assert ("disk" in places) == (cascaded >= UNSERVED_CHUNKS and landed == 0)
    assert ("jobs" in places) == (oldest > 60.0)


@FEW
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.sampled_from(["store", "load", "reset"])), max_size=40)
)
def test_events_replay_to_what_is_really_there(history: list[tuple[int, int, str]]) -> None:
    """14: the stream of events replays to the residency; what is counted equals a recount."""
    tier = sync_tier().auto()
    stack = stack_of(tiers=[tier], config=settings(10), events=True)
    replayed: dict[str, set[bytes]] = {"primary": set(), "near": set()}
    asked: set[bytes] = set()
    for number, (seed, chunks, what) in enumerate(history):
        if what == "reset":
            stack.core.reset_cache()
            stack.pump()
            replayed["near"].clear()  # a purge empties the tier without naming every key
        elif what == "store":
            asked |= set(fill(stack, f"r{number}", chunks * TPC, seed=f"p{seed}", cascade=True)[0])
        else:
            stack.add(f"r{number}", chunks * TPC, seed=f"p{seed}")
            hit = stack.poll_until_answered(f"r{number}", 0, chunks * TPC)
            plan = stack.take(f"r{number}", hit)
            if plan is not None:
                stack.complete_load(plan)
            stack.finish(f"r{number}")
        for event in stack.core.take_events():
            place = replayed[event.place]
            if event.kind is EventKind.STORED:
                place |= set(event.keys)
            else:
                place -= set(event.keys)
        here = {key for key, found in zip(sorted(asked), in_primary(stack, sorted(asked)), strict=True) if found}
        assert replayed["primary"] == here
        assert replayed["near"] == set(tier.held)
        primary = statistics(stack).primary
        assert primary.resident_bytes == len(here) * SIZE
    go_idle(stack)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "load", "remove", "touch", "step", "settle", "purge"]),
        st.integers(0, 79),
        st.integers(1, 8),
    ),
    max_size=60,
)


@FEW
@given(ACTIONS, st.sampled_from(["memory", "disk"]), st.integers(0, 3))
def test_no_tier_ever_holds_more_than_its_limit(history: list[tuple[str, int, int]], kind: str, seed: int) -> None:
    """9: what is held, reserved and allocated stays within the limit after every step of every task."""
    disk, limit = SimDisk(), 300_000 if kind == "disk" else 60_000
    tier: Tier = MemoryTier(limit=limit)
    if kind == "disk":
        tier = DiskTier(path="/d", limit=limit, segment_bytes=40_960, largest_chunk=3000, files=SimFiles(disk, seed))
    rig = TierHarness(tier, chunk_bytes=3000, slots=128, seed=seed)

    def measure() -> None:
        assert "/d" not in disk.directories or disk.allocated("/d") <= limit

    rig.checks.append(measure)
    rig.open()
    keys = chunk_keys(90)
    for what, start, count in history:
        picked = keys[start : start + count]
        if len(rig._free) < 20:
            rig.settle()
        match what:
            case "store":
                rig.submit_store(picked)
            case "load":
                rig.submit_load(picked)
            case "remove":
                rig.tier.remove(picked)
            case "touch":
                rig.tier.touch(picked)
            case "settle":
                rig.settle()
            case "purge":
                rig.tier.purge(NAMESPACE)
        rig.step()
    rig.settle()
    for record in rig.jobs.values():
        assert record.ended is not None
        rig.check_loaded(record)
    rig.close()
