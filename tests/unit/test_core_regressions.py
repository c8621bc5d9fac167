"""Cases that the stateful machine found, each as short as it could be made. The machine should have caught them all."""

from __future__ import annotations

from kvstrata.core.messages import RequestContext, RequestOptions
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds import FullAttention
from kvstrata.testing.scripted import ScriptedTier
from kvstrata.testing.stack import CoreStack
from kvstrata.types import Capabilities, LookupResult, ResetReason

PLAIN = Layout((Group(FullAttention(), 16, chunk_bytes=64),))


def sync_tier() -> ScriptedTier:
    return ScriptedTier().auto()


def replayed(stack: CoreStack, resident: set[bytes]) -> set[bytes]:
    """What primary has by its events."""
    for event in stack.core.take_events():
        if event.place == "primary":
            resident = resident | set(event.keys) if event.kind.value == "stored" else resident - set(event.keys)
    return resident


def test_expired_request_is_answered_from_a_primary_that_never_held_a_chunk() -> None:
    stack = CoreStack(PLAIN, [ScriptedTier(capabilities=Capabilities(sync_probe=False))], chunks=4)
    stack.add("a", 64)
    assert stack.poll("a", 0, 64).hit is None
    stack.wait(3.0)
    assert stack.poll("a", 0, 64).hit == 0


def test_reset_tells_of_pinned_chunks_that_left_primary() -> None:
    stack = CoreStack(PLAIN, [], chunks=4, events=True)
    stack.add("a", 64)
    stack.store("a")
    assert stack.poll("a", 0, 64).hit == 64
    plan = stack.take("a", 64)
    assert plan is not None
    assert replayed(stack, set()) == set(plan.keys)
    stack.core.reset_cache(ResetReason.MEMORY_GOING_AWAY)
    stack.check()
    assert replayed(stack, set(plan.keys)) == set()


def test_after_a_silence_nothing_is_left_of_the_clocks() -> None:
    tier = ScriptedTier()
    stack = CoreStack(PLAIN, [tier], chunks=4)
    tier.put(stack.add("a", 64)[0])
    assert stack.poll("a", 0, 64).hit is None
    stack.wait(31.0)
    assert stack.poll("a", 0, 64).hit == 0
    assert len(tier.loads) == 1


def test_slot_given_up_and_taken_again_within_one_step_is_read_once() -> None:
    tier = ScriptedTier()
    stack = CoreStack(PLAIN, [tier], chunks=4)
    keys = stack.keys("a", 64)[0]
    tier.put(keys)
    context = RequestContext("a")
    assert stack.lookup(keys[0], context) is LookupResult.HIT_PENDING
    stack.core.advance(stack.clock.advance(31.0))
    stack.core.preempt("a")
    stack.lookup(keys[0], context)
    stack.end_step()
    assert sum(len(load.job.keys) for load in tier.loads) <= 1


def test_no_hit_again_on_chunks_whose_load_failed() -> None:
    stack = CoreStack(PLAIN, [sync_tier()], chunks=8)
    stack.add("a", 64)
    stack.store("a")
    assert stack.poll("a", 0, 64).hit == 64
    plan = stack.take("a", 64)
    assert plan is not None
    assert stack.complete_load(plan, ok=False) is False
    assert stack.poll("a", 0, 64).hit == 0
    stack.take("a", 0)
    stack.add("b", 64, seed="a")
    assert stack.poll("b", 0, 64).hit == 64


def test_no_hit_on_chunks_whose_load_fails_while_the_request_has_them_again() -> None:
    stack = CoreStack(PLAIN, [], chunks=8)
    stack.add("a", 64)
    stack.store("a")
    assert stack.poll("a", 0, 64).hit == 64
    plan = stack.take("a", 64)
    assert plan is not None
    stack.preempt("a")
    assert stack.poll("a", 0, 64).hit == 64
    stack.complete_load(plan, ok=False)
    assert stack.poll("a", 0, 64).hit == 0


def test_reset_brings_nothing_to_a_request_that_must_not_load() -> None:
    tier = ScriptedTier()
    stack = CoreStack(PLAIN, [tier], chunks=8)
    tier.put(stack.add("a", 64, RequestOptions(may_load=False))[0])
    assert stack.poll("a", 0, 64).hit == 0
    stack.core.reset_cache(ResetReason.MEMORY_GOING_AWAY)
    assert stack.poll("a", 0, 64).hit == 0
    assert not tier.calls_of("probe")


def test_tier_that_may_still_write_old_content_is_not_asked_after_a_purge() -> None:
    tier = ScriptedTier()
    stack = CoreStack(PLAIN, [tier], chunks=8)
    keys = stack.add("a", 64)[0]
    stack.store("a")
    stack.core.reset_cache(ResetReason.CONTENT_INVALID)
    stack.wait(20.0)
    store = tier.stores[0]
    store.progress(range(len(store.job.keys)))
    stack.add("b", 64, seed="a")
    assert tier.held
    assert stack.poll("b", 0, 64).hit == 0
    while tier.stores:
        tier.stores[0].end()
    stack.pump()
    assert not tier.held
    tier.put(keys)
    stack.add("c", 64, seed="a")
    assert stack.poll("c", 0, 64).hit is None


def test_what_a_preempted_request_looked_up_is_not_asked_for_any_more() -> None:
    tier = ScriptedTier(capabilities=Capabilities(sync_probe=False))
    stack = CoreStack(PLAIN, [tier], chunks=8)
    keys = stack.add("a", 64)[0]
    stack.store("a", [(0, 0)])
    context = RequestContext("b")
    assert stack.lookup(keys[0], context) is LookupResult.HIT
    assert stack.lookup(keys[1], context) is LookupResult.RETRY
    assert stack.core.prepare_load(keys[:1], context) is not None
    stack.preempt("b")
    stack.end_step()
    assert not tier.probes
    assert stack.lookup(keys[1], context) is LookupResult.RETRY
    stack.end_step()
    tier.probes[0].finish()
    stack.pump()
    assert stack.lookup(keys[1], context) is LookupResult.MISS
