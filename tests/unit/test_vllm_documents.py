"""docs/vllm.md names every option, metric and cause that there is."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from kvstrata.core.messages import AnswerCause
from kvstrata.core.settings import CoreConfig
from kvstrata.integrations.vllm import options, settings, stats, versions
from kvstrata.tiers.disk.tier import DiskTier

PAGE = Path(__file__).resolve().parents[2] / "docs" / "vllm.md"
SET_ELSEWHERE = {"capacity_bytes", "alignment", "tail_room", "no_cascade"}
"""Fields of the core that follow from primary's size and the tiers' own options."""
FOR_TESTS = {"self", "name", "files", "verify"}


def names(table: str) -> list[str]:
    core = {field.name for field in dataclasses.fields(CoreConfig)} - SET_ELSEWHERE
    return {
        "options": [*settings.OWN, *settings.SHORT, *settings.WHOLE, "config"],
        "core": sorted(core),
        "disk": sorted(set(inspect.signature(DiskTier.__init__).parameters) - FOR_TESTS),
        "request": sorted(options._READERS),
        "metrics": [*stats.METRICS, "hit_tokens{place}"],
        "causes": [str(cause) for cause in AnswerCause if cause is not AnswerCause.WAITING],
    }[table]


@pytest.mark.parametrize("table", ["options", "core", "disk", "request", "metrics", "causes"])
def test_the_page_names_all(table: str) -> None:
    said = set(re.findall(r"`([^`]+)`", PAGE.read_text()))
    said |= {word for phrase in said for word in re.findall(r"[a-z_]+", phrase)}
    assert [name for name in names(table) if name not in said] == []


def test_the_page_names_the_versions() -> None:
    page = PAGE.read_text()
    assert all(series in page for series in versions.TESTED)
