"""The fs tier on real threads: many sessions, values derived from keys, a small primary. No wrong byte, no lost job."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kvstrata.runtime.clock import SystemClock
from kvstrata.runtime.executor import ThreadExecutor
from kvstrata.testing import chunk_keys, payload_of
from kvstrata.testing.tier_harness import LAYOUT_TAG, NAMESPACE
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.fs import FsTier
from kvstrata.types import JobEnded, KeysDone, TierJob

CHUNK = 700
SLOTS = 16
LIMIT = 40 * 4096


class Sessions:
    """Random stores, loads and removals over a few slots; every loaded chunk is compared."""

    def __init__(self, root: Path, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.keys = chunk_keys(80)
        self.region = memoryview(bytearray(SLOTS * CHUNK))
        self.free = list(range(SLOTS))
        self.open: dict[int, tuple[TierJob, bool]] = {}
        self.loaded = self.stored = 0
        self.root = root
        self.tier = FsTier(str(root), limit=LIMIT)
        executor = ThreadExecutor("fs-test", 4)
        context = TierContext(self.region, NAMESPACE, LAYOUT_TAG, SystemClock(), executor)
        self.tier.open(context)

    def submit(self, number: int) -> None:
        picked = [self.keys[int(i)] for i in self.rng.integers(0, len(self.keys), size=min(3, len(self.free)))]
        slots = [self.free.pop() for _ in picked]
        job = TierJob(number, picked, [slot * CHUNK for slot in slots], [CHUNK] * len(picked))
        load = bool(self.rng.integers(2))
        for key, offset in zip(job.keys, job.offsets, strict=True):
            self.region[offset : offset + CHUNK] = bytes(CHUNK) if load else payload_of(key, CHUNK)
        self.open[number] = (job, load)
        (self.tier.submit_load if load else self.tier.submit_store)(job)

    def poll(self) -> None:
        for event in self.tier.poll():
            if isinstance(event, KeysDone):
                self.check(event)
            elif isinstance(event, JobEnded):
                job, _ = self.open.pop(event.job_id)
                self.free += [offset // CHUNK for offset in job.offsets]

    def check(self, event: KeysDone) -> None:
        job, load = self.open[event.job_id]
        self.stored += 0 if load else len(event.done)
        for index in event.done if load else ():
            offset = job.offsets[index]
            assert self.region[offset : offset + CHUNK] == payload_of(job.keys[index], CHUNK)
            self.loaded += 1


@pytest.mark.scenario_39
@pytest.mark.slow
def test_many_sessions_on_threads(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path / "cache", seed=3)
    for number in range(1500):
        if not sessions.free:
            assert sessions.tier.drain(60.0)
        if number % 40 == 0:
            sessions.tier.remove(sessions.keys[:10])
        sessions.poll()
        if sessions.free:
            sessions.submit(number)
        usage = sessions.tier.usage()
        assert usage.bytes_held + usage.bytes_reserved <= LIMIT
    assert sessions.tier.drain(60.0)
    sessions.poll()
    assert sessions.open == {}
    assert sessions.loaded > 100
    assert sessions.stored > 100
    sessions.tier.close()
    files = [os.path.join(folder, name) for folder, _, names in os.walk(tmp_path / "cache") for name in names]
    assert sum(os.stat(file).st_blocks * 512 for file in files) <= LIMIT
