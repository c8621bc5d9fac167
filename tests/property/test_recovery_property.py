"""Back-pressure, breakers, clocks and silence with a manual clock: it recovers in bounded time."""

from __future__ import annotations

import math

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
    settings,
    stack_of,
    statistics,
    sync_tier,
    wide,
)
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from kvstrata.core.breakers import LONGEST_REST, Breaker, BreakerState
from kvstrata.core.clocks import Pace, WaitClock
from kvstrata.core.settings import CoreConfig
from kvstrata.testing import ScriptedTier
from kvstrata.testing.stack import CoreStack
from kvstrata.types import FailCause

EXAMPLES = 100 if examples.default is None else examples.default.max_examples
FEW = examples(max_examples=max(EXAMPLES // 4, 10))
FIRST, MOST = 1.0, 60.0
BOUND = 2 * MOST + 1.0
"""A breaker that is open for its longest time becomes half open, and closes after as long again at the latest."""
REST_BOUND = (LONGEST_REST + 1) * MOST + 1.0
"""The same for one that rests because requests waited for its tier in vain."""

# the breaker by itself

happenings = st.lists(
    st.tuples(
        st.sampled_from(["fail", "fail at once", "ok", "ask", "release", "late", "in time"]), st.floats(0.0, 90.0)
    ),
    max_size=60,
)


@given(happenings)
def test_a_breaker_closes_within_its_bound_once_nothing_happens(history: list[tuple[str, float]]) -> None:
    breaker, now = Breaker(3, FIRST, MOST), 0.0
    for what, gap in history:
        now += gap
        breaker.advance(now)
        match what:
            case "fail" | "fail at once":
                breaker.failure(now, at_once=what == "fail at once")
            case "ok":
                breaker.success()
            case "ask" if breaker.allows:
                breaker.asked()
            case "release":
                breaker.released()
            case "late":
                breaker.late(now, gap)
            case "in time":
                breaker.in_time()
    if not breaker.allows and breaker.state is BreakerState.HALF_OPEN:
        breaker.released()  # whoever asks owes an end: an answer, an error, or a bound of its job
    steps = 0
    while breaker.state is not BreakerState.CLOSED:
        due = breaker.deadline()
        assert due is not None
        assert due <= now + REST_BOUND, "it does not lie beyond the bound"
        breaker.advance(max(due, now))
        steps += 1
        assert steps <= 2


@given(st.integers(1, 40))
def test_each_failed_trial_doubles_the_time_up_to_the_bound_and_one_that_works_forgets_it(trials: int) -> None:
    breaker, now = Breaker(3, FIRST, MOST), 0.0
    for _ in range(3):
        breaker.failure(now)
    for trial in range(trials):
        assert breaker.state is BreakerState.OPEN
        due = breaker.deadline()
        assert due is not None
        assert due - now == min(FIRST * 2**trial, MOST)
        now = due
        breaker.advance(now)
        assert breaker.state is BreakerState.HALF_OPEN
        breaker.asked()
        breaker.failure(now)
    now = breaker.deadline() or now
    breaker.advance(now)
    breaker.asked()
    breaker.success()
    assert breaker.state is BreakerState.CLOSED
    for _ in range(3):
        breaker.failure(now)
    assert breaker.deadline() == now + FIRST


# the breaker in the core, under every kind of traffic

TRAFFIC = ("none", "reads", "writes", "flood")


def sick(stack: CoreStack, tier: ScriptedTier, how: str) -> None:
    """The tier fails until both of its breakers have opened."""
    tier.on_load = tier.on_store = lambda job: job.fail(FailCause.IO_ERROR)
    state = core_of(stack).tiers[0]
    for number in range(40):
        if state.reads.state is BreakerState.OPEN and state.writes.state is BreakerState.OPEN:
            return
        add_held(stack, tier, f"sick{how}{number}", TPC)
        stack.poll_until_answered(f"sick{how}{number}", 0, TPC)
        stack.take(f"sick{how}{number}", 0)
        stack.store(f"sick{how}{number}")
        stack.finish(f"sick{how}{number}")
        stack.wait(0.05)
    raise AssertionError("the breakers never opened")


def drive(stack: CoreStack, tier: ScriptedTier, traffic: str, number: int) -> None:
    """A step's worth of traffic."""
    if traffic in ("reads", "flood"):
        for part in range(5 if traffic == "flood" else 1):
            name = f"r{number}.{part}"
            add_held(stack, tier, name, TPC)
            hit = stack.poll(name, 0, TPC).hit
            if hit is not None:
                stack.take(name, 0)
            stack.finish(name)
    if traffic in ("writes", "flood"):
        fill(stack, f"w{number}", 2 * TPC, cascade=True)


@FEW
@given(st.sampled_from(TRAFFIC), st.integers(1, 4), st.floats(0.05, 5.0))
def test_both_breakers_of_a_tier_that_is_well_close_whatever_the_traffic(traffic: str, bouts: int, step: float) -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(32), checked=False)
    state = core_of(stack).tiers[0]
    for bout in range(bouts):
        sick(stack, tier, f".{bout}")
        stack.wait(0.5)
    tier.auto()  # well again
    waited, number = 0.0, 0
    while BreakerState.OPEN in (state.reads.state, state.writes.state) or not (
        state.reads.allows and state.writes.allows
    ):
        drive(stack, tier, traffic, number)
        stack.wait(step)
        waited, number = waited + step, number + 1
        assert waited <= BOUND + step, f"{traffic}: {state.reads.state}, {state.writes.state}"
    stack.check()
    stack.wait(BOUND)
    assert state.reads.state is state.writes.state is BreakerState.CLOSED
    add_held(stack, tier, "last", 2 * TPC)
    assert stack.poll_until_answered("last", 0, 2 * TPC) == 2 * TPC
    stack.finish("last")
    go_idle(stack)


@FEW
@given(st.integers(1, 12), st.lists(st.sampled_from(["fail", "hang", "ok"]), max_size=10))
def test_what_a_tier_missed_is_offered_again_and_reaches_it(queue: int, ends: list[str]) -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=CoreConfig(capacity_bytes=48 * SIZE, cascade_queue=queue), checked=False)
    keys = [key for number in range(8) for key in fill(stack, f"p{number}", 3 * TPC, cascade=True)[0]]
    for end in ends:
        if tier.stores and end != "hang":
            (tier.stores[0].finish if end == "ok" else tier.stores[0].fail)()
            stack.pump()
        stack.wait(1.0)
    for pending in [*tier.stores]:
        pending.finish()
    tier.auto()
    stack.pump()
    stack.wait(4 * BOUND, step=1.0)  # with nothing else going on
    missing = [key for key, here in zip(keys, in_primary(stack, keys), strict=True) if here and key not in tier.held]
    assert missing == [], f"{len(missing)} chunks are still in primary and never reached the tier"
    assert not core_of(stack).tiers[0].missed
    go_idle(stack)


# clocks

TICKS = st.lists(
    st.tuples(
        st.sampled_from(["wait", "poll", "progress", "run", "stop", "by polls", "plan", "round"]), st.floats(0.0, 1.5)
    ),
    max_size=60,
)


@given(TICKS)
def test_the_total_only_runs_out_and_never_begins_anew(history: list[tuple[str, float]]) -> None:
    now, total = 100.0, 4.0
    clock = WaitClock(2.0, total, 0.1, now)
    last = 0.0
    fixed = False
    for what, gap in history:
        now += gap
        match what:
            case "poll" | "round" | "wait":
                clock.account(now)
            case "progress":
                clock.progress(now)
            case "run":
                clock.switch(Pace.RUNNING, now)
            case "stop":
                clock.switch(Pace.STOPPED, now)
            case "by polls":
                clock.switch(Pace.BY_POLLS, now)
            case "plan" if not fixed:
                clock.fix_once(2.0, total + 1.0)
                fixed, total = True, total + 1.0
            case "plan":
                clock.fix_once(100.0, 100.0)  # a later plan changes nothing
        assert clock.waited >= last, "time that was counted is not taken back"
        last = clock.waited
        due = clock.deadline()
        assert due == math.inf or due <= now + total
    clock.switch(Pace.RUNNING, now)
    clock.account(now + total)
    assert clock.exhausted
    assert clock.expired(now + total)


@FEW
@given(
    st.lists(st.sampled_from(["fail", "land", "wait", "more computed", "reset"]), max_size=25),
    st.floats(0.01, 0.4),
)
def test_a_request_is_answered_within_its_total_whatever_happens_on_the_way(events: list[str], step: float) -> None:
    tier = sync_tier()
    total = 3.0
    config = wide(64, stall_s=total, total_s=total, max_fetch_rounds=1000, breaker_errors=1000)
    stack = stack_of(tiers=[tier], config=config)
    add_held(stack, tier, "a", 8 * TPC)
    begun, computed = stack.clock.monotonic(), 0
    answer = stack.poll("a", computed, 8 * TPC)
    for event in [*events, *["wait"] * 400]:
        if answer.hit is not None:
            break
        if event == "fail" and tier.loads:
            tier.loads[0].fail(FailCause.GONE)
            stack.pump()
        elif event == "land" and tier.loads:
            job = tier.loads[0]
            left = [i for i in range(len(job.job.keys)) if i not in job.reported]
            if left[1:]:  # one lands, another one is always missing
                job.progress(left[:1])
                stack.pump()
        elif event == "more computed":
            computed = min(computed + TPC, 6 * TPC)
        stack.wait(step)
        answer = stack.poll("a", computed, 8 * TPC)
    assert answer.hit is not None
    assert stack.clock.monotonic() - begun <= total + 2 * step
    go_idle(stack)


# silence

STATES = ("resolving", "fetching", "ready", "queued", "partly landed", "per key")


@FEW
@given(st.sampled_from(STATES), st.floats(30.0, 500.0), st.booleans())
def test_silence_gives_back_everything(where: str, silence: float, busy: bool) -> None:
    probing = async_tier("slow")
    tier = sync_tier("near") if where != "resolving" else probing
    config = settings(8, stall_s=1000.0, total_s=1000.0, job_idle_s=5000.0, job_total_s=5000.0, inflight_share=1.0)
    stack = stack_of(tiers=[tier], config=config)
    if where == "queued":
        add_held(stack, tier, "first", 4 * TPC)
        stack.poll("first", 0, 4 * TPC)
    keys = add_held(stack, tier, "a", 4 * TPC)
    if where == "per key":
        for key in keys[0]:
            stack.lookup(key, context("b"))
        stack.end_step()
    else:
        stack.poll("a", 0, 4 * TPC)
    if where in ("ready", "per key"):
        finish_loads(stack, tier)
    elif where == "partly landed":
        tier.loads[0].progress([0])
        stack.pump()
    stack.clock.advance(silence)
    stack.core.advance(stack.clock.monotonic())
    stack.pump()
    stack.check()
    residency = stack.core.residency
    assert residency.held_bytes == 0, "nothing is held by requests that nobody asks about"
    assert statistics(stack).queued == 0
    for job in list(tier.loads):
        job.finish()
    answer_probes(stack, tier)
    stack.pump()
    assert residency.pinned_bytes == residency.reserved_bytes == residency.quarantined_bytes == 0
    if busy:  # and others have all of it
        hold(stack, tier, [stack.keys("other", 4 * TPC)[0]])
        stack.add("other", 4 * TPC)
        stack.poll("other", 0, 4 * TPC)
        answer_probes(stack, tier)
        finish_loads(stack, tier)
        assert stack.poll("other", 0, 4 * TPC).hit == 4 * TPC
    go_idle(stack)


# pacing and overdue

LOAD_ENDS = st.lists(
    st.sampled_from(["finish", "fail", "hang", "partial", "late", "abort", "new"]), min_size=1, max_size=30
)


@FEW
@given(LOAD_ENDS, st.integers(4, 24), st.sampled_from([0.1, 0.25, 1.0]))
def test_pacing_and_overdue_marks_never_leak_capacity(ends: list[str], chunks: int, share: float) -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=settings(chunks, inflight_share=share))
    core = core_of(stack)
    hung: list[object] = []
    names: list[str] = []
    for number, end in enumerate(ends):
        if end in ("new", "hang") or not names:
            names.append(f"r{number}")
            add_held(stack, tier, names[-1], 4 * TPC)
        for name in names:
            hit = stack.poll(name, 0, 4 * TPC).hit
            if hit is not None:
                stack.take(name, 0)
        jobs = [job for job in tier.loads if job not in hung]
        match end:
            case "finish" if jobs:
                jobs[0].finish()
            case "fail" if jobs:
                jobs[0].fail()
            case "partial" if jobs:
                jobs[0].finish(done=[0])
            case "hang" if jobs:
                hung.append(jobs[0])
                stack.wait(11.0)
            case "late" if hung:
                hung.pop(0).finish()  # type: ignore[attr-defined]
            case "abort":
                stack.finish(names.pop(0))
        stack.pump()
        stack.wait(0.5)
        state = core.tiers[0]
        assert state.inflight <= core.inflight_limit
        assert core.overdue_bytes() <= core.inflight_limit
    for name in names:
        stack.finish(name)
    for job in list(tier.loads):
        job.finish()
    stack.pump()
    state = core.tiers[0]
    assert (state.inflight, state.loads_out, state.overdue, state.overdue_jobs) == (0, 0, 0, 0)
    assert stack.core.residency.quarantined_bytes == 0
    tier.auto()
    stack.wait(2 * BOUND, step=10.0)
    share_chunks = min(4, core.share_limit // SIZE)
    add_held(stack, tier, "last", share_chunks * TPC)
    assert stack.poll_until_answered("last", 0, share_chunks * TPC) == share_chunks * TPC, "all of it is usable again"
    stack.finish("last")
    go_idle(stack)


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
def test_a_clock_that_stands_still_changes_nothing(seconds: float) -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    add_held(stack, tier, "a", TPC)
    for _ in range(50):
        assert stack.poll("a", 0, TPC).hit is None
        stack.clock.advance(seconds)
        stack.core.advance(stack.clock.monotonic())
    finish_loads(stack, tier)
    assert stack.poll("a", 0, TPC).hit == TPC
