"""What the contract suite of tiers asks of a tier's author, and the rig of its tests."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from kvstrata.testing.tier_harness import TierHarness
from kvstrata.tiers.base import Tier
from kvstrata.types import FailCause, OffloadKey, Presence

ABSENT, UNKNOWN, PRESENT = Presence.ABSENT, Presence.UNKNOWN, Presence.PRESENT
REFUSING = (FailCause.REFUSED, FailCause.GONE, FailCause.CANCELLED)
"""What a closed tier may say about the keys of a job."""


class TierContractHooks:
    """The hooks of `TierContract`."""

    chunk_bytes: ClassVar[int] = 1000
    persistent: ClassVar[bool] = True
    """Whether what was stored is there after close and open of a new tier in the same place."""
    strict_lru: ClassVar[bool] = True
    """Whether single chunks are evicted coldest first. False for tiers that reclaim by larger units."""
    tail_room: ClassVar[int] = 0
    """Bytes behind each chunk that the tier is given (`TierContext.tail_room`); what lies behind those is guarded."""

    place: Path

    # hooks

    def make(self, limit: int | None) -> Tier:
        """A tier on `self.place` that may hold `limit` bytes (None: without limit). Required."""
        raise NotImplementedError

    def capacity(self, chunks: int) -> int:
        """The least limit under which exactly `chunks` chunks of `chunk_bytes` can be held. Required."""
        raise NotImplementedError

    def damage(self, tier: Tier, key: OffloadKey) -> None:
        """Alter one payload byte of the stored chunk, behind the tier's back. Required."""
        raise NotImplementedError

    def delete(self, tier: Tier, key: OffloadKey) -> None:
        """Take the stored chunk away behind the tier's back."""
        pytest.skip("the tier has no `delete` hook")

    def truncate(self, tier: Tier, key: OffloadKey) -> None:
        """Shorten the stored chunk behind the tier's back."""
        pytest.skip("the tier has no `truncate` hook")

    def fail_reads(self, tier: Tier, failing: bool) -> None:
        """From now on every read of the device fails with an I/O error, or no more."""
        pytest.skip("the tier has no `fail_reads` hook")

    def fail_writes(self, tier: Tier, failing: bool) -> None:
        """From now on every write to the device fails with an I/O error, or no more."""
        pytest.skip("the tier has no `fail_writes` hook")

    def recount(self) -> int:
        """Bytes allocated in the place now, found by looking, not by asking the tier."""
        pytest.skip("the tier has no `recount` hook")

    def index_entries(self, tier: Tier) -> int:
        """How many entries all of the tier's tables hold together."""
        pytest.skip("the tier has no `index_entries` hook")

    # rig

    @pytest.fixture(autouse=True)
    def _rig(self, tmp_path: Path) -> object:
        self.place = tmp_path / "place"
        self.place.mkdir(mode=0o700)
        self._rigs: list[TierHarness] = []
        yield
        for rig in self._rigs:
            rig.executor.hang = False
            rig.close()
            assert not rig.executor.raised, f"a task of the tier raised: {rig.executor.raised}"

    def rig(
        self, chunks: int | None = None, *, seed: int | None = None, slots: int = 256, **how: object
    ) -> TierHarness:
        """An open tier that can hold `chunks` chunks, with its harness."""
        limit = None if chunks is None else self.capacity(chunks)
        how = {"tail_room": self.tail_room, **how}
        rig = TierHarness(self.make(limit), chunk_bytes=self.chunk_bytes, seed=seed, slots=slots, **how)  # type: ignore[arg-type]
        self._rigs.append(rig)
        return rig.open()
