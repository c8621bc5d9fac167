"""A stand-in worker for vLLM's own tiering that copies between host tensors, so that it runs without an accelerator.

For benchmarks and tests only. The scheduler side, with its primary and its secondary tiers, is vLLM's.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from typing import Any

_OFFLOAD = "vllm.v1.kv_offload"


class HostWorkerMethods:
    """Copies at once."""

    def __init__(self, caches: Any, region: Any) -> None:
        self._tensors = caches.tensors
        self._region = region
        self._sizes = [tensor.page_size_bytes for tensor in self._tensors]
        self._ended: list[Any] = []
        self._result = importlib.import_module(f"{_OFFLOAD}.base").TransferResult

    def _row(self, number: int, chunk: int) -> Any:
        at = chunk * self._region._row_stride + sum(self._sizes[:number])
        return self._region._base[at : at + self._sizes[number]]

    def submit_store(self, job_id: int, source: Any, target: Any) -> bool:
        """Blocks to chunks."""
        for block, chunk in zip(source.block_ids.tolist(), target.chunk_ids.tolist(), strict=True):  # glossary: allow
            for number, tensor in enumerate(self._tensors):
                self._row(number, chunk).copy_(tensor.tensor[block])
        self._ended.append(self._result(job_id, True, 1, 1e-6))
        return True

    def submit_load(self, job_id: int, source: Any, target: Any) -> bool:
        """Chunks to blocks."""
        for chunk, block in zip(source.chunk_ids.tolist(), target.block_ids.tolist(), strict=True):  # glossary: allow
            for number, tensor in enumerate(self._tensors):
                tensor.tensor[block].copy_(self._row(number, chunk))
        self._ended.append(self._result(job_id, True, 1, 1e-6))
        return True

    def get_finished(self) -> list[Any]:
        """Jobs since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: Iterable[int]) -> None:
        """Nothing is ever under way."""


class HostSpecMethods:
    """vLLM's tiering with that worker."""

    _worker: Any

    def get_worker(self, caches: Any) -> Any:
        """The worker of this rank."""
        if not self._worker:
            shared = importlib.import_module(f"{_OFFLOAD}.cpu.shared_offload_region").SharedOffloadRegion
            spec: Any = self
            region = shared(
                engine_id=spec._engine_id,
                num_chunks=spec.num_chunks,
                rank=spec.config.parallel.rank,
                kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
                cpu_page_size=spec.cpu_page_size_per_worker,
            )
            base = importlib.import_module(f"{_OFFLOAD}.base").OffloadingWorker
            worker = type("HostWorker", (HostWorkerMethods, base), {"__module__": __name__})
            self._worker = worker(caches, region)
        return self._worker


@functools.cache
def spec_class() -> type:
    """The specification class for vLLM."""
    base = importlib.import_module(f"{_OFFLOAD}.tiering.spec").TieringOffloadingSpec
    return type("HostTieringSpec", (HostSpecMethods, base), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    if name == "HostTieringSpec":
        return spec_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
