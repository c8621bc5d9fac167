"""The guard keeps every exception and every illegal answer of a tier from its caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvstrata.runtime.clock import SystemClock
from kvstrata.runtime.guard import MAX_FAULTS, GuardedTier
from kvstrata.tiers.base import TierContext
from kvstrata.types import (
    Capabilities,
    FailCause,
    Flushed,
    JobEnded,
    KeysDone,
    KeysRemoved,
    Locality,
    Medium,
    Presence,
    ProbeDone,
    TierJob,
    TierUsage,
)

KEYS = [b"a" * 36, b"b" * 36, b"c" * 36]
JOB = TierJob(7, KEYS, [0, 10, 20], [10, 10, 10])


class NoExecutor:
    def submit(self, task: object) -> None:
        raise AssertionError("not used")

    def close(self, timeout: float) -> bool:
        return True


class RaisingTier:
    """Every method raises."""

    name = "bad"
    medium = Medium.CPU
    locality = Locality.LOCAL
    capabilities = Capabilities(sync_probe=True)

    def __init__(self, quiet: Sequence[str] = ()) -> None:
        for method in METHODS:
            setattr(self, method, (lambda *_: None) if method in quiet else self._raise)

    def _raise(self, *_: object) -> None:
        raise OSError("the device is on fire")


METHODS = (
    "open",
    "close",
    "probe",
    "touch",
    "submit_load",
    "submit_store",
    "cancel",
    "remove",
    "purge",
    "flush",
    "poll",
)
METHODS += ("usage", "drain", "self_test")


class AnsweringTier:
    """Answers what the test puts in."""

    name = "fake"
    medium = Medium.CPU
    locality = Locality.LOCAL
    capabilities = Capabilities(sync_probe=False)

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.answer: Any = None
        self.calls: list[str] = []
        self.ticket = 41

    def open(self, context: TierContext) -> None:
        self.calls.append("open")

    def close(self, timeout: float = 5.0) -> None:
        self.calls.append("close")

    def probe(self, keys: Sequence[bytes]) -> Any:
        return self.answer

    def touch(self, keys: Sequence[bytes]) -> None:
        self.calls.append("touch")

    def submit_load(self, job: TierJob) -> None:
        self.calls.append("load")

    def submit_store(self, job: TierJob) -> None:
        self.calls.append("store")

    def cancel(self, job_id: int) -> None:
        self.calls.append(f"cancel {job_id}")

    def remove(self, keys: Sequence[bytes]) -> None:
        self.calls.append("remove")

    def purge(self, namespace: bytes) -> int:
        return self.ticket

    def flush(self) -> int:
        return self.ticket

    def poll(self) -> Any:
        events, self.events = self.events, []
        return events

    def usage(self) -> Any:
        return self.answer

    def drain(self, timeout: float) -> bool:
        return True

    def self_test(self) -> str | None:
        return None


def opened(tier: Any) -> tuple[GuardedTier, list[int]]:
    woken: list[int] = []
    guard = GuardedTier(tier)
    guard.open(
        TierContext(memoryview(bytearray(64)), b"n" * 16, 1, SystemClock(), NoExecutor(), lambda: woken.append(1))
    )
    return guard, woken


def test_a_tier_that_raises_everywhere_is_an_empty_refusing_tier() -> None:
    guard, woken = opened(RaisingTier(quiet=["open"]))
    assert guard.open_error is None
    ticket = guard.probe(KEYS)
    guard.touch(KEYS)
    guard.remove(KEYS)
    guard.submit_load(JOB)
    guard.submit_store(TierJob(8, KEYS[:1], [0], [10]))
    guard.cancel(7)
    purge, flush = guard.purge(b"n" * 16), guard.flush()
    assert guard.usage() == TierUsage(0, 0, None, 0)
    assert not guard.drain(0.0)
    assert guard.self_test() == "bad failed its self-test: OSError: the device is on fire"
    events = guard.poll()
    probe = events[0]
    assert isinstance(probe, ProbeDone)
    assert (probe.ticket, probe.error, probe.answers.tolist()) == (ticket, FailCause.IO_ERROR, [0, 0, 0])
    assert events[1:] == [
        KeysDone(7, (), tuple((index, FailCause.REFUSED) for index in range(3))),
        JobEnded(7, FailCause.REFUSED),
        KeysDone(8, (), ((0, FailCause.REFUSED),)),
        JobEnded(8, FailCause.REFUSED),
        Flushed(purge, ok=False),
        Flushed(flush, ok=False),
    ]
    guard.close(0.0)
    assert len(woken) >= 3
    statistics = guard.statistics()
    # all but open, and but cancel: job 7 has already ended when it is cancelled
    assert statistics.exceptions == len(METHODS) - 2
    assert (statistics.jobs_open, statistics.probes_open, statistics.violations) == (0, 0, 0)


def test_a_tier_that_does_not_open_refuses_and_says_why() -> None:
    guard, _ = opened(RaisingTier())
    assert isinstance(guard.open_error, OSError)
    answers = guard.probe(KEYS)
    assert isinstance(answers, np.ndarray)
    assert answers.tolist() == [0, 0, 0]
    guard.submit_load(JOB)
    ticket = guard.flush()
    assert guard.poll()[-2:] == [JobEnded(7, FailCause.REFUSED), Flushed(ticket, ok=False)]
    assert guard.self_test() == "bad did not open: the device is on fire"


def test_legal_answers_pass_unchanged() -> None:
    tier = AnsweringTier()
    guard, _ = opened(tier)
    tier.answer = np.array([0, 1, 2], dtype=np.int8)
    assert guard.probe(KEYS) is tier.answer
    guard.submit_load(JOB)
    tier.events = [
        KeysDone(7, [0], [(1, FailCause.GONE)]),
        KeysDone(7, [2]),
        JobEnded(7),
        KeysRemoved(KEYS[:1]),
    ]
    expected = list(tier.events)
    assert guard.busy
    assert guard.poll() == expected
    assert not guard.busy
    assert guard.statistics().violations == 0
    assert guard.self_test() is None
    assert guard.drain(1.0)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [0, 0, 2],
        np.zeros(2, dtype=np.int8),
        np.zeros(3, dtype=np.int64),
        np.array([0, 3, 0], dtype=np.int8),
        np.array([0, -1, 0], dtype=np.int8),
    ],
)
def test_an_illegal_probe_answer_is_an_error_of_the_tier_and_absent(answer: object) -> None:
    tier = AnsweringTier()
    guard, _ = opened(tier)
    tier.answer = answer
    ticket = guard.probe(KEYS)
    (event,) = guard.poll()
    assert isinstance(event, ProbeDone)
    assert (event.ticket, event.error, event.answers.tolist()) == (ticket, FailCause.IO_ERROR, [0, 0, 0])
    assert guard.statistics().violations == 1


def test_probe_tickets_are_renumbered_and_answered_once() -> None:
    tier = AnsweringTier()
    guard, _ = opened(tier)
    tier.answer = 5
    first = guard.probe(KEYS)
    again = guard.probe(KEYS[:1])  # the tier repeats a ticket that it still owes
    assert first != again
    tier.events = [ProbeDone(5, np.array([2, 2, 0], dtype=np.int8)), ProbeDone(5, np.zeros(3, dtype=np.int8))]
    events = guard.poll()
    assert [event.ticket for event in events if isinstance(event, ProbeDone)] == [first, again]
    assert guard.statistics().violations == 2
    third = guard.probe(KEYS)
    tier.events = [ProbeDone(5, np.zeros(1, dtype=np.int8))]
    (event,) = guard.poll()
    assert isinstance(event, ProbeDone)
    assert (event.ticket, event.error) == (third, FailCause.IO_ERROR)


def test_a_job_ends_once_and_a_key_is_reported_once() -> None:
    tier = AnsweringTier()
    guard, _ = opened(tier)
    guard.submit_store(JOB)
    tier.events = [
        KeysDone(7, [0, 0], [(0, FailCause.GONE), (1, FailCause.CORRUPT)]),
        KeysDone(7, [1]),
        KeysDone(7, [-1, 3]),
        KeysDone(99, [0]),
        JobEnded(7),
        JobEnded(7),
        JobEnded(99),
        KeysDone(7, [2]),
    ]
    assert guard.poll() == [KeysDone(7, [0], [(1, FailCause.CORRUPT)]), JobEnded(7)]
    assert guard.statistics().violations == 7


def test_what_is_no_event_or_malformed_is_dropped_and_the_rest_passes() -> None:
    tier = AnsweringTier()
    guard, _ = opened(tier)
    guard.submit_load(JOB)
    bad: Any = KeysDone(7, [0], [object()])  # type: ignore[list-item]
    tier.events = ["nonsense", bad, KeysDone(7, None), Flushed(3), JobEnded(7)]  # type: ignore[arg-type]
    assert guard.poll() == [JobEnded(7)]
    assert guard.statistics().violations == 4
    tier.events = 5  # type: ignore[assignment]
    assert guard.poll() == []
    assert guard.poll() == []
    assert guard.statistics().exceptions == 0
    assert guard.statistics().violations == 5


def test_flush_tickets_are_renumbered() -> None:
    tier = AnsweringTier()
    guard, _ = opened(tier)
    purge = guard.purge(b"n" * 16)
    tier.events = [Flushed(41)]
    assert guard.poll() == [Flushed(purge, ok=True)]
    tier.ticket = None  # type: ignore[assignment]
    flush = guard.flush()
    assert flush != purge
    assert guard.poll() == [Flushed(flush, ok=False)]


def test_usage_keeps_the_last_true_answer() -> None:
    tier = AnsweringTier()
    guard, _ = opened(tier)
    tier.answer = TierUsage(10, 0, 20, 1)
    assert guard.usage() == tier.answer
    tier.answer = 12
    assert guard.usage() == TierUsage(10, 0, 20, 1)
    assert guard.statistics().violations == 1


def test_cancel_reaches_only_an_open_job() -> None:
    tier = AnsweringTier()
    guard, _ = opened(tier)
    guard.submit_load(JOB)
    guard.cancel(7)
    guard.cancel(8)
    assert tier.calls == ["open", "load", "cancel 7"]


def test_faults_are_bounded_and_of_one_line() -> None:
    tier = AnsweringTier()
    guard, _ = opened(tier)
    for number in range(MAX_FAULTS * 2):
        tier.events = [JobEnded(number)]
        guard.poll()
    statistics = guard.statistics()
    assert statistics.violations == MAX_FAULTS * 2
    assert len(statistics.faults) == MAX_FAULTS
    assert "\n" not in statistics.faults[-1].text


def test_every_presence_but_an_assumed_one_may_be_answered() -> None:
    may_be_answered = sorted(set(Presence) - {Presence.ASSUMED})
    tier = AnsweringTier()
    guard, _ = opened(tier)
    tier.answer = np.array(may_be_answered, np.int8)
    assert guard.probe(KEYS) is tier.answer
    for illegal in (min(Presence) - 1, Presence.ASSUMED, max(Presence) + 1):
        tier.answer = np.array([illegal, 0, 0], np.int8)
        assert guard.probe(KEYS) is not tier.answer
