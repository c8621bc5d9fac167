"""Bytes that tiers keep, damaged in every way: nothing raises, nothing hangs, nothing wrong is accepted."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash
from fuzz_kit import EXTREMES, little_memory, mutate, mutations
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.testing.simfs import SimDisk, SimFiles
from kvstrata.testing.tier_harness import TierHarness, chunk_keys, payload_of
from kvstrata.tiers.common import claims
from kvstrata.tiers.common.record import HEADER_BYTES, Header, Identity, check_header, make_header
from kvstrata.tiers.disk import DiskTier, TierState
from kvstrata.tiers.disk.format import (
    BLOCK,
    CHECKPOINT_RECORD_DTYPE,
    CHECKPOINT_SEGMENT_DTYPE,
    HEAD_BYTES,
    MAX_SEGMENT_BYTES,
    Batch,
    BatchKind,
    Checkpoint,
    Realm,
    Reject,
    SegmentHeader,
    find_batches,
    judge_batch,
    make_records,
    pack_batch,
    pack_checkpoint,
    pack_segment,
    parse_batch,
    parse_checkpoint,
    parse_segment,
    payload_digest,
)
from kvstrata.tiers.disk.index import words_of
from kvstrata.types import FailCause

SAMPLE = settings.default
ASSERTED = Identity(b"n" * 16, 77)
KEY = chunk_keys(1)[0]
PAYLOAD = payload_of(KEY, 1000)
RECORD = make_header(ASSERTED, KEY, len(PAYLOAD), payload_digest(PAYLOAD))

SEGMENT_ID = bytes(range(16))
REALM = Realm(b"0123456789abcdef", 5)
KEYS = chunk_keys(3)
SEGMENT = pack_segment(SegmentHeader(SEGMENT_ID, 7, 3, 1 << 20, 1_700_000_000_000_000))
SIZE = 1 << 20


def batch_block() -> bytes:
    digests = b"".join(payload_digest(payload_of(key, 512)) for key in KEYS)
    records = make_records(b"".join(KEYS), digests, [8192 + 512 * n for n in range(3)], [512] * 3)
    return pack_batch(BatchKind.RECORDS, REALM, SEGMENT_ID, 7, 4096, 8192, 1, records)


def checkpoint_file() -> bytes:
    segments = np.zeros(2, CHECKPOINT_SEGMENT_DTYPE)
    segments["id"] = np.frombuffer(SEGMENT_ID, np.uint8)
    segments["number"], segments["seq"], segments["scan_from"] = [0, 1], 7, 20_480
    records = np.zeros(3, CHECKPOINT_RECORD_DTYPE)
    records["key"] = words_of(KEYS)
    records["offset"], records["length"] = [8192 + 512 * n for n in range(3)], 512
    return b"".join(pack_checkpoint(Checkpoint(4, (REALM,), segments, records)))


BATCH = batch_block()
CHECKPOINT = checkpoint_file()


def seal(block: bytes) -> bytes:
    """A block of 4 KiB with a checksum that is right again: damage that the checksum does not show."""
    out = bytearray(block[:BLOCK].ljust(BLOCK, b"\0"))
    state = xxhash.xxh3_128(bytes(out[: HEAD_BYTES - 16]))
    state.update(bytes(out[HEAD_BYTES:]))
    out[HEAD_BYTES - 16 : HEAD_BYTES] = state.digest()
    return bytes(out)


# the record of one chunk (fs, object, redis)


@given(mutations(RECORD))
def test_a_record_header_is_the_one_that_was_written_or_is_refused(data: bytes) -> None:
    found = check_header(data, ASSERTED, KEY)
    if isinstance(found, Header):
        assert data[:HEADER_BYTES] == RECORD
        assert found == Header(len(PAYLOAD), payload_digest(PAYLOAD))
    else:
        assert found in (FailCause.WRONG_SIZE, FailCause.CORRUPT, FailCause.FOREIGN)


@given(st.data(), st.integers(0, HEADER_BYTES - 9), st.sampled_from(EXTREMES))
def test_a_record_header_with_a_right_checksum_and_strange_numbers(data: st.DataObject, at: int, value: int) -> None:
    body = bytearray(mutate(RECORD, data.draw)[: HEADER_BYTES - 8].ljust(HEADER_BYTES - 8, b"\0"))
    struct.pack_into("<Q", body, min(at, len(body) - 8), value)
    whole = bytes(body) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(body)))
    with little_memory():
        found = check_header(whole, ASSERTED, KEY)
    if isinstance(found, Header):  # the fields that say whose it is are as asked; a load compares length and digest
        assert whole[16:76] == RECORD[16:76]


# claims of parts


class Table:
    """A place of claims in a dictionary."""

    def __init__(self, entries: dict[str, bytes]) -> None:
        self.entries = entries

    def create(self, name: str, data: bytes) -> bool:
        return self.entries.setdefault(name, data) is data

    def replace(self, name: str, data: bytes) -> None:
        self.entries[name] = data

    def read(self, name: str) -> bytes | None:
        return self.entries.get(name)

    def delete(self, name: str) -> None:
        self.entries.pop(name, None)

    def names(self) -> list[str]:
        return list(self.entries)


CLAIM = b'{"quota": 600, "total": 1000}'
OWNER = b'{"host": "h", "boot": "b", "pid": 12, "started": "3", "token": "t"}'


@given(mutations(CLAIM), mutations(OWNER))
def test_a_damaged_claim_never_makes_room(claim: bytes, owner: bytes) -> None:
    place = Table({"other": claim, "other.owner": owner, "third": b'{"quota": 300, "total": 1000}'})
    for found in claims.list_claims(place):
        assert found.quota is None or found.quota >= 0
    claims.owner_of(place, "other")
    refusal = claims.take_part(place, claims.Claim("mine", 500, 1000), claims.this_process())
    fits = [found for found in claims.list_claims(place) if found.part != "mine"]
    if refusal is None:
        assert all(found.quota is not None for found in fits)
        assert sum(found.quota or 0 for found in fits) + 500 <= 1000


NONSENSE = {
    "deep": b"[" * 100_000,
    "negative": b'{"quota": -5000}',
    "long": b'{"quota": ' + b"9" * 5000 + b"}",
    "true": b'{"quota": true}',
    "text": b"\xff",
    "empty": b"",
}


@pytest.mark.parametrize("claim", NONSENSE.values(), ids=NONSENSE)
def test_a_claim_that_makes_no_sense_has_no_limit(claim: bytes) -> None:
    place = Table({"other": claim})
    assert [found.quota for found in claims.list_claims(place)] == [None]
    assert claims.owner_of(Table({"other.owner": claim}), "other") is None


# blocks of the disk tier


@given(mutations(SEGMENT))
def test_a_segment_header_is_the_one_that_was_written_or_is_refused(data: bytes) -> None:
    found = parse_segment(memoryview(data))
    if isinstance(found, SegmentHeader):
        assert data[:BLOCK] == SEGMENT
    else:
        assert found in Reject


@given(mutations(BATCH), st.sampled_from([4096, 8192]))
def test_a_header_block_is_the_one_that_was_written_or_is_refused(data: bytes, at: int) -> None:
    found = parse_batch(memoryview(data), SEGMENT_ID, at, SIZE)
    if isinstance(found, Batch):
        assert data[:BLOCK] == BATCH
        assert at == 4096
        assert [row.tobytes() for row in found.records["key"]] == KEYS
    find_batches(memoryview(data), SEGMENT_ID)


@given(mutations(BATCH), st.booleans(), st.sampled_from([4096, 8192]), st.sampled_from([SIZE, 4096, 12_288]))
def test_what_a_scan_is_told_of_a_header_block_is_what_the_block_says(
    text: bytes, sealed: bool, start: int, size: int
) -> None:
    block = memoryview(seal(text) if sealed else text[:BLOCK].ljust(BLOCK, b"\0"))
    told = judge_batch(block, SEGMENT_ID, start, size)
    batch = parse_batch(block, SEGMENT_ID, start, size)
    if isinstance(batch, Reject):
        assert told is batch
    else:
        assert told == (batch.kind, len(batch.records), batch.span)


@given(mutations(CHECKPOINT))
def test_a_checkpoint_is_the_one_that_was_written_or_is_refused(data: bytes) -> None:
    with little_memory():
        found = parse_checkpoint(memoryview(data))
    if isinstance(found, Checkpoint):
        assert data[: len(CHECKPOINT)] == CHECKPOINT
        assert found.records["key"].tobytes() == b"".join(KEYS)


@given(st.data(), st.sampled_from(["segment", "batch", "checkpoint"]))
def test_blocks_with_a_right_checksum_and_strange_numbers_stay_in_bounds(data: st.DataObject, which: str) -> None:
    valid = {"segment": SEGMENT, "batch": BATCH, "checkpoint": CHECKPOINT}[which]
    head = bytearray(valid[:BLOCK])
    for _ in range(data.draw(st.integers(1, 3))):
        value = data.draw(st.sampled_from(EXTREMES))
        struct.pack_into("<Q", head, data.draw(st.integers(8, 120)), value)
    whole = seal(bytes(head)) + valid[BLOCK:]
    with little_memory():
        segment = parse_segment(memoryview(whole))
        batch = parse_batch(memoryview(whole[:BLOCK]), SEGMENT_ID, 4096, SIZE)
        parse_checkpoint(memoryview(whole))
    if isinstance(segment, SegmentHeader):
        assert segment.seq < 1 << 32, "it is half of an order of 64 bits"
        assert segment.epoch < 1 << 63, "the next one has to fit too"
        assert segment.size <= MAX_SEGMENT_BYTES
    if isinstance(batch, Batch):
        assert batch.seq < 1 << 32
        assert 4096 + batch.span <= SIZE
        if batch.kind is BatchKind.RECORDS and len(batch.records):
            ends = batch.records["offset"].astype(np.int64) + batch.records["length"]
            assert int(ends.max()) <= 4096 + batch.span


# a whole directory of the disk tier


CHUNK = 3000
PATH = "/fuzz"


def tier_on(disk: SimDisk) -> TierHarness:
    tier = DiskTier(path=PATH, limit=400_000, segment_bytes=40_960, checkpoint_segments=2, largest_chunk=1,
                    files=SimFiles(disk))  # fmt: skip
    return TierHarness(tier, chunk_bytes=CHUNK, slots=64)


def filled() -> dict[str, bytes]:
    """The files of a directory with stores, removals, a purge of another namespace, and a checkpoint."""
    disk = SimDisk()
    rig = tier_on(disk).open()
    keys = chunk_keys(40)
    for start in range(0, 40, 5):
        rig.store(keys[start : start + 5])
    rig.tier.remove(keys[:3])
    rig.settle()
    rig.purge(b"contract-suite-b")
    rig.close()
    return {name: bytes(inode.data) for name, inode in disk.directories[PATH].names.items()}


FILES = filled()


def damaged(draw: st.DataObject) -> SimDisk:
    """A device with that directory, some of its files changed behind everybody's back."""
    disk = SimDisk()
    files = SimFiles(disk)
    directory = files.open_directory(PATH, create=True)
    for name, content in FILES.items():
        handle = files.open(directory, name, write=True, create=True)
        files.pwritev(handle, [memoryview(content)], 0)
        files.close(handle)
    names = sorted(name for name in FILES if name.endswith(".kvs"))
    for _ in range(draw.draw(st.integers(1, 4))):
        held = disk.file(PATH, draw.draw(st.sampled_from(names)))
        if draw.draw(st.booleans()):  # inside one block, with a right checksum
            block = draw.draw(st.integers(0, max(len(held) // BLOCK - 1, 0))) * BLOCK
            part = mutate(bytes(held[block : block + 256]), draw.draw)[:256].ljust(256, b"\0")
            held[block : block + BLOCK] = seal(part + bytes(held[block + 256 : block + BLOCK]))
        else:
            held[:] = mutate(bytes(held), draw.draw)
    files.kill()
    return disk


@settings(max_examples=max(SAMPLE.max_examples // 2, 10) if SAMPLE is not None else 50)
@given(st.data())
def test_a_damaged_directory_opens_and_delivers_what_was_stored_or_nothing(data: st.DataObject) -> None:
    disk = damaged(data)
    rig = tier_on(disk)
    rig.over_limit_at_open = True
    rig.open()
    rig.over_limit_at_open = False
    assert isinstance(rig.tier, DiskTier)
    assert rig.tier.statistics().state is TierState.OPEN, rig.tier.status
    keys = chunk_keys(40)
    present = rig.present(keys)
    for start in range(0, 40, 10):
        rig.check_loaded(rig.load(keys[start : start + 10]))
    assert len(present) <= 40
    for start in range(100, 200, 10):  # it goes on: everything is reclaimed once
        rig.submit_store(chunk_keys(10, start=start))
        rig.settle()
    record = rig.load(rig.present(chunk_keys(100, start=100))[:20])
    assert record.ok
    rig.check_loaded(record)
    rig.close()
    assert not rig.executor.raised
    again = tier_on(disk).open()
    assert isinstance(again.tier, DiskTier)
    assert again.tier.statistics().state is TierState.OPEN, again.tier.status
    again.check_loaded(again.load(keys))
    again.close()


@given(st.data())
def test_rows_of_a_checkpoint_that_lie_beyond_their_segment_are_not_believed(data: st.DataObject) -> None:
    disk = damaged_checkpoint(data)
    with little_memory():
        rig = tier_on(disk).open()
    assert isinstance(rig.tier, DiskTier)
    assert rig.tier.statistics().state is TierState.OPEN, rig.tier.status
    volume = rig.tier._live
    assert volume is not None
    for index in volume.desk.indexes.values():
        rows = index.live_rows()
        assert (index.offset[rows].astype(np.int64) + index.length[rows] <= 40_960).all()
    rig.check_loaded(rig.load(chunk_keys(40)))
    rig.close()
    assert not rig.executor.raised


def test_a_checkpoint_that_starts_a_scan_beyond_its_segment_costs_nothing() -> None:
    found = parse_checkpoint(memoryview(FILES["checkpoint.kvs"]))
    assert isinstance(found, Checkpoint)
    kept = tier_on(disk_of({})).open()
    for value in EXTREMES[-5:]:
        segments = found.segments.copy()
        segments["scan_from"] = value
        spoilt = b"".join(pack_checkpoint(Checkpoint(found.wall_us, found.realms, segments, found.records)))
        rig = tier_on(disk_of({"checkpoint.kvs": spoilt})).open()
        assert rig.present(chunk_keys(40)) == kept.present(chunk_keys(40))
        rig.close()
        assert not rig.executor.raised
    kept.close()


def damaged_checkpoint(draw: st.DataObject) -> SimDisk:
    """The directory with a checkpoint whose checksums are right and whose numbers are not."""
    found = parse_checkpoint(memoryview(FILES["checkpoint.kvs"]))
    assert isinstance(found, Checkpoint)
    segments, records = found.segments.copy(), found.records.copy()
    for _ in range(draw.draw(st.integers(1, 5))):
        table = draw.draw(st.sampled_from([segments, records]))
        name = draw.draw(st.sampled_from([name for name in table.dtype.names if table.dtype[name].shape == ()]))
        most = (1 << 8 * table.dtype[name].itemsize) - 1
        table[name][draw.draw(st.integers(0, len(table) - 1))] = draw.draw(st.sampled_from(EXTREMES)) & most
    spoilt = b"".join(pack_checkpoint(Checkpoint(found.wall_us, found.realms, segments, records)))
    return disk_of({"checkpoint.kvs": spoilt})


def disk_of(instead: dict[str, bytes]) -> SimDisk:
    """A device with the directory, some of its files replaced."""
    disk = SimDisk()
    files = SimFiles(disk)
    directory = files.open_directory(PATH, create=True)
    for name, content in {**FILES, **instead}.items():
        handle = files.open(directory, name, write=True, create=True)
        files.pwritev(handle, [memoryview(content)], 0)
        files.close(handle)
    files.kill()
    return disk
