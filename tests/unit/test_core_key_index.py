"""Keys of primary: what lies in pieces is found as what is looked up one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstrata.core.arrays import slot_array
from kvstrata.core.index import KeyIndex


def scattered(draw: random.Random, keys: list[bytes]) -> KeyIndex:
    """An index whose slots are runs of neighbours of random lengths, in random places."""
    index, pieces, at = KeyIndex(), [], 0
    while at < len(keys):
        size = draw.choice((1, 2, 7, 8, 9, 20))
        pieces.append(keys[at : at + size])
        at += size
    draw.shuffle(pieces)
    slot = 0
    for piece in pieces:
        slot += draw.choice((0, 0, 3))
        slots = np.arange(slot, slot + len(piece))
        slot += len(piece)
        index.enter(piece, slots, slot)
    return index


@pytest.mark.parametrize("seed", range(100))
def test_pieces_are_found_like_single_keys(seed: int) -> None:
    draw = random.Random(seed)
    keys = [b"key %d" % i for i in range(60)]
    index = scattered(draw, keys)
    gone = draw.sample(keys, draw.choice((0, 0, 1, 20)))
    index.forget(slot_array(index.slots[key] for key in gone))
    for _ in range(20):
        first, count = draw.randrange(60), draw.randrange(60)
        asked = [bytes(bytearray(key)) for key in keys[first : first + count]]  # equal, and not the same objects
        if draw.random() < 0.2:
            asked += draw.choices(keys, k=3)
        assert index.find(asked).tolist() == [index.slots.get(key, -1) for key in asked]
        assert index.find(tuple(asked)).tolist() == [index.slots.get(key, -1) for key in asked]


def test_one_piece_is_recognised() -> None:
    keys = [b"key %d" % i for i in range(40)]
    index = KeyIndex()
    index.enter(keys, np.arange(5, 45), 45)
    assert index._in_pieces(keys) is not None
    assert index.has(np.arange(5, 45), keys)
    index.forget(slot_array([20]))
    assert index._in_pieces(keys) is None
    assert not index.has(np.arange(5, 45), keys)
