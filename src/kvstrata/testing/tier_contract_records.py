"""The tier contract on what is stored and read: exactly the stored bytes, or a miss."""

from __future__ import annotations

import pytest
import xxhash

from kvstrata.testing.tier_contract_hooks import ABSENT, PRESENT, UNKNOWN, TierContractHooks
from kvstrata.testing.tier_harness import OTHER_NAMESPACE, chunk_keys, payload_of
from kvstrata.types import FailCause


class RecordsContract(TierContractHooks):
    """Storing, probing, loading, and misses."""

    # store, probe, load

    def test_what_was_stored_is_loaded(self) -> None:
        rig = self.rig()
        keys = chunk_keys(5)
        assert rig.probe(keys) == [ABSENT] * 5
        assert rig.store(keys).ok
        assert rig.probe(keys) == [PRESENT] * 5
        record = rig.load(keys)
        assert record.ok
        rig.check_loaded(record)

    def test_a_key_is_visible_only_when_its_bytes_are_there(self) -> None:
        rig = self.rig()
        keys = chunk_keys(4)
        assert rig.present(keys) == []
        store = rig.submit_store(keys)
        for _ in range(1000):
            seen = rig.present(keys)
            if seen:
                record = rig.load(seen)
                assert record.ok, record.causes
                rig.check_loaded(record)
                break
            rig.step()
        rig.settle()
        assert rig.jobs[store].ok
        assert rig.present(keys) == keys

    def test_a_failed_store_is_never_visible(self) -> None:
        rig = self.rig()
        self.fail_writes(rig.tier, True)
        keys = chunk_keys(3)
        record = rig.store(keys)
        assert not record.done
        assert rig.present(keys) == []
        self.fail_writes(rig.tier, False)
        rig.clock.advance(120.0)
        rig.settle()
        assert rig.store(keys).ok
        rig.check_loaded(rig.load(keys))

    def test_results_are_per_key(self) -> None:
        rig = self.rig()
        keys = chunk_keys(5)
        rig.store([key for key in keys if key != keys[2]])
        record = rig.load(keys)
        assert record.done == {0, 1, 3, 4}
        assert record.failed == {2: FailCause.GONE}
        rig.check_loaded(record)
        assert rig.load([keys[0]]).ok, "the next job works"

    def test_a_key_that_is_there_is_stored_with_success(self) -> None:
        rig = self.rig()
        keys = chunk_keys(3)
        rig.store(keys)
        before = rig.tier.usage()
        record = rig.store(keys, variant=1)
        assert record.ok
        assert rig.tier.usage().bytes_held == before.bytes_held
        loaded = rig.load(keys)
        assert loaded.ok
        for index, key in enumerate(keys):
            assert loaded.payloads[index] in (payload_of(key, self.chunk_bytes), payload_of(key, self.chunk_bytes, 1))

    def test_a_key_twice_in_one_store(self) -> None:
        rig = self.rig()
        one, two = chunk_keys(2)
        assert rig.store([one, two, one, one]).ok
        assert rig.tier.usage().keys == 2
        rig.check_loaded(rig.load([one, two]))

    def test_a_key_twice_in_one_load(self) -> None:
        rig = self.rig()
        one, two = chunk_keys(2)
        rig.store([one, two])
        record = rig.load([one, two, one])
        assert record.ok
        rig.check_loaded(record)

    def test_one_key_in_two_stores_in_flight(self) -> None:
        rig = self.rig()
        keys = chunk_keys(3)
        first = rig.submit_store(keys)
        second = rig.submit_store(keys[::-1])
        rig.settle()
        assert rig.jobs[first].ok
        assert rig.jobs[second].ok
        assert rig.tier.usage().keys == 3
        rig.check_loaded(rig.load(keys))

    def test_chunks_of_unlike_size(self) -> None:
        rig = self.rig()
        small, large, tiny = chunk_keys(3)
        assert rig.store([small], length=self.chunk_bytes // 2).ok
        assert rig.store([large], length=self.chunk_bytes * 2).ok
        assert rig.store([tiny], length=64).ok
        for key, length in ((small, self.chunk_bytes // 2), (large, self.chunk_bytes * 2), (tiny, 64)):
            record = rig.load([key], length=length)
            assert record.ok
            rig.check_loaded(record)

    def test_jobs_and_probes_without_keys(self) -> None:
        rig = self.rig()
        assert rig.probe([]) == []
        assert rig.store([]).ended is not None
        assert rig.load([]).ended is not None
        rig.tier.touch([])
        rig.tier.remove([])
        rig.settle()

    def test_given_digests_are_what_a_load_verifies(self) -> None:
        rig = self.rig()
        good, bad = chunk_keys(2)
        digest = xxhash.xxh3_128_digest(payload_of(good, self.chunk_bytes))
        rig.store([good], digests=[digest])
        assert rig.load([good]).ok
        rig.store([bad], digests=[digest])
        assert not rig.load([bad]).done, "the tier did not verify against the digest that it was given"

    def test_wake_comes_before_the_caller_has_to_ask(self) -> None:
        rig = self.rig()
        before = rig.wakes
        rig.submit_store(chunk_keys(1))
        rig.executor.run_all()
        assert rig.wakes > before

    # misses

    def test_an_unknown_key_is_a_miss(self) -> None:
        rig = self.rig()
        record = rig.load(chunk_keys(2))
        assert record.causes == [FailCause.GONE] * 2

    def test_an_entry_deleted_behind_the_tier_is_a_miss_and_told_once(self) -> None:
        rig = self.rig()
        keys = chunk_keys(3)
        rig.store(keys)
        self.delete(rig.tier, keys[1])
        record = rig.load(keys)
        assert record.causes == [None, FailCause.GONE, None]
        assert rig.load([keys[1]]).causes == [FailCause.GONE]
        rig.tier.remove([keys[1]])
        rig.settle()
        assert rig.removed.count(keys[1]) <= 1
        assert rig.probe(keys) == [PRESENT, ABSENT, PRESENT]
        assert rig.tier.usage().keys == 2
        assert rig.store([keys[1]]).ok
        rig.check_loaded(rig.load(keys))

    def test_damaged_bytes_are_a_miss_and_neighbours_are_not(self) -> None:
        rig = self.rig()
        keys = chunk_keys(5)
        rig.store(keys)
        self.damage(rig.tier, keys[2])
        record = rig.load(keys)
        assert record.causes == [None, None, FailCause.CORRUPT, None, None]
        rig.check_loaded(record)
        assert rig.probe(keys) == [PRESENT, PRESENT, ABSENT, PRESENT, PRESENT]
        assert rig.store([keys[2]]).ok, "a later store makes it a hit again"
        record = rig.load(keys)
        assert record.ok
        rig.check_loaded(record)

    def test_a_shortened_entry_is_a_miss(self) -> None:
        rig = self.rig()
        keys = chunk_keys(3)
        rig.store(keys)
        self.truncate(rig.tier, keys[0])
        record = rig.load(keys)
        assert record.done == {1, 2}
        assert record.failed[0].is_content
        assert rig.probe(keys[:1]) == [ABSENT]

    def test_another_length_than_stored_is_a_miss(self) -> None:
        rig = self.rig()
        keys = chunk_keys(1)
        rig.store(keys)
        assert rig.load(keys, length=self.chunk_bytes // 2).causes == [FailCause.WRONG_SIZE]

    def test_a_failed_read_removes_only_the_version_that_failed(self) -> None:
        for seed in (None, 1, 2, 3):
            rig = self.rig(seed=seed)
            keys = chunk_keys(3, start=100 * (seed or 0))
            rig.store(keys)
            self.damage(rig.tier, keys[0])
            rig.submit_load(keys[:1])
            rig.tier.remove(keys[:1])
            rig.submit_store(keys[:1], variant=7)
            rig.settle()
            if rig.present(keys[:1]):
                record = rig.load(keys[:1])
                assert record.ok
                rig.check_loaded(record, variant=7)
            assert rig.present(keys[1:]) == keys[1:]
            rig.close()

    def test_a_transient_read_error_keeps_the_data(self) -> None:
        rig = self.rig()
        keys = chunk_keys(3)
        rig.store(keys)
        self.fail_reads(rig.tier, True)
        record = rig.load(keys)
        assert not record.done
        assert all(cause is not None and cause.is_passing for cause in record.causes), record.causes
        self.fail_reads(rig.tier, False)
        rig.clock.advance(120.0)
        rig.settle()
        assert rig.present(keys) == keys
        record = rig.load(keys)
        assert record.ok
        rig.check_loaded(record)

    def test_probe_and_load_agree(self) -> None:
        rig = self.rig(chunks=24)
        keys = chunk_keys(60)
        for start in range(0, 60, 6):
            rig.store(keys[start : start + 6])
        rig.tier.remove(keys[56:])
        rig.settle()
        found = rig.probe(keys)
        assert UNKNOWN not in found
        record = rig.load(keys)
        assert [cause is None for cause in record.causes] == [presence is PRESENT for presence in found]
        rig.check_loaded(record)

    def test_another_namespace_reads_nothing(self) -> None:
        if not self.persistent:
            pytest.skip("the tier does not outlive its close")
        rig = self.rig()
        keys = chunk_keys(3)
        rig.store(keys)
        rig.close()
        other = self.rig(namespace=OTHER_NAMESPACE)
        assert other.present(keys) == []
        assert not other.load(keys).done
        other.close()
        again = self.rig()
        assert again.present(keys) == keys
        again.check_loaded(again.load(keys))

    def test_another_layout_reads_nothing(self) -> None:
        if not self.persistent:
            pytest.skip("the tier does not outlive its close")
        rig = self.rig()
        keys = chunk_keys(3)
        rig.store(keys)
        rig.close()
        other = self.rig(layout_tag=99)
        assert other.present(keys) == []
        assert not other.load(keys).done
        other.store(keys, variant=3)
        record = other.load(keys)
        assert record.ok
        other.check_loaded(record, variant=3)
