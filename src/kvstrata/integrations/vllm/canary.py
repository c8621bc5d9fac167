"""The canary: known bytes go block -> primary -> another block through the real copier, before anything is served."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstrata.integrations.vllm.shapes import EngineShape
from kvstrata.transfer.base import Copier
from kvstrata.transfer.pieces import Piece
from kvstrata.transfer.torch_views import LayerBytes

STORE_JOB = -1001
LOAD_JOB = -1002


class Canary:
    """Uses two free blocks, which get their former bytes back, and the first bytes of this rank's share of primary."""

    def __init__(
        self, shape: EngineShape, layers: Sequence[Sequence[LayerBytes]], primary: memoryview, blocks: int
    ) -> None:
        self._shape = shape
        self._layers = layers
        self._primary = primary
        self._blocks = blocks

    def sing(self, copier: Copier, rank: int) -> str | None:
        """None if every group's bytes came back, else one line that says which did not."""
        if self._blocks < 3:
            return None  # there is no pair of free blocks; the cache is too small to be of use anyway
        for g in range(len(self._shape.groups)):
            trouble = self._group(copier, g, rank)
            if trouble is not None:
                return f"canary: group {self._shape.groups[g].index}: {trouble}"
        return None

    def _group(self, copier: Copier, g: int, rank: int) -> str | None:
        source, target = 1, self._blocks - 1
        place = self._place(g, rank)
        if place is None:
            return None
        kept = [(layer.tensor[source].clone(), layer.tensor[target].clone()) for layer in self._layers[g]]
        try:
            return self._round_trip(copier, g, source, target, place)
        finally:
            for layer, (before, after) in zip(self._layers[g], kept, strict=True):
                layer.tensor[source].copy_(before)
                layer.tensor[target].copy_(after)

    def _place(self, g: int, rank: int) -> int | None:
        """Where in primary; ranks must not meet."""
        size = -(-max(self._shape.rank_bytes(i) for i in range(len(self._shape.groups))) // 4096) * 4096
        place = rank * size
        return place if place + self._shape.groups[g].block_bytes <= len(self._primary) else None

    def _round_trip(self, copier: Copier, g: int, source: int, target: int, place: int) -> str | None:
        torch = importlib.import_module("torch")
        patterns = []
        for number, layer in enumerate(self._layers[g]):
            values = np.random.default_rng([g, number]).integers(0, 256, layer.tensor.shape[1], dtype=np.uint8)
            patterns.append(torch.from_numpy(values).to(layer.tensor.device))
            layer.tensor[source].copy_(patterns[-1])
            layer.tensor[target].zero_()
        places = np.array([place], dtype=np.int64)
        copier.store(STORE_JOB, [Piece(g, np.array([source], dtype=np.int64), places)])
        if not self._ended(copier, STORE_JOB):
            return "the copy of a block into primary failed"
        expected = np.concatenate([pattern.cpu().numpy() for pattern in patterns])
        found = np.frombuffer(self._primary, np.uint8, len(expected), place)
        if not (found == expected).all():
            return "primary does not hold the bytes of the block that was copied to it"
        copier.load(LOAD_JOB, [Piece(g, np.array([target], dtype=np.int64), places)])
        if not self._ended(copier, LOAD_JOB):
            return "the copy from primary into a block failed"
        return self._compare(g, target, patterns)

    @staticmethod
    def _ended(copier: Copier, job_id: int) -> bool:
        """Wait for a job; whether it went well."""
        copier.wait([job_id])
        for _ in range(1_000_000):
            for done in copier.finished():
                if done.job_id == job_id:
                    return done.ok
        return False

    def _compare(self, g: int, target: int, patterns: Sequence[Any]) -> str | None:
        for layer, pattern in zip(self._layers[g], patterns, strict=True):
            if not bool((layer.tensor[target] == pattern).all()):
                return f"layer {layer.name}: a block does not get back the bytes that another one had"
        return None
