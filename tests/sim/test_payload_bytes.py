"""Chunk bytes made from keys: any other bytes are seen, at every size."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from kvstrata.sim.payload import Payloads, scaled_bytes
from kvstrata.types import make_key

KEYS = [make_key(bytes([n]) * 32, n % 3) for n in range(40)]


@pytest.mark.parametrize("length", [1, 7, 8, 64, 100, 4096, 300_001])
def test_what_was_written_is_right_and_anything_else_is_not(length: int) -> None:
    payloads = Payloads(300_001)
    keys = KEYS[:6]
    offsets = [3 + n * (length + 5) for n in range(len(keys))]
    region = np.zeros(offsets[-1] + length + 9, dtype=np.uint8)
    digests = payloads.write(region, keys, offsets, [length] * len(keys))
    assert payloads.wrong(region, keys, offsets, [length] * len(keys)) == []
    for key, offset in zip(keys, offsets, strict=True):
        there = region[offset : offset + length].tobytes()
        assert there == payloads.make(key, length)
        assert digests[key] == xxhash.xxh3_128_digest(there)
    region[offsets[2] + length - 1] ^= 1
    assert payloads.wrong(region, keys, offsets, [length] * len(keys)) == [keys[2]]


def test_bytes_of_another_key_place_or_nobody_are_wrong() -> None:
    payloads = Payloads(1024)
    region = np.zeros(4096, dtype=np.uint8)
    payloads.write(region, KEYS[:2], [0, 1024], [1024, 1024])
    assert payloads.wrong(region, [KEYS[1]], [0], [1024]) == [KEYS[1]]
    assert payloads.wrong(region, [KEYS[0]], [8], [512]) == [KEYS[0]]
    assert payloads.wrong(region, [KEYS[0]], [2048], [1024]) == [KEYS[0]]


def test_lengths_may_be_mixed_in_one_batch() -> None:
    payloads = Payloads(2048)
    lengths = [64, 2048, 100, 64]
    offsets = [0, 64, 2112, 2212]
    region = np.zeros(2300, dtype=np.uint8)
    assert set(payloads.write(region, KEYS[:4], offsets, lengths)) == set(KEYS[:4])
    assert payloads.wrong(region, KEYS[:4], offsets, lengths) == []


@pytest.mark.parametrize(
    ("real", "scale", "stored"),
    [
        (16 << 20, 1 / 1024, 16_384),
        (65_536, 1 / 1024, 64),
        (1000, 1 / 1024, 64),
        (48, 1 / 1024, 48),
        (1000, 1.0, 1000),
        (100_000, 0.5, 50_000),
        (100_001, 0.5, 50_000),
    ],
)
def test_the_scale_shrinks_payloads_but_never_below_64_bytes(real: int, scale: float, stored: int) -> None:
    assert scaled_bytes(real, scale) == stored
