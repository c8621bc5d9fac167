"""Paged accelerator memory: one pool of blocks for all groups, with reuse, and the engine's own prefix cache.

All groups share the bytes of a block, so a block that is handed to another group is overwritten by it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstrata.integrations.vllm.shapes import EngineShape
from kvstrata.testing.oracle import consumed_by
from kvstrata.testing.simulation.content import Content
from kvstrata.testing.world_checks import demand

NULL = 0
U8 = npt.NDArray[np.uint8]


@dataclass(slots=True)
class EngineBlock:
    """A block as the engine shows it."""

    block_id: int
    is_null: bool
    block_hash: object


class Memory:
    """The bytes of all blocks on each rank."""

    def __init__(self, shape: EngineShape, content: Content, blocks: int) -> None:
        self.shape = shape
        self.content = content
        layers = max(len(group.layers) for group in shape.groups)
        width = max(layer.page for group in shape.groups for layer in group.layers)
        self.tensors = [[np.zeros((blocks, width), np.uint8) for _ in range(layers)] for _ in range(shape.ranks)]

    def views(self, rank: int) -> list[list[U8]]:
        """Per group and layer the blocks of one rank, as copiers take them."""
        return [
            [self.tensors[rank][i][:, : layer.page] for i, layer in enumerate(group.layers)]
            for group in self.shape.groups
        ]

    def page(self, rank: int, g: int, layer: int, block: int) -> bytes:
        """The bytes of one layer of a block."""
        return self.tensors[rank][layer][block, : self.shape.groups[g].layers[layer].page].tobytes()

    def compute(self, g: int, block: int, block_hash: bytes) -> None:
        """A forward pass fills the block that ends at `block_hash`, on every rank."""
        for rank, tensors in enumerate(self.tensors):
            for number, layer in enumerate(self.shape.groups[g].layers):
                page = self.content.page(block_hash, g, number, rank, layer.page)
                tensors[number][block, : layer.page] = np.frombuffer(page, np.uint8)

    def scribble(self, blocks: Sequence[int], value: int) -> None:
        """Blocks are being written; what they held is gone."""
        if not blocks:
            return
        for tensors in self.tensors:
            for tensor in tensors:
                tensor[blocks[0] if len(blocks) == 1 else list(blocks)] = value

    def demand_right(self, what: str, g: int, block: int, block_hash: bytes) -> None:
        """A computation reads this block: it must hold what belongs there, on every rank."""
        demand(block != NULL, f"{what}: group {g} reads a block that it does not have")
        right = self.content.right_page
        for rank, tensors in enumerate(self.tensors):
            for number, layer in enumerate(self.shape.groups[g].layers):
                if not right(tensors[number][block].tobytes()[: layer.page], block_hash, g, number, rank):
                    raise AssertionError(
                        f"{what}: group {g} reads wrong bytes in block {block}, layer {number}, rank {rank}"
                    )


class Pool:
    """Which blocks are free, owned, or free and still cached."""

    def __init__(self, shape: EngineShape, blocks: int) -> None:
        self.shape = shape
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self.owners: dict[int, int] = {}
        self.cached: dict[tuple[int, bytes], int] = {}
        self.names: dict[int, tuple[int, bytes]] = {}
        self.version = 0
        sizes = [group.tokens_per_block for group in shape.groups]
        self._step = math.lcm(*sizes)
        self._groups = shape.layout().groups

    def take(self, count: int) -> list[int] | None:
        """Blocks for a new owner, the longest unused first; None if there are too few."""
        if count > len(self.free):
            return None
        out = []
        for _ in range(count):
            block, _ = self.free.popitem(last=False)
            self._forget(block)
            self.owners[block] = 1
            out.append(block)
        return out

    def _forget(self, block: int) -> None:
        name = self.names.pop(block, None)
        if name is not None:
            del self.cached[name]
            self.version += 1

    def refer(self, block: int) -> None:
        """One more owner of a cached block."""
        self.free.pop(block, None)
        self.owners[block] = self.owners.get(block, 0) + 1

    def give(self, blocks: Sequence[int]) -> None:
        """An owner is gone; cached blocks stay cached until they are taken."""
        for block in blocks:
            if block == NULL:
                continue
            self.owners[block] -= 1
            if not self.owners[block]:
                del self.owners[block]
                self.free[block] = None
                if block not in self.names:
                    self.free.move_to_end(block, last=False)

    def cache(self, g: int, block: int, block_hash: bytes) -> None:
        """The block is whole, and found under its hash from now on."""
        if block != NULL and block not in self.names and (g, block_hash) not in self.cached:
            self.names[block] = (g, block_hash)
            self.cached[(g, block_hash)] = block
            self.version += 1

    def clear(self) -> None:
        """Nothing is cached any more."""
        self.cached.clear()
        self.names.clear()
        self.version += 1

    def computed(self, hashes: Sequence[bytes], total: int) -> int:
        """The most tokens, below `total`, that the engine has itself of a prompt with these hashes."""
        if not self.cached:
            return 0
        for boundary in range((total - 1) // self._step * self._step, 0, -self._step):
            if all(self._has(g, boundary, hashes) for g in range(len(self._groups))):
                return boundary
        return 0

    def _has(self, g: int, boundary: int, hashes: Sequence[bytes]) -> bool:
        group = self.shape.groups[g]
        needed = consumed_by(self._groups[g], group.tokens_per_block, 0, boundary)
        per = group.tokens_per_block // self.shape.tokens_per_hash
        return needed is not None and all((g, hashes[(i + 1) * per - 1]) in self.cached for i in needed)

    def shown(self, block: int) -> EngineBlock:
        """The block as the engine shows it."""
        return EngineBlock(block, block == NULL, self.names.get(block))
