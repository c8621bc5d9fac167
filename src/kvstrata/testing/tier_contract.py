"""The contract suite of tiers: a pytest base class that the author of a tier subclasses.

    class TestMyTier(TierContract):
        def make(self, limit): return MyTier(path=self.place / "data", limit=limit)
        def capacity(self, chunks): return chunks * (self.chunk_bytes + MY_HEADER)
        def damage(self, tier, key): ...

`make`, `capacity` and `damage` are required. The other hooks widen the suite; a test whose hook is missing is skipped
and names it. All tests run without threads: the suite steps the tier's tasks with a `ManualExecutor` and a
`ManualClock`. A fresh `place` (an empty folder) is given to every test; two tiers made in one test share it.

The suite is meant to be read: each rule of the tier contract is one test with its name, by subject in
`tier_contract_records`, `tier_contract_room` and `tier_contract_life`.
"""

from __future__ import annotations

from kvstrata.testing.tier_contract_life import LifeContract
from kvstrata.testing.tier_contract_records import RecordsContract
from kvstrata.testing.tier_contract_room import RoomContract


class TierContract(RecordsContract, RoomContract, LifeContract):
    """Subclass it, name the subclass `Test...`, and give it the hooks."""
