"""What a copy between accelerator and primary is made of: which blocks of a group, and where they lie in primary.

The bytes of one block of a group are, one behind the other, the pages of the group's layers in the order of the
group. A rank's part of a chunk is its blocks, one behind the other; a chunk in primary is the parts of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvstrata.types import I64


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks of one group; block `blocks[i]` has its bytes at `places[i]` in primary."""

    group: int
    blocks: I64
    places: I64


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks and places that go up in constant steps: one strided copy moves them all."""

    block: int
    place: int
    count: int
    block_step: int
    place_step: int


@dataclass(frozen=True, slots=True)
class Done:
    """A copy that has ended. `ok` False: its target is not to be used."""

    job_id: int
    ok: bool
    size: int = 0
    seconds: float = 0.0


def runs(piece: Piece) -> Iterator[Run]:
    """The piece as few runs, in order of blocks; steps are at least 1."""
    if len(piece.blocks) == 1:
        yield Run(int(piece.blocks[0]), int(piece.places[0]), 1, 1, 1)
        return
    order = np.argsort(piece.blocks, kind="stable")
    blocks, places = piece.blocks[order], piece.places[order]
    block_steps, place_steps = np.diff(blocks), np.diff(places)
    at, count = 0, len(blocks)
    while at < count:
        end = at + 1
        if end < count and block_steps[at] > 0 and place_steps[at] > 0:
            same = (block_steps[at:] == block_steps[at]) & (place_steps[at:] == place_steps[at])
            breaks = np.flatnonzero(~same)
            end = at + 1 + (int(breaks[0]) if len(breaks) else len(same))
        several = end - at > 1
        yield Run(
            int(blocks[at]),
            int(places[at]),
            end - at,
            int(block_steps[at]) if several else 1,
            int(place_steps[at]) if several else 1,
        )
        at = end


def unit(sizes: Iterable[int], most: int = 8) -> int:
    """The widest element, in bytes, that all of these sizes and offsets are whole multiples of."""
    return math.gcd(most, *sizes)


def total_blocks(pieces: Sequence[Piece]) -> int:
    """Blocks of all pieces together."""
    return sum(len(piece.blocks) for piece in pieces)
