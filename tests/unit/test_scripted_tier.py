"""The scripted tier does what the script says, legal or not."""

from __future__ import annotations

import numpy as np
import pytest

from kvstrata.testing import ScriptedTier, TierHarness, chunk_keys, payload_of
from kvstrata.tiers.base import Tier
from kvstrata.types import Capabilities, FailCause, Flushed, JobEnded, KeysDone, KeysRemoved, Presence, ProbeDone

KEYS = chunk_keys(4)


def rig(tier: ScriptedTier | None = None) -> tuple[ScriptedTier, TierHarness]:
    scripted = tier or ScriptedTier()
    return scripted, TierHarness(scripted, chunk_bytes=64).open()


def test_it_is_a_tier() -> None:
    assert isinstance(ScriptedTier(), Tier)


def test_nothing_ends_by_itself() -> None:
    tier, harness = rig()
    harness.submit_load(KEYS)
    harness.submit_store(KEYS)
    harness.settle()
    assert harness.events == []
    assert (len(tier.loads), len(tier.stores)) == (1, 1)
    assert not tier.drain(0.0)


def test_auto_behaves_like_a_healthy_tier() -> None:
    tier, harness = rig(ScriptedTier().auto())
    assert harness.store(KEYS).ok
    assert harness.probe(KEYS) == [Presence.PRESENT] * 4
    record = harness.load(KEYS)
    assert record.ok
    harness.check_loaded(record)
    assert harness.load(chunk_keys(1, start=9)).causes == [FailCause.GONE]
    assert harness.flush()
    assert tier.drain(0.0)


def test_partial_results_and_causes() -> None:
    tier, harness = rig()
    tier.put(KEYS)
    job = harness.submit_load(KEYS)
    tier.loads[0].progress(done=[1])
    tier.loads[0].finish(done=[0], failed={2: FailCause.CORRUPT}, cause=FailCause.TIMEOUT)
    harness.poll()
    record = harness.jobs[job]
    assert record.causes == [None, None, FailCause.CORRUPT, FailCause.TIMEOUT]
    harness.check_loaded(record)


def test_wrong_bytes_can_be_delivered() -> None:
    tier, harness = rig()
    tier.put(KEYS, variant=5)
    harness.submit_load(KEYS)
    tier.loads[0].finish()
    harness.poll()
    with pytest.raises(AssertionError, match="wrong bytes"):
        harness.check_loaded(harness.jobs[1])


def test_a_whole_job_fails_and_a_lost_one_comes_late() -> None:
    tier, harness = rig()
    first, second = harness.submit_load(KEYS), harness.submit_load(KEYS)
    lost = tier.loads[1]
    tier.loads[0].fail(FailCause.REFUSED)
    lost.lose()
    harness.poll()
    assert harness.jobs[first].causes == [FailCause.REFUSED] * 4
    assert harness.jobs[second].ended is None
    tier.close()
    lost.finish()
    harness.poll()
    assert harness.jobs[second].causes == [FailCause.GONE] * 4


def test_cancel_is_noted_and_obeyed_if_told() -> None:
    tier, harness = rig()
    job = harness.submit_load(KEYS)
    tier.cancel(job)
    assert tier.loads[0].cancelled
    assert tier.poll() == []
    tier.obeys_cancel = True
    tier.cancel(job)
    assert tier.poll() == [JobEnded(job, FailCause.CANCELLED)]


def test_illegal_reports_can_be_made() -> None:
    tier, harness = rig()
    job = harness.submit_load(KEYS)
    pending = tier.loads[0]
    pending.progress(done=[0])
    pending.progress(done=[0])
    pending.end()
    pending.end()
    assert tier.poll() == [KeysDone(job, [0], [])] * 2 + [JobEnded(job)] * 2


def test_asynchronous_probes_are_answered_by_the_script() -> None:
    tier, _ = rig(ScriptedTier(capabilities=Capabilities(sync_probe=False)))
    tier.put(KEYS[:2])
    tickets = [tier.probe(KEYS) for _ in range(3)]
    assert len(set(map(int, tickets))) == 3
    tier.writing = {KEYS[3]}
    tier.probes[1].finish()
    tier.probes[0].finish(error=FailCause.TIMEOUT)
    tier.probes[0].lose()
    answered, failed = tier.poll()
    assert isinstance(answered, ProbeDone)
    assert answered.answers.tolist() == [2, 2, 0, 1]
    assert isinstance(failed, ProbeDone)
    assert (failed.ticket, failed.error) == (tickets[0], FailCause.TIMEOUT)
    assert not failed.answers.any()
    assert tier.probes == []


def test_every_call_and_every_key_is_counted() -> None:
    tier, harness = rig()
    tier.probe(KEYS)
    tier.probe(KEYS[:1])
    harness.submit_load(KEYS[:2])
    tier.touch(KEYS)
    tier.remove(KEYS[:1])
    assert tier.keys_touched == {"probe": 5, "submit_load": 2, "touch": 4, "remove": 1, "open": 0}
    assert tier.total_keys_touched == 12
    assert [call.keys for call in tier.calls_of("probe")] == [tuple(KEYS), tuple(KEYS[:1])]
    assert tier.calls_of("submit_load")[0].job_id == 1


def test_it_raises_where_it_is_told_to() -> None:
    tier, _ = rig()
    tier.raise_in = {"probe", "poll"}
    with pytest.raises(RuntimeError, match="probe"):
        tier.probe(KEYS)
    with pytest.raises(RuntimeError, match="poll"):
        tier.poll()
    tier.open_error = ValueError("no device")
    with pytest.raises(ValueError, match="no device"):
        TierHarness(tier, chunk_bytes=64).open()


def test_losses_purges_and_usage() -> None:
    tier, harness = rig()
    tier.put(KEYS, length=10)
    assert tier.held[KEYS[0]] == payload_of(KEYS[0], 10)
    tier.lose_keys([KEYS[0], chunk_keys(1, start=50)[0]])
    assert tier.poll() == [KeysRemoved([KEYS[0]])]
    assert (tier.usage().keys, tier.usage().bytes_held) == (3, 30)
    ticket = tier.purge(b"x" * 16)
    assert tier.poll() == [Flushed(ticket)]
    assert np.array_equal(tier.probe(KEYS), np.zeros(4, dtype=np.int8))
    tier.self_test_answer = "broken"
    assert harness.tier.self_test() == "broken"
