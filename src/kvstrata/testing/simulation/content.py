"""What the bytes of every block must be: each page names the tokens, layer, rank and epoch that it was computed for.

A page is one 16-byte unit, repeated: four random bytes (computing the same tokens twice gives other low bits), then a
digest of those and of what the page is for. So a page is checked without remembering who wrote it when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from kvstrata.integrations.vllm.shapes import EngineShape
from kvstrata.types import OffloadKey, make_key

UNIT = 16
_SALT = 4


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """One page of a chunk in primary: where it lies in the chunk, how long it is, and what it is for."""

    at: int
    size: int
    meaning: bytes


class Content:
    """Makes and checks the pages of one layout; `epoch` is part of what a page is for."""

    def __init__(self, shape: EngineShape) -> None:
        self.shape = shape
        self.epoch = 0
        self._salt = 0
        self._chunks: dict[OffloadKey, tuple[bytes, ...]] = {}
        """Per key the block hashes of the blocks that are kept of the chunk."""
        self._parts: dict[OffloadKey, list[ChunkPart]] = {}
        self._good: dict[OffloadKey, tuple[bytes, int]] = {}
        """Per key the last bytes of its chunk that were found right, and for which epoch."""
        self._good_pages: dict[tuple[bytes, int, int, int], tuple[bytes, int]] = {}
        """The same by page: block hash, group, layer and rank."""

    # -- keys

    def next_hash(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """The hash of the tokens after `parent`."""
        digest = xxhash.xxh3_128_digest(parent + np.array(tokens, np.int32).tobytes())
        return digest + digest[::-1]

    def keys_of(self, hashes: Sequence[bytes]) -> list[list[OffloadKey]]:
        """Keys of the whole chunks of a prompt with these hashes, per group; what they must hold is noted."""
        return self.note(hashes, 0)

    def note(self, hashes: Sequence[bytes], known: int) -> list[list[OffloadKey]]:
        """The same for the chunks that end behind the `known` first hashes."""
        shape, out = self.shape, []
        for g, group in enumerate(shape.groups):
            per_block = group.tokens_per_block // shape.tokens_per_hash
            per_chunk = per_block * shape.blocks_per_chunk
            keys = []
            for chunk in range(known // per_chunk, len(hashes) // per_chunk):
                end = (chunk + 1) * per_chunk
                key = make_key(hashes[end - 1], g)
                keys.append(key)
                if key not in self._chunks:
                    blocks = range(end - per_block * shape.stored_blocks(g), end, per_block)
                    self._chunks[key] = tuple(hashes[b + per_block - 1] for b in blocks)
            out.append(keys)
        return out

    def knows(self, key: OffloadKey) -> bool:
        """Whether any prompt has this chunk."""
        return key in self._chunks

    # -- pages

    def page(self, block_hash: bytes, g: int, layer: int, rank: int, size: int) -> bytes:
        """Fresh bytes for the block that ends at `block_hash`."""
        self._salt += 1
        salt = self._salt.to_bytes(_SALT, "big")
        unit = (
            salt + xxhash.xxh3_128_digest(salt + self.meaning(block_hash, g, layer, rank, self.epoch))[: UNIT - _SALT]
        )
        return (unit * (size // UNIT + 1))[:size]

    def meaning(self, block_hash: bytes, g: int, layer: int, rank: int, epoch: int) -> bytes:
        """What a page is for."""
        rank = 0 if self.shape.groups[g].replicated else rank
        return block_hash + bytes((g, layer, rank)) + epoch.to_bytes(4, "big")

    def right_page(self, page: bytes, block_hash: bytes, g: int, layer: int, rank: int) -> bool:
        """Whether a page of the accelerator is what belongs there now."""
        name = block_hash, g, layer, rank
        if self._good_pages.get(name) == (page, self.epoch):
            return True
        if not self.right(page, self.meaning(*name, self.epoch)):
            return False
        self._good_pages[name] = page, self.epoch
        return True

    def right(self, page: bytes, meaning: bytes) -> bool:
        """Whether a page is whole and for this."""
        unit = page[:UNIT]
        return (
            unit[_SALT:] == xxhash.xxh3_128_digest(unit[:_SALT] + meaning)[: UNIT - _SALT]
            and page == (unit * (len(page) // UNIT + 1))[: len(page)]
        )

    # -- chunks as they lie in primary and in tiers

    def _parts_of(self, key: OffloadKey) -> list[ChunkPart]:
        found = self._parts.get(key)
        if found is None:
            g = int.from_bytes(key[-4:], "big")
            group, at, found = self.shape.groups[g], 0, []
            for rank in range(self.shape.parts(g)):
                for block_hash in self._chunks[key]:
                    for number, layer in enumerate(group.layers):
                        meaning = self.meaning(block_hash, g, number, rank, 0)[:-4]
                        found.append(ChunkPart(at, layer.page, meaning))
                        at += layer.page
            self._parts[key] = found
        return found

    def chunk(self, key: OffloadKey) -> bytes:
        """Right bytes of a whole chunk, as if an engine had computed and stored it."""
        epoch, out = self.epoch.to_bytes(4, "big"), []
        for part in self._parts_of(key):
            self._salt += 1
            salt = self._salt.to_bytes(_SALT, "big")
            unit = salt + xxhash.xxh3_128_digest(salt + part.meaning + epoch)[: UNIT - _SALT]
            out.append((unit * (part.size // UNIT + 1))[: part.size])
        return b"".join(out)

    def chunk_fault(self, key: OffloadKey, payload: bytes, epoch: int | None = None) -> str:
        """What is wrong with the bytes of a chunk; empty if nothing is."""
        if key not in self._chunks:
            return "nobody has computed this key"
        epoch = self.epoch if epoch is None else epoch
        if self._good.get(key) == (payload, epoch):
            return ""
        tail = epoch.to_bytes(4, "big")
        end = 0
        for part in self._parts_of(key):
            end = part.at + part.size
            if not self.right(payload[part.at : end], part.meaning + tail):
                return f"wrong bytes at {part.at}"
        if len(payload) != end:
            return f"{len(payload)} bytes, not {end}"
        self._good[key] = payload, epoch
        return ""
