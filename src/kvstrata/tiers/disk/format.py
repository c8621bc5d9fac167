"""Bytes on disk: the segment header, the batch header block with its record table, and the checkpoint.

All integers are little endian, all blocks are 4 KiB. `docs/format.md` describes the same bytes in prose, with a worked
example. Nothing here touches a file: functions turn values into blocks and blocks into values. A block that cannot be
used is a `Reject`, never an exception.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from kvstrata.types import DIGEST_BYTES, KEY_BYTES

FORMAT_VERSION = 1
BLOCK = 4096
SECTOR = 512
HEAD_BYTES = 256
RECORD_BYTES = 60
RECORDS_PER_BATCH = (BLOCK - HEAD_BYTES) // RECORD_BYTES
ID_BYTES = 16
MAX_SEGMENT_BYTES = (1 << 32) - BLOCK
"""Record offsets are 32 bits."""
MAX_SEQ = (1 << 32) - 1
"""A life's number and an offset make an order of 64 bits, and the next life's number has to fit too."""
MAX_COUNT = 1 << 63
"""Epochs and times at or above it are damage: the next one might not fit."""
RESYNC_BYTES = 256 << 20
"""How far beyond a hole a scan looks for the next batch; writers keep unfinished batches closer together than this."""

_SEGMENT_MAGIC = b"kvstrSEG"
_BATCH_MAGIC = b"kvstrBAT"
_CHECKPOINT_MAGIC = b"kvstrCKP"
_SEGMENT = struct.Struct("<8sHHI16sQQQQ")
_BATCH = struct.Struct("<8sHBBHH16sQ16sQQQQ")
_JUDGED = struct.Struct("<8sHBxH26x16sQQQQ152x16s")
"""What of `_BATCH` a scan looks at, and the checksum at the end of the head."""
_CHECKPOINT = struct.Struct("<8sHHIQIIQ16s")
_PLACE = struct.Struct("<52xII")
"""Where a record's payload is."""
_HASH_PIECE = 1 << 16
_HASH_IN_PIECES = 1 << 19
_CHECKSUM_AT = HEAD_BYTES - DIGEST_BYTES
_BATCH_WORD = np.uint64(int.from_bytes(_BATCH_MAGIC, "little"))

Bytes: TypeAlias = npt.NDArray[np.uint8]
Heads: TypeAlias = npt.NDArray[np.void]
Records: TypeAlias = npt.NDArray[np.void]
Words: TypeAlias = npt.NDArray[np.uint32]

KEY_WORDS = KEY_BYTES // 4
RECORD_DTYPE = np.dtype(
    [("key", "<u4", (KEY_WORDS,)), ("digest", "<u8", (2,)), ("offset", "<u4"), ("length", "<u4")], align=False
)
_HEAD_FIELDS = {
    "magic": (0, "<u8"), "version": (8, "<u2"), "kind": (10, "u1"), "count": (12, "<u2"), "realm": (16, ("u1", (24,))),
    "id": (40, ("u1", (ID_BYTES,))), "start": (56, "<u8"), "span": (64, "<u8"), "seq": (72, "<u8"),
    "wall_us": (80, "<u8"),
}  # fmt: skip
_HEAD_DTYPE = np.dtype(
    {
        "names": list(_HEAD_FIELDS),
        "formats": [form for _, form in _HEAD_FIELDS.values()],
        "offsets": [at for at, _ in _HEAD_FIELDS.values()],
        "itemsize": HEAD_BYTES,
    }
)
"""The head of a block, `_BATCH` by names; "realm" is namespace and layout tag."""
REALM_DTYPE = np.dtype([("namespace", "S16"), ("tag", "<u8")])
CHECKPOINT_SEGMENT_DTYPE = np.dtype(
    [("number", "<u4"), ("pad", "<u4"), ("id", "u1", (16,)), ("seq", "<u8"), ("scan_from", "<u8")]
)
CHECKPOINT_RECORD_DTYPE = np.dtype(
    [
        ("key", "<u4", (KEY_WORDS,)),
        ("digest", "<u8", (2,)),
        ("segment", "<u4"),
        ("offset", "<u4"),
        ("length", "<u4"),
        ("stamp", "<u4"),
        ("realm", "<u2"),
        ("pad", "<u2"),
    ]
)
CHECKPOINT_RECORD_BYTES = CHECKPOINT_RECORD_DTYPE.itemsize


class Reject(enum.StrEnum):
    """Why a block, or a record, is not used. `fsck` and the counters of an opened tier report by these names."""

    EMPTY = "empty"  # no magic: nothing was written here, or the page was lost
    VERSION = "version"  # written by another format version
    CHECKSUM = "checksum"  # the header block does not have its own checksum
    STALE = "stale"  # of the segment's former life, or of another segment
    MISPLACED = "misplaced"  # not at the offset that it names
    MALFORMED = "malformed"  # right checksum, impossible contents
    TRUNCATED = "truncated"  # the file ends before the bytes do
    DIGEST = "digest"  # the payload does not have its digest


class BatchKind(enum.IntEnum):
    """What a header block announces."""

    RECORDS = 1  # records, whose payloads follow
    REMOVE = 2  # keys that are no longer held
    PURGE = 3  # the namespace of the head is no longer held
    END = 4  # nothing follows in this segment


CARRYING = (BatchKind.RECORDS, BatchKind.REMOVE)
"""Kinds of batch that carry records."""
_KINDS = frozenset(map(int, BatchKind))
_RECORDS = int(BatchKind.RECORDS)


@dataclass(frozen=True, slots=True)
class Realm:
    """What a record must share with the tier that reads it: the namespace and the layout tag."""

    namespace: bytes
    layout_tag: int


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The first block of a segment file. `seq` orders lives of segments; `epoch` counts openings of the directory."""

    segment_id: bytes
    seq: int
    epoch: int
    size: int
    wall_us: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One header block: the head and its record table. `span` is the distance to the next header block."""

    kind: BatchKind
    realm: Realm
    segment_id: bytes
    seq: int
    start: int
    span: int
    wall_us: int
    records: Records


def align_up(value: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below `value`."""
    return -(-value // unit) * unit


def payload_digest(payload: bytes | memoryview) -> bytes:
    """xxh3-128 of a payload, big endian."""
    if not _HASH_PIECE < len(payload) <= _HASH_IN_PIECES:
        return xxhash.xxh3_128_digest(payload)
    # Above this size xxhash lets other threads in, and getting the interpreter back costs more than the hash does.
    state = xxhash.xxh3_128()
    view = memoryview(payload)
    for at in range(0, len(view), _HASH_PIECE):
        state.update(view[at : at + _HASH_PIECE])
    return state.digest()


def _checksum(block: memoryview) -> bytes:
    state = xxhash.xxh3_128(block[:_CHECKSUM_AT])
    state.update(block[HEAD_BYTES:])
    return state.digest()


def _seal(block: bytearray) -> bytes:
    block[_CHECKSUM_AT:HEAD_BYTES] = _checksum(memoryview(block))
    return bytes(block)


def _reject(block: memoryview, magic: bytes) -> Reject | None:
    if bytes(block[:8]) != magic:
        return Reject.EMPTY
    if _checksum(block) != bytes(block[_CHECKSUM_AT:HEAD_BYTES]):
        return Reject.CHECKSUM
    if int.from_bytes(block[8:10], "little") != FORMAT_VERSION:
        return Reject.VERSION
    return None


def pack_segment(header: SegmentHeader) -> bytes:
    """The first block of a segment file."""
    block = bytearray(BLOCK)
    _SEGMENT.pack_into(
        block, 0, _SEGMENT_MAGIC, FORMAT_VERSION, 0, SECTOR, header.segment_id, header.seq, header.epoch, header.size,
        header.wall_us,
    )  # fmt: skip
    return _seal(block)


def parse_segment(block: memoryview) -> SegmentHeader | Reject:
    """What the first block of a segment file says."""
    if len(block) < BLOCK:
        return Reject.TRUNCATED
    reject = _reject(block, _SEGMENT_MAGIC)
    if reject is not None:
        return reject
    _, _, _, _, segment_id, seq, epoch, size, wall_us = _SEGMENT.unpack_from(block, 0)
    if seq >= MAX_SEQ or epoch >= MAX_COUNT or size > MAX_SEGMENT_BYTES or wall_us >= MAX_COUNT:
        return Reject.MALFORMED
    return SegmentHeader(segment_id, seq, epoch, size, wall_us)


def pack_batch(
    kind: BatchKind,
    realm: Realm,
    segment_id: bytes,
    seq: int,
    start: int,
    span: int,
    wall_us: int,
    records: Records | None,
) -> bytes:
    """One header block. `records` has at most 64 rows of `RECORD_DTYPE`."""
    block = bytearray(BLOCK)
    count = 0 if records is None else len(records)
    _BATCH.pack_into(
        block, 0, _BATCH_MAGIC, FORMAT_VERSION, kind, 0, count, 0, realm.namespace, realm.layout_tag, segment_id, start,
        span, seq, wall_us,
    )  # fmt: skip
    if records is not None:
        block[HEAD_BYTES : HEAD_BYTES + count * RECORD_BYTES] = records.tobytes()
    return _seal(block)


def make_records(keys: bytes, digests: bytes, offsets: Sequence[int], lengths: Sequence[int]) -> Records:
    """A record table; `keys` and `digests` are concatenated."""
    table = np.zeros(len(offsets), RECORD_DTYPE)
    table["key"] = np.frombuffer(keys, "<u4").reshape(-1, KEY_WORDS)
    if digests:
        table["digest"] = np.frombuffer(digests, "<u8").reshape(-1, 2)
    table["offset"] = offsets
    table["length"] = lengths
    return table


def parse_batch(block: memoryview, segment_id: bytes, start: int, segment_size: int) -> Batch | Reject:
    """What the block found at `start` of the segment with `segment_id` says, if it belongs there.

    `records` of the answer are a view of the block.
    """
    if len(block) < BLOCK:
        return Reject.TRUNCATED
    found = judge_batch(block, segment_id, start, segment_size)
    if isinstance(found, Reject):
        return found
    _, _, kind, _, count, _, namespace, tag, _, _, span, seq, wall_us = _BATCH.unpack_from(block, 0)
    records: Records = np.frombuffer(block, RECORD_DTYPE, count, HEAD_BYTES)
    return Batch(BatchKind(kind), Realm(namespace, tag), segment_id, seq, start, span, wall_us, records)


def judge_batch(block: memoryview, segment_id: bytes, start: int, size: int) -> tuple[int, int, int] | Reject:
    """Kind, count of records and span of a header block of this life of a segment, if `block` is one.

    `start`: where it was found; `size`: of the file. A scan asks this for every batch, so it makes as little as it can.
    """
    magic, version, kind, count, life, at, span, seq, wall_us, checksum = _JUDGED.unpack_from(block)
    if magic != _BATCH_MAGIC:
        return Reject.EMPTY
    if life != segment_id:  # of a former life, or copied from another segment: not worth a checksum
        return Reject.STALE
    if _checksum(block) != checksum:
        return Reject.CHECKSUM
    if version != FORMAT_VERSION:
        return Reject.VERSION
    if at != start:
        return Reject.MISPLACED
    if count > RECORDS_PER_BATCH or kind not in _KINDS or seq >= MAX_SEQ or wall_us >= MAX_COUNT:
        return Reject.MALFORMED
    if span < BLOCK or span % BLOCK or span > size - start:
        return Reject.MALFORMED
    if kind == _RECORDS:  # none of them outside of the batch that announces them
        first, end = start + BLOCK, start + span
        for begin, length in _PLACE.iter_unpack(block[HEAD_BYTES : HEAD_BYTES + count * RECORD_BYTES]):
            if begin < first or begin + length > end:
                return Reject.MALFORMED
    return kind, count, span


def heads_of(blocks: Bytes) -> Heads:
    """The heads of blocks (n, 4096), as a view."""
    heads: Heads = blocks[:, :HEAD_BYTES].view(_HEAD_DTYPE)[:, 0]
    return heads


def find_batches(window: memoryview, segment_id: bytes) -> list[int]:
    """Offsets of the blocks in `window` that look like header blocks of this life of the segment."""
    blocks = len(window) // BLOCK
    heads = heads_of(np.frombuffer(window, np.uint8, blocks * BLOCK).reshape(blocks, BLOCK))
    rows = np.flatnonzero(heads["magic"] == _BATCH_WORD)
    if not len(rows):
        return []
    life = np.frombuffer(segment_id, np.uint8)
    return [int(row) * BLOCK for row in rows[(heads["id"][rows] == life).all(axis=1)]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The index at one moment. `segments` names, for each segment, the life it speaks of and where to scan on."""

    wall_us: int
    realms: tuple[Realm, ...]
    segments: npt.NDArray[np.void]
    records: Records


def pack_checkpoint(checkpoint: Checkpoint) -> list[bytes]:
    """Header block and body parts, to be written one after the other."""
    realms = np.array([(r.namespace, r.layout_tag) for r in checkpoint.realms], REALM_DTYPE)
    body = [realms.tobytes(), checkpoint.segments.tobytes(), checkpoint.records.tobytes()]
    state = xxhash.xxh3_128()
    for part in body:
        state.update(part)
    block = bytearray(BLOCK)
    _CHECKPOINT.pack_into(
        block, 0, _CHECKPOINT_MAGIC, FORMAT_VERSION, 0, len(realms), len(checkpoint.records), len(checkpoint.segments),
        0, checkpoint.wall_us, state.digest(),
    )  # fmt: skip
    return [_seal(block), *body]


def checkpoint_bytes(realms: int, segments: int, records: int) -> int:
    """Size of a checkpoint file."""
    return (
        BLOCK
        + realms * REALM_DTYPE.itemsize
        + segments * CHECKPOINT_SEGMENT_DTYPE.itemsize
        + records * CHECKPOINT_RECORD_BYTES
    )


def parse_checkpoint(content: memoryview) -> Checkpoint | Reject:
    """The checkpoint in a file's content, or why it is not used."""
    if len(content) < BLOCK:
        return Reject.TRUNCATED
    reject = _reject(content[:BLOCK], _CHECKPOINT_MAGIC)
    if reject is not None:
        return reject
    _, _, _, n_realms, n_records, n_segments, _, wall_us, digest = _CHECKPOINT.unpack_from(content, 0)
    size = checkpoint_bytes(n_realms, n_segments, n_records)
    if len(content) < size:
        return Reject.TRUNCATED
    if payload_digest(content[BLOCK:size]) != digest:
        return Reject.DIGEST
    at = BLOCK
    arrays: list[npt.NDArray[Any]] = []
    for dtype, count in (
        (REALM_DTYPE, n_realms),
        (CHECKPOINT_SEGMENT_DTYPE, n_segments),
        (CHECKPOINT_RECORD_DTYPE, n_records),
    ):
        arrays.append(np.frombuffer(content, dtype, count, at))
        at += count * dtype.itemsize
    realms = tuple(Realm(bytes(content[i : i + 16]), int(row["tag"])) for i, row in _realm_rows(arrays[0]))
    return Checkpoint(wall_us, realms, arrays[1], arrays[2])


def _realm_rows(rows: npt.NDArray[np.void]) -> list[tuple[int, Any]]:
    # The namespace is read from the content itself: numpy strips trailing zero bytes of an "S16".
    return [(BLOCK + index * REALM_DTYPE.itemsize, row) for index, row in enumerate(rows)]
