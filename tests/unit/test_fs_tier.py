"""The fs tier beyond the contract: its directory, its lock, its order, its settings."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from kvstrata.errors import ConfigError, StateError
from kvstrata.testing import TierHarness, chunk_key, chunk_keys, payload_of
from kvstrata.testing.faulty_files import FaultyFileSystem
from kvstrata.testing.tier_harness import NAMESPACE, OTHER_NAMESPACE
from kvstrata.tiers.common.record import HEADER_BYTES
from kvstrata.tiers.fs import FsTier
from kvstrata.types import FailCause, Presence

BLOCK = 4096
CHUNK = 1000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def make(root: Path, *, slots: int = 128, namespace: bytes = NAMESPACE, **settings: object) -> TierHarness:
    tier = FsTier(str(root), **settings)  # type: ignore[arg-type]
    return TierHarness(tier, chunk_bytes=CHUNK, slots=slots, namespace=namespace)


def fs_of(rig: TierHarness) -> FsTier:
    assert isinstance(rig.tier, FsTier)
    return rig.tier


def chunk_path(root: Path, key: bytes, namespace: bytes = NAMESPACE) -> Path:
    return root / namespace.hex() / key[:1].hex() / key.hex()


# settings and the directory


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"limit": 0}, "limit"), ({"limit": -1}, "limit"), ({"limit": True}, "limit"), ({"min_free": -5}, "min_free")],
)
def test_impossible_settings_are_named(root: Path, settings: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=f"tier fs: {field}: ") as caught:
        make(root, **settings).open()
    assert "\n" not in str(caught.value)


def test_a_path_that_is_a_file(root: Path) -> None:
    root.write_text("mine")
    with pytest.raises(ConfigError, match="Not a directory"):
        make(root).open()
    assert root.read_text() == "mine"


def test_a_path_whose_parent_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        make(tmp_path / "no" / "where").open()


def test_a_directory_that_cannot_be_written(root: Path) -> None:
    files = FaultyFileSystem()
    files.fail("open", code=errno.EACCES, when=lambda name: name == "kvstrata-fs.lock")
    with pytest.raises(ConfigError, match="Permission denied"):
        make(root, files=files).open()


def test_a_directory_that_everybody_may_write(root: Path) -> None:
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(ConfigError, match="written by everybody"):
        make(root).open()


def test_a_refused_open_leaves_no_descriptor(root: Path) -> None:
    root.mkdir()
    root.chmod(0o777)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ConfigError):
            make(root).open()
    assert len(os.listdir("/proc/self/fd")) == before


def test_open_and_close_give_every_descriptor_back(root: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        rig = make(root).open()
        rig.store(chunk_keys(3))
        rig.load(chunk_keys(4))
        rig.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_opening_twice_is_an_error(root: Path) -> None:
    rig = make(root).open()
    with pytest.raises(StateError):
        rig.open()
    rig.close()


def test_modes_are_private(root: Path) -> None:
    rig = make(root).open()
    rig.store(chunk_keys(2))
    for folder, _, files in os.walk(root):
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        for file in files:
            assert stat.S_IMODE(os.stat(os.path.join(folder, file)).st_mode) == 0o600
    rig.close()


def test_names_are_hex_of_the_key(root: Path) -> None:
    rig = make(root).open()
    key = chunk_key(1)
    rig.store([key])
    file = chunk_path(root, key)
    assert file.stat().st_size == HEADER_BYTES + CHUNK
    assert file.read_bytes()[HEADER_BYTES:] == payload_of(key, CHUNK)
    rig.close()


def test_files_of_others_are_left_alone(root: Path) -> None:
    key = chunk_key(1)
    fan = chunk_path(root, key).parent
    fan.mkdir(parents=True)
    mine = [root / "notes.txt", root / "tmp" / "draft.tmp", fan / "README", fan / ("g" * 72)]
    (root / "tmp").mkdir()
    for file in mine:
        file.write_bytes(b"x" * 10_000)
    rig = make(root, limit=2 * BLOCK).open()
    for start in range(6):
        rig.store(chunk_keys(1, start=start))
    rig.purge(NAMESPACE)
    rig.close()
    assert all(file.stat().st_size == 10_000 for file in mine)


def test_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    key, other = chunk_keys(2)
    rig = make(root).open()
    rig.store([key, other])
    secret = tmp_path / "secret"
    secret.write_bytes(chunk_path(root, other).read_bytes())
    chunk_path(root, other).unlink()
    chunk_path(root, other).symlink_to(secret)
    assert rig.load([other]).causes == [FailCause.FOREIGN]
    assert secret.exists()
    assert chunk_path(root, other).is_symlink()
    rig.close()
    again = make(root).open()
    assert again.present([key, other]) == [key]
    again.close()


def test_a_key_of_another_length_is_refused(root: Path) -> None:
    rig = make(root).open()
    assert rig.store([b"short"]).causes == [FailCause.REFUSED]
    assert rig.load([b"short"]).causes == [FailCause.GONE]
    assert rig.probe([b"short"]) == [Presence.ABSENT]
    rig.close()


# one engine per directory


def test_a_second_engine_refuses_says_so_once_and_takes_over(root: Path) -> None:
    first, second = make(root).open(), make(root).open()
    keys = chunk_keys(3)
    first.store(keys)
    for _ in range(5):
        second.clock.advance(10.0)
        second.settle()
    assert len(fs_of(second).notices) == 1
    assert "in use by another engine" in fs_of(second).notices[0]
    assert second.probe(keys) == [Presence.ABSENT] * 3
    assert second.store(keys).causes == [FailCause.REFUSED] * 3
    assert second.load(keys).causes == [FailCause.REFUSED] * 3
    assert second.tier.self_test() == fs_of(second).notices[0]
    first.close()
    second.settle()
    assert second.present(keys) == []
    second.clock.advance(1.0)
    second.settle()
    assert second.present(keys) == keys
    assert fs_of(second).notices[1].endswith("in use by this engine now")
    second.close()


def test_a_task_that_hangs_keeps_the_directory_locked(root: Path) -> None:
    first = make(root).open()
    first.submit_store(chunk_keys(1))
    task = first.executor._queue[0]
    first.executor.hang = True
    task.started = True  # type: ignore[attr-defined]  # a worker has begun and does not come back
    first.close(timeout=0.0)
    second = make(root).open()
    assert fs_of(second).notices
    first.executor.run_all()
    first.poll()
    second.clock.advance(1.0)
    second.settle()
    assert second.store(chunk_keys(1)).ok
    second.close()


def test_the_lock_of_a_dead_owner_is_free(root: Path) -> None:
    root.mkdir(mode=0o700)
    holder = os.open(root / "kvstrata-fs.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    rig = make(root).open()
    assert fs_of(rig).notices
    os.close(holder)
    rig.clock.advance(1.0)
    rig.settle()
    assert rig.store(chunk_keys(1)).ok
    rig.close()


# temporary files


@pytest.mark.scenario_18
def test_temporary_files_of_dead_owners_are_swept_and_of_others_left(root: Path) -> None:
    rig = make(root).open()
    rig.store(chunk_keys(2))
    rig.close()
    stale = [root / "tmp" / f"{pid}-0123abcd-{pid}.tmp" for pid in (1, 22, 333)]
    other = root / "tmp" / "editor.tmp"
    for file in (*stale, other):
        file.write_bytes(b"x" * 5000)
    again = make(root).open()
    assert not any(file.exists() for file in stale)
    assert other.exists()
    assert again.tier.usage().bytes_held == 2 * BLOCK
    again.close()


# order of eviction


@pytest.mark.scenario_66
def test_recency_outlives_a_restart(root: Path) -> None:
    rig = make(root, limit=6 * BLOCK).open()
    keys = chunk_keys(9)
    for key in keys[:6]:
        rig.store([key])
        rig.clock.advance(1.0)
    rig.tier.touch([keys[0]])
    rig.load([keys[2]])
    rig.close()
    again = make(root, limit=6 * BLOCK)
    again.clock.advance(60.0)
    again.open()
    for key in keys[6:]:
        again.store([key])
    assert again.present(keys) == [keys[0], keys[2], keys[5], *keys[6:]]
    again.close()


def test_recency_survives_a_wall_clock_that_went_back(root: Path) -> None:
    rig = make(root, limit=3 * BLOCK).open()
    keys = chunk_keys(5)
    rig.store(keys[:3])
    rig.close()
    again = make(root, limit=3 * BLOCK)
    again.clock.set_wall(1000.0)
    again.open()
    again.store(keys[3:4])
    again.close()
    third = make(root, limit=3 * BLOCK).open()
    third.store(keys[4:])
    assert third.present(keys) == [keys[0], keys[3], keys[4]]
    third.close()


def test_touches_are_written_down_in_batches(root: Path) -> None:
    files = FaultyFileSystem()
    rig = make(root, files=files, touch_interval_s=10.0).open()
    keys = chunk_keys(20)
    rig.store(keys)
    rig.clock.advance(10.0)
    rig.settle()
    files.log.clear()
    for _ in range(50):
        rig.tier.touch(keys)
        rig.settle()
    written = [name for call, name in files.log if call == "set_mtime"]
    assert len(written) <= 20
    rig.clock.advance(10.0)
    rig.settle()
    assert len([name for call, name in files.log if call == "set_mtime"]) == len(written) + 20
    rig.close()


# scan


def test_until_the_scan_has_ended_nothing_is_absent_and_nothing_is_written(root: Path) -> None:
    rig = make(root, limit=30 * BLOCK).open()
    keys = chunk_keys(25)
    rig.store(keys)
    rig.close()
    again = make(root, limit=27 * BLOCK)
    again.tier.open(again.context())
    new = chunk_keys(4, start=100)
    job = again.submit_store(new)
    seen = set()
    while set(again.probe(keys)) != {Presence.PRESENT}:
        found = again.probe(keys)
        assert Presence.ABSENT not in found
        seen.add(found.count(Presence.PRESENT))
        assert again.tier.usage().bytes_reserved == 0
        assert again.step()
    assert len(seen) > 3
    again.settle()
    assert again.jobs[job].ok
    assert again.tier.usage().bytes_held <= 27 * BLOCK
    again.close()


def test_a_removal_during_the_scan_holds(root: Path) -> None:
    rig = make(root).open()
    keys = chunk_keys(6)
    rig.store(keys)
    rig.close()
    again = make(root)
    again.tier.open(again.context())
    again.tier.remove(keys[:3])
    purge = again.tier.purge(OTHER_NAMESPACE)
    assert again.probe(keys) == [Presence.ABSENT] * 3 + [Presence.UNKNOWN] * 3
    again.settle()
    assert again.present(keys) == keys[3:]
    assert again.flushed[purge]
    assert not any(chunk_path(root, key).exists() for key in keys[:3])
    again.close()


def test_stores_do_not_wait_for_a_scan_without_end(root: Path) -> None:
    rig = make(root).open()
    rig.store(chunk_keys(3))
    rig.close()
    again = make(root)
    again.tier.open(again.context())
    waiting = again.submit_store(chunk_keys(1, start=9))
    again.clock.advance(6.0)
    again.poll()
    assert again.jobs[waiting].causes == [FailCause.REFUSED]
    late = again.submit_store(chunk_keys(1, start=9))
    again.poll()
    assert again.jobs[late].causes == [FailCause.REFUSED]
    again.settle()
    assert again.store(chunk_keys(1, start=9)).ok
    again.close()


def test_files_that_a_load_would_refuse_are_not_shown_but_counted(root: Path) -> None:
    rig = make(root).open()
    keys = chunk_keys(5)
    rig.store(keys)
    rig.close()
    os.truncate(chunk_path(root, keys[0]), 500)
    os.truncate(chunk_path(root, keys[1]), 0)
    with open(chunk_path(root, keys[2]), "r+b") as file:
        file.write(b"\0" * HEADER_BYTES)
    again = make(root).open()
    assert again.present(keys) == keys[3:]
    assert again.tier.usage().keys == 2
    assert again.tier.usage().bytes_held == 4 * BLOCK
    assert again.store(keys).ok, "they are replaced by a later store"
    record = again.load(keys)
    assert record.ok
    again.check_loaded(record)
    assert again.tier.usage().bytes_held == 5 * BLOCK
    again.close()


def test_what_takes_room_for_another_namespace_is_evicted_too(root: Path) -> None:
    rig = make(root, limit=4 * BLOCK).open()
    rig.store(chunk_keys(4))
    rig.close()
    other = make(root, limit=4 * BLOCK, namespace=OTHER_NAMESPACE).open()
    assert other.tier.usage().bytes_held == 4 * BLOCK
    assert other.tier.usage().keys == 0
    keys = chunk_keys(3, start=50)
    assert other.store(keys).ok
    assert other.tier.usage().bytes_held == 4 * BLOCK
    assert other.removed == []
    other.close()


# limit


def test_the_head_of_a_job_that_does_not_fit_is_kept(root: Path) -> None:
    rig = make(root, limit=5 * BLOCK).open()
    keys = chunk_keys(8)
    assert rig.store(keys).causes == [None] * 5 + [FailCause.NO_SPACE] * 3
    assert rig.present(keys) == keys[:5]
    rig.close()


def test_one_key_of_two_jobs_under_cancel(root: Path) -> None:
    rig = make(root).open()
    keys = chunk_keys(2)
    first, second = rig.submit_store(keys), rig.submit_store(keys)
    rig.tier.cancel(second)
    rig.poll()
    assert rig.jobs[second].causes == [FailCause.CANCELLED] * 2
    rig.settle()
    assert rig.jobs[first].ok
    third, fourth = rig.submit_store(chunk_keys(2, start=9)), rig.submit_store(chunk_keys(2, start=9))
    rig.tier.cancel(third)
    rig.settle()
    assert rig.jobs[third].ended is not None
    assert rig.jobs[fourth].ok
    rig.check_loaded(rig.load(chunk_keys(2, start=9)))
    rig.close()


def test_a_store_that_replaces_a_cancelled_one(root: Path) -> None:
    rig = make(root).open()
    keys = chunk_keys(2)
    first = rig.submit_store(keys)
    rig.tier.cancel(first)
    second = rig.submit_store(keys, variant=4)
    rig.settle()
    assert rig.jobs[first].causes == [FailCause.CANCELLED] * 2
    assert rig.jobs[second].ok
    rig.check_loaded(rig.load(keys), variant=4)
    rig.close()


def test_damage_is_seen_and_without_the_check_it_is_delivered(root: Path) -> None:
    key = chunk_key(1)
    rig = make(root, verify=False).open()
    assert not fs_of(rig).damage(key)
    rig.store([key])
    assert fs_of(rig).damage(key)
    record = rig.load([key])
    assert record.ok
    with pytest.raises(AssertionError, match="wrong bytes"):
        rig.check_loaded(record)
    rig.close()
    again = make(root).open()
    assert again.load([key]).causes == [FailCause.CORRUPT]
    again.close()


def test_empty_directories_of_old_namespaces_go_away(root: Path) -> None:
    rig = make(root).open()
    rig.store(chunk_keys(3))
    rig.purge(NAMESPACE)
    rig.close()
    for _ in range(2):
        make(root, namespace=OTHER_NAMESPACE).open().close()
    assert not (root / NAMESPACE.hex()).exists()


# purge and flush under way


def test_a_purge_waits_for_stores_under_way(root: Path) -> None:
    rig = make(root).open()
    keys = chunk_keys(3)
    job = rig.submit_store(keys)
    ticket = rig.tier.purge(NAMESPACE)
    rig.poll()
    assert ticket not in rig.flushed
    again = rig.submit_store(keys[:1], variant=2)
    rig.settle()
    assert rig.jobs[job].causes == [FailCause.CANCELLED] * 3
    assert rig.flushed == {ticket: True}
    assert rig.jobs[again].ok, "what is stored after the purge stays"
    assert rig.present(keys) == keys[:1]
    rig.check_loaded(rig.load(keys[:1]), variant=2)
    rig.close()


def test_tickets_that_are_open_at_close_are_answered(root: Path) -> None:
    rig = make(root).open()
    rig.store(chunk_keys(2))
    rig.executor.hang = True
    tickets = [rig.tier.flush(), rig.tier.purge(NAMESPACE)]
    rig.close(timeout=0.0)
    assert rig.flushed == dict.fromkeys(tickets, False)


def test_one_tier_object_opens_again_after_close(root: Path) -> None:
    tier = FsTier(str(root))
    keys = chunk_keys(3)
    for life in range(3):
        rig = TierHarness(tier, chunk_bytes=CHUNK).open()
        assert rig.present(keys) == keys[:life]
        assert rig.store(keys[life : life + 1]).ok
        rig.check_loaded(rig.load(keys[: life + 1]))
        rig.close()


def test_self_test_of_a_full_tier_and_after_one_that_hung(root: Path) -> None:
    rig = make(root, limit=2 * BLOCK).open()
    rig.store(chunk_keys(2))
    rig.executor.hang = True
    said = rig.tier.self_test()
    assert said is not None
    assert "did not end" in said
    rig.executor.hang = False
    rig.settle()
    assert rig.tier.self_test() is None
    rig.settle()
    assert not any(getattr(event, "job_id", 0) < 0 for event in rig.events)
    rig.close()
