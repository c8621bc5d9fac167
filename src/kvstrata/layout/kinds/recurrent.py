"""Recurrent state: Mamba, linear attention, short convolution. One state stands for all tokens before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from kvstrata.layout.kinds.base import NEVER, multiples, require
from kvstrata.types import I64, Bool

Mode = Literal["align", "all", "none"]


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """Consumes the one chunk that ends exactly at T; T is a multiple of the tokens per chunk.

    Of a chunk only the state at its end is stored and loaded. `mode` says where the engine leaves states behind:
    "all" after each block; "align" only where it hands one off (see `StoreCursor.keep` in layout/cursor.py); "none"
    nowhere, so that no boundary exists and every external hit is impossible.
    """

    mode: Mode = "all"

    name: ClassVar[str] = "recurrent"
    prefix: ClassVar[bool] = False
    stores_all: ClassVar[bool] = False
    may_draft: ClassVar[bool] = False
    free_step: ClassVar[int] = 0

    def __post_init__(self) -> None:
        require(self.mode in ("align", "all", "none"), "mode", self.mode, "must be align, all or none")

    @property
    def parameters(self) -> Mapping[str, int | str]:
        return {"mode": self.mode}

    def step(self, tokens_per_chunk: int) -> int:
        return 0 if self.mode == "none" else tokens_per_chunk

    def allowed(self, boundaries: I64, tokens_per_chunk: int) -> Bool:
        if self.mode == "none":
            return np.zeros(len(boundaries), dtype=np.bool_)
        ends: Bool = boundaries % tokens_per_chunk == 0
        return ends

    def consumed(self, boundaries: I64, computed: int, tokens_per_chunk: int) -> tuple[I64, I64]:
        hi = boundaries // tokens_per_chunk
        return hi - 1, hi

    def consumed_at(self, boundary: int, computed: int, tokens_per_chunk: int) -> tuple[int, int]:
        hi = boundary // tokens_per_chunk
        return hi - 1, hi

    def earliest(self, chunks: I64, computed: int, tokens_per_chunk: int) -> I64:
        if self.mode == "none":
            return np.full_like(chunks, NEVER)
        return (chunks + 1) * tokens_per_chunk

    def edges(self, low: int, high: int, tokens_per_chunk: int) -> I64:
        return multiples(tokens_per_chunk, low, high)
