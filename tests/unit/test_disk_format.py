"""The bytes on disk: round trips, rejects, and the golden files that must never change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvstrata.testing.tier_harness import chunk_keys, payload_of
from kvstrata.tiers.disk.format import (
    BLOCK,
    CHECKPOINT_RECORD_BYTES,
    CHECKPOINT_RECORD_DTYPE,
    CHECKPOINT_SEGMENT_DTYPE,
    RECORD_BYTES,
    RECORD_DTYPE,
    RECORDS_PER_BATCH,
    Batch,
    BatchKind,
    Checkpoint,
    Realm,
    Reject,
    SegmentHeader,
    align_up,
    checkpoint_bytes,
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

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "disk"
SEGMENT_ID = bytes(range(16))
REALM = Realm(b"0123456789abcdef", 0x1122334455667788)
KEYS = chunk_keys(3)
PAYLOADS = [payload_of(key, 512) for key in KEYS]
HEADER = SegmentHeader(SEGMENT_ID, 7, 3, 1 << 20, 1_700_000_000_000_000)


def golden_batch() -> bytes:
    places = [8192 + 512 * n for n in range(3)]
    records = make_records(b"".join(KEYS), b"".join(map(payload_digest, PAYLOADS)), places, [512] * 3)
    return pack_batch(BatchKind.RECORDS, REALM, SEGMENT_ID, 7, 4096, 8192, 1_700_000_000_000_001, records)


def golden_removal() -> bytes:
    records = make_records(KEYS[0], b"", [12_288], [0])
    return pack_batch(BatchKind.REMOVE, REALM, SEGMENT_ID, 7, 12_288, 4096, 1_700_000_000_000_002, records)


def golden_purge() -> bytes:
    return pack_batch(
        BatchKind.PURGE, Realm(REALM.namespace, 0), SEGMENT_ID, 7, 16_384, 4096, 1_700_000_000_000_003, None
    )


def golden_checkpoint() -> bytes:
    segments = np.zeros(1, CHECKPOINT_SEGMENT_DTYPE)
    segments[0]["id"] = np.frombuffer(SEGMENT_ID, np.uint8)
    segments[0]["seq"], segments[0]["scan_from"] = 7, 20_480
    records = np.zeros(2, CHECKPOINT_RECORD_DTYPE)
    for row, n in enumerate((1, 2)):
        records[row]["key"] = words_of([KEYS[n]])[0]
        records[row]["digest"] = np.frombuffer(payload_digest(PAYLOADS[n]), "<u8")
        records[row]["offset"], records[row]["length"], records[row]["stamp"] = 8192 + 512 * n, 512, n
    return b"".join(pack_checkpoint(Checkpoint(1_700_000_000_000_004, (REALM,), segments, records)))


GOLDEN_BYTES = {
    "segment_header.bin": lambda: pack_segment(HEADER),
    "batch_records.bin": golden_batch,
    "batch_remove.bin": golden_removal,
    "batch_purge.bin": golden_purge,
    "checkpoint.bin": golden_checkpoint,
}


@pytest.mark.parametrize("name", sorted(GOLDEN_BYTES))
def test_golden_bytes(name: str) -> None:
    assert GOLDEN_BYTES[name]() == (GOLDEN / name).read_bytes()


def test_golden_bytes_mean_what_they_meant() -> None:
    assert parse_segment(memoryview((GOLDEN / "segment_header.bin").read_bytes())) == HEADER
    batch = parse_batch(memoryview((GOLDEN / "batch_records.bin").read_bytes()), SEGMENT_ID, 4096, 1 << 20)
    assert isinstance(batch, Batch)
    assert (batch.kind, batch.realm, batch.seq, batch.span) == (BatchKind.RECORDS, REALM, 7, 8192)
    assert [row.tobytes() for row in batch.records["key"]] == KEYS
    assert [row.tobytes() for row in batch.records["digest"]] == list(map(payload_digest, PAYLOADS))
    removal = parse_batch(memoryview((GOLDEN / "batch_remove.bin").read_bytes()), SEGMENT_ID, 12_288, 1 << 20)
    assert isinstance(removal, Batch)
    assert removal.kind is BatchKind.REMOVE
    purge = parse_batch(memoryview((GOLDEN / "batch_purge.bin").read_bytes()), SEGMENT_ID, 16_384, 1 << 20)
    assert isinstance(purge, Batch)
    assert (purge.kind, purge.realm.namespace) == (BatchKind.PURGE, REALM.namespace)
    found = parse_checkpoint(memoryview((GOLDEN / "checkpoint.bin").read_bytes()))
    assert isinstance(found, Checkpoint)
    assert found.realms == (REALM,)
    assert found.records["offset"].tolist() == [8704, 9216]


def test_sizes_are_those_of_the_document() -> None:
    assert RECORD_BYTES == RECORD_DTYPE.itemsize == 60
    assert RECORDS_PER_BATCH == 64
    assert CHECKPOINT_RECORD_BYTES == 72
    assert len(golden_checkpoint()) == checkpoint_bytes(1, 1, 2)


@pytest.mark.parametrize(
    ("change", "reject"),
    [
        (lambda b: b.__setitem__(0, 0), Reject.EMPTY),
        (lambda b: b.__setitem__(41, 99), Reject.STALE),
        (lambda b: b.__setitem__(300, b[300] ^ 1), Reject.CHECKSUM),
        (lambda b: b.__setitem__(245, b[245] ^ 1), Reject.CHECKSUM),
        (lambda b: b.__delitem__(slice(4000, None)), Reject.TRUNCATED),
    ],
)
def test_a_header_block_that_cannot_be_used_says_why(change: object, reject: Reject) -> None:
    block = bytearray(golden_batch())
    change(block)  # type: ignore[operator]
    assert parse_batch(memoryview(block), SEGMENT_ID, 4096, 1 << 20) is reject


def test_a_header_block_elsewhere_is_misplaced_and_one_too_long_malformed() -> None:
    block = memoryview(golden_batch())
    assert parse_batch(block, SEGMENT_ID, 8192, 1 << 20) is Reject.MISPLACED
    assert parse_batch(block, SEGMENT_ID, 4096, 8192) is Reject.MALFORMED


@pytest.mark.parametrize("row", [0, 1, 63])
@pytest.mark.parametrize(
    ("begin", "length", "inside"),
    [
        (8192, 0, True),
        (8192, 4096, True),
        (12_288, 0, True),
        (8191, 1, False),
        (4096, 0, False),
        (8192, 4097, False),
        (12_288, 1, False),
        (12_289, 0, False),
        (8192, (1 << 32) - 1, False),
        ((1 << 32) - 1, 1, False),
        (0, 1 << 31, False),
    ],
)
def test_records_have_to_lie_behind_the_block_that_announces_them_and_before_the_next(
    row: int, begin: int, length: int, inside: bool
) -> None:
    places, lengths = [8192] * 64, [4096] * 64
    places[row], lengths[row] = begin, length
    table = make_records(bytes(36 * 64), bytes(16 * 64), places, lengths)
    for kind, good in ((BatchKind.RECORDS, inside), (BatchKind.REMOVE, True)):  # what is removed lies anywhere
        block = pack_batch(kind, REALM, SEGMENT_ID, 7, 4096, 8192, 0, table)
        found = judge_batch(memoryview(block), SEGMENT_ID, 4096, 1 << 20)
        assert found == ((kind, 64, 8192) if good else Reject.MALFORMED)


@pytest.mark.parametrize(
    ("span", "seq", "wall_us", "good"),
    [
        (BLOCK, 0, (1 << 63) - 1, True),
        (BLOCK, 0, 1 << 63, False),
        (BLOCK, (1 << 32) - 2, 0, True),
        (BLOCK, (1 << 32) - 1, 0, False),
        (BLOCK + 512, 0, 0, False),
        (BLOCK - 512, 0, 0, False),
        (0, 0, 0, False),
        (1 << 63, 0, 0, False),
    ],
)
def test_a_header_block_with_impossible_numbers_is_malformed(span: int, seq: int, wall_us: int, good: bool) -> None:
    block = memoryview(pack_batch(BatchKind.PURGE, REALM, SEGMENT_ID, seq, 4096, span, wall_us, None))
    found = judge_batch(block, SEGMENT_ID, 4096, 1 << 20)
    assert found == ((BatchKind.PURGE, 0, span) if good else Reject.MALFORMED)


def test_a_namespace_of_zero_bytes_survives() -> None:
    realm = Realm(bytes(16), 0)
    parts = pack_checkpoint(
        Checkpoint(0, (realm,), np.zeros(0, CHECKPOINT_SEGMENT_DTYPE), np.zeros(0, CHECKPOINT_RECORD_DTYPE))
    )
    found = parse_checkpoint(memoryview(b"".join(parts)))
    assert isinstance(found, Checkpoint)
    assert found.realms == (realm,)


@pytest.mark.parametrize(("at", "reject"), [(0, Reject.EMPTY), (20, Reject.CHECKSUM), (BLOCK + 30, Reject.DIGEST)])
def test_a_damaged_checkpoint_says_why(at: int, reject: Reject) -> None:
    content = bytearray(golden_checkpoint())
    content[at] ^= 1
    assert parse_checkpoint(memoryview(content)) is reject
    assert parse_checkpoint(memoryview(content[: BLOCK + 50])) in (Reject.TRUNCATED, reject)


def test_batches_are_found_among_garbage() -> None:
    garbage = np.random.default_rng(1).bytes(BLOCK)
    other = pack_batch(BatchKind.END, REALM, b"another life----", 7, 0, BLOCK, 0, None)
    window = garbage + golden_batch() + other + garbage + golden_removal()
    assert find_batches(memoryview(window), SEGMENT_ID) == [BLOCK, 4 * BLOCK]


def test_align_up() -> None:
    assert [align_up(n, 512) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]
