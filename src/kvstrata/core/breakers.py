"""Circuit breaker of one direction of one tier: open means the tier is not asked.

    closed --errors in a row, or an overdue job--> open --time--> half open --one trial ok--> closed
                                                    ^                |
                                                    +--trial failed--+      (open twice as long, up to a bound)

It recovers with time whatever the traffic: an open breaker becomes half open by itself, and a half-open one that
nobody tries for as long again closes.

A tier may also answer, but too late: requests wait for it until their clocks run out and gain little. After as many
such waits in a row as of errors, the breaker opens for a multiple of the time that the last one took. It doubles with
each further one, up to `REST_MOST`: a tier that was slow for a while is back after about as long, and one that serves
nobody in time costs less than 2 %. A request that was served in time ends the row; a trial that merely works does not.
"""

from __future__ import annotations

import enum

REST_FIRST, REST_MOST = 4.0, 60.0
"""Seconds of rest for each second that a request waited for nothing, at first and at most."""

LONGEST_REST = 10.0
"""Longest rest, in longest times that the breaker stays open."""


class BreakerState(enum.Enum):
    """The three states of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """One breaker. All times are seconds of the core's clock."""

    __slots__ = ("_errors", "_errors_to_open", "_late", "_open_s", "_open_s_first", "_open_s_max", "_rest", "_trial",
                 "_until", "opened", "state")  # fmt: skip

    def __init__(self, errors_to_open: int, open_s: float, open_s_max: float) -> None:
        self.state = BreakerState.CLOSED
        self.opened = 0
        self._errors = 0
        self._errors_to_open = errors_to_open
        self._open_s_first = open_s
        self._open_s = open_s
        self._open_s_max = open_s_max
        self._until = 0.0
        self._trial = False
        self._late = 0
        self._rest = REST_FIRST

    def advance(self, now: float) -> bool:
        """Let time pass: open becomes half open, an untried half open becomes closed. True if it changed."""
        if self.state is BreakerState.CLOSED or now < self._until or self._trial:
            return False
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.HALF_OPEN
            self._until += self._open_s
            if now < self._until:
                return True
        self._close()
        return True

    def deadline(self) -> float | None:
        """When `advance` has something to do, or None."""
        return None if self.state is BreakerState.CLOSED or self._trial else self._until

    @property
    def allows(self) -> bool:
        """Whether the tier may be asked now; half open admits one trial at a time."""
        return self.state is BreakerState.CLOSED or (self.state is BreakerState.HALF_OPEN and not self._trial)

    @property
    def is_trial(self) -> bool:
        """Whether what is asked next is a trial: one chunk only."""
        return self.state is BreakerState.HALF_OPEN

    def asked(self) -> None:
        """Something was handed over; in half open this is the trial."""
        if self.state is BreakerState.HALF_OPEN:
            self._trial = True

    def success(self) -> None:
        """The tier answered."""
        self._errors = 0
        if self.state is BreakerState.HALF_OPEN:
            self._close()

    def released(self) -> None:
        """The trial ended without telling anything (it was cancelled)."""
        self._trial = False

    def failure(self, now: float, *, at_once: bool = False) -> None:
        """The tier failed; `at_once` (an overdue job) opens without counting."""
        self._errors += 1
        if self.state is BreakerState.HALF_OPEN:
            self._open_s = min(self._open_s * 2, self._open_s_max)
            self._open(now)
        elif self.state is BreakerState.CLOSED and (at_once or self._errors >= self._errors_to_open):
            self._open(now)

    def late(self, now: float, waited: float) -> None:
        """A request that waited for the tier until its clock ran out has gained little."""
        self._late += 1
        if self.state is not BreakerState.OPEN and self._late >= self._errors_to_open:
            self._open(now, min(self._rest * waited, LONGEST_REST * self._open_s_max))
            self._rest = min(2 * self._rest, REST_MOST)

    def in_time(self) -> None:
        """A request got what it waited for."""
        self._late = 0
        self._rest = REST_FIRST

    def _open(self, now: float, rest: float = 0.0) -> None:
        self.state = BreakerState.OPEN
        self.opened += 1
        self._trial = False
        self._until = now + max(self._open_s, rest)

    def _close(self) -> None:
        self.state = BreakerState.CLOSED
        self._errors = 0
        self._trial = False
        self._open_s = self._open_s_first
