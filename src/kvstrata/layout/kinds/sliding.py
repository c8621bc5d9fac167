"""Sliding-window attention: a token attends to itself and the `window - 1` tokens before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvstrata.layout.kinds.base import ceil_div, multiples, require_count
from kvstrata.types import I64, Bool


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Consumes the chunks that overlap [max(C, T - (window - 1) - retained_extra), T).

    `retained_extra` is history, in tokens, that speculative modules keep beyond the window; the same number rules
    stores and loads.
    """

    window: int
    retained_extra: int = 0

    name: ClassVar[str] = "sliding_window"
    prefix: ClassVar[bool] = False
    stores_all: ClassVar[bool] = False
    may_draft: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_count("window", self.window, 1)
        require_count("retained_extra_tokens", self.retained_extra, 0)

    @property
    def reach(self) -> int:
        """How many tokens before T are consumed."""
        return self.window - 1 + self.retained_extra

    @property
    def free_step(self) -> int:
        # A window of one token looks at nothing that came before.
        return 0 if self.reach else 1

    @property
    def parameters(self) -> Mapping[str, int | str]:
        return {"window": self.window, "retained_extra_tokens": self.retained_extra}

    def step(self, tokens_per_chunk: int) -> int:
        return 1

    def allowed(self, boundaries: I64, tokens_per_chunk: int) -> Bool:
        return np.ones(len(boundaries), dtype=np.bool_)

    def consumed(self, boundaries: I64, computed: int, tokens_per_chunk: int) -> tuple[I64, I64]:
        hi = ceil_div(boundaries, tokens_per_chunk)
        if not self.reach:
            return hi, hi
        return np.maximum(boundaries - self.reach, computed) // tokens_per_chunk, hi

    def consumed_at(self, boundary: int, computed: int, tokens_per_chunk: int) -> tuple[int, int]:
        hi = -(-boundary // tokens_per_chunk)
        return max(boundary - self.reach, computed) // tokens_per_chunk if self.reach else hi, hi

    def earliest(self, chunks: I64, computed: int, tokens_per_chunk: int) -> I64:
        begins = chunks * tokens_per_chunk
        if not self.reach:
            # Nothing is consumed, so `lo` is the first chunk that begins at or after T.
            return begins - tokens_per_chunk + 1
        return np.where(begins <= computed, 0, begins + self.reach)

    def edges(self, low: int, high: int, tokens_per_chunk: int) -> I64:
        return multiples(tokens_per_chunk, low, high)
