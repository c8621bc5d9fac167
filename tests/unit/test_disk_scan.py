"""The scan of header blocks: the same is found in every way of reading, and how many reads and rounds it takes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstrata.testing.simfs import FaultyFiles, SimDisk, SimFiles
from kvstrata.tiers.disk.calls import Call, CallQueue
from kvstrata.tiers.disk.format import (
    BLOCK,
    BatchKind,
    Realm,
    Reject,
    SegmentHeader,
    make_records,
    pack_batch,
    pack_segment,
)
from kvstrata.tiers.disk.io import Files, SystemFiles
from kvstrata.tiers.disk.recover import recover
from kvstrata.tiers.disk.scan import Handles, scan_all
from kvstrata.tiers.disk.trail import READ_AHEAD, Kept, SegmentScan
from kvstrata.types import KEY_BYTES

REALM = Realm(b"0123456789abcdef", 5)
OTHER = Realm(b"fedcba9876543210", 6)
EVEN = [2] * 1000
UNEVEN = [2 + n % 7 * (n % 3) for n in range(300)]


def life_of(number: int) -> bytes:
    return bytes([number]) * 16


def key_of(number: int, at: int) -> bytes:
    return (number << 40 | at).to_bytes(KEY_BYTES, "little")


def segment(number: int, spans: Sequence[int], spare: int = 0) -> bytearray:
    """A segment file with a record in each of its batches, `spans` blocks long, and `spare` blocks behind them."""
    size = BLOCK * (1 + sum(spans) + spare)
    content = bytearray(size)
    content[:BLOCK] = pack_segment(SegmentHeader(life_of(number), number + 1, 1, size, 0))
    at = BLOCK
    for count, span in enumerate(spans):
        records = make_records(key_of(number, at), bytes(16), [at + BLOCK], [100 if span > 1 else 0])
        realm = OTHER if count % 50 == 49 else REALM
        content[at : at + BLOCK] = pack_batch(
            BatchKind.RECORDS, realm, life_of(number), number + 1, at, span * BLOCK, 7, records
        )
        at += span * BLOCK
    return content


def opened(files: Files, path: str, contents: Sequence[bytearray], *, direct: bool = False) -> Handles:
    """The files with these contents, open."""
    directory = files.open_directory(path, create=True)
    handles: Handles = {}
    for number, content in enumerate(contents):
        name = f"segment-{number:08x}.kvs"
        handle = files.open(directory, name, write=True, create=True)
        files.pwritev(handle, [memoryview(content)], 0)
        files.close(handle)
        handle = files.open(directory, name, write=False, direct=direct)
        header = SegmentHeader(life_of(number), number + 1, 1, len(content), 0)
        handles[number] = (handle, header, len(content))
    files.close(directory)
    return handles


def told(scans: Sequence[SegmentScan]) -> list[object]:
    """Everything that scans say."""
    return [
        (
            scan.number, scan.end, scan.ended, scan.rejects,
            [(batch.realm, batch.kind, batch.start, batch.span, batch.wall_us, batch.records.tobytes())
             for batch in map(scan.batch, range(len(scan.batches)))],
        )
        for scan in scans
    ]  # fmt: skip


def starts_of(handles: Handles) -> dict[int, int]:
    return dict.fromkeys(handles, BLOCK)


def damaged() -> list[bytearray]:
    """Five segments: whole; with lost and torn header blocks; sealed; cut short; never written."""
    torn = segment(1, UNEVEN)
    for start in (BLOCK * 50, BLOCK * 300):
        place = torn.index(b"kvstrBAT", start)
        torn[place + 300] ^= 1
        place = torn.index(b"kvstrBAT", place + BLOCK)
        torn[place : place + BLOCK] = bytes(BLOCK)
    sealed = segment(2, EVEN[:70], 4)
    at = BLOCK * 141
    sealed[at : at + BLOCK] = pack_batch(BatchKind.END, REALM, life_of(2), 3, at, BLOCK, 9, None)
    sealed[at + BLOCK : at + 3 * BLOCK] = segment(2, [2])[BLOCK:]
    cut = segment(3, EVEN[:90])
    del cut[BLOCK * 100 + 700 :]
    return [segment(0, EVEN[:130]), torn, sealed, cut, segment(4, [], 20)]


class Later:
    """Helpers that begin when they are told to."""

    def __init__(self) -> None:
        self.given: list[Callable[[], None]] = []

    def __call__(self, work: Callable[[], None]) -> None:
        self.given.append(work)


def test_what_is_found_is_what_is_there() -> None:
    files = SimFiles(SimDisk())
    handles = opened(files, "/d", damaged())
    whole, torn, sealed, cut, spare = scan_all(files, handles, starts_of(handles))
    assert [len(scan.batches) for scan in (whole, torn, sealed, cut, spare)] == [130, 296, 71, 49, 0]
    assert [scan.ended for scan in (whole, torn, sealed, cut, spare)] == [False, False, True, False, False]
    assert torn.rejects == {Reject.CHECKSUM: 2}
    assert cut.rejects == {Reject.MALFORMED: 1}
    assert sealed.end == BLOCK * 142
    assert whole.end == whole.size
    assert spare.end == BLOCK
    for scan in (whole, torn, cut):
        assert [key.tobytes() for key in scan.records["key"]] == [
            key_of(scan.number, at) for at in scan.batches["start"].tolist()
        ]
    assert [scan.realms[number] for number in whole.batches["realm"].tolist()] == ([REALM] * 49 + [OTHER]) * 2 + [
        REALM
    ] * 30


@pytest.mark.parametrize("contents", [damaged(), [segment(n, UNEVEN[n:90]) for n in range(70)]], ids=["few", "many"])
def test_every_way_of_reading_finds_the_same(contents: list[bytearray], tmp_path: Path) -> None:
    files = SimFiles(SimDisk())
    handles = opened(files, "/d", contents)
    plain = told(scan_all(files, handles, starts_of(handles)))
    assert told(scan_all(files, handles, starts_of(handles), call_queue=True)) == plain
    one_by_one = [told(scan_all(files, {n: handles[n]}, starts_of(handles))) for n in handles]
    assert [scan for (scan,) in one_by_one] == plain
    real = SystemFiles()
    real_handles = opened(real, str(tmp_path / "d"), contents)
    try:
        assert told(scan_all(real, real_handles, starts_of(real_handles), call_queue=True)) == plain
    finally:
        for handle, _, _ in real_handles.values():
            real.close(handle)


def test_helpers_that_come_early_late_or_never_change_nothing() -> None:
    files = SimFiles(SimDisk())
    handles = opened(files, "/d", damaged())
    alone = told(scan_all(files, handles, starts_of(handles)))
    late = Later()
    assert told(scan_all(files, handles, starts_of(handles), helpers=late, many=16)) == alone
    assert len(late.given) == len(handles) - 1
    for work in late.given:
        work()
    assert told(scan_all(files, handles, starts_of(handles), helpers=lambda work: work(), many=16)) == alone
    assert not scan_all(files, {}, {}, helpers=late, many=16)


def test_what_a_helper_raises_is_raised_where_it_is_waited_for() -> None:
    files = FaultyFiles(SimFiles(SimDisk()))
    handles = opened(files, "/d", damaged())

    def strike(call: str) -> None:
        if call == "preadv":
            raise MemoryError

    def helpers(work: Callable[[], None]) -> None:
        files.before = strike
        work()
        files.before = None

    with pytest.raises(MemoryError):
        scan_all(files, handles, starts_of(handles), helpers=helpers, many=1)


# operations


class Watched(SimFiles):
    """Counts reads of a block, rounds (waiting for answers), hand-overs and queues."""

    def __init__(self) -> None:
        super().__init__(SimDisk())
        self.reads = self.rounds = self.submits = self.queues = self.open_queues = 0
        self.results: dict[int, int] = {}
        """By number of the read: what it ends with instead."""

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.reads += sum(map(len, buffers)) == BLOCK
        return super().preadv(handle, buffers, offset)

    def call_queue(self, depth: int) -> CallQueue | None:
        inner = super().call_queue(depth)
        assert inner is not None
        self.queues += 1
        self.open_queues += 1
        return WatchedQueue(self, inner)


class WatchedQueue:
    """Hands on to a queue, and counts; some calls end with what the test says."""

    handle = -1

    def __init__(self, files: Watched, inner: CallQueue) -> None:
        self._files = files
        self._inner = inner

    def push(self, tag: int, call: Call, begin: int, size: int) -> None:
        self._inner.push(tag, call, begin, size)

    def submit(self) -> None:
        self._files.submits += 1
        self._inner.submit()

    def take(self, least: int = 0) -> list[tuple[int, int]]:
        first = self._files.reads
        self._files.rounds += 1
        ended = self._inner.take(least)
        return [(tag, self._files.results.get(first + n, result)) for n, (tag, result) in enumerate(ended)]

    def close(self) -> None:
        self._files.open_queues -= 1
        self._inner.close()


def test_batches_of_one_length_are_read_256_at_a_time() -> None:
    files = Watched()
    handles = opened(files, "/d", [segment(0, EVEN)])
    (scan,) = scan_all(files, handles, starts_of(handles), call_queue=True)
    assert len(scan.batches) == 1000
    assert files.reads == 1000
    assert files.rounds <= 1000 // READ_AHEAD + 10  # 1, 1, 1, 2, 4 ... 256
    assert files.submits <= 2 * files.rounds
    assert (files.queues, files.open_queues) == (1, 0)


def test_many_segments_are_read_in_the_same_rounds_whatever_their_batches_are_like() -> None:
    files = Watched()
    handles = opened(files, "/d", [segment(n, UNEVEN[n:200]) for n in range(64)])
    batches = sum(len(scan.batches) for scan in scan_all(files, handles, starts_of(handles), call_queue=True))
    assert batches == sum(range(137, 201))
    assert files.rounds <= 200
    assert files.submits <= batches // 8 + files.rounds
    assert files.reads <= batches + READ_AHEAD  # the last ones have room to read ahead


def test_without_a_queue_nothing_is_read_in_vain() -> None:
    files = Watched()
    handles = opened(files, "/d", [segment(n, [2] * 9 + UNEVEN[:40] + [3] * 9) for n in range(3)])
    scans = scan_all(files, handles, starts_of(handles), helpers=lambda work: work(), many=2)
    assert files.reads == sum(len(scan.batches) for scan in scans) == 3 * 58


def test_with_a_queue_one_thread_follows_all_files() -> None:
    files, late = Watched(), Later()
    handles = opened(files, "/d", damaged())
    scan_all(files, handles, starts_of(handles), call_queue=True, helpers=late, many=16)
    assert (len(late.given), files.queues, files.open_queues) == (0, 1, 0)


@pytest.mark.parametrize("seed", range(6))
def test_no_more_is_read_in_vain_than_there_are_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spans = np.repeat(rng.integers(1, 4, 60), rng.integers(1, 2 + 8 * seed, 60)).tolist()
    for queue in (False, True):
        files = Watched()
        handles = opened(files, "/d", [segment(0, spans)])
        (scan,) = scan_all(files, handles, starts_of(handles), call_queue=queue)
        assert len(scan.batches) == len(spans)
        assert files.reads <= 2 * len(spans)


@pytest.mark.parametrize("result", [-errno.EIO, -errno.EAGAIN, 0, 512])
def test_a_block_that_the_queue_does_not_read_whole_is_read_once_more(result: int) -> None:
    files = Watched()
    handles = opened(files, "/d", damaged())
    whole = told(scan_all(files, handles, starts_of(handles), call_queue=True))
    files.results = {files.reads + n: result for n in (0, 1, 5, 90, 200)}
    assert told(scan_all(files, handles, starts_of(handles), call_queue=True)) == whole


def test_a_block_that_cannot_be_read_is_a_hole() -> None:
    files = Watched()
    handles = opened(files, "/d", [segment(0, EVEN[:40])])
    bad = BLOCK * 21
    read = SimFiles.preadv

    def preadv(self: SimFiles, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset == bad and sum(map(len, buffers)) == BLOCK:
            raise OSError(errno.EIO, "a bad sector")
        return read(self, handle, buffers, offset)

    for queue in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SimFiles, "preadv", preadv)
            (scan,) = scan_all(files, handles, starts_of(handles), call_queue=queue)
        assert len(scan.batches) == 39
        assert bad not in scan.batches["start"]
        assert scan.rejects == {Reject.EMPTY: 1}


def test_queues_are_closed_after_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    files = Watched()
    handles = opened(files, "/d", damaged())

    def strike(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Kept, "add", strike)
    with pytest.raises(MemoryError):
        scan_all(files, handles, starts_of(handles), call_queue=True)
    assert files.queues == 1
    assert files.open_queues == 0


def test_nothing_of_the_kernels_queues_stays_open(tmp_path: Path) -> None:
    files = SystemFiles()
    handles = opened(files, str(tmp_path / "d"), damaged())
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        scan_all(files, handles, starts_of(handles), call_queue=True)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    for handle, _, _ in handles.values():
        files.close(handle)


# what is not a fact


@pytest.mark.parametrize("kind", [BatchKind.PURGE, BatchKind.END])
def test_records_of_blocks_that_carry_none_are_not_believed(kind: BatchKind) -> None:
    files = SimFiles(SimDisk())
    content = segment(0, EVEN[:3], 2)
    at = BLOCK * 7
    records = make_records(key_of(9, 9), bytes(16), [BLOCK], [1 << 30])
    content[at : at + BLOCK] = pack_batch(kind, OTHER, life_of(0), 1, at, BLOCK, 0, records)
    found = recover(files, opened(files, "/d", [content]), None, verify_tail=0)
    assert found.scanned_batches == 4
    assert {realm: index.count for realm, index in found.indexes.items()} == {REALM: 3}
