"""Executors without threads: tasks run when, and in the order that, the test says.

InlineExecutor   runs each task inside `submit`
ManualExecutor   queues tasks; the test runs them one by one, first in first out or in a seeded order
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Task = Callable[[], None]


class InlineExecutor:
    """Runs each task at once, on the caller's stack. `raised` keeps what tasks raised though they must not."""

    def __init__(self) -> None:
        self.raised: list[BaseException] = []
        self.closed = False
        self.ran = 0

    def submit(self, task: Task) -> None:
        """Run `task` now; after `close` it is dropped."""
        if self.closed:
            return
        self.ran += 1
        try:
            task()
        except Exception as error:
            self.raised.append(error)

    def wait_idle(self, timeout: float) -> bool:
        """Nothing is ever queued."""
        return True

    def close(self, timeout: float) -> bool:
        """Drop later tasks."""
        self.closed = True
        return True


class ManualExecutor:
    """Queued tasks that the test runs by hand.

    `seed` None: first in, first out. With a seed, `run_next` picks a queued task at random, the same order for the
    same seed. While `hang` is set, `wait_idle` and `close` find a device that does not answer: they return False
    and run nothing. `raised` keeps what tasks raised though they must not.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._queue: list[Task] = []
        self._rng = None if seed is None else np.random.default_rng(seed)
        self.raised: list[BaseException] = []
        self.closed = False
        self.hang = False
        self.ran = 0

    @property
    def pending(self) -> int:
        """Tasks that wait to be run."""
        return len(self._queue)

    def submit(self, task: Task) -> None:
        """Queue `task`; after `close` it is dropped."""
        if not self.closed:
            self._queue.append(task)

    def run_next(self) -> bool:
        """Run one task; False if none waits."""
        if not self._queue:
            return False
        self.run_at(0 if self._rng is None else int(self._rng.integers(len(self._queue))))
        return True

    def run_at(self, index: int) -> None:
        """Run the task at `index` of the queue (0 is the oldest)."""
        task = self._queue.pop(index)
        self.ran += 1
        try:
            task()
        except Exception as error:
            self.raised.append(error)

    def run_all(self, limit: int = 1_000_000) -> int:
        """Run until none waits, tasks that tasks submit included; returns how many ran. Stops after `limit`."""
        count = 0
        while count < limit and self.run_next():
            count += 1
        return count

    def drop_next(self) -> bool:
        """Lose the oldest task: it never runs, as if its thread had died."""
        if not self._queue:
            return False
        del self._queue[0]
        return True

    def wait_idle(self, timeout: float) -> bool:
        """Run all that is queued, unless the device hangs."""
        if self.hang:
            return not self._queue
        self.run_all()
        return True

    def close(self, timeout: float) -> bool:
        """Run all that is queued and take no more; False, with the queue kept for late runs, if the device hangs."""
        idle = self.wait_idle(timeout)
        self.closed = True
        return idle
