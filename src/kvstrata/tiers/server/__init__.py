"""Tiers over a server: one engine for `object`, `redis` and outside stores, which differ in their `StoreClient` only.

client    what a store must offer, and the items that are read and written
tasks     what workers do with a client
core      state, lanes of work, the part: taking, keeping, scanning it
loads     presence, reading, time-outs
stores    writing and removing (room and the stores of a job: common/storing.py)
tier      the `Tier` itself: open, close, poll, self-test
"""

from kvstrata.tiers.server.client import ReadItem, StoreClient, WriteItem
from kvstrata.tiers.server.tier import ServerSettings, ServerTier

__all__ = ["ReadItem", "ServerSettings", "ServerTier", "StoreClient", "WriteItem"]
