"""The plug-in's own bound on a wait. The core has its clocks; this one holds also when the core is what fails."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.core.messages import RequestOptions
from kvstrata.core.settings import CoreConfig
from kvstrata.layout.groups import Layout

GRACE_S = 1.0
"""How much longer than the core's own clocks a wait may last."""


def bound_s(config: CoreConfig, layout: Layout, options: RequestOptions, tokens: int) -> float:
    """The longest wait that the core's clocks allow a request of so many tokens, and a grace."""
    own = options.total_s
    totals = [config.total_s, *config.tier_total_s.values()] if own is None else [own]
    spans = layout.consumed_ranges(tokens, 0) if tokens > 0 else ()
    # One chunk more per group: another boundary may consume it.
    size = sum((hi - lo + 1) * size for (lo, hi), size in zip(spans, layout.chunk_bytes, strict=False))
    return max(total or config.job_total_s for total in totals) + size / config.min_rate_bytes_per_s + GRACE_S


@dataclass(slots=True)
class Patience:
    """Seconds left of one wait. A gap between polls counts as the core counts it while a request waits for room."""

    left: float
    last: float

    def lasts(self, now: float, most: float) -> bool:
        """Count the time since the last poll, `most` of it at most; whether anything is left."""
        self.left -= min(max(now - self.last, 0.0), most)
        self.last = now
        return self.left > 0
