"""Chunk bytes made from the chunk's key: written on store, checked on load.

Word j (8 bytes, little endian) of a chunk is `mark(key) + pattern[j]` modulo 2**64, where `mark` is xxh3-64 of the key
and `pattern` is one fixed pseudo-random sequence. So bytes of another key, of another place in the chunk, of a shorter
chunk or of nobody differ in nearly every word, and making a batch of them is one addition per word.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvstrata.types import OffloadKey

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]

WORD = 8
MIN_PAYLOAD_BYTES = 64
"""No payload scale shrinks a chunk below this."""
_PATTERN_SEED = 0x6B767374
_BATCH_BYTES = 1 << 20
"""Most bytes that one batch makes at a time, so that they are still in the processor's cache when they are copied."""


def scaled_bytes(real_bytes: int, scale: float) -> int:
    """Payload bytes of a chunk of `real_bytes` at `scale`: whole words, never below 64 bytes unless it is smaller."""
    shrunk = int(real_bytes * scale) // WORD * WORD
    return min(real_bytes, max(MIN_PAYLOAD_BYTES, shrunk)) if scale < 1.0 else real_bytes


class Payloads:
    """Writes and checks chunk bytes in place, many chunks of any lengths at a time."""

    def __init__(self, largest: int) -> None:
        words = -(-max(largest, 1) // WORD)
        self._pattern: U64 = np.random.Generator(np.random.PCG64(_PATTERN_SEED)).integers(
            0, 1 << 64, size=words, dtype=np.uint64
        )

    def make(self, key: OffloadKey, length: int) -> bytes:
        """The bytes of one chunk."""
        return bytes(self._rows([key], length)[0])

    def write(
        self, region: U8, keys: Sequence[OffloadKey], offsets: Sequence[int], lengths: Sequence[int]
    ) -> dict[OffloadKey, bytes]:
        """Write each chunk into its place of `region`; the xxh3-128 digest of each, made while the bytes are hot."""
        digests: dict[OffloadKey, bytes] = {}
        digest = xxhash.xxh3_128_digest
        for some, starts, length in _batches(keys, offsets, lengths):
            rows = self._rows(some, length)
            for key, row, start in zip(some, rows, starts, strict=True):
                region[start : start + length] = row
                digests[key] = digest(row)
        return digests

    def wrong(
        self, region: U8, keys: Sequence[OffloadKey], offsets: Sequence[int], lengths: Sequence[int]
    ) -> list[OffloadKey]:
        """The keys whose place in `region` holds other bytes than theirs, compared byte for byte."""
        bad: list[OffloadKey] = []
        for some, starts, length in _batches(keys, offsets, lengths):
            rows = self._rows(some, length)
            found = np.empty_like(rows)
            for place, start in enumerate(starts):
                found[place] = region[start : start + length]
            equal = (found == rows).all(axis=1)
            if not equal.all():
                bad += [key for key, same in zip(some, equal, strict=True) if not same]
        return bad

    def _rows(self, keys: Sequence[OffloadKey], length: int) -> U8:
        """One row of `length` bytes per key."""
        mark = xxhash.xxh3_64_intdigest
        marks = np.fromiter((mark(key) for key in keys), dtype=np.uint64, count=len(keys))
        words = np.add.outer(marks, self._pattern[: -(-length // WORD)])
        return words.astype("<u8", copy=False).view(np.uint8)[:, :length]


def _batches(
    keys: Sequence[OffloadKey], offsets: Sequence[int], lengths: Sequence[int]
) -> list[tuple[list[OffloadKey], list[int], int]]:
    """Chunks of equal length together, in pieces of about `_BATCH_BYTES`."""
    by_length: dict[int, tuple[list[OffloadKey], list[int]]] = {}
    for key, offset, length in zip(keys, offsets, lengths, strict=True):
        some, starts = by_length.setdefault(int(length), ([], []))
        some.append(key)
        starts.append(int(offset))
    out = []
    for length, (some, starts) in by_length.items():
        step = max(1, _BATCH_BYTES // max(length, 1))
        for first in range(0, len(some), step):
            out.append((some[first : first + step], starts[first : first + step], length))
    return out
