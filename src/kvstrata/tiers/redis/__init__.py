"""The redis tier: one verified value per chunk, in Redis or Valkey."""

from kvstrata.tiers.redis.tier import RedisTier

__all__ = ["RedisTier"]
