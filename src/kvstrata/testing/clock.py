"""A clock that moves only when the test says so."""

from __future__ import annotations


class ManualClock:
    """Monotonic and wall time under the hand of a test; both move together.

    `monotonic_start` is deliberately not zero, so that code which mistakes "no time" for 0.0 is seen.
    """

    def __init__(self, monotonic_start: float = 1000.0, wall_start: float = 1_700_000_000.0) -> None:
        self._now = monotonic_start
        self._wall = wall_start

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return self._now

    def wall(self) -> float:
        """Seconds since the epoch."""
        return self._wall

    def advance(self, seconds: float) -> float:
        """Move both clocks forward; returns the new monotonic time. Negative steps are a `ValueError`."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now += seconds
        self._wall += seconds
        return self._now

    def set_wall(self, seconds: float) -> None:
        """Move the wall clock alone, also backwards, as an administrator would."""
        self._wall = seconds
