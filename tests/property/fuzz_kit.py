"""Mutations of valid bytes for the fuzz tests, drawn by Hypothesis: flips, cuts, splices, numbers at their extremes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hypothesis import strategies as st

EXTREMES = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFF_FFFF, 0xFFFF_FFFF, 1 << 32, (1 << 62) + 1, (1 << 63) - 1, 1 << 63,
            (1 << 64) - 1)  # fmt: skip


def mutate(data: bytes, draw: Callable[[st.SearchStrategy[int]], int]) -> bytes:
    """One change of `data`. `draw` draws from a strategy of integers."""
    out = bytearray(data)

    def below(bound: int) -> int:
        return draw(st.integers(0, max(bound - 1, 0)))

    match draw(st.integers(0, 6)):
        case 0 if out:  # a bit
            out[below(len(out))] ^= 1 << below(8)
        case 1 if out:  # a byte
            out[below(len(out))] = below(256)
        case 2:  # cut
            del out[below(len(out) + 1) :]
        case 3 if out:  # a number at an extreme, where numbers may stand
            width = (1, 2, 4, 8)[below(4)]
            at = below(len(out))
            value = EXTREMES[below(len(EXTREMES))] & ((1 << 8 * width) - 1)
            out[at : at + width] = value.to_bytes(width, "little" if below(2) else "big")
        case 4 if out:  # a piece of itself elsewhere
            start, target, size = below(len(out)), below(len(out)), below(64) + 1
            piece = bytes(out[start : start + size])
            if below(2):
                out[target:target] = piece
            else:
                out[target : target + len(piece)] = piece
        case 5 if out:  # a zeroed stretch
            at = below(len(out))
            size = min(below(512) + 1, len(out) - at)
            out[at : at + size] = bytes(size)
        case _:  # something more
            at = below(len(out) + 1)
            out[at:at] = bytes(below(256) for _ in range(below(16)))
    return bytes(out)


@st.composite
def mutations(draw: st.DrawFn, valid: bytes, most: int = 4) -> bytes:
    """`valid` after one to `most` changes; now and then random bytes instead."""
    if draw(st.integers(0, 19)) == 0:
        return draw(st.binary(max_size=300))
    data = valid
    for _ in range(draw(st.integers(1, most))):
        data = mutate(data, lambda strategy: draw(strategy))
    return data


@contextmanager
def little_memory(most: int = 4 << 20) -> Iterator[None]:
    """What is done inside takes at most `most` bytes more at any moment, whatever lengths the input states."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        yield
        _, peak = tracemalloc.get_traced_memory()
        assert peak - before <= most, f"{peak - before} bytes were taken"
    finally:
        tracemalloc.stop()
