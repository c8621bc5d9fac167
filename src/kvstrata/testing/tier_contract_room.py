"""The tier contract on room: the limit, eviction, removal, and the account of what is held."""

from __future__ import annotations

import numpy as np
import pytest

from kvstrata.testing.tier_contract_hooks import ABSENT, PRESENT, TierContractHooks
from kvstrata.testing.tier_harness import NAMESPACE, OTHER_NAMESPACE, TierHarness, chunk_key, chunk_keys
from kvstrata.types import FailCause, TierUsage


class RoomContract(TierContractHooks):
    """The limit, removal, and accounting."""

    # limit

    def test_the_limit_is_hard(self) -> None:
        rig = self.rig(chunks=20)
        limit = self.capacity(20)

        def measure() -> None:
            usage = rig.tier.usage()
            found = self.recount()
            assert found <= limit, f"{found} bytes lie in the place, the limit is {limit}"
            assert found <= usage.bytes_held + usage.bytes_reserved, f"{found} bytes lie there, told are {usage}"

        if type(self).recount is not TierContractHooks.recount:
            rig.checks.append(measure)
        keys = chunk_keys(60)
        for start in range(0, 60, 12):
            for part in range(start, start + 12, 3):
                rig.submit_store(keys[part : part + 3])
            rig.settle()
        assert all(record.ended is not None for record in rig.jobs.values())
        found = rig.present(keys)
        assert 0 < len(found) <= 20
        assert rig.tier.usage().keys == len(found)
        record = rig.load(found)
        assert record.ok
        rig.check_loaded(record)

    def test_one_job_larger_than_the_limit(self) -> None:
        rig = self.rig(chunks=8)
        keys = chunk_keys(24)
        record = rig.store(keys)
        assert record.ended is not None
        assert set(record.failed.values()) <= {FailCause.NO_SPACE}
        found = rig.present(keys)
        assert 0 < len(found) <= 8
        rig.check_loaded(rig.load(found))

    def test_a_chunk_larger_than_the_limit_has_no_space(self) -> None:
        rig = self.rig(chunks=1)
        big = self.capacity(1) + 1
        wide = TierHarness(rig.tier, chunk_bytes=big, slots=2, tail_room=self.tail_room)
        rig.close()
        wide.open()
        assert wide.store(chunk_keys(1)).causes == [FailCause.NO_SPACE]
        assert wide.tier.usage().keys == 0
        wide.close()

    def test_the_coldest_is_evicted_first(self) -> None:
        if not self.strict_lru:
            pytest.skip("the tier evicts by larger units")
        rig = self.rig(chunks=6)
        keys = chunk_keys(8)
        for key in keys[:6]:
            rig.store([key])
            rig.clock.advance(1.0)
        rig.tier.touch([keys[0]])
        rig.load([keys[1]])
        for key in keys[6:]:
            rig.store([key])
        assert rig.present(keys) == [keys[0], keys[1], *keys[4:]]

    def test_a_touched_chain_loses_its_tail_first(self) -> None:
        if not self.strict_lru:
            pytest.skip("the tier evicts by larger units")
        rig = self.rig(chunks=4)
        keys = chunk_keys(6)
        rig.store(keys[:4])
        rig.tier.touch(keys[:4])
        rig.store(keys[4:])
        assert rig.present(keys) == [keys[0], keys[1], keys[4], keys[5]]

    def test_evictions_are_told(self) -> None:
        rig = self.rig(chunks=6)
        keys = chunk_keys(18)
        for key in keys:
            rig.store([key])
        missing = sorted(set(keys) - set(rig.present(keys)))
        assert sorted(set(rig.removed)) == missing
        assert len(rig.removed) == len(missing)
        assert rig.tier.usage().evicted == len(missing)

    def test_index_memory_is_bounded_by_what_is_held(self) -> None:
        rig = self.rig(chunks=10)
        for start in range(0, 200, 5):
            rig.store(chunk_keys(5, start))
            rig.tier.touch(chunk_keys(50, 10_000 + start))
            rig.tier.remove(chunk_keys(50, 20_000 + start))
            rig.load(chunk_keys(5, 30_000 + start))
        assert rig.tier.usage().keys <= 10
        assert self.index_entries(rig.tier) <= 40

    # remove, purge, flush

    def test_removal_is_idempotent_and_accounted(self) -> None:
        rig = self.rig()
        keys = chunk_keys(4)
        rig.store(keys)
        held = rig.tier.usage().bytes_held
        assert held > 0
        for _ in range(2):
            rig.tier.remove([*keys[:2], chunk_key(77)])
            assert PRESENT not in rig.probe(keys[:2], settle=rig.tier.capabilities.sync_probe is False)
            rig.settle()
        assert rig.probe(keys) == [ABSENT, ABSENT, PRESENT, PRESENT]
        rig.tier.remove(keys)
        rig.settle()
        usage = rig.tier.usage()
        assert usage.keys == 0
        assert usage.bytes_reserved == 0
        assert usage.bytes_held < held

    def test_a_removed_key_can_be_stored_again_at_once(self) -> None:
        rig = self.rig()
        keys = chunk_keys(3)
        rig.store(keys)
        rig.tier.remove(keys)
        second = rig.submit_store(keys, variant=2)
        rig.settle()
        record = rig.jobs[second]
        assert record.ended is not None
        loaded = rig.load(keys)
        assert [cause is None for cause in record.causes] == [cause is None for cause in loaded.causes]
        rig.check_loaded(loaded, variant=2)

    def test_a_key_removed_while_it_is_stored_is_not_seen_later(self) -> None:
        rig = self.rig()
        keys = chunk_keys(3)
        rig.submit_store(keys)
        rig.tier.remove(keys)
        assert rig.present(keys) == []
        rig.settle()
        assert rig.present(keys) == []
        assert rig.tier.usage().keys == 0

    def test_purge_drops_one_namespace(self) -> None:
        rig = self.rig()
        keys = chunk_keys(4)
        rig.store(keys)
        if self.persistent:
            rig.close()
            rig = self.rig(namespace=OTHER_NAMESPACE)
            rig.store(keys, variant=1)
            assert rig.purge(OTHER_NAMESPACE)
            assert rig.present(keys) == []
            rig.close()
            rig = self.rig(namespace=OTHER_NAMESPACE)
            assert rig.present(keys) == []
            rig.close()
            rig = self.rig()
        assert rig.purge(OTHER_NAMESPACE)
        assert rig.present(keys) == keys
        assert rig.purge(NAMESPACE)
        assert rig.present(keys) == []
        assert rig.tier.usage().keys == 0
        assert rig.store(keys).ok

    def test_a_flush_is_answered_once_per_ticket(self) -> None:
        rig = self.rig()
        rig.store(chunk_keys(3))
        tickets = [rig.tier.flush() for _ in range(3)]
        assert len(set(tickets)) == 3
        rig.settle()
        assert [rig.flushed[ticket] for ticket in tickets] == [True] * 3

    # accounting

    def test_usage_is_true_at_every_instant(self) -> None:
        rig = self.rig(chunks=12, seed=5)
        self.recount()
        rng = np.random.default_rng(11)
        keys = chunk_keys(40)

        def measure() -> None:
            usage, found = rig.tier.usage(), self.recount()
            assert found <= usage.bytes_held + usage.bytes_reserved, f"{found} bytes lie there, told are {usage}"

        rig.checks.append(measure)
        for _ in range(40):
            picked = [keys[int(i)] for i in rng.integers(0, 40, size=3)]
            match int(rng.integers(4)):
                case 0 | 1:
                    rig.submit_store(picked)
                case 2:
                    rig.submit_load(picked)
                case _:
                    rig.tier.remove(picked)
            rig.step()
        rig.settle()
        usage = rig.tier.usage()
        assert usage.bytes_reserved == 0
        assert usage.bytes_held == self.recount()
        assert usage.keys == len(rig.present(keys))
        assert usage.bytes_peak >= usage.bytes_held

    def test_any_order_of_completion_gives_stored_bytes_or_a_miss(self) -> None:
        for seed in range(4):
            rig = self.rig(chunks=10, seed=seed)
            rng = np.random.default_rng(seed)
            keys = chunk_keys(24)
            loads = []
            for _ in range(60):
                picked = [keys[int(i)] for i in rng.integers(0, 24, size=2)]
                match int(rng.integers(8)):
                    case 0 | 1 | 2:
                        rig.submit_store(picked)
                    case 3 | 4 | 5:
                        loads.append(rig.submit_load(picked))
                    case 6:
                        rig.tier.remove(picked)
                    case _:
                        rig.tier.touch(picked)
                for _ in range(int(rng.integers(3))):
                    rig.step()
            rig.settle()
            for job in loads:
                assert rig.jobs[job].ended is not None
                rig.check_loaded(rig.jobs[job])
            assert len(rig.present(keys)) <= 10
            rig.close()

    def test_the_limit_is_told(self) -> None:
        rig = self.rig(chunks=10)
        usage = rig.tier.usage()
        assert isinstance(usage, TierUsage)
        assert usage.bytes_limit == self.capacity(10)
        assert self.rig_without_limit().tier.usage().bytes_limit is None

    def rig_without_limit(self) -> TierHarness:
        """An open tier without limit, after the others were closed."""
        for rig in self._rigs:
            rig.close()
        return self.rig()
