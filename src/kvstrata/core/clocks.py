"""The two clocks of a waiting request, as pure arithmetic (DESIGN section 5, "Clocks").

*Total* bounds the whole wait; *stall* bounds the wait without progress (an answered probe, a landed chunk). Both start
with the first poll and are never restarted by a failed round or a new plan. How time counts depends on what the
request does: while it resolves or fetches all of it counts, while it waits for room the gap between two polls counts
only up to a bound (an idle engine does not step), while it is ready nothing counts.
"""

from __future__ import annotations

import enum
import math


class Pace(enum.Enum):
    """How time counts now."""

    STOPPED = "stopped"
    RUNNING = "running"
    BY_POLLS = "by_polls"


class WaitClock:
    """Clocks of one wait of one request. Seconds of the core's clock."""

    __slots__ = ("_gap", "_mark", "_pace", "_stall", "_stalled", "_total", "_waited", "fixed")

    def __init__(self, stall: float, total: float, gap: float, now: float) -> None:
        self._stall = stall
        self._total = total
        self._gap = gap
        self._waited = 0.0
        self._stalled = 0.0
        self._mark = now
        self._pace = Pace.RUNNING
        self.fixed = False

    @property
    def waited(self) -> float:
        """Seconds counted so far by the total clock."""
        return self._waited

    def account(self, now: float) -> None:
        """Count the time since the last call; while waiting for room, call it at polls only."""
        passed = now - self._mark
        self._mark = now
        if self._pace is Pace.STOPPED or passed <= 0:
            return
        if self._pace is Pace.BY_POLLS:
            passed = min(passed, self._gap)
        self._waited += passed
        self._stalled += passed

    def switch(self, pace: Pace, now: float) -> None:
        """From now on time counts as `pace` says."""
        if pace is not self._pace:
            self.account(now)
            self._pace = pace

    def progress(self, now: float) -> None:
        """A probe was answered or a chunk landed: the stall begins anew."""
        if self._pace is not Pace.BY_POLLS:
            self.account(now)
        self._stalled = 0.0

    def fix_once(self, stall: float, total: float) -> None:
        """The first plan is made: its tiers and its bytes say how long is waited. Later plans do not."""
        if not self.fixed:
            self.fixed, self._stall, self._total = True, stall, total

    def fix_bytes_once(self, seconds: float) -> None:
        """The same where the first plan says only how long its bytes take."""
        self.fix_once(self._stall, self._total + seconds)

    def extend(self, seconds: float) -> None:
        """More bytes belong to the first plan."""
        self._total += seconds

    def deadline(self) -> float:
        """When the nearer clock runs out if nothing happens; infinite where only a poll can let time pass."""
        left = min(self._total - self._waited, self._stall - self._stalled)
        if self._pace is Pace.STOPPED or (self._pace is Pace.BY_POLLS and left > self._gap):
            return math.inf
        return self._mark + left

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left of a clock, at whatever pace it goes."""
        return min(self._total - self._waited, self._stall - self._stalled) <= 1e-9

    def expired(self, now: float) -> bool:
        """Whether a clock has run out at `now`."""
        return now >= self.deadline() - 1e-9
