"""The memory tier beyond the contract."""

from __future__ import annotations

import pytest

from kvstrata.errors import ConfigError
from kvstrata.testing import TierHarness, chunk_keys
from kvstrata.tiers.memory import MemoryTier
from kvstrata.types import FailCause


def rig(**settings: object) -> TierHarness:
    return TierHarness(MemoryTier(**settings), chunk_bytes=100).open()  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_makes_no_sense(limit: int) -> None:
    with pytest.raises(ConfigError, match="limit"):
        rig(limit=limit)


def test_damage_is_seen_and_without_the_check_it_is_delivered() -> None:
    key = chunk_keys(1)[0]
    for verify in (True, False):
        harness = rig(verify=verify)
        assert isinstance(harness.tier, MemoryTier)
        assert not harness.tier.damage(key)
        harness.store([key])
        assert harness.tier.damage(key)
        record = harness.load([key])
        if verify:
            assert record.causes == [FailCause.CORRUPT]
        else:
            assert record.ok
            with pytest.raises(AssertionError, match="wrong bytes"):
                harness.check_loaded(record)


def test_events_are_there_at_the_next_poll() -> None:
    harness = rig()
    harness.submit_store(chunk_keys(3))
    assert harness.executor.pending == 0
    assert len(harness.poll()) == 2
    assert harness.poll() == []


def test_the_head_of_a_job_that_does_not_fit_is_kept() -> None:
    harness = rig(limit=500)
    keys = chunk_keys(8)
    record = harness.store(keys)
    assert record.causes == [None] * 5 + [FailCause.NO_SPACE] * 3
    assert harness.present(keys) == keys[:5]


def test_what_a_job_names_is_no_victim_of_it() -> None:
    harness = rig(limit=500)
    keys = chunk_keys(8)
    harness.store(keys[:5])
    record = harness.store([keys[4], keys[3], *keys[5:8]])
    assert record.ok
    assert harness.present(keys) == [keys[3], keys[4], *keys[5:8]]
    assert sorted(harness.removed) == sorted(keys[:3])


def test_close_forgets_everything() -> None:
    harness = rig()
    keys = chunk_keys(3)
    harness.store(keys)
    harness.close()
    harness.open()
    assert harness.present(keys) == []
    assert harness.tier.usage().bytes_held == 0
