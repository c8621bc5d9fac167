"""Devices that fail under the fs tier: each error is a value with its cause, nothing is lost, all of it passes."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from kvstrata.testing import TierHarness, chunk_keys
from kvstrata.testing.faulty_files import FaultyFileSystem
from kvstrata.testing.tier_harness import NAMESPACE
from kvstrata.tiers.fs import FsTier
from kvstrata.types import FailCause, KeysRemoved, Presence

BLOCK = 4096
CHUNK = 1000


class Rig(TierHarness):
    """An fs tier on a file system that fails when told."""

    def __init__(self, root: Path, **settings: object) -> None:
        self.files = FaultyFileSystem()
        self.fs = FsTier(str(root), files=self.files, **settings)  # type: ignore[arg-type]
        super().__init__(self.fs, chunk_bytes=CHUNK)

    def later(self, seconds: float = 2.0) -> None:
        """Let time pass, and the tier do what is due."""
        self.clock.advance(seconds)
        self.settle()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def chunk_path(root: Path, key: bytes) -> Path:
    return root / NAMESPACE.hex() / key[:1].hex() / key.hex()


def allocated(root: Path) -> int:
    files = [os.path.join(folder, file) for folder, _, names in os.walk(root) for file in names]
    return sum(os.stat(file).st_blocks * 512 for file in files)


READ_ERRORS = [
    ("read", errno.EIO, FailCause.IO_ERROR),
    ("open", errno.EIO, FailCause.IO_ERROR),
    ("open", errno.EMFILE, FailCause.IO_ERROR),
    ("open", errno.EACCES, FailCause.REFUSED),
    ("open", errno.ESTALE, FailCause.IO_ERROR),
    ("fstat", errno.ESTALE, FailCause.IO_ERROR),
    ("read", errno.ETIMEDOUT, FailCause.TIMEOUT),
]


@pytest.mark.parametrize(("call", "code", "cause"), READ_ERRORS)
def test_one_failing_read_keeps_the_file(root: Path, call: str, code: int, cause: FailCause) -> None:
    rig = Rig(root).open()
    keys = chunk_keys(3)
    rig.store(keys)
    name = keys[1].hex()
    times = {"left": 1}

    def second_only(asked: str) -> bool:
        if call in ("read", "fstat"):  # calls on descriptors carry no name: count to the second record
            times["left"] -= 1
            return times["left"] == -1
        return asked == name

    rig.files.fail(call, code=code, when=second_only)
    record = rig.load(keys)
    assert record.causes == [None, cause, None]
    rig.files.clear()
    assert rig.present(keys) == keys
    assert rig.removed == []
    rig.check_loaded(rig.load(keys))
    rig.close()


WRITE_ERRORS = [
    ("write", errno.ENOSPC, FailCause.NO_SPACE),
    ("write", errno.EDQUOT, FailCause.NO_SPACE),
    ("write", errno.EIO, FailCause.IO_ERROR),
    ("open", errno.EROFS, FailCause.REFUSED),
    ("open", errno.EACCES, FailCause.REFUSED),
    ("mkdir", errno.ENOSPC, FailCause.NO_SPACE),
    ("rename", errno.EIO, FailCause.IO_ERROR),
    ("rename", errno.ESTALE, FailCause.IO_ERROR),
    ("close", errno.EIO, FailCause.IO_ERROR),
    ("set_mtime", errno.EPERM, FailCause.REFUSED),
    ("fstat", errno.EIO, FailCause.IO_ERROR),
]


@pytest.mark.parametrize(("call", "code", "cause"), WRITE_ERRORS)
def test_a_failing_write_leaves_nothing_behind(root: Path, call: str, code: int, cause: FailCause) -> None:
    rig = Rig(root).open()
    keys = chunk_keys(3)
    files_only = (lambda name: name.endswith(".tmp")) if call == "open" else None
    rig.files.fail(call, code=code, when=files_only)
    record = rig.store(keys)
    if call == "close":  # whatever is closed fails, but only a written file has something to lose
        assert set(record.causes) == {cause}
    else:
        assert record.causes == [cause] * 3
    rig.files.clear()
    assert rig.present(keys) == []
    usage = rig.tier.usage()
    assert (usage.bytes_held, usage.bytes_reserved, usage.keys) == (0, 0, 0)
    assert os.listdir(root / "tmp") == []
    rig.later()
    assert rig.store(keys).ok
    rig.check_loaded(rig.load(keys))
    rig.close()


def test_a_full_device_makes_the_tier_give_back_its_coldest(root: Path) -> None:
    rig = Rig(root).open()
    keys = chunk_keys(6)
    for key in keys[:4]:
        rig.store([key])
    rig.files.fail("write", code=errno.ENOSPC, times=1)
    assert rig.store([keys[4]]).ok, "room was made on the device, not only below the limit"
    assert rig.present(keys) == [*keys[1:4], keys[4]]
    rig.later(60.0)
    rig.files.fail("write", code=errno.ENOSPC, times=1)
    assert rig.store([keys[5]]).ok, "also when stores are rare"
    assert rig.present(keys) == [*keys[2:4], keys[4], keys[5]]
    rig.later()
    assert rig.store([keys[0]]).ok
    assert len(rig.present(keys)) == 5, "what was seen of the device is not believed for long"
    rig.files.fail("write", code=errno.ENOSPC)
    assert rig.store([keys[1]]).causes == [FailCause.NO_SPACE], "a device that takes nothing ends it"
    assert len(rig.present(keys)) == 4
    rig.close()


def test_min_free_is_kept_and_young_files_are_evicted_for_it(root: Path) -> None:
    rig = Rig(root, min_free=100 * BLOCK).open()
    keys = chunk_keys(6)
    device = {"bytes": 103 * BLOCK}
    rig.files.free_bytes = lambda: device["bytes"] - allocated(root)
    rig.checks.append(lambda: None if device["bytes"] < 103 * BLOCK else check_floor(device["bytes"]))

    def check_floor(size: int) -> None:
        assert size - allocated(root) >= 100 * BLOCK

    assert rig.store(keys[:3]).ok
    assert rig.store([keys[3]]).ok, "room is made by the tier itself, whatever the age of its files"
    assert rig.present(keys) == [keys[0], keys[1], keys[3]]
    device["bytes"] = 90 * BLOCK  # another program takes the device
    rig.later()
    assert rig.store([keys[4]]).causes == [FailCause.NO_SPACE], "three chunks do not make up for thirteen"
    assert len(rig.present(keys)) == 3, "nothing is evicted in vain"
    device["bytes"] = 200 * BLOCK
    rig.later()
    assert rig.store([keys[4]]).ok
    rig.close()


@pytest.mark.scenario_70
def test_an_eviction_that_fails_keeps_the_account_true_and_is_tried_again(root: Path) -> None:
    rig = Rig(root, limit=4 * BLOCK).open()
    keys = chunk_keys(8)
    for key in keys[:4]:
        rig.store([key])
    rig.files.fail("unlink", code=errno.EACCES, when=lambda name: name == keys[0].hex())
    assert rig.store([keys[4]]).ok, "the next coldest goes instead"
    usage = rig.tier.usage()
    assert (usage.bytes_held, usage.bytes_reserved) == (4 * BLOCK, 0)
    assert allocated(root) == 4 * BLOCK
    assert rig.present(keys) == [keys[0], *keys[2:5]]
    rig.files.clear()
    for key in (keys[5], keys[6], keys[7], keys[1]):
        assert rig.store([key]).ok
    assert not chunk_path(root, keys[0]).exists()
    assert allocated(root) == rig.tier.usage().bytes_held == 4 * BLOCK
    rig.close()


def test_a_removal_that_fails_keeps_the_account_true(root: Path) -> None:
    rig = Rig(root).open()
    keys = chunk_keys(2)
    rig.store(keys)
    rig.files.fail("unlink", code=errno.EACCES)
    rig.tier.remove(keys)
    assert rig.probe(keys) == [Presence.ABSENT] * 2
    rig.settle()
    assert rig.tier.usage().bytes_held == 2 * BLOCK == allocated(root)
    assert not rig.purge(NAMESPACE), "a purge that left files behind is not durable"
    rig.files.clear()
    assert rig.purge(NAMESPACE)
    assert rig.tier.usage().bytes_held == 0 == allocated(root)
    rig.close()


def test_a_temporary_file_that_cannot_be_removed_counts_and_goes_later(root: Path) -> None:
    rig = Rig(root, limit=3 * BLOCK).open()
    keys = chunk_keys(4)
    rig.files.fail("rename", code=errno.EIO)
    rig.files.fail("unlink", code=errno.EACCES)
    assert rig.store([keys[0]]).causes == [FailCause.IO_ERROR]
    assert len(os.listdir(root / "tmp")) == 1
    assert rig.tier.usage().bytes_held == BLOCK == allocated(root)
    rig.files.clear()
    record = rig.store(keys[1:])
    assert record.causes == [None, None, FailCause.NO_SPACE]
    assert allocated(root) == 3 * BLOCK
    rig.later()
    rig.later()
    assert os.listdir(root / "tmp") == []
    assert rig.tier.usage().bytes_held == 2 * BLOCK
    rig.close()


@pytest.mark.parametrize("call", ["names", "stat"])
def test_a_scan_that_fails_is_tried_again_before_anything_is_written(root: Path, call: str) -> None:
    rig = Rig(root).open()
    keys = chunk_keys(6)
    rig.store(keys)
    rig.close()
    again = Rig(root, limit=6 * BLOCK)
    again.tier.open(again.context())
    again.files.fail(call, code=errno.EIO, when=None if call == "names" else lambda name: len(name) == 72)
    again.settle()
    assert again.tier.usage().bytes_reserved == 0
    job = again.submit_store(chunk_keys(1, start=30))
    again.settle()
    assert again.jobs[job].ended is None
    assert Presence.ABSENT not in again.probe(keys)
    again.files.clear()
    again.later(1.0)
    again.later(1.0)
    assert again.jobs[job].ok
    assert len(again.present(keys)) == 5
    assert allocated(root) == 6 * BLOCK
    again.close()


def test_an_error_while_a_header_is_read_hides_nothing(root: Path) -> None:
    rig = Rig(root).open()
    keys = chunk_keys(3)
    rig.store(keys)
    rig.close()
    again = Rig(root)
    again.tier.open(again.context())
    again.files.fail("read", code=errno.EIO, times=2)
    again.settle()
    assert again.present(keys) == keys
    again.check_loaded(again.load(keys))
    again.close()


def test_a_flush_that_fails_says_so_and_the_next_makes_up_for_it(root: Path) -> None:
    rig = Rig(root).open()
    rig.store(chunk_keys(3))
    rig.files.fail("fsync", code=errno.EIO, times=1)
    assert not rig.flush()
    rig.files.log.clear()
    assert rig.flush()
    assert len([call for call, _ in rig.files.log if call == "fsync"]) >= 3 + 2
    rig.files.log.clear()
    assert rig.flush()
    assert not [call for call, _ in rig.files.log if call == "fsync"], "nothing new: nothing to do"
    rig.close()


def test_a_flush_waits_for_the_one_before_it(root: Path) -> None:
    rig = Rig(root).open()
    rig.store(chunk_keys(3))
    first, second = rig.tier.flush(), rig.tier.flush()
    rig.poll()
    assert rig.flushed == {}
    rig.settle()
    assert rig.flushed == {first: True, second: True}
    rig.close()


# a directory that goes away


def test_a_directory_that_vanishes_and_returns(root: Path) -> None:
    rig = Rig(root).open()
    keys = chunk_keys(4)
    rig.store(keys)
    shutil.copytree(root, root.with_name("backup"))
    shutil.rmtree(root)
    record = rig.load(keys)
    assert record.causes == [FailCause.IO_ERROR] * 4
    assert len(rig.fs.notices) == 1
    assert "is gone" in rig.fs.notices[0]
    told = [event for event in rig.events if isinstance(event, KeysRemoved)]
    assert [sorted(event.keys) for event in told] == [sorted(keys)]
    assert rig.probe(keys) == [Presence.ABSENT] * 4
    assert rig.store(keys).causes == [FailCause.REFUSED] * 4
    assert rig.tier.usage().bytes_held == 0
    assert not rig.flush()
    assert rig.tier.self_test()
    root.with_name("backup").rename(root)
    rig.later()
    assert rig.present(keys) == keys
    record = rig.load(keys)
    assert record.ok
    rig.check_loaded(record)
    assert rig.fs.notices[-1].endswith("in use by this engine now")
    rig.close()


def test_a_vanished_directory_is_made_anew(root: Path) -> None:
    rig = Rig(root).open()
    keys = chunk_keys(2)
    rig.store(keys)
    shutil.rmtree(root)
    assert rig.store(chunk_keys(1, start=9)).causes == [FailCause.IO_ERROR]
    rig.later()
    assert rig.store(keys).ok
    rig.check_loaded(rig.load(keys))
    rig.close()


def test_stores_and_tickets_under_way_when_the_directory_goes(root: Path) -> None:
    rig = Rig(root).open()
    rig.store(chunk_keys(3))
    jobs = [rig.submit_store(chunk_keys(2, start=20)), rig.submit_load(chunk_keys(3))]
    tickets = [rig.tier.flush(), rig.tier.purge(NAMESPACE)]
    shutil.rmtree(root)
    rig.settle()
    assert all(rig.jobs[job].ended is not None and not rig.jobs[job].done for job in jobs)
    assert set(rig.flushed) == set(tickets)
    assert not rig.executor.raised
    rig.later()
    assert rig.store(chunk_keys(2)).ok
    rig.close()


def test_a_part_of_the_directory_that_is_deleted(root: Path) -> None:
    rig = Rig(root).open()
    keys = chunk_keys(4)
    rig.store(keys)
    shutil.rmtree(root / NAMESPACE.hex())
    assert rig.load(keys).causes == [FailCause.GONE] * 4
    assert sorted(rig.removed) == sorted(keys)
    assert rig.tier.usage().bytes_held == 0
    assert rig.store(keys).ok
    shutil.rmtree(root / "tmp")
    assert rig.store(chunk_keys(1, start=9)).causes == [FailCause.IO_ERROR]
    rig.later()
    assert rig.present(keys) == keys
    assert rig.store(chunk_keys(1, start=9)).ok
    rig.close()


def test_half_of_the_files_deleted_while_serving(root: Path) -> None:
    rig = Rig(root).open()
    keys = chunk_keys(40)
    rig.store(keys)
    for key in keys[::2]:
        chunk_path(root, key).unlink()
    record = rig.load(keys)
    assert record.causes == [FailCause.GONE, None] * 20
    rig.check_loaded(record)
    assert rig.present(keys) == keys[1::2]
    assert sorted(rig.removed) == sorted(keys[::2])
    assert rig.tier.usage().bytes_held == 20 * BLOCK == allocated(root)
    rig.close()


def test_a_file_that_somebody_replaced_is_not_removed_for_the_old_one(root: Path) -> None:
    rig = Rig(root).open()
    keys = chunk_keys(2)
    rig.store(keys)
    good = chunk_path(root, keys[0]).read_bytes()
    assert rig.fs.damage(keys[0])
    job = rig.submit_load([keys[0]])
    rig.executor.run_all()
    chunk_path(root, keys[0]).rename(root / "old")  # keeps the inode from being used again
    chunk_path(root, keys[0]).write_bytes(good)
    rig.settle()
    assert rig.jobs[job].causes == [FailCause.CORRUPT]
    assert chunk_path(root, keys[0]).exists()
    record = rig.load(keys)
    assert record.ok
    rig.check_loaded(record)
    rig.close()


def test_a_task_that_raises_fails_its_keys_and_the_next_one_works(root: Path) -> None:
    rig = Rig(root).open()
    keys = chunk_keys(2)
    rig.store(keys)
    broken = rig.files.read
    rig.files.read = None  # type: ignore[assignment,method-assign]
    assert rig.load(keys).causes == [FailCause.IO_ERROR] * 2
    rig.files.read = broken  # type: ignore[method-assign]
    rig.files.write, kept = None, rig.files.write  # type: ignore[assignment,method-assign]
    assert rig.store(chunk_keys(2, start=9)).causes == [FailCause.IO_ERROR] * 2
    rig.files.write = kept  # type: ignore[method-assign]
    assert rig.load(keys).ok
    assert rig.store(chunk_keys(2, start=9)).ok
    rig.close()
