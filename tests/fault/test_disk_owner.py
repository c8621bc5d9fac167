"""Whose directory it is: one owner at a time, foreign files left alone, limits that change between runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstrata.errors import ConfigError
from kvstrata.testing.tier_harness import TierHarness, chunk_keys
from kvstrata.tiers.disk import DiskTier, TierState
from kvstrata.types import FailCause

CHUNK = 8000  # no whole sectors: how chunks go into batches does not depend on where memory lies

HOLDER = """
import sys
from kvstrata.testing.tier_harness import TierHarness, chunk_keys
from kvstrata.tiers.disk import DiskTier
tier = DiskTier(path=sys.argv[1], limit=2_000_000, segment_bytes=131_072, largest_chunk=1)
rig = TierHarness(tier, chunk_bytes=8000).open()
assert rig.store(chunk_keys(5)).ok
print("ready", flush=True)
sys.stdin.read()
"""


def rig_on(place: Path, limit: int = 2_000_000, segment_bytes: int | None = 131_072) -> TierHarness:
    tier = DiskTier(path=str(place), limit=limit, segment_bytes=segment_bytes, largest_chunk=CHUNK)
    return TierHarness(tier, chunk_bytes=CHUNK)


def allocated(place: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in place.iterdir())


@pytest.mark.slow
def test_two_processes_and_the_lock_of_a_dead_one(tmp_path: Path) -> None:
    place = tmp_path / "tier"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "ready\n"
    rig = rig_on(place).open()
    tier = rig.tier
    assert isinstance(tier, DiskTier)
    assert tier.statistics().state is TierState.WAITING
    assert "in use" in tier.status
    assert rig.store(chunk_keys(2, start=50)).ended is FailCause.REFUSED
    assert rig.present(chunk_keys(5)) == []
    for _ in range(3):
        rig.clock.advance(2.0)
        rig.settle()
        assert tier.statistics().state is TierState.WAITING
    os.kill(other.pid, signal.SIGKILL)
    other.wait(10)
    other.stdout.close()
    assert other.stdin is not None
    other.stdin.close()
    rig.clock.advance(2.0)
    rig.settle()
    assert tier.statistics().state is TierState.OPEN
    assert tier.status == ""
    assert rig.present(chunk_keys(5)) == chunk_keys(5)
    assert rig.load(chunk_keys(5)).ok
    rig.close()


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "tier"
    place.mkdir(mode=0o700)
    target = tmp_path / "target"
    target.write_bytes(b"precious" * 4096)
    strange = {"notes.txt": b"mine", "segment-0000000g.kvs": b"not one", "segment-00000001.kvs.bak": b"a copy"}
    for name, content in strange.items():
        (place / name).write_bytes(content)
    (place / "segment-00000007.kvs").symlink_to(target)
    (place / "folder").mkdir()
    rig = rig_on(place).open()
    for start in range(0, 600, 20):
        assert rig.store(chunk_keys(20, start=start)).ok
    rig.close()
    for name, content in strange.items():
        assert (place / name).read_bytes() == content
    assert target.read_bytes() == b"precious" * 4096
    assert (place / "segment-00000007.kvs").is_symlink()
    assert (place / "folder").is_dir()


def test_a_lower_limit_trims_the_oldest_at_open(tmp_path: Path) -> None:
    place = tmp_path / "tier"
    rig = rig_on(place).open()
    keys = chunk_keys(200)
    for start in range(0, 200, 10):
        assert rig.store(keys[start : start + 10]).ok
    before = rig.present(keys)
    rig.close()
    for limit in (1_200_000, 600_000):
        again = rig_on(place, limit=limit)
        again.tier.open(again.context())
        assert allocated(place) <= limit
        again.settle()
        found = again.present(keys)
        assert found
        assert list(map(keys.index, found)) == list(map(keys.index, before[-len(found) :]))
        assert allocated(place) <= limit
        before = found
        again.close()
    last = rig_on(place, limit=600_000).open()
    record = last.load(before)
    assert record.ok
    last.check_loaded(record)
    last.close()


def test_a_limit_that_no_longer_holds_two_segments_begins_anew(tmp_path: Path) -> None:
    place = tmp_path / "tier"
    rig = rig_on(place, segment_bytes=None, limit=40_000_000).open()
    assert rig.store(chunk_keys(10)).ok
    rig.close()
    again = rig_on(place, segment_bytes=None, limit=400_000).open()
    assert allocated(place) <= 400_000
    assert again.store(chunk_keys(10, start=100)).ok
    again.close()


def test_a_higher_limit_keeps_everything_and_grows(tmp_path: Path) -> None:
    place = tmp_path / "tier"
    rig = rig_on(place, segment_bytes=None, limit=1_000_000).open()
    keys = chunk_keys(40)
    assert rig.store(keys).ok
    rig.close()
    again = rig_on(place, segment_bytes=None, limit=16_000_000).open()
    assert again.present(keys) == keys
    more = chunk_keys(500, start=1000)
    for start in range(0, 500, 50):
        assert again.store(more[start : start + 50]).ok
    assert again.present(keys) == keys
    assert again.present(more) == more
    again.close()


def test_a_path_that_is_a_file_is_waited_for_and_said(tmp_path: Path) -> None:
    place = tmp_path / "tier"
    place.write_bytes(b"a file")
    rig = rig_on(place).open()
    assert isinstance(rig.tier, DiskTier)
    assert "not a directory" in rig.tier.status
    assert place.read_bytes() == b"a file"


def test_modes_are_private(tmp_path: Path) -> None:
    place = tmp_path / "made" / "tier"
    rig = rig_on(place).open()
    rig.store(chunk_keys(3))
    rig.close()
    assert place.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in place.iterdir()} == {0o600}


@pytest.mark.parametrize("wrong", [{"width": 1}, {"write_depth": 0}, {"write_depth": 99}, {"hot_share": 2.0}])
def test_settings_that_cannot_work_are_config_errors(tmp_path: Path, wrong: dict[str, float]) -> None:
    tier = DiskTier(path=str(tmp_path / "tier"), limit=2_000_000, largest_chunk=1, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        tier.open(TierHarness(tier, chunk_bytes=CHUNK).context())
