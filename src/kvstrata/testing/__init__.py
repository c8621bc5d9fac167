"""Instruments for the tests of kvstrata and of those who extend it. Public.

ManualClock       time that moves when the test says so
ManualExecutor    tasks that run when, and in the order that, the test says; InlineExecutor runs them at once
ScriptedTier      a tier whose every answer the test decides
TierHarness       drives one tier by hand and checks what it owes its caller
stateful          random tests of the whole stack against a plain dict (needs hypothesis; import it by name)
tier_contract     the suite that every tier passes (needs pytest; import `kvstrata.testing.tier_contract`)
server_contract   the same with the hooks that all tiers over a server share (needs obstore)
"""

from kvstrata.testing.clock import ManualClock
from kvstrata.testing.executor import InlineExecutor, ManualExecutor
from kvstrata.testing.scripted import ScriptedTier
from kvstrata.testing.tier_harness import TierHarness, chunk_key, chunk_keys, payload_of

__all__ = [
    "InlineExecutor",
    "ManualClock",
    "ManualExecutor",
    "ScriptedTier",
    "TierHarness",
    "chunk_key",
    "chunk_keys",
    "payload_of",
]
