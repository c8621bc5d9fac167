"""Verdicts on failed keys, and probe results against newer facts, through the whole core."""

from __future__ import annotations

import pytest
from core_kit import (
    TPC,
    add_held,
    answer_probes,
    async_tier,
    context,
    core_of,
    fill,
    finish_loads,
    hold,
    loaded_keys,
    stack_of,
    sync_tier,
    wide,
)

from kvstrata.testing import ScriptedTier
from kvstrata.testing.stack import CoreStack
from kvstrata.types import Capabilities, FailCause, KeysRemoved, LookupResult, Presence

CONTENT = [FailCause.WRONG_SIZE, FailCause.CORRUPT, FailCause.FOREIGN]
PASSING = [FailCause.IO_ERROR, FailCause.TIMEOUT, FailCause.REFUSED]


def hit_of(stack: CoreStack, tier: ScriptedTier, name: str, *, seed: str = "p", tokens: int = 4 * TPC) -> int:
    """The hit of a fresh request when everything that is read comes."""
    stack.add(name, tokens, seed=seed)
    stack.poll(name, 0, tokens)
    answer_probes(stack, tier)
    finish_loads(stack, tier)
    hit = stack.poll(name, 0, tokens).hit
    assert hit is not None
    stack.take(name, 0)
    stack.finish(name)
    stack.core.residency.evict(stack.core.residency.find([k for k in stack.keys(seed, tokens)[0] if there(stack, k)]))
    return hit


def there(stack: CoreStack, key: bytes) -> bool:
    """Whether primary has the key."""
    return stack.core.residency.slot_of(key) >= 0


def fail_second(stack: CoreStack, tier: ScriptedTier, name: str, cause: FailCause) -> None:
    """A request whose second chunk fails; it is over afterwards, and primary is empty."""
    stack.add(name, 4 * TPC, seed="p")
    stack.poll(name, 0, 4 * TPC)
    answer_probes(stack, tier)
    (job,) = tier.loads
    at = list(job.job.keys).index(stack.keys("p", 4 * TPC)[0][1])
    job.finish(failed={at: cause})
    stack.pump()
    assert stack.poll(name, 0, 4 * TPC).hit == TPC
    stack.take(name, 0)
    stack.finish(name)
    stack.core.residency.evict(stack.core.residency.find([k for k in stack.keys("p", 4 * TPC)[0] if there(stack, k)]))


@pytest.mark.parametrize("cause", CONTENT)
@pytest.mark.parametrize("make", [sync_tier, async_tier])
def test_bad_content_stays_a_miss_until_this_process_stores_the_key(make, cause: FailCause) -> None:  # type: ignore[no-untyped-def]
    tier = make("t")
    stack = stack_of(tiers=[tier])
    hold(stack, tier, stack.keys("p", 4 * TPC))
    fail_second(stack, tier, "a", cause)
    assert hit_of(stack, tier, "b") == TPC
    stack.wait(10_000.0)
    assert hit_of(stack, tier, "c") == TPC
    fill(stack, "p", 4 * TPC, cascade=True)
    for job in list(tier.stores):
        job.finish()
    stack.pump()
    stack.core.residency.evict(stack.core.residency.find(stack.keys("p", 4 * TPC)[0]))
    assert hit_of(stack, tier, "d") == 4 * TPC


@pytest.mark.parametrize("cause", PASSING)
def test_a_passing_cause_is_a_miss_for_a_back_off_that_doubles(cause: FailCause) -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    hold(stack, tier, stack.keys("p", 4 * TPC))
    for turn, back_off in enumerate((1, 2, 4)):
        fail_second(stack, tier, f"a{turn}", cause)
        stack.wait(back_off - 0.1)
        assert hit_of(stack, tier, f"b{turn}") == TPC
        stack.wait(0.1)
    assert hit_of(stack, tier, "c") == 4 * TPC


def test_bad_content_in_a_shared_tier_is_a_miss_for_a_back_off() -> None:
    tier = ScriptedTier(name="t", capabilities=Capabilities(sync_probe=True, shared=True))
    stack = stack_of(tiers=[tier])
    hold(stack, tier, stack.keys("p", 4 * TPC))
    fail_second(stack, tier, "a", FailCause.CORRUPT)
    assert hit_of(stack, tier, "b") == TPC
    stack.wait(1.0)
    assert hit_of(stack, tier, "c") == 4 * TPC


def test_a_verdict_holds_for_one_tier_only() -> None:
    first, second = sync_tier("first"), sync_tier("second")
    stack = stack_of(tiers=[first, second])
    keys = stack.keys("p", 4 * TPC)
    hold(stack, first, keys)
    fail_second(stack, first, "a", FailCause.CORRUPT)
    hold(stack, second, keys)
    stack.add("b", 4 * TPC, seed="p")
    stack.poll("b", 0, 4 * TPC)
    finish_loads(stack, first, second)
    assert stack.poll("b", 0, 4 * TPC).hit == 4 * TPC
    assert loaded_keys(second) == keys[0][1:2]


def test_no_more_than_the_bound_of_verdicts_is_kept() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier], config=wide(64, max_verdicts=5))
    for i in range(20):
        add_held(stack, tier, f"r{i}", TPC)
        stack.poll(f"r{i}", 0, TPC)
        tier.loads[0].finish(failed={0: FailCause.CORRUPT})
        stack.pump()
    assert len(core_of(stack).verdicts) == 5


def test_the_default_bound_is_65536() -> None:
    from kvstrata.core.settings import CoreConfig

    assert CoreConfig().max_verdicts == 65_536
    assert CoreConfig().max_requests == 100_000


def test_a_truncated_file_wedges_nobody() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    keys = stack.add("a", 3 * TPC, seed="p")
    stack.add("b", 3 * TPC, seed="p")
    hold(stack, tier, keys)
    for name in ("a", "b"):
        stack.poll(name, 0, 3 * TPC)
    tier.loads[0].finish(failed={1: FailCause.WRONG_SIZE})
    stack.pump()
    probes = sum(keys[0][1] in call.keys for call in tier.calls_of("probe"))
    for name in ("a", "b"):
        assert stack.poll(name, 0, 3 * TPC).hit == TPC
    assert loaded_keys(tier).count(keys[0][1]) == 1
    assert sum(keys[0][1] in call.keys for call in tier.calls_of("probe")) == probes
    stack.store("a")
    stack.add("c", 3 * TPC, seed="p")
    assert stack.poll("c", 0, 3 * TPC).hit == 3 * TPC


# probe results older than the newest fact


def test_a_probe_that_started_before_the_store_does_not_overwrite_it() -> None:
    tier = async_tier()
    stack = stack_of(tiers=[tier])
    keys = stack.add("a", 2 * TPC, seed="p")
    stack.poll("a", 0, 2 * TPC)
    (probe,) = tier.probes
    fill(stack, "p", 2 * TPC, cascade=True)
    tier.stores[0].finish()
    stack.pump()
    stack.core.residency.evict(stack.core.residency.find(keys[0]))
    probe.finish(dict.fromkeys(keys[0], Presence.ABSENT))
    stack.pump()
    finish_loads(stack, tier)
    assert stack.poll("a", 0, 2 * TPC).hit == 2 * TPC


def test_a_probe_that_started_before_the_removal_does_not_overwrite_it() -> None:
    tier = async_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 2 * TPC)
    stack.poll("a", 0, 2 * TPC)
    (probe,) = tier.probes
    tier.emit(KeysRemoved(keys[0]))
    stack.pump()
    probe.finish(dict.fromkeys(keys[0], Presence.PRESENT))
    stack.pump()
    assert stack.poll("a", 0, 2 * TPC).hit == 0
    assert not tier.loads


@pytest.mark.parametrize("stored", [True, False])
def test_the_same_holds_through_the_per_key_door(stored: bool) -> None:
    tier = async_tier()
    stack = stack_of(tiers=[tier])
    keys = stack.keys("p", 2 * TPC)[0]
    for key in keys:
        assert stack.lookup(key, context("a")) is LookupResult.RETRY
    stack.end_step()
    (probe,) = tier.probes
    if stored:
        fill(stack, "p", 2 * TPC, cascade=True)
        tier.stores[0].finish()
        stack.pump()
        stack.core.residency.evict(stack.core.residency.find(keys))
        probe.finish(dict.fromkeys(keys, Presence.ABSENT))
    else:
        tier.emit(KeysRemoved(keys))
        stack.pump()
        probe.finish(dict.fromkeys(keys, Presence.PRESENT))
    stack.pump()
    expected = LookupResult.HIT_PENDING if stored else LookupResult.MISS
    assert [stack.lookup(key, context("a")) for key in keys] == [expected] * 2


def test_a_positive_answer_is_used_up_by_its_wait() -> None:
    tier = async_tier()
    stack = stack_of(tiers=[tier])
    keys = add_held(stack, tier, "a", 2 * TPC)
    stack.poll("a", 0, 2 * TPC)
    answer_probes(stack, tier)
    finish_loads(stack, tier)
    stack.poll("a", 0, 2 * TPC)
    stack.take("a", 2 * TPC)
    tier.held.clear()
    stack.preempt("a")
    for job in list(core_of(stack).ledger):
        stack.core.complete_load(job.job_id)
    stack.core.residency.evict(stack.core.residency.find(keys[0]))
    assert stack.poll("a", 0, 2 * TPC).hit is None
    assert len(tier.calls_of("probe")) == 2
    answer_probes(stack, tier)
    assert stack.poll("a", 0, 2 * TPC).hit == 0
