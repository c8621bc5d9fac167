"""The disk tier: chunks in preallocated segment files of one directory. `tier.py` is the way in."""

from kvstrata.tiers.disk.tier import DiskStatistics, DiskTier, TierState

__all__ = ["DiskStatistics", "DiskTier", "TierState"]
