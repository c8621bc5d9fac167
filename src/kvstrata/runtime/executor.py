"""Threads, locks and signals: the only module that starts a thread or takes a lock from the operating system.

All threads are daemons: the end of the process never waits for a tier. They start at first use, never in a
constructor, so that an engine may fork its workers before.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

from kvstrata.errors import ConfigError, StateError

Lock: TypeAlias = AbstractContextManager[bool]
"""What `make_lock` returns: entered and left by `with`."""


def make_lock() -> Lock:
    """A mutual exclusion that its holder may take again."""
    return threading.RLock()


class Signal:
    """A flag that one thread waits for and any thread raises; raising it twice before a wait counts once."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    @property
    def is_set(self) -> bool:
        """Whether the flag was raised since it was last taken."""
        return self._event.is_set()

    def set(self) -> None:
        """Raise the flag; wakes the waiter. Never blocks."""
        self._event.set()

    def clear(self) -> None:
        """Take the flag down. Look at what it announces after this, never before."""
        self._event.clear()

    def wait(self, timeout: float | None) -> bool:
        """Wait until the flag is raised, at most `timeout` seconds (None: without end); whether it was."""
        return self._event.wait(None if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX))


class Worker:
    """One named daemon thread that runs `body` once."""

    __slots__ = ("_thread",)

    def __init__(self, name: str, body: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=body, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def join(self, timeout: float | None) -> bool:
        """Wait for the end of `body`; False after `timeout` seconds, or when called from the thread itself."""
        if self._thread is threading.current_thread():
            return False
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether `body` is running."""
        return self._thread.is_alive()


YIELD_BY = 15
"""How much nicer a thread is that lets others go first: it has about 3 % of a processor that another one wants."""


def let_others_go_first() -> None:
    """Lower the priority of the calling thread, for good: most processes may not raise it again.

    Only where threads have priorities of their own (Linux); elsewhere it would be that of the whole process.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + YIELD_BY)


@dataclass(frozen=True, slots=True)
class ExecutorStatistics:
    """What an executor has done so far."""

    threads: int
    queued: int
    running: int
    finished: int
    failed: int
    last_failure: str = ""


class ThreadExecutor:
    """Runs tasks on at most `threads` daemon threads, in the order of submission.

    A task that raises is recorded and the thread goes on: one bad task never takes the executor down. `yielding`
    threads let all others go first: for tasks that keep a processor busy while they only wait.
    """

    def __init__(self, name: str, threads: int = 1, *, yielding: bool = False) -> None:
        if threads < 1:
            raise ConfigError(f"threads: {threads} must be at least 1 (executor {name})")
        self.name = name
        self._limit = threads
        self._yielding = yielding
        self._tasks: deque[Callable[[], None]] = deque()
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # workers wait on it for a task or the end
        self._idle = threading.Condition(lock)  # those who wait for the last task
        self._workers: list[Worker] = []
        self._running = 0
        self._finished = 0
        self._failed = 0
        self._last_failure = ""
        self._closed = False

    def submit(self, task: Callable[[], None]) -> None:
        """Queue `task`; never blocks. Raises `StateError` after `close`."""
        with self._changed:
            if self._closed:
                raise StateError(f"executor {self.name} is closed")
            self._tasks.append(task)
            busy = self._running + len(self._tasks)
            if len(self._workers) < min(self._limit, busy):
                worker = Worker(f"{self.name}-{len(self._workers)}", self._work)
                self._workers.append(worker)
                worker.start()
            self._changed.notify()

    def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing is queued or running; False after `timeout` seconds."""
        with self._changed:
            return self._wait_idle(timeout)

    def close(self, timeout: float) -> bool:
        """Finish what is queued, then end the threads; idempotent.

        False if something was still queued or running after `timeout` seconds: what is queued is then dropped, what
        runs is left to its daemon thread.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            done = self._wait_idle(timeout)
            self._tasks.clear()
        if done:
            for worker in self._workers:
                worker.join(max(timeout, 1.0))
        return done

    def _wait_idle(self, timeout: float) -> bool:
        return self._idle.wait_for(lambda: not self._tasks and not self._running, max(timeout, 0.0))

    def statistics(self) -> ExecutorStatistics:
        """A snapshot of the counters."""
        with self._changed:
            return ExecutorStatistics(
                threads=len(self._workers),
                queued=len(self._tasks),
                running=self._running,
                finished=self._finished,
                failed=self._failed,
                last_failure=self._last_failure,
            )

    def _work(self) -> None:
        if self._yielding:
            let_others_go_first()
        while True:
            with self._changed:
                while not self._tasks:
                    if self._closed:
                        return
                    self._changed.wait()
                task = self._tasks.popleft()
                self._running += 1
            failure: str | None = None
            try:
                task()
            except BaseException as error:
                failure = f"{type(error).__name__}: {error}"
            del task  # its buffers must not live until the next task comes
            with self._changed:
                self._running -= 1
                self._finished += 1
                if failure is not None:
                    self._failed += 1
                    self._last_failure = failure
                if not self._tasks and not self._running:
                    self._idle.notify_all()
