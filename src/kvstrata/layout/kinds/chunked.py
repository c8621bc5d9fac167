"""Chunked local attention: a token attends to the tokens before it in its own attention chunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvstrata.layout.kinds.base import ceil_div, multiples, require_count
from kvstrata.types import I64, Bool


@dataclass(frozen=True, slots=True)
class ChunkedLocal:
    """Consumes the chunks that overlap [max(C, floor(T/a)*a), T), a = `chunk_tokens` being the attention chunk.

    Nothing is consumed when T is a multiple of a. The attention chunk and the chunk of offload are two lengths that
    need not divide each other.
    """

    chunk_tokens: int

    name: ClassVar[str] = "chunked_local"
    prefix: ClassVar[bool] = False
    stores_all: ClassVar[bool] = True
    may_draft: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_count("chunk_tokens", self.chunk_tokens, 1)

    @property
    def free_step(self) -> int:
        return self.chunk_tokens

    @property
    def parameters(self) -> Mapping[str, int | str]:
        return {"chunk_tokens": self.chunk_tokens}

    def step(self, tokens_per_chunk: int) -> int:
        return 1

    def allowed(self, boundaries: I64, tokens_per_chunk: int) -> Bool:
        return np.ones(len(boundaries), dtype=np.bool_)

    def consumed(self, boundaries: I64, computed: int, tokens_per_chunk: int) -> tuple[I64, I64]:
        hi = ceil_div(boundaries, tokens_per_chunk)
        first = np.maximum(boundaries // self.chunk_tokens * self.chunk_tokens, computed)
        return np.where(first < boundaries, first // tokens_per_chunk, hi), hi

    def consumed_at(self, boundary: int, computed: int, tokens_per_chunk: int) -> tuple[int, int]:
        hi = -(-boundary // tokens_per_chunk)
        first = max(boundary // self.chunk_tokens * self.chunk_tokens, computed)
        return first // tokens_per_chunk if first < boundary else hi, hi

    def earliest(self, chunks: I64, computed: int, tokens_per_chunk: int) -> I64:
        begins = chunks * tokens_per_chunk
        return np.where(begins <= computed, 0, ceil_div(begins, self.chunk_tokens) * self.chunk_tokens)

    def edges(self, low: int, high: int, tokens_per_chunk: int) -> I64:
        turns = multiples(self.chunk_tokens, low, high + 1)
        # One before each multiple too: at the multiple itself nothing is consumed, which other groups may not allow.
        both = np.concatenate([multiples(tokens_per_chunk, low, high), turns, turns - 1])
        return np.unique(both[(both > low) & (both <= high)])
