"""The contract suite of tiers: a pytest base class that the author of a tier subclasses.

    class TestMyTier(TierContract):
        def make(self, limit): return MyTier(path=self.place / "data", limit=limit)
        def capacity(self, chunks): return chunks * (self.chunk_bytes + MY_HEADER)
        def damage(self, tier, key): ...

`make`, `capacity` and `damage` are required. The other hooks widen the suite; a test whose hook is missing is skipped
and names it. All tests run without threads: the suite steps the tier's tasks with a `ManualExecutor` and a
`ManualClock`. A fresh `place` (an empty folder) is given to every test; two tiers made in one test share it.

The class is meant to be read: each rule of the tier contract is one test with its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import xxhash

from kvstrata.testing.tier_harness import NAMESPACE, OTHER_NAMESPACE, TierHarness, chunk_key, chunk_keys, payload_of
from kvstrata.tiers.base import Tier
from kvstrata.types import FailCause, Flushed, JobEnded, OffloadKey, Presence, TierUsage

ABSENT, UNKNOWN, PRESENT = Presence.ABSENT, Presence.UNKNOWN, Presence.PRESENT
REFUSING = (FailCause.REFUSED, FailCause.GONE, FailCause.CANCELLED)
"""What a closed tier may say about the keys of a job."""


class TierContract:
    """Subclass it, name the subclass `Test...`, and give it the hooks."""

    chunk_bytes: ClassVar[int] = 1000
    persistent: ClassVar[bool] = True
    """Whether what was stored is there after close and open of a new tier in the same place."""
    strict_lru: ClassVar[bool] = True
    """Whether single chunks are evicted coldest first. False for tiers that reclaim by larger units."""

    place: Path

    # hooks

    def make(self, limit: int | None) -> Tier:
        """A tier on `self.place` that may hold `limit` bytes (None: without limit). Required."""
        raise NotImplementedError

    def capacity(self, chunks: int) -> int:
        """The least limit under which exactly `chunks` chunks of `chunk_bytes` can be held. Required."""
        raise NotImplementedError

    def damage(self, tier: Tier, key: OffloadKey) -> None:
        """Alter one payload byte of the stored chunk, behind the tier's back. Required."""
        raise NotImplementedError

    def delete(self, tier: Tier, key: OffloadKey) -> None:
        """Take the stored chunk away behind the tier's back."""
        pytest.skip("the tier has no `delete` hook")

    def truncate(self, tier: Tier, key: OffloadKey) -> None:
        """Shorten the stored chunk behind the tier's back."""
        pytest.skip("the tier has no `truncate` hook")

    def fail_reads(self, tier: Tier, failing: bool) -> None:
        """From now on every read of the device fails with an I/O error, or no more."""
        pytest.skip("the tier has no `fail_reads` hook")

    def fail_writes(self, tier: Tier, failing: bool) -> None:
        """From now on every write to the device fails with an I/O error, or no more."""
        pytest.skip("the tier has no `fail_writes` hook")

    def recount(self) -> int:
        """Bytes allocated in the place now, found by looking, not by asking the tier."""
        pytest.skip("the tier has no `recount` hook")

    def index_entries(self, tier: Tier) -> int:
        """How many entries all of the tier's tables hold together."""
        pytest.skip("the tier has no `index_entries` hook")

    # rig

    @pytest.fixture(autouse=True)
    def _rig(self, tmp_path: Path) -> object:
        self.place = tmp_path / "place"
        self.place.mkdir(mode=0o700)
        self._rigs: list[TierHarness] = []
        yield
        for rig in self._rigs:
            rig.executor.hang = False
            rig.close()
            assert not rig.executor.raised, f"a task of the tier raised: {rig.executor.raised}"

    def rig(
        self, chunks: int | None = None, *, seed: int | None = None, slots: int = 256, **how: object
    ) -> TierHarness:
        """An open tier that can hold `chunks` chunks, with its harness."""
        limit = None if chunks is None else self.capacity(chunks)
        rig = TierHarness(self.make(limit), chunk_bytes=self.chunk_bytes, seed=seed, slots=slots, **how)  # type: ignore[arg-type]
        self._rigs.append(rig)
        return rig.open()

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

    # limit

    def test_the_limit_is_hard(self) -> None:
        rig = self.rig(chunks=20)
        limit = self.capacity(20)

        def measure() -> None:
            usage = rig.tier.usage()
            found = self.recount()
            assert found <= limit, f"{found} bytes lie in the place, the limit is {limit}"
            assert found <= usage.bytes_held + usage.bytes_reserved, f"{found} bytes lie there, told are {usage}"

        if type(self).recount is not TierContract.recount:
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
        wide = TierHarness(rig.tier, chunk_bytes=big, slots=2)
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

    # restart

    def test_reopen_serves_what_was_complete(self) -> None:
        if not self.persistent:
            pytest.skip("the tier does not outlive its close")
        rig = self.rig()
        keys = chunk_keys(10)
        rig.store(keys)
        rig.close()
        again = self.rig()
        assert again.present(keys) == keys
        record = again.load(keys)
        assert record.ok
        again.check_loaded(record)
        assert again.tier.usage().keys == 10

    def test_reopen_under_a_lower_limit_trims(self) -> None:
        if not self.persistent:
            pytest.skip("the tier does not outlive its close")
        rig = self.rig(chunks=30)
        keys = chunk_keys(30)
        for key in keys:
            rig.store([key])
            rig.clock.advance(1.0)
        rig.close()
        again = TierHarness(self.make(self.capacity(10)), chunk_bytes=self.chunk_bytes)
        self._rigs.append(again)
        again.over_limit_at_open = True
        again.open()
        again.over_limit_at_open = False
        again.check_limit()
        found = again.present(keys)
        assert 0 < len(found) <= 10
        if self.strict_lru:
            assert found == keys[20:]
        again.check_loaded(again.load(found))

    def test_two_instances_on_one_place_share_or_refuse(self) -> None:
        if not self.persistent:
            pytest.skip("two tiers share no place")
        first = self.rig()
        keys = chunk_keys(4)
        first.store(keys)
        second = self.rig()
        found = second.present(keys)
        if found:
            second.check_loaded(second.load(found))
        else:
            assert not second.load(keys).done
        record = second.store(chunk_keys(2, start=50))
        assert record.ended is not None
        loaded = first.load(keys)
        assert loaded.ok, "the first instance was disturbed"
        first.check_loaded(loaded)
        first.close()
        second.clock.advance(120.0)
        second.settle()
        assert second.present(keys) == keys, "the second instance did not take over"
        second.check_loaded(second.load(keys))

    # the end of jobs

    def test_a_cancelled_job_ends_once(self) -> None:
        rig = self.rig()
        keys = chunk_keys(6)
        rig.store(keys)
        jobs = [rig.submit_load(keys), rig.submit_store(chunk_keys(6, start=20))]
        for job in jobs:
            rig.tier.cancel(job)
            rig.tier.cancel(job)
        rig.tier.cancel(999)
        rig.settle()
        for job in jobs:
            record = rig.jobs[job]
            assert record.ended is not None
            assert {cause for cause in record.causes if cause} <= {FailCause.CANCELLED}
        late = rig.submit_load(keys)
        rig.step()
        rig.tier.cancel(late)
        rig.settle()
        rig.tier.cancel(late)
        rig.settle()
        assert rig.jobs[late].ended is not None
        rig.check_loaded(rig.jobs[late])
        found = rig.present(chunk_keys(6, start=20))
        rig.check_loaded(rig.load(found))

    def test_jobs_in_flight_at_close_end_once(self) -> None:
        rig = self.rig()
        keys = chunk_keys(4)
        rig.store(keys)
        jobs = [rig.submit_load(keys), rig.submit_store(chunk_keys(4, start=20)), rig.submit_load(keys)]
        rig.close()
        rig.executor.run_all()
        rig.poll()
        for job in jobs:
            assert rig.jobs[job].ended is not None, f"job {job} never ended"
            rig.check_loaded(rig.jobs[job])

    def test_close_abandons_a_device_that_hangs(self) -> None:
        rig = self.rig()
        keys = chunk_keys(4)
        rig.store(keys)
        jobs = [rig.submit_load(keys), rig.submit_store(chunk_keys(4, start=20))]
        rig.executor.hang = True
        assert rig.tier.drain(0.0) is not bool(rig.executor.pending)
        rig.close(timeout=0.0)
        rig.executor.run_all()  # the device comes back after all
        rig.poll()
        for job in jobs:
            assert rig.jobs[job].ended is not None, f"job {job} never ended"
            rig.check_loaded(rig.jobs[job])

    def test_drain_waits_for_every_job(self) -> None:
        rig = self.rig()
        job = rig.submit_store(chunk_keys(4))
        assert rig.tier.drain(5.0)
        rig.poll()
        assert rig.jobs[job].ok

    def test_close_is_idempotent_and_afterwards_all_is_refused(self) -> None:
        rig = self.rig()
        keys = chunk_keys(3)
        rig.store(keys)
        rig.close()
        rig.close()
        self.check_refusing(rig, keys)

    def test_before_open_all_is_refused(self) -> None:
        rig = TierHarness(self.make(None), chunk_bytes=self.chunk_bytes)
        self.check_refusing(rig, chunk_keys(3))

    def check_refusing(self, rig: TierHarness, keys: list[OffloadKey]) -> None:
        """Every method answers as an empty, refusing tier."""
        assert rig.probe(keys) == [ABSENT] * len(keys)
        for job in (rig.submit_load(keys), rig.submit_store(keys)):
            rig.poll()
            record = rig.jobs[job]
            assert record.ended is not None
            assert {cause for cause in record.causes if cause is not None} <= set(REFUSING)
            assert not record.done
        tickets = {rig.tier.flush(), rig.tier.purge(NAMESPACE)}
        rig.tier.touch(keys)
        rig.tier.remove(keys)
        rig.tier.cancel(1)
        rig.poll()
        assert {ticket: rig.flushed[ticket] for ticket in tickets} == dict.fromkeys(tickets, False)
        usage = rig.tier.usage()
        assert (usage.bytes_held, usage.bytes_reserved, usage.keys) == (0, 0, 0)
        assert rig.tier.drain(0.0)
        assert rig.tier.self_test(), "a closed tier passed its self-test"
        assert rig.poll() == []

    def test_each_job_gives_its_keys_before_its_end(self) -> None:
        rig = self.rig()
        keys = chunk_keys(4)
        rig.store(keys)
        rig.load(keys)
        ends = [event.job_id for event in rig.events if isinstance(event, JobEnded)]
        assert sorted(ends) == sorted(rig.jobs)
        assert not any(isinstance(event, Flushed) for event in rig.events)

    # errors

    def test_workers_survive_every_error(self) -> None:
        rig = self.rig()
        keys = chunk_keys(5)
        rig.store(keys)
        self.fail_reads(rig.tier, True)
        self.fail_writes(rig.tier, True)
        rig.load(keys)
        rig.store(chunk_keys(5, start=50))
        rig.tier.remove([keys[4]])
        rig.tier.flush()
        rig.settle()
        self.fail_reads(rig.tier, False)
        self.fail_writes(rig.tier, False)
        rig.clock.advance(120.0)
        rig.settle()
        assert not rig.executor.raised
        assert rig.load(keys[:4]).ok
        assert rig.store(chunk_keys(5, start=100)).ok

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

    # self-test

    def test_self_test_of_a_healthy_tier(self) -> None:
        rig = self.rig(chunks=4)
        keys = chunk_keys(3)
        rig.store(keys)
        assert rig.tier.self_test() is None
        rig.settle()
        assert rig.present(keys) == keys
        assert rig.tier.usage().keys == 3
        assert rig.removed == []

    def test_self_test_of_a_broken_tier_says_what_failed(self) -> None:
        rig = self.rig()
        self.fail_writes(rig.tier, True)
        said = rig.tier.self_test()
        assert said
        assert "\n" not in said
        self.fail_writes(rig.tier, False)
        rig.settle()

    def test_self_test_of_a_tier_that_does_not_answer(self) -> None:
        rig = self.rig()
        rig.executor.hang = True
        said = rig.tier.self_test()
        rig.executor.hang = False
        rig.executor.run_all()
        rig.poll()
        assert said is None or "\n" not in said
