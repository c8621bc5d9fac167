"""How much a busy pure-Python thread, as an engine's scheduler is, slows down while the disk tier moves data.

The thread does units of fixed work; between two of them it takes what the tier reports and hands it the next loads,
as an engine does between steps. A round is four phases: the tier's full rate while the thread only waits, then work
without, with, and again without loads, which come at `PACE` of that full rate. The slow-down of a round compares the
phase with loads to the two around it, so that a machine whose speed drifts does not count.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstrata.errors import CapacityError
from kvstrata.primary.region import SharedRegion
from kvstrata.runtime.clock import SystemClock
from kvstrata.runtime.executor import Signal, ThreadExecutor
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.disk import DiskTier
from kvstrata.types import JobEnded, KeysDone, TierJob, make_key

UNIT_S = 0.002
JOB_BYTES = 16 << 20
DEPTH = 6
"""Loads that the tier always has in hand. A step is some milliseconds, in which a disk moves a few jobs of a few MiB;
an engine hands over a quarter of its primary at a time."""
PATIENCE_S = 30.0
RATE_SHARE = 0.85
"""What of its full rate the tier must move for the slow-down to count."""
PACE = 0.9
"""What of its full rate is asked for: enough to be above `RATE_SHARE` in a round that is slower than others."""
LEAD_S = 0.02
"""So long each phase has begun before it counts: its loads are under way then."""


@dataclass(frozen=True, slots=True)
class InterferenceRow:
    """One way to run the tier's I/O. Rates, shares and slow-downs (fractions) are medians over the rounds."""

    io: str
    """Where it runs: "process" or "threads"."""
    pinned: bool
    """Whether the engine's thread and the I/O process have cores of their own."""
    chunk: int
    full_gbps: float
    """While the engine's thread only waits."""
    gbps: float
    """Beside the busy thread."""
    rate_share: float
    """Of the full rate in the same round."""
    slowdown: float
    """Of the work, the calls into the tier left out."""
    calls_share: float
    """What of the thread's time the calls into the tier took, beside its work."""
    rounds: list[float]
    """The slow-down in each."""


class Rig:
    """An opened disk tier, filled with chunks, and loads of them without end."""

    def __init__(self, place: Path, volume: int, chunk: int, io_process: bool, io_cpus: tuple[int, ...]) -> None:
        self.chunk = chunk
        self._count = volume // chunk
        self._folder = place / f"interference-{'process' if io_process else 'threads'}"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._clock = SystemClock()
        self._signal = Signal()
        self._executor = ThreadExecutor("interference", threads=16)
        self._region = SharedRegion(self._count * chunk).open()
        rng = np.random.default_rng(0)
        words = np.frombuffer(self._region.view, np.uint8)
        for at in range(0, len(words), 1 << 24):
            part = words[at : at + (1 << 24)]
            part[:] = rng.integers(0, 256, len(part), dtype=np.uint8)
        del words, part
        raw = rng.bytes(32 * self._count)
        self._keys = [make_key(raw[at : at + 32], 0) for at in range(0, len(raw), 32)]
        self.tier = DiskTier(
            path=str(self._folder), limit=3 * volume, segment_bytes=max(volume // 4, 4 * chunk), largest_chunk=chunk,
            io_process=io_process, pin_cpus=io_cpus, queue_bytes=2 * volume,
        )  # fmt: skip
        self.tier.open(
            TierContext(
                self._region.view,
                b"bench-namespace!",
                1,
                self._clock,
                self._executor,
                self._signal.set,
                self._region.fileno(),
            )
        )
        self._jobs = 0
        self._at = 0
        self._per_job = min(max(1, JOB_BYTES // chunk), self.tier.capabilities.max_batch)
        self._out: deque[int] = deque()
        self.moved = 0
        self.feeding = False
        self._paced_from = (0.0, 0)
        self._pace = math.inf
        for _ in range(-(-self._count // self._per_job)):
            self.tier.submit_store(self._next_job())
        self.drain()
        self._at = 0

    def _next_job(self) -> TierJob:
        first = self._at if self._at < self._count else 0
        last = min(first + self._per_job, self._count)
        self._at = last
        self._jobs += 1
        offsets = list(range(first * self.chunk, last * self.chunk, self.chunk))
        self._out.append(self._jobs)
        return TierJob(self._jobs, self._keys[first:last], offsets, [self.chunk] * len(offsets))

    def turn(self) -> None:
        """Take what the tier reports, and keep it busy while `feeding`."""
        self._signal.clear()
        for event in self.tier.poll():
            if isinstance(event, KeysDone):
                self.moved += len(event.done) * self.chunk
                if event.failed:
                    raise CapacityError(f"the disk tier failed: {event.failed[0][1]}")
            elif isinstance(event, JobEnded):
                self._out.remove(event.job_id)
        while self.feeding and len(self._out) < DEPTH and self._due():
            self.tier.submit_load(self._next_job())

    def _due(self) -> bool:
        """Whether the pace asks for another load now."""
        if self._pace == math.inf:
            return True
        began, jobs = self._paced_from
        return (self._jobs - jobs) * self._per_job * self.chunk <= self._pace * (self._clock.monotonic() - began)

    def feed(self, gbps: float = math.inf) -> None:
        """From now on keep the tier busy, at most at this rate."""
        self.feeding, self.moved = True, 0
        self._pace, self._paced_from = gbps * 1e9, (self._clock.monotonic(), self._jobs)

    def drain(self) -> None:
        """Wait until nothing is out."""
        self.feeding = False
        while self._out:
            self.turn()
            if self._out and not self._signal.wait(PATIENCE_S):
                raise CapacityError(f"the disk tier is silent for {PATIENCE_S:.0f} s")

    def full_rate(self, seconds: float) -> float:
        """Gigabytes per second while this thread only waits."""
        self.feed()
        began = self._clock.monotonic()
        while (passed := self._clock.monotonic() - began) < seconds:
            self.turn()
            self._signal.wait(PATIENCE_S)
        rate = self.moved / passed / 1e9
        self.drain()
        return rate

    def close(self) -> None:
        """Close the tier and remove its files."""
        self.drain()
        self.tier.close()
        self._executor.close(5.0)
        self._region.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def work(loops: int) -> int:
    """Pure Python: numbers, a list and a dictionary, as a scheduler's step has them."""
    seen: dict[int, int] = {}
    total = 0
    for i in range(loops):
        total = (total * 31 + i) & 0xFFFF
        seen[total & 255] = i
    return total + len(seen)


def phase(rig: Rig, loops: int, seconds: float) -> tuple[float, float, float]:
    """Units of work for some seconds: seconds per unit, gigabytes per second moved, share of time inside the tier."""
    clock = SystemClock()
    for length in (LEAD_S, seconds):
        rig.moved, units, worked = 0, 0, 0.0
        began = clock.monotonic()
        while (passed := clock.monotonic() - began) < length:
            at = clock.monotonic()
            work(loops)
            worked += clock.monotonic() - at
            units += 1
            rig.turn()
    return worked / units, rig.moved / passed / 1e9, 1.0 - worked / passed


def measure(
    place: Path, *, volume: int, chunk: int, rounds: int, seconds: float, io_process: bool, pin: bool
) -> InterferenceRow:
    """All rounds; the engine's thread is pinned after the tier's threads have started."""
    cores = sorted(os.sched_getaffinity(0))
    pin = pin and len(cores) > 1
    rig = Rig(place, volume, chunk, io_process, tuple(cores[1:]) if pin and io_process else ())
    try:
        rig.full_rate(seconds)  # a first one warms up
        if pin:
            os.sched_setaffinity(0, cores[:1])
        loops = _calibrate()
        found = [_round(rig, loops, seconds) for _ in range(rounds)]
    finally:
        os.sched_setaffinity(0, cores)
        rig.close()
    return InterferenceRow(
        io="process" if io_process else "threads",
        pinned=pin,
        chunk=chunk,
        full_gbps=round(statistics.median(each.full for each in found), 3),
        gbps=round(statistics.median(each.gbps for each in found), 3),
        rate_share=round(statistics.median(each.gbps / each.full for each in found), 3),
        slowdown=round(statistics.median(each.slowdown for each in found), 4),
        calls_share=round(statistics.median(each.calls for each in found), 4),
        rounds=[round(each.slowdown, 4) for each in found],
    )


@dataclass(frozen=True, slots=True)
class _Round:
    """What one round has shown; see `InterferenceRow`."""

    full: float
    gbps: float
    slowdown: float
    calls: float


def _round(rig: Rig, loops: int, seconds: float) -> _Round:
    full = rig.full_rate(seconds)
    before, _, _ = phase(rig, loops, seconds)
    rig.feed(PACE * full)
    busy, gbps, calls = phase(rig, loops, seconds)
    rig.drain()
    after, _, _ = phase(rig, loops, seconds)
    return _Round(full, gbps, 2 * busy / (before + after) - 1.0, calls)


def _calibrate() -> int:
    """Loops of work that take about one unit."""
    clock, loops = SystemClock(), 1000
    while True:
        began = clock.monotonic()
        work(loops)
        if clock.monotonic() - began >= UNIT_S:
            return loops
        loops *= 2
