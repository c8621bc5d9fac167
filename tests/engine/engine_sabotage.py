"""What is broken before an engine starts, to see that the start-up checks see it; runs inside an engine's host."""

from __future__ import annotations

from typing import Any

from kvstrata.tiers.memory import MemoryTier
from kvstrata.types import TierJob


def one_wrong_byte(host: Any) -> None:
    """Every copy into primary gets one byte wrong."""
    from kvstrata.transfer.torch_cpu import CpuCopier

    real = CpuCopier.copy

    def copy(self: Any, piece: Any, *, load: bool) -> int:
        size = int(real(self, piece, load=load))
        if not load:
            self._primary[int(piece.places[0]) + 5] ^= 1
        return size

    CpuCopier.copy = copy


def other_version(host: Any) -> None:
    """The installed vLLM says that it is another one."""
    from kvstrata.integrations.vllm import versions

    versions.installed_version = lambda: "0.29.3"


class SwappingTier(MemoryTier):
    """Gives back another key's bytes."""

    def submit_load(self, job: TierJob) -> None:
        """Load the keys into each other's slots."""
        super().submit_load(TierJob(job.job_id, job.keys[::-1], job.offsets, job.lengths))
