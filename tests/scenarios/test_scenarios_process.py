"""Scenarios about processes: regions that outlive nobody, several workers, many sessions on threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstrata.core.manager import TieringOffloadingManager
from kvstrata.core.messages import RequestContext
from kvstrata.core.settings import CoreConfig
from kvstrata.errors import CapacityError
from kvstrata.integrations.vllm.share import publish, region_name, withdraw
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds import FullAttention
from kvstrata.primary.region import AnonymousRegion, SharedRegion
from kvstrata.runtime.clock import SystemClock
from kvstrata.runtime.driver import Driver
from kvstrata.runtime.executor import Signal, ThreadExecutor
from kvstrata.runtime.guard import GuardedTier
from kvstrata.testing.tier_harness import chunk_keys, payload_of
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.disk import DiskTier
from kvstrata.types import LookupResult

SHARED_FOLDER = Path("/dev/shm")
PLACES = ("before sizing", "after sizing", "after publishing", "after mapping")

HOLDER = """
import mmap, os, sys
from kvstrata.integrations.vllm.share import publish
from kvstrata.primary.region import SharedRegion
where = sys.argv[1]
def stop(here):
    if here == where:
        print(here, flush=True)
        sys.stdin.read()
size, map_ = os.ftruncate, mmap.mmap
def truncate(*args):
    stop("before sizing"); size(*args); stop("after sizing")
os.ftruncate = truncate
region = SharedRegion(1 << 20, name="kvstrata-crash").open()
publish("crash", region)
stop("after publishing")
region.view[:4] = b"mine"
stop("after mapping")
"""


def leftovers() -> set[str]:
    """Files of shared memory that have a name."""
    return set(os.listdir(SHARED_FOLDER))


@pytest.mark.scenario_68
@pytest.mark.scenario_124
@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_kill_while_the_region_is_made_leaves_nothing_and_touches_no_neighbour(place: str) -> None:
    before = leftovers()
    with SharedRegion(1 << 20, name="kvstrata-neighbour") as neighbour:
        neighbour.view[:5] = b"alive"
        for _ in range(2):
            child = subprocess.Popen(
                [sys.executable, "-c", HOLDER, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert child.stdout is not None
            assert child.stdout.readline() == f"{place}\n"
            os.kill(child.pid, signal.SIGKILL)
            child.wait(10)
            child.stdout.close()
            assert child.stdin is not None
            child.stdin.close()
            assert leftovers() == before, "no file with a name, so none to trip over"
            with SharedRegion(1 << 20, name="kvstrata-crash") as again:  # the restart succeeds
                again.view[:4] = b"next"
        assert bytes(neighbour.view[:5]) == b"alive"


@pytest.mark.scenario_124
def test_no_room_is_a_plain_error_before_anything_is_taken() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CapacityError, match=r"does not fit.*choose a smaller primary size"):
        SharedRegion(1 << 60).open()
    assert len(os.listdir("/proc/self/fd")) == descriptors


WORKER = """
import sys
from kvstrata.integrations.vllm.share import attach
attached = attach("workers")
assert len(attached.view) == int(sys.argv[2]), len(attached.view)
rank = int(sys.argv[1])
attached.view[rank] = rank + 1
attached.close()
"""


@pytest.mark.scenario_33
@pytest.mark.slow
@pytest.mark.parametrize("stale", [False, True])
def test_four_workers_map_the_one_region_of_the_right_size(stale: bool) -> None:
    size = 1 << 16
    rng = np.random.default_rng(4)
    old = SharedRegion(size // 2, name=region_name("workers")).open() if stale else None  # of a half-dead engine
    if old is not None:
        old.close()
    with SharedRegion(size, name=region_name("workers")) as region:
        publish("workers", region)
        started = [
            subprocess.Popen([sys.executable, "-c", WORKER, str(rank), str(size)], stderr=subprocess.PIPE, text=True)
            for rank in rng.permutation(4)
        ]
        for worker in started:
            _, said = worker.communicate(timeout=60)
            assert worker.returncode == 0, said
        assert bytes(region.view[:4]) == bytes([1, 2, 3, 4])
        withdraw("workers")


CHUNK = 600
LAYOUT = Layout((Group(FullAttention(), 16, chunk_bytes=CHUNK),))
SESSIONS = 64
PER_SESSION = 3


class Service:
    """Primary of 8 slots over a disk tier on threads, through the driver with its own thread."""

    def __init__(self, place: Path) -> None:
        self.clock = SystemClock()
        self.region = AnonymousRegion(8 * CHUNK).open()
        self.view = np.frombuffer(self.region.view, np.uint8)
        self.executor = ThreadExecutor("sessions", 4)
        tier = DiskTier(path=str(place), limit=2_000_000, segment_bytes=65_536, largest_chunk=CHUNK)
        self.guard = GuardedTier(tier)
        config = CoreConfig(
            capacity_bytes=8 * CHUNK, promotion_share=1.0, store_reserve=0.0, inflight_share=1.0, stall_s=30, total_s=30
        )
        self.manager = TieringOffloadingManager(LAYOUT, config, [self.guard])
        self.driver: Driver[TieringOffloadingManager] = Driver(self.manager, [self.guard], self.clock)
        self.signal = Signal()
        self.guard.open(TierContext(self.region.view, b"sessions", 1, self.clock, self.executor, self.driver.wake))
        self.driver.start()
        self.loaded = self.stored = 0

    def keys(self, session: int) -> list[bytes]:
        return chunk_keys(PER_SESSION, start=session * PER_SESSION)

    def store(self, name: str, session: int) -> None:
        """Write the session's chunks into the slots that it is given, once the disk has let go of some."""
        keys = self.keys(session)
        with self.driver.step() as manager:
            manager.add_request(name, [keys])
        while True:
            with self.driver.step() as manager:
                plan = manager.prepare_store(name, [(0, i) for i in range(PER_SESSION)])
                if plan is not None or manager.idle:
                    break
            self.signal.wait(0.0005)
        if plan is not None:
            for key, offset in zip(plan.keys, plan.offsets.tolist(), strict=True):
                self.view[offset : offset + CHUNK] = np.frombuffer(payload_of(key, CHUNK), np.uint8)
            with self.driver.step() as manager:
                manager.complete_store(plan.job_id)
            self.stored += len(plan.keys)

    def load(self, name: str, session: int) -> None:
        """Bring the session back, and compare every byte with what its key says."""
        keys, total = self.keys(session), 16 * PER_SESSION
        with self.driver.step() as manager:
            manager.add_request(name, [keys])
        while True:
            with self.driver.step() as manager:
                hit = manager.poll(name, 0, total).hit
            if hit is not None:
                break
            self.signal.wait(0.0005)
        with self.driver.step() as manager:
            plan = manager.take(name, hit)
        if plan is not None:
            for key, offset in zip(plan.keys, plan.offsets.tolist(), strict=True):
                assert self.view[offset : offset + CHUNK].tobytes() == payload_of(key, CHUNK)
            self.loaded += len(plan.keys)
            with self.driver.step() as manager:
                manager.complete_load(plan.job_id)

    def finish(self, name: str) -> None:
        with self.driver.step() as manager:
            manager.finish(name)

    def close(self) -> None:
        self.driver.close()
        self.executor.close(5.0)
        self.view = np.empty(0, np.uint8)
        self.region.close()


@pytest.mark.scenario_39
@pytest.mark.slow
@pytest.mark.parametrize("operations", [600, pytest.param(100_000, marks=pytest.mark.soak)])
def test_64_sessions_over_eight_slots_and_a_disk_get_their_own_chunks(operations: int, tmp_path: Path) -> None:
    service = Service(tmp_path / "disk")
    rng = np.random.default_rng(39)
    for number in range(operations):
        session = int(rng.integers(SESSIONS))
        (service.store if rng.random() < 0.4 else service.load)(f"r{number}", session)
        service.finish(f"r{number}")
        if number % 50 == 0:  # a lookup through the other door, by a request of its own
            with service.driver.step() as manager:
                context = RequestContext(f"x{number}")
                answers = {manager.lookup(key, context) for key in service.keys(session)}
                manager.on_schedule_end()
                manager.finish(f"x{number}")
            assert answers <= set(LookupResult)
    assert service.stored > operations // 8
    assert service.loaded > operations // 20
    service.driver.call(lambda manager: manager.check())
    service.close()
