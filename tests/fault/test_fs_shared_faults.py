"""A shared directory that behaves like NFS on a bad day, at the file seam; and two real processes."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.testing.clock import ManualClock
from kvstrata.testing.faulty_files import FaultyFileSystem
from kvstrata.testing.node import Node, one_group
from kvstrata.testing.node_process import CHUNK_BYTES, TOKENS, NodeProcess
from kvstrata.testing.tier_harness import TierHarness, chunk_keys
from kvstrata.tiers.fs import SharedFsTier
from kvstrata.types import FailCause, Presence

CHUNK = 1000
P, A = Presence.PRESENT, Presence.ABSENT


class Pair:
    """Two engines over one directory; `two` reads through files that fail as told."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.files = FaultyFileSystem()
        self.one = TierHarness(SharedFsTier(str(place), part="one"), chunk_bytes=CHUNK, clock=ManualClock()).open()
        tier = SharedFsTier(str(place), part="two", files=self.files)
        self.two = TierHarness(tier, chunk_bytes=CHUNK, clock=ManualClock()).open()
        self.two.settle()

    def record(self, number: int = 0, part: str = "one") -> Path:
        return sorted((self.place / "parts" / part).glob("*/*/*"))[number]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path / "shared")
    yield made
    made.files.clear()
    made.one.close()
    made.two.close()


def test_a_stale_handle_is_tried_once_more_and_then_a_miss(pair: Pair) -> None:
    keys = chunk_keys(2)
    pair.one.store(keys)
    pair.files.fail("read", code=errno.ESTALE, times=1)
    pair.two.check_loaded(pair.two.load(keys))
    fault = pair.files.fail("read", code=errno.ESTALE)
    assert set(pair.two.load(keys).causes) == {FailCause.IO_ERROR}
    pair.files.clear(fault)
    pair.two.check_loaded(pair.two.load(keys))  # nothing was thrown away
    pair.files.fail("stat", code=errno.ESTALE, times=1)
    assert pair.two.probe(keys) == [P, P]


def test_a_stale_directory_is_opened_anew(pair: Pair) -> None:
    keys = chunk_keys(2)
    pair.one.store(keys)
    pair.files.fail("open", code=errno.ESTALE, times=1, when=lambda name: name == "one")
    assert pair.two.probe(keys) == [P, P]
    pair.files.fail("open", code=errno.ESTALE, times=1, when=lambda name: name == "one")
    pair.two.check_loaded(pair.two.load(keys))


def test_a_file_that_goes_after_it_was_seen_is_a_miss(pair: Pair) -> None:
    keys = chunk_keys(2)
    pair.one.store(keys)
    assert pair.two.probe(keys) == [P, P]
    pair.record().unlink()
    causes = pair.two.load(keys).causes
    assert sorted(str(cause) for cause in causes) == ["None", "gone"]


def test_names_without_files_are_misses(pair: Pair) -> None:
    keys = chunk_keys(2)
    pair.one.store(keys)
    names = pair.files.names
    pair.files.names = lambda fd: [*names(fd), "ghost"]  # type: ignore[method-assign]
    assert pair.two.probe(chunk_keys(1, 9)) == [A]
    pair.two.check_loaded(pair.two.load(keys))


def test_an_io_error_is_a_miss_that_passes(pair: Pair) -> None:
    keys = chunk_keys(2)
    pair.one.store(keys)
    fault = pair.files.fail("read", "stat", code=errno.EIO)
    assert set(pair.two.load(keys).causes) == {FailCause.IO_ERROR}
    pair.two.probe(keys, settle=True)
    assert pair.two.probed[max(pair.two.probed)].error is FailCause.IO_ERROR
    pair.files.clear(fault)
    assert pair.two.probe(keys) == [P, P]


@pytest.mark.parametrize("visible", [0, 64, 500])
def test_a_file_that_is_not_all_there_yet_is_a_miss_until_it_is(pair: Pair, visible: int) -> None:
    keys = chunk_keys(1)
    pair.one.store(keys)
    path = pair.record()
    whole = path.read_bytes()
    path.write_bytes(whole[:visible])
    if visible < 128:
        assert pair.two.probe(keys) == [A]
    assert pair.two.load(keys).causes in ([FailCause.WRONG_SIZE], [FailCause.GONE])
    assert pair.two.probe(keys) == [A]  # that version is not shown again
    path.write_bytes(whole)
    assert pair.two.probe(keys) == [P]
    pair.two.check_loaded(pair.two.load(keys))
    assert path.exists()  # another writer's file is not ours to remove


def test_zeros_where_the_bytes_are_not_there_yet_are_a_miss(pair: Pair) -> None:
    keys = chunk_keys(1)
    pair.one.store(keys)
    path = pair.record()
    whole = path.read_bytes()
    path.write_bytes(whole[:600] + bytes(len(whole) - 600))
    assert pair.two.load(keys).causes == [FailCause.CORRUPT]
    path.write_bytes(whole)
    pair.two.check_loaded(pair.two.load(keys))


def test_a_move_whose_answer_was_lost_is_counted(pair: Pair) -> None:
    rename = pair.files.rename

    def lost_answer(source: str, target: str, source_dir: int, target_dir: int) -> None:
        rename(source, target, source_dir, target_dir)
        raise OSError(errno.ETIMEDOUT, "lost")

    pair.files.rename = lost_answer  # type: ignore[method-assign]
    assert set(pair.two.store(chunk_keys(2)).causes) == {FailCause.TIMEOUT}
    pair.files.rename = rename  # type: ignore[method-assign]
    usage = pair.two.tier.usage()
    assert usage.bytes_held == 2 * 4096
    assert usage.keys == 0
    assert pair.two.store(chunk_keys(2)).ok
    assert pair.two.tier.usage().bytes_held == 2 * 4096


def test_a_link_whose_answer_was_lost_still_makes_the_claim(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    link = files.link

    def lost_answer(source: str, target: str, source_dir: int, target_dir: int) -> None:
        link(source, target, source_dir, target_dir)
        raise FileExistsError(errno.EEXIST, "sent again")

    files.link = lost_answer  # type: ignore[method-assign]
    rig = TierHarness(SharedFsTier(str(tmp_path / "s"), part="one", files=files), chunk_bytes=CHUNK).open()
    assert rig.store(chunk_keys(1)).ok
    rig.close()


def test_a_file_system_without_links_is_used_all_the_same(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    files.fail("link", code=errno.EOPNOTSUPP)
    rig = TierHarness(SharedFsTier(str(tmp_path / "s"), part="one", files=files), chunk_bytes=CHUNK).open()
    assert rig.store(chunk_keys(1)).ok
    second = TierHarness(SharedFsTier(str(tmp_path / "s"), part="one", files=files), chunk_bytes=CHUNK).open()
    assert not second.store(chunk_keys(1, 5)).ok
    for one in (rig, second):
        one.close()


def test_temporary_files_that_would_not_go_are_counted_and_go_later(pair: Pair) -> None:
    rename = pair.files.fail("rename", code=errno.EIO)
    unlink = pair.files.fail("unlink", code=errno.EIO, when=lambda name: name.endswith(".tmp"))
    assert set(pair.two.store(chunk_keys(1)).causes) == {FailCause.IO_ERROR}
    assert list((pair.place / "parts" / "two" / "tmp").iterdir())
    assert pair.two.tier.usage().bytes_held == 4096
    pair.files.clear(rename)
    assert not pair.two.store(chunk_keys(1, 5)).ok  # nothing new while something is stuck
    pair.files.clear(unlink)
    assert pair.two.store(chunk_keys(1)).ok
    assert not list((pair.place / "parts" / "two" / "tmp").iterdir())


def test_a_directory_that_goes_and_comes_back_is_used_again(pair: Pair, tmp_path: Path) -> None:
    keys = chunk_keys(2)
    pair.two.store(keys)
    shutil.rmtree(pair.place)
    assert not pair.two.load(keys).ok
    assert not pair.two.store(chunk_keys(1, 5)).ok
    pair.place.mkdir(mode=0o700)
    for _ in range(20):
        pair.two.clock.advance(6.0)
        pair.two.settle()
    assert pair.two.store(chunk_keys(2, 10)).ok
    assert pair.two.probe(chunk_keys(2, 10)) == [P, P]


# real processes


@pytest.mark.slow
def test_two_processes_share_1000_chunks(tmp_path: Path) -> None:
    place = str(tmp_path / "shared")
    layout = one_group(CHUNK_BYTES, TOKENS)
    other = NodeProcess({"type": "fs", "path": place, "part": "two"})
    with other, Node(layout, [SharedFsTier(place, part="one")]) as node:
        assert other.ask("store a 1000") == "stored 1000"
        assert node.load("a", 1000 * TOKENS) == 1000 * TOKENS
        assert node.statistics().tiers["fs"].probed <= 40
        node.store("b", 1000 * TOKENS)
        assert other.ask("load b 1000") == "loaded 1000"
        node.check_idle()


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_no_half_chunk_and_its_part_can_be_taken_again(tmp_path: Path) -> None:
    place = str(tmp_path / "shared")
    limit = 8_000_000
    other = NodeProcess({"type": "fs", "path": place, "part": "two", "limit": limit})
    with other, Node(one_group(CHUNK_BYTES, TOKENS), [SharedFsTier(place, part="one")]) as node:
        assert other.ask("write 64") == "writing"
        other.kill()
        for turn in range(20):  # `load` compares every byte that it is given
            node.load(f"turn-{turn}", 64 * TOKENS)
        node.settle()
        node.check_idle()
    again = SharedFsTier(place, part="two", limit=limit)
    with Node(one_group(CHUNK_BYTES, TOKENS), [again]) as node:
        node.store("b", 4 * TOKENS)
        assert not again.notices  # the owner is provably dead
        assert not list((tmp_path / "shared" / "parts" / "two" / "tmp").iterdir())
        found = [os.stat(os.path.join(root, name)) for root, _, names in os.walk(place) for name in names]
        assert sum(status.st_blocks * 512 for status in found) <= limit
