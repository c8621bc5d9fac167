"""Threads and signals of the runtime. Hand-over between threads is by queues and locks, never by sleeping."""

from __future__ import annotations

import os
import queue
import sys
import threading

import pytest

from kvstrata.errors import ConfigError, StateError
from kvstrata.runtime.clock import SystemClock, thread_cpu_s
from kvstrata.runtime.executor import YIELD_BY, Signal, ThreadExecutor, Worker, make_lock

LONG = 30.0


def test_tasks_run_in_order_on_one_named_daemon_thread() -> None:
    executor = ThreadExecutor("io", threads=1)
    seen: queue.SimpleQueue[tuple[int, str, bool]] = queue.SimpleQueue()
    for number in range(20):

        def task(number: int = number) -> None:
            seen.put((number, threading.current_thread().name, threading.current_thread().daemon))

        executor.submit(task)
    assert executor.close(LONG)
    assert [seen.get_nowait() for _ in range(20)] == [(number, "io-0", True) for number in range(20)]


def test_threads_start_at_first_use_and_never_exceed_the_limit() -> None:
    before = threading.active_count()
    executor = ThreadExecutor("lazy", threads=3)
    assert executor.statistics().threads == 0
    assert threading.active_count() == before
    release = threading.Event()
    for _ in range(10):
        executor.submit(lambda: release.wait(LONG))
    assert executor.statistics().threads == 3
    release.set()
    assert executor.close(LONG)
    assert executor.statistics().finished == 10
    assert threading.active_count() == before


def test_a_task_that_raises_is_recorded_and_the_thread_goes_on() -> None:
    executor = ThreadExecutor("faulty")
    done: list[int] = []

    def bad() -> None:
        raise OSError("disk is gone")

    def worse() -> None:
        raise SystemExit(3)

    executor.submit(bad)
    executor.submit(worse)
    executor.submit(lambda: done.append(1))
    assert executor.close(LONG)
    statistics = executor.statistics()
    assert done == [1]
    assert (statistics.finished, statistics.failed) == (3, 2)
    assert statistics.last_failure == "SystemExit: 3"


def test_close_is_idempotent_and_refuses_what_comes_after() -> None:
    executor = ThreadExecutor("closed")
    assert executor.close(0.0)
    assert executor.close(0.0)
    with pytest.raises(StateError, match="closed"):
        executor.submit(lambda: None)


def test_close_abandons_a_task_that_hangs_and_drops_what_is_queued() -> None:
    executor = ThreadExecutor("hung")
    release = threading.Event()
    ran: list[int] = []
    executor.submit(lambda: release.wait(LONG))
    executor.submit(lambda: ran.append(1))
    assert not executor.close(0.0)
    assert executor.statistics().queued == 0
    release.set()
    assert executor.close(LONG)
    assert ran == []


def test_wait_idle_waits_for_what_is_queued_and_running() -> None:
    executor = ThreadExecutor("idle", threads=2)
    assert executor.wait_idle(0.0)
    release = threading.Event()
    done: list[int] = []
    executor.submit(lambda: release.wait(LONG))
    for number in range(5):
        executor.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    assert not executor.wait_idle(0.0)
    release.set()
    assert executor.wait_idle(LONG)
    assert sorted(done) == [0, 1, 2, 3, 4]
    assert executor.close(LONG)


def test_an_executor_needs_a_thread() -> None:
    with pytest.raises(ConfigError, match="threads"):
        ThreadExecutor("none", threads=0)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_yielding_threads_let_others_go_first_and_no_other_thread_does() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    found: list[int] = []
    for yielding in (True, False):
        executor = ThreadExecutor("nice", 1, yielding=yielding)
        executor.submit(lambda: found.append(os.getpriority(os.PRIO_PROCESS, 0)))
        assert executor.close(10.0)
    assert found == [min(before + YIELD_BY, 19), before]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_signal_counts_once_until_it_is_taken() -> None:
    signal = Signal()
    assert not signal.wait(0.0)
    signal.set()
    signal.set()
    assert signal.wait(None)
    assert signal.is_set
    signal.clear()
    assert not signal.wait(-1.0)


def test_a_worker_does_not_wait_for_itself() -> None:
    answers: list[bool] = []
    worker = Worker("self", lambda: answers.append(worker.join(None)))
    worker.start()
    assert worker.join(LONG)
    assert answers == [False]
    assert not worker.alive


def test_a_lock_may_be_taken_again_by_its_holder() -> None:
    lock = make_lock()
    with lock, lock:
        pass


def test_the_system_clock_never_goes_back() -> None:
    clock = SystemClock()
    first, second = clock.monotonic(), clock.monotonic()
    assert second >= first
    assert clock.wall() > 1.6e9


def test_cpu_time_of_the_thread_passes_with_work_and_is_told_at_once() -> None:
    begin = now = thread_cpu_s()
    for _ in range(1000):
        before, now = now, thread_cpu_s()
        assert now >= before
    assert now > begin
