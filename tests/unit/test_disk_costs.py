"""What the disk tier costs the engine's thread, in operations: calls per job with the I/O in a process of its own.

Counted are Python calls and calls of C functions in `submit_store`, `submit_load` and `poll`. The process is played by
the test, outside of what is counted. Limits are a quarter above what was counted when they were set.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from disk_kit import Played

from kvstrata.primary.region import SharedRegion
from kvstrata.runtime.clock import SystemClock
from kvstrata.testing.executor import InlineExecutor
from kvstrata.testing.tier_harness import chunk_keys
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.disk import DiskTier, process
from kvstrata.tiers.disk.tasks import Forget, Task
from kvstrata.tiers.disk.writes import Writes
from kvstrata.types import JobEnded, KeysDone, TierEvent, TierJob

KIB = 1 << 10
BATCH = 64


class Rig:
    """A tier over a played process; each job has its own keys and goes through from its submission to its end."""

    def __init__(self, child: Played, tier: DiskTier, chunk: int) -> None:
        self.child, self.tier, self.chunk = child, tier, chunk
        self.keys = chunk_keys(100 * BATCH)
        self.jobs = 0
        self.tasks: list[Task | Forget] = []
        self.settle()

    @property
    def batches(self) -> int:
        """Of a job: 64 records or 8 MiB each."""
        return max(BATCH * self.chunk // (8 << 20), 1)

    def settle(self) -> None:
        for _ in range(20):
            self.tasks += self.child.answer()
            self.tier.poll()

    def job(self, number: int) -> TierJob:
        self.jobs += 1
        keys = self.keys[number * BATCH : (number + 1) * BATCH]
        return TierJob(self.jobs, keys, [n * self.chunk for n in range(BATCH)], [self.chunk] * BATCH)

    def calls(self, submit: Callable[[TierJob], None], numbers: Sequence[int]) -> float:
        """Calls per job, for jobs that are submitted together."""
        jobs = [self.job(number) for number in numbers]
        self.tasks.clear()
        count = counted(lambda: [submit(job) for job in jobs])
        events: list[TierEvent] = []
        while sum(isinstance(event, JobEnded) for event in events) < len(jobs):
            count += counted(lambda: events.extend(self.tier.poll()))
            self.tasks += self.child.answer()
        done = [index for event in events if isinstance(event, KeysDone) for index in event.done]
        assert len(done) == BATCH * len(jobs)
        return count / len(jobs)

    def store(self, numbers: Sequence[int]) -> float:
        return self.calls(self.tier.submit_store, numbers)

    def load(self, numbers: Sequence[int]) -> float:
        return self.calls(self.tier.submit_load, numbers)


def counted(work: Callable[[], object]) -> int:
    """Python and C calls made by `work`."""
    calls = 0

    def watch(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


@pytest.fixture(params=[32 * KIB, 256 * KIB])
def rig(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    child = Played()
    monkeypatch.setattr(process, "_Child", lambda *_: child)
    with SharedRegion(BATCH * 256 * KIB) as region:
        tier = DiskTier(path=str(tmp_path / "tier"), segment_bytes=512 << 20, io_process=True)
        tier.open(TierContext(region.view, bytes(16), 1, SystemClock(), InlineExecutor(), region_fd=region.fileno()))
        yield Rig(child, tier, request.param)
        child.ended = child.silent = True
        tier.close()


def tasks_of(rig: Rig, name: str) -> int:
    return sum(type(task).__name__ == name for task in rig.tasks)


def test_the_calls_of_a_store(rig: Rig) -> None:
    batches = rig.batches
    alone = rig.store([0])
    assert tasks_of(rig, "WriteBatch") == batches
    assert alone <= 310 + 52 * batches
    assert rig.store(range(1, 17)) <= 48 + 58 * batches


def test_the_calls_of_a_load(rig: Rig) -> None:
    rig.store(range(16))
    rig.load([0])
    assert rig.load([1]) <= 231
    assert tasks_of(rig, "ReadEven") == 1
    assert rig.load(range(16)) <= 81


def test_the_calls_of_a_poll_that_finds_nothing(rig: Rig) -> None:
    rig.store([0])
    rig.tier.submit_load(rig.job(0))
    rig.tier.poll()
    assert counted(rig.tier.poll) <= 36


def test_a_store_that_looks_at_each_key_is_found(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard can fail: a job that asks the index for one key after the other."""
    plain = Writes.submit_new

    def looks(self: Writes, state: Any, *others: Any) -> None:
        for key in state.job.keys:
            self._desk.find([key])
        plain(self, state, *others)

    monkeypatch.setattr(Writes, "submit_new", looks)
    assert rig.store(range(16)) > 48 + 58 * rig.batches
