"""Full attention: every token attends to all tokens before it (MHA, GQA, MLA)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvstrata.layout.kinds.base import NEVER, ceil_div, multiples
from kvstrata.types import I64, Bool


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Consumes all chunks that overlap [C, T); a partly used last chunk is consumed whole."""

    name: ClassVar[str] = "full"
    prefix: ClassVar[bool] = True
    stores_all: ClassVar[bool] = True
    may_draft: ClassVar[bool] = True
    free_step: ClassVar[int] = 0

    @property
    def parameters(self) -> Mapping[str, int | str]:
        return {}

    def step(self, tokens_per_chunk: int) -> int:
        return 1

    def allowed(self, boundaries: I64, tokens_per_chunk: int) -> Bool:
        return np.ones(len(boundaries), dtype=np.bool_)

    def consumed(self, boundaries: I64, computed: int, tokens_per_chunk: int) -> tuple[I64, I64]:
        hi = ceil_div(boundaries, tokens_per_chunk)
        return np.full_like(hi, computed // tokens_per_chunk), hi

    def consumed_at(self, boundary: int, computed: int, tokens_per_chunk: int) -> tuple[int, int]:
        return computed // tokens_per_chunk, -(-boundary // tokens_per_chunk)

    def earliest(self, chunks: I64, computed: int, tokens_per_chunk: int) -> I64:
        return np.where(chunks * tokens_per_chunk <= computed, 0, NEVER)

    def edges(self, low: int, high: int, tokens_per_chunk: int) -> I64:
        return multiples(tokens_per_chunk, low, high)
