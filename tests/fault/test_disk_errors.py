"""A device that fails: the tier degrades, a breaker over it opens, and everything recovers by itself."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.core.breakers import Breaker, BreakerState
from kvstrata.testing.simfs import FaultyFiles, SimDisk, SimFiles
from kvstrata.testing.tier_harness import JobRecord, TierHarness, chunk_keys
from kvstrata.tiers.disk import DiskTier, TierState
from kvstrata.types import FailCause

PATH = "/disk"
CHUNK = 8192


class Watched:
    """A tier behind a breaker of each direction, as the core has them."""

    def __init__(self, disk: SimDisk, **settings: object) -> None:
        self.disk = disk
        self.files = FaultyFiles(SimFiles(disk))
        how = {"limit": 900_000, "segment_bytes": 131_072, **settings}
        tier = DiskTier(path=PATH, largest_chunk=1, files=self.files, **how)  # type: ignore[arg-type]
        self.rig = TierHarness(tier, chunk_bytes=CHUNK)
        self.tier = tier
        self.breakers = {"load": Breaker(3, 5.0, 60.0), "store": Breaker(3, 5.0, 60.0)}
        self.states = {name: [breaker.state] for name, breaker in self.breakers.items()}
        self.next_key = 1000

    def ask(self, kind: str, numbers: list[int] | None = None) -> JobRecord | None:
        breaker, now = self.breakers[kind], self.rig.clock.monotonic()
        breaker.advance(now)
        record = None
        if breaker.allows:
            breaker.asked()
            if kind == "load":
                record = self.rig.load([chunk_keys(1, start=n)[0] for n in numbers or [0]])
            else:
                self.next_key += 1
                record = self.rig.store(chunk_keys(1, start=self.next_key))
            if record.ok:
                breaker.success()
            else:
                breaker.failure(now)
        if self.states[kind][-1] is not breaker.state:
            self.states[kind].append(breaker.state)
        return record

    def until(self, kind: str, state: BreakerState, seconds: float = 1.0) -> None:
        for _ in range(200):
            self.ask(kind)
            if self.breakers[kind].state is state:
                return
            self.rig.clock.advance(seconds)
            self.rig.settle()
        raise AssertionError(f"the {kind} breaker never became {state}")

    def closed_open_closed(self, kind: str, heal: Callable[[], None]) -> None:
        self.until(kind, BreakerState.OPEN, seconds=0.1)
        heal()
        self.until(kind, BreakerState.CLOSED)
        seen = [state for state in self.states[kind] if state is not BreakerState.HALF_OPEN]
        assert seen == [BreakerState.CLOSED, BreakerState.OPEN, BreakerState.CLOSED]


def opened(**settings: object) -> Watched:
    watched = Watched(SimDisk(), **settings)
    watched.rig.open()
    assert watched.rig.store(chunk_keys(4)).ok
    return watched


def served(watched: Watched, numbers: list[int]) -> None:
    record = watched.rig.load([chunk_keys(1, start=n)[0] for n in numbers])
    assert record.ok
    watched.rig.check_loaded(record)


def test_errors_of_reads() -> None:
    watched = opened()
    watched.files.fail("preadv")
    watched.closed_open_closed("load", watched.files.heal)
    served(watched, [0, 1, 2, 3])


def test_errors_of_writes() -> None:
    watched = opened()
    watched.files.fail("pwritev")
    watched.closed_open_closed("store", watched.files.heal)
    served(watched, [0, 1, 2, 3, watched.next_key])


def test_one_bad_sector_fails_one_chunk_of_a_job() -> None:
    watched = opened()
    assert watched.rig.store(chunk_keys(6, start=50)).ok
    watched.files.fail("preadv", skip=3, count=1)
    watched.files.fail("preadv", count=1)  # the call for all of them
    record = watched.rig.load(chunk_keys(6, start=50))
    assert list(record.failed.values()) == [FailCause.IO_ERROR]
    assert len(record.done) == 5
    watched.rig.check_loaded(record)
    assert watched.rig.load(chunk_keys(6, start=50)).ok


def test_a_device_that_another_program_filled() -> None:
    watched = opened()
    disk = watched.disk
    disk.others = disk.capacity
    for _ in range(200):  # it goes on in the segments that it has
        record = watched.ask("store")
        assert record is not None
        assert record.ok
    assert watched.rig.tier.usage().evicted
    assert watched.states["store"] == [BreakerState.CLOSED]
    disk.others = 0
    assert watched.ask("store").ok  # type: ignore[union-attr]
    served(watched, [n for n in range(1001, watched.next_key + 1) if watched.rig.present(chunk_keys(1, start=n))])


@pytest.mark.parametrize("before", [0, 30, 200])
def test_a_device_that_another_program_filled_where_writing_again_takes_space_too(before: int) -> None:
    watched = opened()
    for _ in range(before):
        watched.ask("store")
    disk, files = watched.disk, watched.files
    disk.others = disk.capacity
    files.fail("pwritev", code=errno.ENOSPC)  # as a file system does that never writes in place
    seen = watched.ask("store")
    assert seen is not None
    assert seen.causes == [FailCause.NO_SPACE]
    held = [n for n in range(1001, watched.next_key) if watched.rig.present(chunk_keys(1, start=n))]
    assert len(held) >= min(before, 30)
    served(watched, held or [0, 1, 2, 3])  # loads go on

    def heal() -> None:
        disk.others = 0
        files.heal()

    watched.closed_open_closed("store", heal)
    served(watched, [watched.next_key])
    served(watched, [n for n in held if watched.rig.present(chunk_keys(1, start=n))] or [0, 1, 2, 3])
    assert watched.rig.tier.usage().bytes_limit == 900_000
    assert disk.allocated(PATH) <= 900_000


def test_a_device_that_was_full_from_the_start() -> None:
    disk = SimDisk()
    watched = Watched(disk)
    disk.others = disk.capacity - 60_000
    watched.rig.open()
    assert watched.ask("store").causes == [FailCause.NO_SPACE]  # type: ignore[union-attr]

    def heal() -> None:
        disk.others = 0

    watched.closed_open_closed("store", heal)
    served(watched, [watched.next_key])


def test_the_floor_of_free_space_is_kept() -> None:
    disk = SimDisk(capacity=2_000_000)
    watched = Watched(disk, limit=5_000_000, min_free=700_000)
    watched.rig.open()
    for start in range(0, 400, 8):
        watched.rig.store(chunk_keys(8, start=start))
        assert disk.free >= 700_000
    assert watched.rig.tier.usage().evicted
    served(watched, [399])


def test_errors_of_open() -> None:
    watched = opened()
    watched.rig.close()
    watched.files.fail("open")
    watched.rig.open()
    assert watched.tier.statistics().state is TierState.WAITING
    assert "cannot be used" in watched.tier.status
    watched.closed_open_closed("load", watched.files.heal)
    served(watched, [0, 1, 2, 3])


def test_a_read_only_remount() -> None:
    watched = opened()
    watched.disk.read_only = True
    served(watched, [0, 1])

    def heal() -> None:
        watched.disk.read_only = False

    watched.closed_open_closed("store", heal)
    served(watched, [0, 1, 2, 3, watched.next_key])


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_device_that_vanishes_and_comes_back(kind: str) -> None:
    watched = opened()
    watched.disk.vanished = True

    def heal() -> None:
        watched.disk.vanished = False

    watched.closed_open_closed(kind, heal)
    watched.rig.clock.advance(5.0)
    watched.rig.settle()
    assert watched.tier.statistics().state is TierState.OPEN
    served(watched, [0, 1, 2, 3])


def test_a_directory_that_is_removed_and_made_again(tmp_path: Path) -> None:
    place = tmp_path / "tier"
    tier = DiskTier(path=str(place), limit=900_000, segment_bytes=131_072, largest_chunk=1)
    rig = TierHarness(tier, chunk_bytes=CHUNK).open()
    keys = chunk_keys(4)
    assert rig.store(keys).ok
    shutil.rmtree(place)
    rig.clock.advance(2.0)
    rig.settle()
    assert rig.present(keys) == []
    assert set(keys) <= set(rig.removed)
    for _ in range(4):
        rig.clock.advance(2.0)
        rig.settle()
    assert tier.statistics().state is TierState.OPEN
    assert rig.store(keys, variant=3).ok
    record = rig.load(keys)
    assert record.ok
    rig.check_loaded(record, variant=3)
    rig.close()
    again = TierHarness(
        DiskTier(path=str(place), limit=900_000, segment_bytes=131_072, largest_chunk=1), chunk_bytes=CHUNK
    ).open()
    assert again.present(keys) == keys
    again.close()


@pytest.mark.parametrize("call", ["pwritev", "sync", "rename", "open", "sync_directory", "allocate", "free_bytes"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_any_call_may_fail_at_any_time(call: str, code: int) -> None:
    for skip in range(0, 30, 3):
        watched = opened(checkpoint_segments=1)
        watched.files.fail(call, code=code, skip=skip, count=4)
        for start in range(0, 120, 6):
            watched.rig.store(chunk_keys(6, start=start))
            watched.rig.tier.flush()
            watched.rig.clock.advance(1.0)
        watched.rig.settle()
        watched.files.heal()
        watched.rig.clock.advance(30.0)
        watched.rig.settle()
        assert watched.rig.store(chunk_keys(6, start=500)).ok
        served(watched, list(range(500, 506)))
        assert not watched.rig.executor.raised
        record = watched.rig.load(watched.rig.present(chunk_keys(120)))
        assert record.ok
        watched.rig.check_loaded(record)
        assert watched.disk.allocated(PATH) <= 900_000
