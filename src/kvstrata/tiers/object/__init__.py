"""The object tier: one verified object per chunk, in S3, GCS, Azure or a compatible store."""

from kvstrata.tiers.object.tier import ObjectTier

__all__ = ["ObjectTier"]
