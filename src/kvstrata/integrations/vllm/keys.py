"""Chunk keys from the engine's block hashes."""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.integrations.vllm.shapes import EngineShape
from kvstrata.layout.namespace import scoped_hash
from kvstrata.types import OffloadKey, make_key


class KeyChain:
    """The keys of one request's whole chunks, per group, as far as its blocks are hashed."""

    __slots__ = ("_counts", "_hashes_per_chunk", "_scope")

    def __init__(self, shape: EngineShape, scope: bytes) -> None:
        self._hashes_per_chunk = tuple(
            group.tokens_per_block * shape.blocks_per_chunk // shape.tokens_per_hash for group in shape.groups
        )
        self._counts = [0] * len(shape.groups)
        self._scope = scope

    @property
    def counts(self) -> Sequence[int]:
        """Keys given out so far, per group."""
        return self._counts

    def take(self, block_hashes: Sequence[bytes]) -> list[list[OffloadKey]] | None:
        """Keys of chunks that became whole since the last call, per group; None if there are none."""
        total = len(block_hashes)
        if all(total // per < count + 1 for per, count in zip(self._hashes_per_chunk, self._counts, strict=True)):
            return None
        fresh: list[list[OffloadKey]] = []
        for g, per in enumerate(self._hashes_per_chunk):
            first, last = self._counts[g], total // per
            fresh.append(
                [
                    make_key(scoped_hash(bytes(block_hashes[(i + 1) * per - 1]), self._scope), g)
                    for i in range(first, last)
                ]
            )
            self._counts[g] = max(first, last)
        return fresh
