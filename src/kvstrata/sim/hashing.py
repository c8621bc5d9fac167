"""Block hashes and chunk keys of a trace's requests; `docs/replay.md` has the rule.

The hash of the block that ends before token `e` is BLAKE2b-256 over a tag, the trace's source, the seed, the length
of its runs, the id of the run that holds token `e-1`, and the offset of that token in the run. An id stands for its
tokens and everything before them, so equal hashes mean equal prefixes, whatever the size of a block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvstrata.sim.traces import Request, Trace
from kvstrata.types import BLOCK_HASH_BYTES, OffloadKey

_TAG = b"kvstrata replay block hash 1"


class BlockHasher:
    """Makes the keys of a trace's requests. Only chunks that lie whole within the prompt have one."""

    def __init__(self, trace: Trace, seed: int) -> None:
        source = trace.source.encode()
        self._tokens_per_id = trace.tokens_per_id
        self._base = hashlib.blake2b(digest_size=BLOCK_HASH_BYTES)
        self._base.update(_TAG + len(source).to_bytes(4, "big") + source)
        self._base.update(seed.to_bytes(8, "big", signed=True) + trace.tokens_per_id.to_bytes(4, "big"))

    def keys(self, request: Request, tokens_per_chunk: Sequence[int]) -> list[list[OffloadKey]]:
        """The keys of each group's whole chunks, in token order."""
        hashes: dict[int, list[bytes]] = {}
        for tokens in tokens_per_chunk:
            if tokens not in hashes:
                hashes[tokens] = self._hashes(request, tokens)
        keys = []
        for group, tokens in enumerate(tokens_per_chunk):
            suffix = group.to_bytes(4, "big")
            keys.append([block_hash + suffix for block_hash in hashes[tokens]])
        return keys

    def _hashes(self, request: Request, tokens: int) -> list[bytes]:
        """The hash of every block that ends a chunk of `tokens` tokens."""
        last = np.arange(1, request.prompt_tokens // tokens + 1, dtype=np.int64) * tokens - 1
        places = np.empty((len(last), 2), dtype=">u8")
        places[:, 0] = request.ids[last // self._tokens_per_id]
        places[:, 1] = last % self._tokens_per_id
        packed = places.tobytes()
        out = []
        copy = self._base.copy
        for start in range(0, len(packed), 16):
            state = copy()
            state.update(packed[start : start + 16])
            out.append(state.digest())
        return out
