"""The real clock. Nothing else in kvstrata reads time; everything else is given it."""

from __future__ import annotations

import time


class SystemClock:
    """The operating system's time, as `tiers.base.Clock`."""

    __slots__ = ()

    def monotonic(self) -> float:
        """Seconds that never go back; the origin means nothing."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch; may jump when the machine's time is set."""
        return time.time()


def thread_cpu_s() -> float:
    """CPU seconds of the calling thread until now. `getrusage` tells those until the scheduler's last look at it."""
    return time.thread_time()
