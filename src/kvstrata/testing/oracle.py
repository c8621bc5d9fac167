"""The oracle: the boundary by brute force, with plain sets, straight from the table of what a boundary consumes.

It shares no code with the planner: it tries each T from the limit down and asks for every single chunk. It is far too
slow for an engine and too simple to be wrong; the planner, the core and outside authors are tested against it. It
reads kinds only by their names and parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from kvstrata.layout.groups import Group, Layout


@dataclass(frozen=True, slots=True)
class OracleAnswer:
    """The largest boundary (the computed tokens if none) and per group the chunks that it consumes, ascending."""

    boundary: int
    load: tuple[tuple[int, ...], ...]


def oracle(
    layout: Layout,
    present: Sequence[Collection[int]],
    computed: int,
    total: int,
    *,
    limit: int | None = None,
    byte_limit: int | None = None,
) -> OracleAnswer:
    """The answer for the sets of present chunks, one per group."""
    if limit is None:
        limit = total if all(group.kind.name == "full" for group in layout.groups) else total - 1
    sets = [frozenset(chunks) for chunks in present]
    for boundary in range(limit, computed, -1):
        if boundary != limit and boundary % layout.alignment_tokens:
            continue
        load = fits(layout, sets, computed, boundary)
        if load is None or not any(load):
            continue
        size = sum(len(chunks) * group.chunk_bytes for chunks, group in zip(load, layout.groups, strict=True))
        if byte_limit is None or size <= byte_limit:
            return OracleAnswer(boundary, load)
    return OracleAnswer(computed, ((),) * len(layout.groups))


def fits(
    layout: Layout, present: Sequence[frozenset[int]], computed: int, boundary: int
) -> tuple[tuple[int, ...], ...] | None:
    """Per group the chunks that `boundary` consumes, or None if a group cannot stop there or lacks a chunk."""
    load = []
    for group, have in zip(layout.groups, present, strict=True):
        tokens = group.tokens_per_block * layout.blocks_per_chunk
        chunks = consumed_by(group, tokens, computed, boundary)
        if chunks is None or not have.issuperset(chunks):
            return None
        if group.drafter and next_chunk(tokens, boundary) not in have:
            return None
        load.append(tuple(chunks))
    return tuple(load)


def consumed_by(group: Group, tokens: int, computed: int, boundary: int) -> list[int] | None:
    """The chunks of `tokens` tokens that `boundary` consumes in this group; None if it cannot stop there."""
    values = group.kind.parameters
    match group.kind.name:
        case "full":
            return overlapping(computed, boundary, tokens)
        case "sliding_window":
            reach = int(values["window"]) - 1 + int(values["retained_extra_tokens"])
            return overlapping(max(computed, boundary - reach), boundary, tokens)
        case "chunked_local":
            attention_chunk = int(values["chunk_tokens"])
            begin = boundary // attention_chunk * attention_chunk
            return overlapping(max(computed, begin), boundary, tokens)
        case "recurrent":
            if values["mode"] == "none" or boundary % tokens:
                return None
            return [boundary // tokens - 1]
    raise AssertionError(f"the oracle does not know the kind {group.kind.name}")


def overlapping(begin: int, end: int, tokens: int) -> list[int]:
    """The chunks that hold a token of [begin, end)."""
    if begin >= end:
        return []
    return list(range(begin // tokens, (end - 1) // tokens + 1))


def next_chunk(tokens: int, boundary: int) -> int:
    """The first chunk that begins at or after `boundary`."""
    chunk = boundary // tokens
    return chunk if chunk * tokens >= boundary else chunk + 1


def completions(
    present: Sequence[Collection[int]], unknown: Sequence[Collection[int]]
) -> Iterator[list[frozenset[int]]]:
    """All ways in which the unknown chunks can turn out, 2**n of them."""
    flat = [(g, chunk) for g, chunks in enumerate(unknown) for chunk in chunks]
    for turn in product((False, True), repeat=len(flat)):
        sets = [set(chunks) for chunks in present]
        for (g, chunk), there in zip(flat, turn, strict=True):
            if there:
                sets[g].add(chunk)
        yield [frozenset(chunks) for chunks in sets]
