"""The memory tier keeps the tier contract."""

from __future__ import annotations

from kvstrata.testing.tier_contract import TierContract
from kvstrata.tiers.base import Tier
from kvstrata.tiers.memory import MemoryTier
from kvstrata.types import OffloadKey


class TestMemoryTier(TierContract):
    persistent = False

    def make(self, limit: int | None) -> Tier:
        return MemoryTier(limit=limit)

    def capacity(self, chunks: int) -> int:
        return chunks * self.chunk_bytes

    def damage(self, tier: Tier, key: OffloadKey) -> None:
        assert isinstance(tier, MemoryTier)
        assert tier.damage(key)

    def truncate(self, tier: Tier, key: OffloadKey) -> None:
        assert isinstance(tier, MemoryTier)
        payload, digest = tier._entries[key]
        tier._entries[key] = (payload[:-1], digest)

    def index_entries(self, tier: Tier) -> int:
        assert isinstance(tier, MemoryTier)
        return len(tier._entries)
