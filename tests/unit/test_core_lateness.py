"""A tier that answers, but too late: requests wait for it in vain, and it rests."""

from __future__ import annotations

import pytest
from core_kit import TPC, async_tier, core_of, finish_loads, hold, stack_of, sync_tier

from kvstrata.core.breakers import REST_FIRST, REST_MOST, BreakerState
from kvstrata.core.messages import RequestOptions
from kvstrata.testing import ScriptedTier
from kvstrata.testing.stack import CoreStack


def wait_in_vain(stack: CoreStack, tier: ScriptedTier, name: str, **options: float) -> None:
    """A request that waits for the tier until its clock runs out and gains nothing."""
    keys = stack.add(name, 4 * TPC, RequestOptions(**options))
    hold(stack, tier, keys)
    assert stack.poll_until_answered(name, 0, 4 * TPC, step=0.1) == 0
    stack.take(name, 0)
    stack.finish(name)
    for job in list(tier.loads):  # it comes, but nobody waits any more
        job.finish()
    stack.pump()


def rest_of(stack: CoreStack, tier: ScriptedTier) -> float:
    """How long the tier rests now, in steps of a second; nothing is read meanwhile."""
    reads, asked, rest = core_of(stack).tiers[0].reads, len(tier.calls_of("submit_load")), 0.0
    assert reads.state is BreakerState.OPEN
    while not reads.allows:
        name = f"meanwhile {stack.clock.monotonic()}"
        hold(stack, tier, stack.add(name, 4 * TPC))
        assert stack.poll(name, 0, 4 * TPC).hit == 0, "answered at once"
        stack.finish(name)
        stack.wait(1.0)
        rest += 1.0
    assert len(tier.calls_of("submit_load")) == asked
    return rest


def test_a_tier_that_is_waited_for_in_vain_rests_longer_and_longer() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    for number in range(3):
        assert core_of(stack).tiers[0].reads.state is BreakerState.CLOSED
        wait_in_vain(stack, tier, f"r{number}")
    rests = []
    for number in range(7):
        rests.append(rest_of(stack, tier))
        wait_in_vain(stack, tier, f"again{number}")  # the row goes on: one more is enough
    waited = 2.0
    expected = [min(REST_FIRST * 2**number, REST_MOST) * waited for number in range(7)]
    assert rests == pytest.approx(expected, abs=8.0)


def test_one_that_is_served_in_time_ends_the_row() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    reads = core_of(stack).tiers[0].reads
    for number in range(6):
        wait_in_vain(stack, tier, f"r{number}")
        if number % 2:
            hold(stack, tier, stack.add(f"ok{number}", 4 * TPC))
            stack.poll(f"ok{number}", 0, 4 * TPC)
            finish_loads(stack, tier)
            assert stack.poll(f"ok{number}", 0, 4 * TPC).hit == 4 * TPC
            stack.finish(f"ok{number}")
        assert reads.state is BreakerState.CLOSED


def test_who_gains_half_of_what_it_waited_for_has_not_waited_in_vain() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    for number in range(6):
        hold(stack, tier, stack.add(f"r{number}", 4 * TPC))
        stack.poll(f"r{number}", 0, 4 * TPC)
        tier.loads[-1].progress([0, 1])
        stack.pump()
        assert stack.poll_until_answered(f"r{number}", 0, 4 * TPC, step=0.1) == 2 * TPC
        stack.take(f"r{number}", 0)
        stack.finish(f"r{number}")
        tier.loads[-1].finish()
        stack.pump()
        assert core_of(stack).tiers[0].reads.state is BreakerState.CLOSED


def test_a_request_with_a_clock_of_its_own_says_nothing_of_a_tier() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    for number in range(10):  # else one client could switch a tier off for all
        wait_in_vain(stack, tier, f"r{number}", total_s=0.05)
    assert core_of(stack).tiers[0].reads.state is BreakerState.CLOSED


def test_probes_that_are_waited_for_in_vain_count_too() -> None:
    tier = async_tier()
    stack = stack_of(tiers=[tier])
    for number in range(3):
        stack.add(f"r{number}", 4 * TPC)
        assert stack.poll_until_answered(f"r{number}", 0, 4 * TPC, step=0.1) == 0
        stack.take(f"r{number}", 0)
        stack.finish(f"r{number}")
    assert core_of(stack).tiers[0].reads.state is BreakerState.OPEN
