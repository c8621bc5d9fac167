"""Which engine blocks a load fills and a store reads. Pure: block tables in, copies out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from kvstrata.core.messages import LoadPlan, StorePlan
from kvstrata.integrations.vllm.metadata import GroupCopy
from kvstrata.integrations.vllm.shapes import EngineShape

NULL_BLOCK = 0
"""The engine's block that stands for "not needed"; nothing is ever read from or written to it."""


class Block(Protocol):
    """The part of an engine's block that is looked at."""

    block_id: int
    is_null: bool

    @property
    def block_hash(self) -> object:
        """What the block is known by in the engine's own prefix cache; None if its content is nobody else's."""
        ...


def load_copies(shape: EngineShape, plan: LoadPlan, tables: Sequence[Sequence[Block]]) -> list[GroupCopy]:
    """The blocks that a load fills, per group; `tables` are the request's blocks by the engine's group numbers.

    Only blocks that this request was given for [computed, boundary): none below, no null block, none that carries a
    hash already.
    """
    copies, at = [], 0
    for g, (lo, hi) in enumerate(plan.ranges):
        copy = GroupCopy(g)
        offsets = plan.offsets[at : at + hi - lo].tolist()
        at += hi - lo
        table = tables[shape.groups[g].index]
        for chunk, offset in zip(range(lo, hi), offsets, strict=True):
            for inside, block in _fillable(shape, g, chunk, plan, table):
                copy.blocks.append(block.block_id)
                copy.chunks.append(offset)
                copy.inside.append(inside)
        if copy.blocks:
            copies.append(copy)
    return copies


def _fillable(
    shape: EngineShape, g: int, chunk: int, plan: LoadPlan, table: Sequence[Block]
) -> Iterable[tuple[int, Block]]:
    """The blocks of one chunk that may be written, with their place in the part of the chunk that is kept."""
    group = shape.groups[g]
    first, span = chunk * shape.blocks_per_chunk, range(shape.blocks_per_chunk)
    for j in span[-1:] if group.recurrent else span:
        index = first + j
        begin = index * group.tokens_per_block
        if begin < plan.computed or begin >= plan.boundary or index >= len(table):
            continue
        block = table[index]
        if not block.is_null and block.block_id != NULL_BLOCK and block.block_hash is None:
            yield (0 if group.recurrent else j), block


def misses(shape: EngineShape, plan: LoadPlan, copies: Sequence[GroupCopy]) -> int | None:
    """A group whose state, or newest block, the load would leave unwritten; None if all is well.

    A boundary needs the block that holds its last token in every group that consumes anything.
    """
    filled = {copy.group: len(copy.blocks) for copy in copies}
    for g, (lo, hi) in enumerate(plan.ranges):
        if hi > lo and not filled.get(g):
            return g
    return None


def store_sources(
    shape: EngineShape,
    g: int,
    chunk: int,
    table: Sequence[int],
    states: Mapping[tuple[int, int], int],
) -> list[int] | None:
    """The engine's blocks of a chunk, whole and the request's own; None if one of them is not.

    `states`: blocks of states that the engine handed off in this step, by (group, chunk).
    """
    group, per_chunk = shape.groups[g], shape.blocks_per_chunk
    if group.recurrent:
        if shape.states_handed_off:
            block = states.get((g, chunk), NULL_BLOCK)
            return None if block == NULL_BLOCK else [block]
        table = table[(chunk + 1) * per_chunk - 1 : (chunk + 1) * per_chunk]
        per_chunk = 1
    else:
        table = table[chunk * per_chunk : (chunk + 1) * per_chunk]
    if len(table) < per_chunk or NULL_BLOCK in table:
        return None
    return list(table)


def store_copies(plan: StorePlan, sources: Callable[[int, int], Sequence[int]], groups: int) -> list[GroupCopy]:
    """The copies of a store; `sources` gives the blocks of (group, chunk)."""
    copies = [GroupCopy(g) for g in range(groups)]
    for (g, chunk), offset in zip(plan.chunks, plan.offsets.tolist(), strict=True):
        for inside, block in enumerate(sources(g, chunk)):
            copies[g].blocks.append(block)
            copies[g].chunks.append(offset)
            copies[g].inside.append(inside)
    return [copy for copy in copies if copy.blocks]
