"""The fs tier keeps the tier contract."""

from __future__ import annotations

import os

import pytest

from kvstrata.testing.faulty_files import FaultyFileSystem
from kvstrata.testing.tier_contract import TierContract
from kvstrata.testing.tier_harness import NAMESPACE
from kvstrata.tiers.base import Tier
from kvstrata.tiers.fs import FsTier
from kvstrata.types import OffloadKey

BLOCK = 4096
READ_CALLS = ("read",)
WRITE_CALLS = ("write", "rename", "fsync")


class TestFsTier(TierContract):
    @pytest.fixture(autouse=True)
    def _files(self) -> None:
        self.files = FaultyFileSystem()

    def make(self, limit: int | None) -> Tier:
        return FsTier(str(self.place), limit=limit, files=self.files)

    def capacity(self, chunks: int) -> int:
        return chunks * BLOCK

    def path(self, key: OffloadKey) -> str:
        return os.path.join(self.place, NAMESPACE.hex(), key[:1].hex(), key.hex())

    def damage(self, tier: Tier, key: OffloadKey) -> None:
        assert isinstance(tier, FsTier)
        assert tier.damage(key)

    def delete(self, tier: Tier, key: OffloadKey) -> None:
        os.unlink(self.path(key))

    def truncate(self, tier: Tier, key: OffloadKey) -> None:
        os.truncate(self.path(key), self.chunk_bytes // 2)

    def fail_reads(self, tier: Tier, failing: bool) -> None:
        self.files.clear()
        if failing:
            self.files.fail(*READ_CALLS)

    def fail_writes(self, tier: Tier, failing: bool) -> None:
        self.files.clear()
        if failing:
            self.files.fail(*READ_CALLS, *WRITE_CALLS)

    def recount(self) -> int:
        found = 0
        for folder, _, files in os.walk(self.place):
            for file in files:
                status = os.stat(os.path.join(folder, file))
                found += max(status.st_blocks * 512, -(-status.st_size // BLOCK) * BLOCK)
        return found

    def index_entries(self, tier: Tier) -> int:
        assert isinstance(tier, FsTier)
        index = tier._index
        tables = (index.entries, index.fresh, index.dying, index.strays, tier._pending, tier._unsynced, tier._touched)
        return sum(map(len, tables)) + len(tier._jobs.open) + len(tier._running)
