"""What may go wrong in a run, how often, and how often each kind did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstrata.testing.choices import Choices

TIER_KINDS = (
    "late", "lost", "partial", "duplicate", "corrupt", "stall", "full", "failed", "cancelled", "vanished",
    "probe error", "probe lost", "probe unknown", "scribble",
)  # fmt: skip
"""Faults of tiers that are not real: each job or probe may meet one."""

WORLD_KINDS = (
    "crash", "limit change", "keys removed", "reset memory", "reset content", "clock jump", "silence", "abort",
    "preempt", "cache dropped", "part taken", "copy failed", "restart", "power cut", "device error", "bit rot",
    "device full",
)  # fmt: skip
"""Faults that strike the whole, the engine, its ranks, or the device below the disk tier."""

KINDS = TIER_KINDS + WORLD_KINDS

MOST = 50
"""Highest rate, in percent."""


def weighted(weights: Mapping[str, int]) -> tuple[str, ...]:
    """Each kind so many times, as `Faults.meets` draws one of them."""
    return tuple(kind for kind, weight in weights.items() for _ in range(weight))


@dataclass(slots=True)
class Faults:
    """The rates of one run, in percent, and the counts of what struck."""

    rate: int
    """Percent of jobs, probes and turns that meet a fault at all; 0: nothing ever goes wrong."""
    allowed: frozenset[str]
    struck: Counter[str] = field(default_factory=Counter)

    @classmethod
    def draw(cls, choices: Choices, seed: int) -> Faults:
        """Every tenth seed has none; the others 1 to 50 percent, of all kinds or of some."""
        if seed % 10 == 0:
            return cls(0, frozenset())
        rate = choices.pick((5, 10, 20, 2, 50, 1, 35))
        kinds = KINDS if choices.below(3) == 0 else tuple(kind for kind in KINDS if choices.below(3))
        return cls(rate, frozenset(kinds))

    def meets(self, choices: Choices, kinds: tuple[str, ...], *, times: int = 1) -> str:
        """The fault that is met now, if any; `times` as often, up to `MOST`, for what happens seldom."""
        if not self.rate or not choices.chance(min(times * self.rate, MOST)):
            return ""
        kind = choices.pick(kinds)
        return kind if kind in self.allowed else ""

    def strike(self, kind: str) -> None:
        """A fault has really happened."""
        self.struck[kind] += 1
