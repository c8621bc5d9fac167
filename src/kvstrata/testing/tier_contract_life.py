"""The tier contract on a tier's life: restart, the end of jobs, errors, and the self-test."""

from __future__ import annotations

import pytest

from kvstrata.testing.tier_contract_hooks import ABSENT, REFUSING, TierContractHooks
from kvstrata.testing.tier_harness import NAMESPACE, TierHarness, chunk_keys
from kvstrata.types import FailCause, Flushed, JobEnded, OffloadKey


class LifeContract(TierContractHooks):
    """Restart, the end of jobs, errors, and the self-test."""

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
        again = TierHarness(self.make(self.capacity(10)), chunk_bytes=self.chunk_bytes, tail_room=self.tail_room)
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
