"""The object tier keeps the tier contract. Its store is obstore's own in memory; real servers are in tests/services."""

from __future__ import annotations

import obstore
import pytest
from obstore.store import MemoryStore

from kvstrata.testing.faulty_store import FaultyClient
from kvstrata.testing.tier_contract import TierContract
from kvstrata.testing.tier_harness import LAYOUT_TAG, NAMESPACE
from kvstrata.tiers.base import Tier
from kvstrata.tiers.common.record import HEADER_BYTES
from kvstrata.tiers.object import ObjectTier
from kvstrata.types import FailCause, OffloadKey

SCOPE = NAMESPACE.hex() + LAYOUT_TAG.to_bytes(8, "big").hex()


class TestObjectTier(TierContract):
    @pytest.fixture(autouse=True)
    def _store(self) -> None:
        self.store = MemoryStore()
        self.clients: list[FaultyClient] = []

    def make(self, limit: int | None) -> Tier:
        tier = ObjectTier("memory://here/below", limit=limit, part="engine", store=self.store)
        tier._client = FaultyClient(tier._client)
        self.clients.append(tier._client)
        return tier

    def capacity(self, chunks: int) -> int:
        return chunks * (HEADER_BYTES + self.chunk_bytes)

    def path(self, key: OffloadKey) -> str:
        return f"below/parts/engine/{SCOPE}/{key.hex()}"

    def damage(self, tier: Tier, key: OffloadKey) -> None:
        data = bytearray(obstore.get(self.store, self.path(key)).bytes())
        data[-1] ^= 0xFF
        obstore.put(self.store, self.path(key), bytes(data))

    def delete(self, tier: Tier, key: OffloadKey) -> None:
        obstore.delete(self.store, self.path(key))

    def truncate(self, tier: Tier, key: OffloadKey) -> None:
        data = bytes(obstore.get(self.store, self.path(key)).bytes())
        obstore.put(self.store, self.path(key), data[: len(data) // 2])

    def fail_reads(self, tier: Tier, failing: bool) -> None:
        for client in self.clients:
            client.failing_reads = FailCause.IO_ERROR if failing else None

    def fail_writes(self, tier: Tier, failing: bool) -> None:
        for client in self.clients:
            client.failing_writes = FailCause.IO_ERROR if failing else None

    def recount(self) -> int:
        return sum(meta["size"] for page in obstore.list(self.store, prefix="below/parts") for meta in page)

    def index_entries(self, tier: Tier) -> int:
        assert isinstance(tier, ObjectTier)
        index = tier._index
        tables = (index.entries, index.fresh, index.dying, tier._pending, tier._touched, tier._waiting, tier._removed)
        return sum(map(len, tables)) + len(tier._jobs.open) + len(list(tier._tasks()))
