"""The driver carries events in and commands out, by hand and by its own thread. The manager here is a plain fake."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvstrata.core.messages import CancelJob, PurgeTier, SubmitLoad, SubmitStore, TouchKeys
from kvstrata.errors import InternalError, StateError
from kvstrata.runtime.clock import SystemClock
from kvstrata.runtime.driver import Driver
from kvstrata.runtime.guard import GuardedTier
from kvstrata.tiers.base import TierContext
from kvstrata.types import (
    Capabilities,
    Flushed,
    JobEnded,
    KeysDone,
    KeysRemoved,
    Locality,
    Medium,
    TierEvent,
    TierJob,
    TierUsage,
)

LONG = 30.0
KEY = b"k" * 36


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


class FakeManager:
    """Records what it is told; gives out the commands that the test queued."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.commands: list[Any] = []
        self.deadline: float | None = None
        self.on_log: Callable[[Any], None] = lambda _: None
        self.fail_on: set[str] = set()
        self.purges: list[tuple[int, int]] = []

    def _note(self, entry: Any) -> None:
        self.log.append(entry)
        self.on_log(entry)

    def advance(self, now: float) -> None:
        self._note(("advance", now))
        if self.deadline is not None and now >= self.deadline:
            self.deadline = None
            self._note("due")

    def next_deadline(self) -> float | None:
        return self.deadline

    def take_commands(self) -> list[Any]:
        commands, self.commands = self.commands, []
        return commands

    def on_event(self, tier: int, event: TierEvent) -> None:
        if type(event).__name__ in self.fail_on:
            raise InternalError("broken")
        self._note((tier, event))

    def purge_submitted(self, tier: int, ticket: int) -> None:
        self.purges.append((tier, ticket))


class EchoTier:
    """Finishes each job at once, but tells it only when polled; wakes through its context."""

    medium = Medium.CPU
    locality = Locality.LOCAL
    capabilities = Capabilities(sync_probe=True)

    def __init__(self, name: str = "echo", *, wakes: bool = True) -> None:
        self.name = name
        self.calls: list[Any] = []
        self.events: list[TierEvent] = []
        self.wakes = wakes
        self.context: TierContext | None = None

    def open(self, context: TierContext) -> None:
        self.context = context

    def close(self, timeout: float = 5.0) -> None:
        self.calls.append("close")

    def _finish(self, call: str, job: TierJob) -> None:
        self.calls.append((call, job.job_id))
        self.events += [KeysDone(job.job_id, list(range(len(job.keys)))), JobEnded(job.job_id)]
        if self.wakes and self.context is not None:
            self.context.wake()

    def submit_load(self, job: TierJob) -> None:
        self._finish("load", job)

    def submit_store(self, job: TierJob) -> None:
        self._finish("store", job)

    def probe(self, keys: Sequence[bytes]) -> Any:
        return np.zeros(len(keys), dtype=np.int8)

    def touch(self, keys: Sequence[bytes]) -> None:
        self.calls.append(("touch", list(keys)))

    def cancel(self, job_id: int) -> None:
        self.calls.append(("cancel", job_id))

    def remove(self, keys: Sequence[bytes]) -> None:
        self.calls.append(("remove", list(keys)))

    def purge(self, namespace: bytes) -> int:
        self.calls.append(("purge", namespace))
        self.events.append(Flushed(1))
        return 1

    def flush(self) -> int:
        return 2

    def poll(self) -> list[TierEvent]:
        events, self.events = self.events, []
        return events

    def usage(self) -> TierUsage:
        return TierUsage(0, 0, None, 0)

    def drain(self, timeout: float) -> bool:
        return True

    def self_test(self) -> str | None:
        return None


class NoExecutor:
    def submit(self, task: object) -> None:
        raise AssertionError("not used")

    def close(self, timeout: float) -> bool:
        return True


def build(
    tiers: Sequence[EchoTier], clock: Any = None, *, strict: bool = True
) -> tuple[Driver[FakeManager], FakeManager]:
    manager = FakeManager()
    guards = [GuardedTier(tier) for tier in tiers]
    driver = Driver(manager, guards, clock or HandClock(), strict=strict)
    for guard in guards:
        guard.open(
            TierContext(memoryview(bytearray(16)), b"n" * 16, 1, SystemClock(), NoExecutor(), driver.wake),
        )
    return driver, manager


def job(job_id: int) -> TierJob:
    return TierJob(job_id, [KEY], [0], [16])


def test_commands_reach_their_tier_and_events_come_back_with_its_number() -> None:
    first, second = EchoTier("first"), EchoTier("second")
    driver, manager = build([first, second])
    manager.commands = [
        SubmitLoad(1, job(1)),
        SubmitStore(0, job(2)),
        TouchKeys(0, [KEY]),
        PurgeTier(0),
    ]
    assert driver.pump() == 4
    assert first.calls == [("store", 2), ("touch", [KEY]), ("purge", b"n" * 16)]
    assert second.calls == [("load", 1)]
    assert driver.pump() == 5
    events = [entry for entry in manager.log if entry[0] != "advance"]
    assert events == [
        (0, KeysDone(2, [0])),
        (0, JobEnded(2)),
        (0, Flushed(1)),
        (1, KeysDone(1, [0])),
        (1, JobEnded(1)),
    ]
    assert driver.pump() == 0
    statistics = driver.statistics()
    assert (statistics.rounds, statistics.events, statistics.commands, statistics.faults) == (3, 5, 4, 0)


def test_a_purge_that_fails_is_not_repeated_in_a_tight_circle() -> None:
    clock = HandClock()
    tier = EchoTier()
    driver, manager = build([tier], clock)
    purges: list[bytes] = []

    def broken(namespace: bytes) -> int:
        purges.append(namespace)
        raise OSError("read-only")

    tier.purge = broken  # type: ignore[method-assign]

    def again(entry: Any) -> None:
        if isinstance(entry[1], Flushed) and not entry[1].ok:
            manager.commands.append(PurgeTier(0))

    manager.on_log = again
    manager.commands = [PurgeTier(0)]
    driver.settle()
    assert purges == [b"n" * 16]
    assert manager.purges == [(0, 1)]
    clock.now += 0.9
    driver.settle()
    assert len(purges) == 1
    clock.now += 0.2
    driver.settle()
    assert len(purges) == 2


def test_cancel_goes_to_the_tier_that_has_the_job() -> None:
    tier = EchoTier()
    driver, manager = build([tier])
    manager.commands = [SubmitLoad(0, job(1)), CancelJob(0, 1)]
    driver.pump()
    assert tier.calls == [("load", 1), ("cancel", 1)]


def test_a_step_applies_what_arrived_first_and_hands_over_last() -> None:
    tier = EchoTier()
    driver, manager = build([tier])
    tier.events = [KeysRemoved([KEY])]
    with driver.step() as inside:
        assert inside is manager
        assert manager.log[-2:] == [(0, KeysRemoved([KEY])), ("advance", 100.0)]
        manager.commands = [SubmitLoad(0, job(1))]
        assert tier.calls == []
    assert tier.calls == [("load", 1)]
    assert driver.call(lambda inner: len(inner.log)) == len(manager.log)


def test_a_step_that_raises_still_hands_over() -> None:
    tier = EchoTier()
    driver, _ = build([tier])

    def fail(inner: FakeManager) -> None:
        inner.commands = [SubmitLoad(0, job(1))]
        raise StateError("no such request")

    with pytest.raises(StateError, match="no such request"):
        driver.call(fail)
    assert tier.calls == [("load", 1)]


def test_what_arrived_is_applied_before_its_clock_runs_out() -> None:
    clock = HandClock()
    tier = EchoTier()
    driver, manager = build([tier], clock)
    driver.pump()
    manager.log.clear()
    manager.deadline = 102.0
    tier.events = [KeysRemoved([KEY])]
    clock.now = 105.0
    driver.pump()
    assert [entry if isinstance(entry, str) else entry[0] for entry in manager.log] == ["advance", 0, "advance", "due"]
    assert 101.9 < manager.log[0][1] < 102.0
    assert manager.log[2] == ("advance", 105.0)


def test_the_core_never_sees_time_go_back() -> None:
    clock = HandClock()
    driver, manager = build([EchoTier()], clock)
    driver.pump()
    clock.now = 50.0
    driver.pump()
    assert manager.log == [("advance", 100.0)]


def test_settle_pumps_until_nothing_moves() -> None:
    tier = EchoTier()
    driver, manager = build([tier])
    manager.commands = [SubmitLoad(0, job(1))]
    follow_up = [[SubmitStore(0, job(2))], [SubmitStore(0, job(3))]]

    def more(entry: Any) -> None:
        if isinstance(entry[1], JobEnded) and follow_up:
            manager.commands += follow_up.pop(0)

    manager.on_log = more
    assert driver.settle() == 4
    assert tier.calls == [("load", 1), ("store", 2), ("store", 3)]


def test_settle_gives_up_by_an_error() -> None:
    driver, manager = build([EchoTier()])

    def forever(_: Any) -> None:
        manager.commands = [TouchKeys(0, [KEY])]

    manager.on_log = forever
    with pytest.raises(StateError, match="did not settle in 5 rounds"):
        driver.settle(max_rounds=5)


def test_a_fault_of_the_core_is_recorded_and_the_next_event_is_applied() -> None:
    tier = EchoTier()
    driver, manager = build([tier], strict=False)
    manager.fail_on = {"KeysRemoved"}
    tier.events = [KeysRemoved([KEY]), KeysRemoved([KEY])]
    manager.commands = [SubmitLoad(0, job(1))]
    driver.settle()
    assert (0, JobEnded(1)) in manager.log
    assert driver.statistics().faults == 2
    assert driver.statistics().last_faults[0] == "KeysRemoved: InternalError: broken"


def test_strict_raises_a_fault_of_the_core() -> None:
    tier = EchoTier()
    driver, manager = build([tier])
    manager.fail_on = {"KeysRemoved"}
    tier.events = [KeysRemoved([KEY])]
    with pytest.raises(InternalError, match="broken"):
        driver.pump()


def test_the_thread_works_without_a_step() -> None:
    """A wake alone brings a completion in, and what follows from it out."""
    tier = EchoTier()
    driver, manager = build([tier], SystemClock(), strict=False)
    seen: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def follow(entry: Any) -> None:
        if isinstance(entry[1], JobEnded):
            if entry[1].job_id == 1:
                manager.commands.append(SubmitStore(0, job(2)))
            seen.put(entry[1].job_id)

    manager.on_log = follow
    driver.start()
    driver.start()
    driver.call(lambda inner: inner.commands.append(SubmitLoad(0, job(1))))
    assert seen.get(timeout=LONG) == 1
    assert seen.get(timeout=LONG) == 2
    assert driver.running
    assert driver.stop(LONG)
    assert not driver.running
    assert driver.stop(LONG)


def test_the_thread_wakes_for_a_deadline_that_a_step_made() -> None:
    driver, manager = build([EchoTier()], SystemClock(), strict=False)
    asleep: queue.SimpleQueue[Any] = queue.SimpleQueue()
    due: queue.SimpleQueue[Any] = queue.SimpleQueue()
    manager.on_log = lambda entry: (due if entry == "due" else asleep).put(entry)
    driver.start()
    asleep.get(timeout=LONG)  # the first round is over or nearly: the thread sleeps without end

    def make_deadline(inner: FakeManager) -> None:
        inner.deadline = SystemClock().monotonic() + 0.002

    driver.call(make_deadline)
    assert due.get(timeout=LONG) == "due"
    assert driver.close(LONG)


def test_a_tier_that_never_wakes_is_still_heard_by_the_thread() -> None:
    tier = EchoTier(wakes=False)
    driver, manager = build([tier], SystemClock(), strict=False)
    ended = threading.Event()
    manager.on_log = lambda entry: ended.set() if isinstance(entry[1], JobEnded) else None
    driver.start()
    driver.call(lambda inner: inner.commands.append(SubmitLoad(0, job(1))))
    assert ended.wait(LONG)
    assert driver.close(LONG)


def test_the_thread_outlives_a_fault_of_the_core() -> None:
    tier = EchoTier()
    driver, manager = build([tier], SystemClock(), strict=True)
    faults: queue.SimpleQueue[None] = queue.SimpleQueue()

    def broken() -> float | None:
        del manager.next_deadline  # type: ignore[misc]
        faults.put(None)
        raise InternalError("broken")

    manager.next_deadline = broken  # type: ignore[method-assign]
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    manager.on_log = lambda entry: ended.put(entry) if isinstance(entry[1], JobEnded) else None
    driver.start()
    faults.get(timeout=LONG)
    driver.call(lambda inner: inner.commands.append(SubmitLoad(0, job(1))))
    ended.get(timeout=LONG)
    assert driver.statistics().last_faults == ("round: InternalError: broken",)
    assert driver.close(LONG)


def test_close_hands_over_what_is_left_and_closes_the_tiers() -> None:
    tier = EchoTier()
    driver, manager = build([tier], SystemClock())
    with driver:
        manager.commands = [SubmitStore(0, job(1))]
    assert tier.calls == [("store", 1), "close"]
    assert manager.log[-2] == (0, JobEnded(1))
    driver.close()
    before = threading.active_count()
    driver.start()
    assert driver.close(LONG)
    assert threading.active_count() == before


def test_start_while_an_old_thread_hangs_is_an_error() -> None:
    driver, manager = build([EchoTier()], SystemClock(), strict=False)
    release, inside = threading.Event(), threading.Event()

    def hang(_: Any) -> None:
        inside.set()
        release.wait(LONG)

    manager.on_log = hang
    driver.start()
    assert inside.wait(LONG)
    assert not driver.stop(0.0)
    with pytest.raises(StateError, match="not ended yet"):
        driver.start()
    assert not driver.close(0.0)  # and does not wait for the lock that the thread holds
    release.set()
    assert driver.stop(LONG)


def test_a_stop_that_comes_just_before_a_round_ends_the_thread() -> None:
    """The round takes the signal down that the stop raised; the thread must not go to sleep on that."""

    class StopsTheDriver:
        """The clock is read between the thread's look at the stop and its round."""

        asked = False

        def monotonic(self) -> float:
            if driver.running and not self.asked:
                self.asked = True
                driver.stop(0.0)
            return 1.0

        def wall(self) -> float:
            return 1.0

    driver, _ = build([EchoTier()], StopsTheDriver())
    driver.start()
    assert driver._worker is not None
    assert driver._worker.join(2.0)
