"""How many bytes of stores may be at the disk at once.

A load that comes waits for what is there, so it is what the disk writes in a short time, measured as it goes: much for
a fast disk, which is kept busy by that, and little for a slow one. Pure: time is an argument.
"""

from __future__ import annotations

DRAIN_S = 0.03
"""So long the stores at the disk take to end."""
MEASURE_S = 0.02
LEAST_BYTES = 16 << 20


class StoreRoom:
    """`bytes` is what may be there; `most` bounds it."""

    __slots__ = ("_done", "_most", "_since", "bytes")

    def __init__(self, most: int) -> None:
        self._most = max(most, LEAST_BYTES)
        self._since = self._done = 0.0
        self.bytes = LEAST_BYTES

    def restart(self, now: float) -> None:
        """Measure from now on: the disk has begun to store, or did something else beside it."""
        self._since, self._done = now, 0

    def ended(self, size: int, now: float) -> None:
        """So many bytes have been stored, of stores that had the disk for themselves since they were counted last."""
        self._done += size
        passed = now - self._since
        if passed >= MEASURE_S:
            self.bytes = int(min(max(self._done / passed * DRAIN_S, LEAST_BYTES), self._most))
            self.restart(now)
