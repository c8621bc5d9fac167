"""What things take in simulated time. All rates are of real bytes, whatever the payload scale.

The defaults are round numbers for one data-centre accelerator with an 8B model beside host memory and one NVMe
device. They only decide *when* things happen; what hits is decided by what is where.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Channel:
    """How fast one tier answers. Each direction has `lanes` that share the rate."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float
    lanes: int = 2


CHANNELS = {
    "memory": Channel(read_bytes_per_s=12e9, write_bytes_per_s=12e9, latency_s=2e-5),
    "fs": Channel(read_bytes_per_s=5e9, write_bytes_per_s=4e9, latency_s=2e-4),
    "disk": Channel(read_bytes_per_s=6e9, write_bytes_per_s=4e9, latency_s=1e-4),
}
"""By kind of tier."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Rates of the simulated engine. Raises `ConfigError`, naming the field, for one that is not above zero."""

    prefill_tokens_per_s: float = 8000.0
    prefill_step_tokens: int = 8192
    """Most tokens of one prefill step; a longer prompt takes several, between which others get their turn."""
    step_overhead_s: float = 0.004
    decode_s_per_token: float = 0.015
    link_bytes_per_s: float = 25e9
    """Copies between accelerator and primary."""
    accelerator_tokens: int = 131_072
    """Size of accelerator memory, in tokens of all groups' full-attention chunks or what kept boundaries need; it
    grows to the longest request."""
    channel: Channel | None = None
    """The tier below primary; None: that of its kind in `CHANNELS`."""

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "prefill_step_tokens", "link_bytes_per_s", "accelerator_tokens"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} must be above 0")
        for name in ("step_overhead_s", "decode_s_per_token"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}: {getattr(self, name)} must be at least 0")

    def prefill_s(self, tokens: int) -> float:
        """One prefill step."""
        return self.step_overhead_s + tokens / self.prefill_tokens_per_s

    def decode_s(self, tokens: int) -> float:
        """All output tokens after the first."""
        return max(tokens - 1, 0) * self.decode_s_per_token

    def copy_s(self, size: int) -> float:
        """A copy of `size` real bytes between accelerator and primary."""
        return size / self.link_bytes_per_s
