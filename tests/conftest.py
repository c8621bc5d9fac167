"""Settings for all tests: Hypothesis profiles, chosen by the environment variable KVSTRATA_PROFILE, and marks.

`default` is short and gives the same examples in every run; `soak` is long and gives new ones. Every row of
docs/scenarios.md has a mark: `pytest -m scenario_49` runs the tests of scenario 49.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("default", derandomize=True, deadline=None, max_examples=100, database=None)
settings.register_profile(
    "soak",
    deadline=None,
    max_examples=2000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile(os.environ.get("KVSTRATA_PROFILE", "default"))

SCENARIOS = Path(__file__).parent.parent / "docs" / "scenarios.md"


def pytest_configure(config: pytest.Config) -> None:
    """Register one mark for each scenario of the docs; a mark with another number is an error.

    Without `-m`, tests that take long or need an engine or a server are left out.
    """
    if not config.option.markexpr:
        config.option.markexpr = "not soak and not engine and not services"
    for number in re.findall(r"^\| (\d+) \|", SCENARIOS.read_text(encoding="utf-8"), re.MULTILINE):
        config.addinivalue_line("markers", f"scenario_{number}: scenario {number} of docs/scenarios.md")
