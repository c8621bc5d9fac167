"""The mooncake tier: Mooncake Store, straight from and into primary."""

from kvstrata.tiers.mooncake.tier import MooncakeTier

__all__ = ["MooncakeTier"]
