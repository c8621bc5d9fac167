"""The fs tier: one verified file per chunk in a directory."""

from kvstrata.tiers.fs.tier import FsTier

__all__ = ["FsTier"]
