"""The whole stack under the simulation: fixed seeds, seeds that once failed, and that a seed is a run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kvstrata.integrations.vllm.scheduler import SchedulerSide
from kvstrata.testing.coverage import Coverage
from kvstrata.testing.simulation import SimulationError, simulate
from kvstrata.testing.simulation.run import LEAST_REQUESTS, LEAST_STEPS

ONCE_FAILED = Path(__file__).parent / "seeds_once_failed.txt"


def once_failed() -> list[int]:
    lines = (line.partition("#")[0].strip() for line in ONCE_FAILED.read_text(encoding="utf-8").splitlines())
    return [int(line) for line in lines if line]


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
def test_fixed_seeds(block: int) -> None:
    coverage, struck = Coverage(), Counter[str]()
    outcomes = [simulate(seed, coverage, struck=struck) for seed in range(10 * block, 10 * block + 10)]
    assert all(outcome.core_steps >= LEAST_STEPS and outcome.requests >= LEAST_REQUESTS for outcome in outcomes)
    assert sum(outcome.promoted > 0 for outcome in outcomes) >= 7
    assert struck.total() > 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", once_failed())
def test_seeds_that_once_failed(seed: int) -> None:
    simulate(seed)


def test_a_seed_is_the_same_run_in_every_process() -> None:
    command = "from kvstrata.testing.simulation import simulate; print(simulate(3).digest, simulate(10).digest)"
    found = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        found.add(done.stdout.strip())
    assert found == {f"{simulate(3).digest} {simulate(10).digest}"}


def test_a_failure_is_shown_as_a_short_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchedulerSide, "_fences", lambda self, output: [])
    with pytest.raises(SimulationError, match="seed 1, ") as caught:
        simulate(1)
    first, *trace = str(caught.value).splitlines()
    turns, of = map(int, re.findall(r"(\d+) turns of (\d+)", first)[0])
    assert turns < of
    assert trace[0].startswith("Setup(")
    assert len(trace) < 120
