"""The waiting cost: with 2000 waiting requests and 1000 steps without a completion no key is touched, anywhere."""

from __future__ import annotations

from collections import Counter

import pytest
from core_kit import TPC, async_tier, core_of, hold, settings, stack_of, state, sync_tier

from kvstrata.core.grants import Grants
from kvstrata.core.index import KeyIndex
from kvstrata.core.messages import RequestOptions, TierFilter
from kvstrata.core.presence import PresenceBook
from kvstrata.core.requests import RequestState
from kvstrata.testing import ScriptedTier
from kvstrata.testing.stack import CoreStack

CHUNKS = 4
STEPS = 1000
WAITING = {RequestState.RESOLVING: 900, RequestState.FETCHING: 900, RequestState.QUEUED: 200}
PATIENT = {"stall_s": 1e9, "total_s": 1e9, "silence_s": 1e9, "job_idle_s": 1e9, "job_total_s": 1e9}


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts every look at keys: in residency, gathering, placing, and in the tiers."""
    calls: Counter[str] = Counter()
    looks = [
        (KeyIndex, "find"),
        (KeyIndex, "keys_of"),
        (PresenceBook, "gather"),
        (PresenceBook, "gather_ready"),
        (Grants, "place"),
        (ScriptedTier, "_note"),
    ]
    for owner, name in looks:
        plain = getattr(owner, name)

        def watched(*args, _plain=plain, _name=name, **kwargs):  # type: ignore[no-untyped-def]
            calls[_name] += 1
            return _plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)
    return calls


def many() -> tuple[CoreStack, list[str]]:
    """2000 requests that wait for probes, for loads and for room; nothing will ever be answered."""
    far, near = async_tier("far"), sync_tier("near")
    room = 2 * WAITING[RequestState.FETCHING] * CHUNKS
    stack = stack_of(tiers=[far, near], config=settings(room, **PATIENT), checked=False, auto=False)
    names = []
    for wanted, count in WAITING.items():
        tier = far if wanted is RequestState.RESOLVING else near
        options = RequestOptions(load_tiers=TierFilter(names=frozenset({tier.name})))
        for i in range(count):
            names.append(f"{wanted.value}{i}")
            hold(stack, tier, stack.add(names[-1], CHUNKS * TPC, options))
            stack.core.poll(names[-1], 0, CHUNKS * TPC)
            assert state(stack, names[-1]) is wanted
    stack.pump()
    return stack, names


@pytest.mark.slow
def test_2000_waiting_requests_and_1000_steps_touch_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    stack, names = many()
    core, poll, now = core_of(stack), stack.core.poll, stack.clock.monotonic()
    touched = [tier.total_keys_touched for tier in stack.tiers]  # type: ignore[attr-defined]
    before = (core.counters.keys_gathered, core.counters.resolves)
    calls = counted(monkeypatch)
    for step in range(STEPS):
        stack.core.advance(now + 0.01 * step)
        for name in names:
            poll(name, 0, CHUNKS * TPC)
        assert not stack.core.take_commands()
    assert not calls
    assert (core.counters.keys_gathered, core.counters.resolves) == before
    assert [tier.total_keys_touched for tier in stack.tiers] == touched  # type: ignore[attr-defined]
    assert stack.core.statistics().waiting == len(names) == 2000
    assert len(core.timers) < 5 * len(names)
