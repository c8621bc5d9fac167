"""Tiers by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvstrata.errors import ConfigError
from kvstrata.tiers.base import Tier
from kvstrata.tiers.fs import FsTier
from kvstrata.tiers.memory import MemoryTier
from kvstrata.tiers.registry import make_tier


def test_built_in_tiers_by_name() -> None:
    memory = make_tier("memory", limit=100, name="m")
    assert isinstance(memory, MemoryTier)
    assert memory.name == "m"
    assert isinstance(make_tier("fs", path="somewhere"), FsTier)
    assert isinstance(memory, Tier)


def test_an_outside_tier_by_its_place() -> None:
    assert make_tier("kvstrata.testing.scripted:ScriptedTier", name="s").name == "s"


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("nvme", {}, "'nvme' is not known"),
        ("kvstrata.nowhere:Tier", {}, "cannot be imported"),
        ("kvstrata.tiers.memory:Missing", {}, "cannot be imported"),
        ("memory", {"colour": "red"}, "colour"),
        ("fs", {"path": "somewhere", "part": "a", "colour": "red"}, "SharedFsTier.*unexpected.*'colour'"),
        # What a tier over a server sets for itself is no option of it.
        ("fs", {"path": "somewhere", "part": "a", "max_queue": 4}, "SharedFsTier.*unexpected.*'max_queue'"),
        ("kvstrata.testing:ManualClock", {}, "is not a tier"),
    ],
)
def test_what_cannot_be_made_is_one_clear_line(name: str, settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        make_tier(name, **settings)
    assert "\n" not in str(caught.value)


def test_naming_a_tier_imports_nothing_of_it() -> None:
    code = "import sys, kvstrata.tiers.registry; print([m for m in sys.modules if 'tiers.fs' in m or 'memory' in m])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.strip() == "[]"
