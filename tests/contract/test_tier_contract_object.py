"""The object tier keeps the tier contract. Its store is obstore's own in memory; real servers are in tests/services."""

from __future__ import annotations

import pytest
from obstore.store import MemoryStore

from kvstrata.testing.server_contract import PART, ObjectTierContract
from kvstrata.tiers.object import ObjectTier


class TestObjectTier(ObjectTierContract):
    @pytest.fixture(autouse=True)
    def _store(self) -> None:
        self.raw = MemoryStore()

    def open_tier(self, limit: int | None) -> ObjectTier:
        return ObjectTier(f"memory://here/{self.prefix}", limit=limit, part=PART, store=self.raw)
