"""The scan of header blocks finds what a reader of one block at a time finds, whatever the files and the reading."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.testing.simfs import SimDisk, SimFiles
from kvstrata.tiers.disk import scan as scanning
from kvstrata.tiers.disk import trail as trails
from kvstrata.tiers.disk.calls import Call, CallQueue
from kvstrata.tiers.disk.format import (
    BLOCK,
    Batch,
    BatchKind,
    Realm,
    Reject,
    SegmentHeader,
    make_records,
    pack_batch,
    pack_segment,
    parse_batch,
)
from kvstrata.tiers.disk.trail import SegmentScan
from kvstrata.types import KEY_BYTES

REALMS = [Realm(b"0123456789abcdef", 5), Realm(b"fedcba9876543210", 6)]
KINDS = [BatchKind.RECORDS] * 12 + [BatchKind.REMOVE] * 2 + [BatchKind.PURGE]


def life_of(number: int) -> bytes:
    return bytes([number + 1]) * 16


class Filling:
    """Makes one segment file: batches of regular and irregular lengths, and what may go wrong with them."""

    def __init__(self, number: int, rng: np.random.Generator) -> None:
        self.number, self.rng = number, rng
        spans = [span for span in rng.integers(1, 9, 12).tolist() for _ in range(int(rng.choice([1, 1, 1, 2, 9])))]
        self.content = bytearray(BLOCK * (1 + sum(spans) + int(rng.integers(0, 12))))
        header = SegmentHeader(life_of(number), number + 1, 1, len(self.content), 0)
        self.content[:BLOCK] = pack_segment(header)
        self.starts: list[int] = []
        at = BLOCK
        for span in spans:
            self.starts.append(at)
            self.put(at, self.block(at, span * BLOCK))
            at += span * BLOCK
        for _ in range(int(rng.integers(0, 4))):
            self.harm()
        if rng.random() < 0.2:
            del self.content[int(rng.integers(BLOCK, len(self.content))) // 512 * 512 :]

    def put(self, at: int, block: bytes) -> None:
        self.content[at : at + BLOCK] = block

    def block(self, at: int, span: int, kind: BatchKind | None = None, life: bytes | None = None) -> bytes:
        kind = BatchKind(int(self.rng.choice(KINDS))) if kind is None else kind
        count = int(self.rng.integers(0, 4)) if kind in (BatchKind.RECORDS, BatchKind.REMOVE) else 0
        place = at + BLOCK if span > BLOCK or kind is BatchKind.REMOVE else at + span
        records = make_records(self.rng.bytes(KEY_BYTES * count), bytes(16 * count), [place] * count, [0] * count)
        realm = REALMS[int(self.rng.random() < 0.1)]
        return pack_batch(kind, realm, life or life_of(self.number), self.number + 1, at, span, 7, records)

    def harm(self) -> None:
        """One of: lost, torn, stale, an end, a copy of a block elsewhere, or a block for where it is."""
        rng, start = self.rng, int(self.rng.choice(self.starts))
        anywhere = BLOCK * int(rng.integers(1, len(self.content) // BLOCK))
        match int(rng.integers(0, 6)):
            case 0:
                self.put(start, bytes(BLOCK))
            case 1:
                self.content[start + 300] ^= 1
            case 2:
                self.put(start, self.block(start, BLOCK, life=b"x" * 16))
            case 3:
                self.put(start, self.block(start, BLOCK, BatchKind.END))
            case 4:
                self.put(anywhere, bytes(self.content[start : start + BLOCK]))
            case _:
                self.put(anywhere, self.block(anywhere, BLOCK * int(rng.integers(1, 9))))


def plain(number: int, content: bytes) -> tuple[object, ...]:
    """One block after the other; behind a hole, every block until one is good."""
    size, at, end, ended = len(content), BLOCK, BLOCK, False
    rejects: Counter[Reject] = Counter()
    batches: list[Batch] = []

    def read(place: int) -> Batch | Reject:
        return parse_batch(memoryview(content)[place : place + BLOCK], life_of(number), place, size)

    while at + BLOCK <= size and not ended:
        found = read(at)
        if isinstance(found, Batch):
            batches.append(found)
            at = end = at + found.span
            ended = found.kind is BatchKind.END
            continue
        later = [place for place in range(at + BLOCK, size - BLOCK + 1, BLOCK) if isinstance(read(place), Batch)]
        rejects[found] += bool(later) or found not in (Reject.EMPTY, Reject.STALE)
        if not later:
            break
        at = later[0]
    carries = (BatchKind.RECORDS, BatchKind.REMOVE)
    told = [
        (each.realm, each.kind, each.start, each.span, each.records.tobytes() if each.kind in carries else b"")
        for each in batches
    ]
    return number, end, ended, +rejects, told


def told(scan: SegmentScan) -> tuple[object, ...]:
    batches = map(scan.batch, range(len(scan.batches)))
    rows = [(each.realm, each.kind, each.start, each.span, each.records.tobytes()) for each in batches]
    return scan.number, scan.end, scan.ended, +scan.rejects, rows


class LooseQueue:
    """Answers some of what it was handed, in any order; some calls fail, or end early."""

    handle = -1

    def __init__(self, inner: CallQueue, rng: np.random.Generator) -> None:
        self._inner, self._rng = inner, rng
        self._ended: list[tuple[int, int]] = []
        self._buffers: dict[int, list[memoryview]] = {}

    def push(self, tag: int, call: Call, begin: int, size: int) -> None:
        self._buffers[tag] = call.buffers(begin, size)
        self._inner.push(tag, call, begin, size)

    def submit(self) -> None:
        self._inner.submit()
        self._ended += self._inner.take()

    def take(self, least: int = 0) -> list[tuple[int, int]]:
        self._rng.shuffle(self._ended)
        count = int(self._rng.integers(0, 4))  # a signal came
        now, self._ended = self._ended[:count], self._ended[count:]
        return [(tag, result if self._rng.random() < 0.97 else self._spoil(tag)) for tag, result in now]

    def _spoil(self, tag: int) -> int:
        for buffer in self._buffers[tag]:
            buffer[:] = bytes(len(buffer))
        return int(self._rng.choice([-errno.EIO, -errno.EAGAIN, 0, 512]))

    def close(self) -> None:
        self._inner.close()


class LooseFiles(SimFiles):
    """Files with loose queues."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__(SimDisk())
        self.rng = rng

    def call_queue(self, depth: int) -> CallQueue | None:
        inner = super().call_queue(depth)
        assert inner is not None
        return LooseQueue(inner, self.rng)


def opened(files: SimFiles, contents: Sequence[bytes]) -> scanning.Handles:
    directory = files.open_directory("/d", create=True)
    handles: scanning.Handles = {}
    for number, content in enumerate(contents):
        handle = files.open(directory, f"segment-{number:08x}.kvs", write=True, create=True)
        files.pwritev(handle, [memoryview(content)], 0)
        header = SegmentHeader(life_of(number), number + 1, 1, len(content), 0)
        handles[number] = (handle, header, len(content))
    return handles


Ways = list[dict[str, bool | int | Callable[[Callable[[], None]], None]]]


@given(
    seed=st.integers(0, 1 << 32),
    segments=st.integers(1, 9),
    ahead=st.sampled_from([1, 2, 3, 5, 16, trails.READ_AHEAD]),
    heads=st.sampled_from([1, 7, 4096]),
    records=st.sampled_from([64, 1 << 14]),
    together=st.sampled_from([1, 3, 8]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_way_of_reading_finds_what_one_block_at_a_time_finds(
    seed: int, segments: int, ahead: int, heads: int, records: int, together: int
) -> None:
    rng = np.random.default_rng(seed)
    contents = [bytes(Filling(number, rng).content) for number in range(segments)]
    expected = [plain(number, content) for number, content in enumerate(contents)]
    files = LooseFiles(rng)
    handles = opened(files, contents)
    starts = dict.fromkeys(handles, BLOCK)
    ways: Ways = [
        {"call_queue": True},
        {},
        {"helpers": lambda work: work(), "many": 2},
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scanning, "READ_AHEAD", ahead)
        patch.setattr(trails, "READ_AHEAD", ahead)
        patch.setattr(trails, "_HEADS", heads)
        patch.setattr(trails, "_RECORDS", records)
        patch.setattr(scanning, "_HAND_OVER", together)
        patch.setattr(scanning, "_WINDOW", BLOCK * int(rng.choice([1, 3, 256])))
        for way in ways:
            assert [told(scan) for scan in scanning.scan_all(files, handles, starts, **way)] == expected  # type: ignore[arg-type]
