"""Every built-in tier passes the trial that an engine makes of it at its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.integrations.vllm.trial import try_tier
from kvstrata.runtime.clock import SystemClock
from kvstrata.runtime.executor import ThreadExecutor
from kvstrata.runtime.guard import GuardedTier
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.registry import make_tier


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("memory", {}),
        ("fs", {"path": "{place}"}),
        ("fs", {"path": "{place}", "part": "a"}),
        ("object", {"url": "file://{place}", "part": "a"}),
    ],
)
def test_an_open_tier_gives_back_what_it_is_given(kind: str, options: dict[str, str], tmp_path: Path) -> None:
    place = tmp_path / "place"
    options = {name: value.replace("{place}", str(place)) for name, value in options.items()}
    tier = GuardedTier(make_tier(kind, **options))
    region, executor = memoryview(bytearray(1 << 20)), ThreadExecutor("trial", 4)
    tier.open(TierContext(region, b"a-namespace-here", 1, SystemClock(), executor))
    trial = try_tier(tier, region, [4096, 65536], SystemClock())
    assert trial.trouble == ""
    assert trial.bytes_per_s > 0
    tier.close()
    executor.close(5.0)
    assert tier.statistics().faults == ()
