"""Who may touch which bytes of primary: an own account, from jobs handed out and reports come back alone.

It knows nothing of slots, pins or states. Whoever writes must be alone; whoever reads must find no writer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Use:
    """The ranges that one job may touch."""

    writes: bool
    ranges: dict[int, tuple[int, int]] = field(default_factory=dict)


class Shadow:
    """All uses of primary under way."""

    def __init__(self, capacity: int) -> None:
        self._readers = np.zeros(capacity, np.int16)
        self._writers = bytearray(capacity)
        self._uses: dict[int, Use] = {}

    def begin(self, job_id: int, offsets: Sequence[int], lengths: Sequence[int], *, writes: bool) -> None:
        """A job may touch these ranges from now on; raises if somebody else's use forbids that."""
        if job_id in self._uses:
            raise AssertionError(f"job {job_id} is handed out twice")
        use = self._uses[job_id] = Use(writes)
        for i, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            end = offset + length
            if end > len(self._readers):
                raise AssertionError(f"job {job_id} gets bytes up to {end} of {len(self._readers)}")
            if self._writers.find(1, offset, end) >= 0 or (writes and self._readers[offset:end].any()):
                verb = "write" if writes else "read"
                raise AssertionError(f"job {job_id} is to {verb} bytes {offset} to {end} that another job still uses")
            if writes:
                self._writers[offset:end] = b"\1" * length
            else:
                self._readers[offset:end] += 1
            use.ranges[i] = (offset, end)

    def end(self, job_id: int, indices: Iterable[int] | None = None) -> None:
        """The job touches these of its ranges (default: all) no more."""
        use = self._uses.get(job_id)
        if use is None:
            return
        for i in list(use.ranges) if indices is None else indices:
            found = use.ranges.pop(i, None)
            if found is not None:
                if use.writes:
                    self._writers[found[0] : found[1]] = bytes(found[1] - found[0])
                else:
                    self._readers[found[0] : found[1]] -= 1
        if indices is None:
            del self._uses[job_id]

    def clear(self) -> None:
        """The process is gone, and with it all who touched its memory."""
        self._uses.clear()
        self._readers[:] = 0
        self._writers = bytearray(len(self._writers))
