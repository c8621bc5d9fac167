"""The whole stack against a plain dict: short runs of every kind here, a million steps in the soak."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from kvstrata.testing.choices import Choices
from kvstrata.testing.coverage import Coverage
from kvstrata.testing.profiles import FOCUS, MIRROR, OWN_TIERS, SCENES, STEADY, WILD
from kvstrata.testing.stateful import LEGAL, StackMachine, soak, walk
from kvstrata.tiers.base import Tier
from kvstrata.tiers.memory import MemoryTier

STEPS = 120
DEFAULT_EXAMPLES = 3_000
SOAK_EXAMPLES = int(os.environ.get("KVSTRATA_SOAK_EXAMPLES", DEFAULT_EXAMPLES))
SOAK_STEPS = 150
SCENE_STEPS = 60
LEAST = 20
"""How often each legal pair of state and event must have struck in a soak of the default size."""

EXAMPLES = int(settings.default.max_examples / 2) if settings.default is not None else 50

TestStackMachine = StackMachine.TestCase
TestStackMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=40)

RUNS = {
    "wild": (WILD, 80),
    "focus": (FOCUS, 40),
    "scenes": (SCENES, 10),
    "steady": (STEADY, 40),
    "mirror": (MIRROR, 40),
}


@pytest.mark.scenario_117
@pytest.mark.scenario_42
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_random_walks(name: str) -> None:
    profile, runs = RUNS[name]
    coverage = soak(range(runs), STEPS, (profile,))
    assert coverage.seen["answer hit"] > runs // 4


@pytest.mark.slow
def test_random_walks_over_a_real_tier() -> None:
    def tiers(choices: Choices, layout: object) -> list[Tier]:
        return [MemoryTier(limit=choices.between(100, 4000))]

    coverage = Coverage()
    for seed in range(10):
        walk(seed, STEPS, OWN_TIERS, coverage, make_tiers=tiers)
    assert coverage.seen["answer hit"] > 5


@pytest.mark.soak
def test_soak_reaches_every_legal_pair(capsys: pytest.CaptureFixture[str]) -> None:
    profiles = (WILD, WILD, WILD, FOCUS, FOCUS, FOCUS, STEADY, MIRROR)
    coverage = soak(range(1_000_000, 1_000_000 + SOAK_EXAMPLES), SOAK_STEPS, profiles)
    for seed in range(2_000_000, 2_000_000 + 2 * SOAK_EXAMPLES):  # rare pairs get scenes, but not without end
        if seed % 100 == 0 and not coverage.missing(LEGAL, LEAST):
            break
        walk(seed, SCENE_STEPS, SCENES, coverage)
    with capsys.disabled():
        print("\n" + coverage.table(LEGAL))
        print(coverage.summary(LEGAL))
    missing = coverage.missing(LEGAL, LEAST)
    if SOAK_EXAMPLES < DEFAULT_EXAMPLES and missing:
        pytest.skip(f"{SOAK_EXAMPLES} runs are too few to reach every pair; {len(missing)} struck too seldom")
    assert not missing, f"struck too seldom: {missing}"
