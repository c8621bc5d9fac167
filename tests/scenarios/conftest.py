"""Places that scenarios run in."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiers_kit import Place


@pytest.fixture
def fs(tmp_path: Path) -> Place:
    return Place("fs", tmp_path / "place")


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path / "place")
