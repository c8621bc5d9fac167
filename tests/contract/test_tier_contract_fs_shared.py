"""The fs tier in a shared directory keeps the tier contract."""

from __future__ import annotations

import os

import pytest

from kvstrata.testing.faulty_files import FaultyFileSystem
from kvstrata.testing.tier_contract import TierContract
from kvstrata.testing.tier_harness import NAMESPACE
from kvstrata.tiers.base import Tier
from kvstrata.tiers.fs import SharedFsTier
from kvstrata.tiers.fs.shared import CLAIM_BYTES
from kvstrata.types import OffloadKey

BLOCK = 4096
READ_CALLS = ("read", "stat")
WRITE_CALLS = ("write", "rename", "fsync", "unlink")


class TestSharedFsTier(TierContract):
    @pytest.fixture(autouse=True)
    def _files(self) -> None:
        self.files = FaultyFileSystem()

    def make(self, limit: int | None) -> Tier:
        return SharedFsTier(str(self.place), part="engine", limit=limit, files=self.files)

    def capacity(self, chunks: int) -> int:
        return chunks * BLOCK + CLAIM_BYTES

    def path(self, key: OffloadKey) -> str:
        return os.path.join(self.place, "parts", "engine", NAMESPACE.hex(), key[:1].hex(), key.hex())

    def damage(self, tier: Tier, key: OffloadKey) -> None:
        status = os.stat(self.path(key))
        with open(self.path(key), "r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 0xFF]))
        os.utime(self.path(key), ns=(status.st_mtime_ns, status.st_mtime_ns))

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
        for folder, _, files in os.walk(self.place / "parts"):
            for file in files:
                status = os.stat(os.path.join(folder, file))
                found += max(status.st_blocks * 512, -(-status.st_size // BLOCK) * BLOCK)
        return found

    def index_entries(self, tier: Tier) -> int:
        assert isinstance(tier, SharedFsTier)
        index = tier._index
        tables = (index.entries, index.fresh, index.dying, tier._pending, tier._touched, tier._waiting, tier._removed)
        unsynced = len(tier._shared.unsynced)
        return sum(map(len, tables)) + len(tier._jobs.open) + len(list(tier._tasks())) + unsynced
