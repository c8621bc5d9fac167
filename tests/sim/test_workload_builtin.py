"""The built-in workload: the same for the same seed, shaped as a trace must be, and worth replaying."""

from __future__ import annotations

import numpy as np
import pytest

from kvstrata.errors import ConfigError
from kvstrata.sim.workloads import TOKENS_PER_ID, builtin_workload


def flat(count: int, seed: int) -> list[tuple[int, int, list[int]]]:
    return [(r.prompt_tokens, r.output_tokens, r.ids.tolist()) for r in builtin_workload(count, seed).requests]


def test_one_seed_one_workload() -> None:
    assert flat(60, 3) == flat(60, 3)
    assert flat(60, 3) != flat(60, 4)


def test_a_shorter_workload_is_the_start_of_a_longer_one() -> None:
    assert flat(80, 1)[:30] == flat(30, 1)


def test_it_keeps_the_rules_of_a_trace() -> None:
    parents: dict[int, int] = {}
    for number, request in enumerate(builtin_workload(400, 0).requests):
        assert request.index == number
        assert len(request.ids) == -(-request.prompt_tokens // TOKENS_PER_ID)
        previous = -1
        for run in request.ids.tolist():
            assert parents.setdefault(run, previous) == previous
            previous = run


def test_much_of_it_was_there_before() -> None:
    seen: set[int] = set()
    total = repeated = 0
    for request in builtin_workload(600, 0).requests:
        repeated += int(np.isin(request.ids, list(seen)).sum())
        total += len(request.ids)
        seen.update(request.ids.tolist())
    assert 0.4 < repeated / total < 0.95


@pytest.mark.parametrize("count", [0, -1])
def test_no_requests_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="requests"):
        builtin_workload(count)
