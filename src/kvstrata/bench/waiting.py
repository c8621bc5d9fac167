"""A later step while requests wait: its cost per request must not grow with how many there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstrata.bench.machine import settle
from kvstrata.bench.resolve import Prepared, measure
from kvstrata.bench.workloads import Workload

REQUESTS = (20, 200, 2000)
TOKENS = 2048
"""Short prompts: a waiting request is not looked at, so that their length plays no part."""


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """One number of waiting requests; microseconds of the engine's thread, the end of the step included."""

    requests: int
    tokens: int
    step_us: float
    us_per_request: float


def rows(requests: Sequence[int] = REQUESTS, runs: int = 5) -> Iterator[WaitingRow]:
    """The best of some runs for each number of requests that wait for chunks that do not come."""
    for count in requests:
        prepared = Prepared(Workload("plain", "all", count, TOKENS))
        settle()
        step_s = min(measure(prepared, sync_probe=True).step_s for _ in range(runs))
        yield WaitingRow(count, TOKENS, round(step_s * 1e6, 2), round(step_s / count * 1e6, 3))
