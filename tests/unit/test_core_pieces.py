"""The small pure pieces of the core, each by itself."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvstrata.core.breakers import Breaker, BreakerState
from kvstrata.core.clocks import Pace, WaitClock
from kvstrata.core.ledger import Ledger
from kvstrata.core.messages import RequestOptions, TierFilter
from kvstrata.core.requests import MOVES, Door, Request, RequestState, RequestTable
from kvstrata.core.residency import Residency
from kvstrata.core.statistics import Counters, PromotionAccount, PromotionTag
from kvstrata.core.verdicts import Verdicts
from kvstrata.errors import InternalError, StateError
from kvstrata.policy.registry import make_policy
from kvstrata.testing import ScriptedTier, chunk_keys
from kvstrata.types import FailCause, JobKind, Locality, Medium, Presence

NO_SLOTS = np.empty(0, np.int32)


class TestBreaker:
    def breaker(self) -> Breaker:
        return Breaker(3, 1.0, 60.0)

    def test_opens_on_consecutive_errors_only(self) -> None:
        breaker = self.breaker()
        for _ in range(5):
            breaker.failure(0.0)
            breaker.failure(0.0)
            breaker.success()
        assert breaker.allows
        for _ in range(3):
            breaker.failure(0.0)
        assert breaker.state is BreakerState.OPEN
        assert not breaker.allows
        assert breaker.opened == 1

    def test_opens_at_once_on_an_overdue_job(self) -> None:
        breaker = self.breaker()
        breaker.failure(0.0, at_once=True)
        assert breaker.state is BreakerState.OPEN

    def test_half_open_admits_one_trial_and_closes_on_success(self) -> None:
        breaker = self.breaker()
        breaker.failure(0.0, at_once=True)
        breaker.advance(0.9)
        assert breaker.state is BreakerState.OPEN
        breaker.advance(1.0)
        assert breaker.state is BreakerState.HALF_OPEN
        assert breaker.allows
        assert breaker.is_trial
        breaker.asked()
        assert not breaker.allows
        assert breaker.deadline() is None
        breaker.advance(100.0)
        assert not breaker.allows
        breaker.success()
        assert breaker.state is BreakerState.CLOSED
        assert breaker.deadline() is None

    def test_a_failed_trial_doubles_the_time_up_to_a_bound(self) -> None:
        breaker = self.breaker()
        breaker.failure(0.0, at_once=True)
        now, waits = 0.0, []
        for _ in range(8):
            due = breaker.deadline()
            assert due is not None
            waits.append(due - now)
            now = due
            breaker.advance(now)
            breaker.asked()
            breaker.failure(now)
        assert waits == [1, 2, 4, 8, 16, 32, 60, 60]

    def test_closes_with_time_whatever_the_traffic(self) -> None:
        breaker = self.breaker()
        breaker.failure(0.0, at_once=True)
        breaker.advance(1.0)
        breaker.advance(2.0)
        assert breaker.state is BreakerState.CLOSED
        breaker.failure(10.0, at_once=True)
        breaker.advance(1000.0)
        assert breaker.state is BreakerState.CLOSED
        breaker.failure(1000.0, at_once=True)
        assert breaker.deadline() == 1001.0

    def test_a_trial_that_told_nothing_gives_way_to_the_next(self) -> None:
        breaker = self.breaker()
        breaker.failure(0.0, at_once=True)
        breaker.advance(1.0)
        breaker.asked()
        breaker.released()
        assert breaker.allows

    def test_asking_a_closed_breaker_is_no_trial(self) -> None:
        breaker = self.breaker()
        breaker.asked()
        assert breaker.allows
        assert not breaker.is_trial


class TestWaitClock:
    def test_both_clocks_run_from_the_start(self) -> None:
        clock = WaitClock(2.0, 3.0, 0.1, 10.0)
        assert clock.deadline() == 12.0
        assert not clock.expired(11.9)
        assert clock.expired(12.0)

    def test_progress_restarts_the_stall_and_not_the_total(self) -> None:
        clock = WaitClock(2.0, 3.0, 0.1, 0.0)
        clock.progress(1.5)
        assert clock.deadline() == 3.0
        clock.progress(2.9)
        assert clock.expired(3.0)

    def test_stands_still_while_stopped(self) -> None:
        clock = WaitClock(2.0, 3.0, 0.1, 0.0)
        clock.switch(Pace.STOPPED, 1.0)
        assert clock.deadline() == math.inf
        clock.switch(Pace.RUNNING, 100.0)
        assert clock.waited == 1.0
        assert clock.deadline() == 101.0

    def test_by_polls_counts_at_most_the_gap(self) -> None:
        clock = WaitClock(2.0, 2.0, 0.1, 0.0)
        clock.switch(Pace.BY_POLLS, 0.0)
        clock.account(50.0)
        assert clock.waited == pytest.approx(0.1)
        clock.account(50.05)
        assert clock.waited == pytest.approx(0.15)
        assert clock.deadline() == math.inf

    def test_by_polls_has_a_deadline_when_less_than_a_gap_is_left(self) -> None:
        clock = WaitClock(0.25, 2.0, 0.1, 0.0)
        clock.switch(Pace.BY_POLLS, 0.0)
        clock.account(1.0)
        assert clock.deadline() == math.inf
        clock.account(2.0)
        assert clock.deadline() == pytest.approx(2.05)

    def test_progress_while_waiting_for_room_takes_no_time_from_the_poll(self) -> None:
        clock = WaitClock(2.0, 2.0, 0.1, 0.0)
        clock.switch(Pace.BY_POLLS, 0.0)
        clock.progress(1.0)
        clock.account(1.0)
        assert clock.waited == pytest.approx(0.1)

    def test_only_the_first_plan_fixes_the_bounds(self) -> None:
        clock = WaitClock(20.0, 2.0, 0.1, 0.0)
        clock.fix_once(20.0, 5.0)
        clock.fix_once(1.0, 100.0)
        assert clock.deadline() == 5.0
        assert not clock.exhausted
        clock.account(5.0)
        assert clock.exhausted

    def test_a_clock_never_goes_back(self) -> None:
        clock = WaitClock(2.0, 2.0, 0.1, 5.0)
        clock.account(4.0)
        assert clock.waited == 0.0


class TestVerdicts:
    def test_a_content_verdict_stands_until_stored(self) -> None:
        for cause in (FailCause.WRONG_SIZE, FailCause.CORRUPT, FailCause.FOREIGN):
            verdicts = Verdicts(10, 1.0, 60.0)
            verdicts.failed(0, b"k", cause, shared=False, now=0.0)
            assert verdicts.blocks(0, b"k", 1e9)
            assert not verdicts.blocks(1, b"k", 0.0)
            verdicts.stored(0, [b"k"])
            assert not verdicts.blocks(0, b"k", 0.0)

    def test_a_content_verdict_in_a_shared_tier_has_a_back_off(self) -> None:
        verdicts = Verdicts(10, 1.0, 60.0)
        verdicts.failed(0, b"k", FailCause.CORRUPT, shared=True, now=0.0)
        assert verdicts.blocks(0, b"k", 0.9)
        assert not verdicts.blocks(0, b"k", 1.0)

    def test_a_back_off_doubles_from_one_to_sixty_seconds(self) -> None:
        for cause in (FailCause.IO_ERROR, FailCause.TIMEOUT, FailCause.REFUSED):
            verdicts = Verdicts(10, 1.0, 60.0)
            now = 0.0
            for expected in (1, 2, 4, 8, 16, 32, 60, 60):
                verdicts.failed(0, b"k", cause, shared=False, now=now)
                assert verdicts.blocks(0, b"k", now + expected - 0.001)
                now += expected
                assert not verdicts.blocks(0, b"k", now)

    def test_gone_no_space_and_cancelled_leave_no_verdict(self) -> None:
        verdicts = Verdicts(10, 1.0, 60.0)
        for cause in (FailCause.GONE, FailCause.NO_SPACE, FailCause.CANCELLED):
            verdicts.failed(0, b"k", cause, shared=False, now=0.0)
        assert len(verdicts) == 0

    def test_a_passing_failure_does_not_soften_a_content_verdict(self) -> None:
        verdicts = Verdicts(10, 1.0, 60.0)
        verdicts.failed(0, b"k", FailCause.CORRUPT, shared=False, now=0.0)
        verdicts.failed(0, b"k", FailCause.TIMEOUT, shared=False, now=0.0)
        assert verdicts.blocks(0, b"k", 1e9)

    def test_the_oldest_is_forgotten_first(self) -> None:
        verdicts = Verdicts(3, 1.0, 60.0)
        for key in (b"1", b"2", b"3", b"1", b"4"):
            verdicts.failed(0, key, FailCause.CORRUPT, shared=False, now=0.0)
        assert len(verdicts) == 3
        assert not verdicts.blocks(0, b"2", 0.0)
        assert all(verdicts.blocks(0, key, 0.0) for key in (b"1", b"3", b"4"))

    def test_mask_makes_what_is_blocked_absent(self) -> None:
        verdicts = Verdicts(10, 1.0, 60.0)
        verdicts.failed(2, b"c", FailCause.CORRUPT, shared=False, now=0.0)
        answers = np.full(2, Presence.PRESENT, np.int8)
        verdicts.mask(2, [b"a", b"b", b"c"], np.array([1, 2], np.int32), answers, 0.0)
        assert answers.tolist() == [Presence.PRESENT, Presence.ABSENT]
        verdicts.clear()
        assert not verdicts.blocks(2, b"c", 0.0)


class TestLedger:
    def test_one_id_space_for_all_kinds(self) -> None:
        ledger = Ledger(10.0, 60.0)
        jobs = [ledger.accept(kind, 0, NO_SLOTS, [], "r", 0.0) for kind in JobKind]
        assert [job.job_id for job in jobs] == [1, 2, 3, 4]
        assert len(ledger) == 4
        assert ledger.get(3) is jobs[2]
        assert list(ledger) == jobs

    def test_a_job_ends_exactly_once(self) -> None:
        ledger = Ledger(10.0, 60.0)
        job = ledger.accept(JobKind.STORE, 0, NO_SLOTS, [], "r", 0.0)
        ledger.end(job)
        assert ledger.get(job.job_id) is None
        with pytest.raises(InternalError, match="ended twice"):
            ledger.end(job)

    def test_only_jobs_of_tiers_have_bounds(self) -> None:
        ledger = Ledger(10.0, 60.0)
        ledger.accept(JobKind.LOAD, 0, NO_SLOTS, [b"k"], "r", 0.0)
        assert ledger.deadline() is None
        assert ledger.overdue(1e9) == []

    def test_ten_seconds_without_a_finished_key_are_overdue(self) -> None:
        ledger = Ledger(10.0, 60.0)
        job = ledger.accept(JobKind.PROMOTE, 0, NO_SLOTS, [b"k"], "r", 0.0, tier=0)
        ledger.hand_over(job.job_id, 0.0)
        assert ledger.deadline() == 10.0
        job.progressed = 5.0
        assert ledger.overdue(10.0) == []
        assert ledger.deadline() == 15.0
        assert ledger.overdue(15.0) == [job]
        assert ledger.overdue(100.0) == []
        assert ledger.deadline() is None

    def test_sixty_seconds_in_all_are_overdue_whatever_the_progress(self) -> None:
        ledger = Ledger(10.0, 60.0)
        job = ledger.accept(JobKind.CASCADE, 0, NO_SLOTS, [b"k"], "r", 0.0, tier=0)
        ledger.hand_over(job.job_id, 0.0)
        for now in range(5, 60, 5):
            job.progressed = float(now)
            assert ledger.overdue(float(now)) == []
        assert ledger.overdue(60.0) == [job]

    def test_bounds_run_from_the_moment_the_tier_is_told(self) -> None:
        ledger = Ledger(10.0, 60.0)
        job = ledger.accept(JobKind.PROMOTE, 0, NO_SLOTS, [b"k"], "r", 0.0, tier=0)
        assert ledger.overdue(1000.0) == []
        ledger.hand_over(job.job_id, 1000.0)
        assert ledger.overdue(1009.0) == []
        assert ledger.overdue(1010.0) == [job]

    def test_an_ended_job_is_never_overdue(self) -> None:
        ledger = Ledger(10.0, 60.0)
        job = ledger.accept(JobKind.PROMOTE, 0, NO_SLOTS, [b"k"], "r", 0.0, tier=0)
        assert ledger.oldest(3.0) == 3.0
        ledger.end(job)
        assert ledger.overdue(10.0) == []
        assert ledger.oldest(3.0) == 0.0


class TestRequests:
    def request(self, name: str, now: float = 0.0) -> Request:
        return Request(name, [[]], RequestOptions(), now)

    def test_an_illegal_move_is_a_bug(self) -> None:
        request = self.request("a")
        request.move(RequestState.RUNNING)
        request.move(RequestState.RUNNING)
        with pytest.raises(InternalError, match="running -> ready is not a legal move"):
            request.move(RequestState.READY)

    def test_finish_and_preemption_are_legal_from_every_state(self) -> None:
        for start, moves in MOVES.items():
            if start is not RequestState.FINISHED:
                assert RequestState.FINISHED in moves
                assert RequestState.NEW in moves or start is RequestState.NEW

    def test_a_request_uses_one_door(self) -> None:
        request = self.request("a")
        request.enter(Door.PER_KEY)
        request.enter(Door.PER_KEY)
        with pytest.raises(StateError, match="per_key door and may not use the two_phase door"):
            request.enter(Door.TWO_PHASE)

    def test_unknown_and_doubled_ids_are_errors_by_name(self) -> None:
        table = RequestTable(10)
        table.add(self.request("a"))
        with pytest.raises(StateError, match="request a: added twice"):
            table.add(self.request("a"))
        with pytest.raises(StateError, match="request b: unknown"):
            table.require("b")
        assert table.get("b") is None
        assert len(table) == 1

    def test_the_longest_silent_record_is_surplus(self) -> None:
        table = RequestTable(2)
        first, second, third = (self.request(name, now) for name, now in (("a", 0.0), ("b", 10.0), ("c", 11.0)))
        table.add(first)
        table.add(second)
        assert table.surplus() is None
        first.last_poll = 5.0
        table.add(third)
        assert table.surplus() is first
        table.remove(first)
        assert table.surplus() is None

    def test_contact_saves_a_record(self) -> None:
        table = RequestTable(2)
        first, second, third = (self.request(name, now) for name, now in (("a", 0.0), ("b", 10.0), ("c", 11.0)))
        table.add(first)
        table.add(second)
        first.last_poll = 10.5
        table.add(third)
        assert table.surplus() is second

    def test_finished_records_are_no_surplus(self) -> None:
        table = RequestTable(2)
        requests = [self.request(str(i), float(i)) for i in range(200)]
        for i, request in enumerate(requests):
            table.add(request)
            if i >= 2:
                surplus = table.surplus()
                assert surplus is requests[i - 2]
                table.remove(surplus)
        assert len(table) == 2


class TestPromotionAccount:
    def account(self) -> tuple[PromotionAccount, Residency, np.ndarray]:
        residency = Residency(8 * 64, [64], make_policy("lru"))
        reserved = residency.reserve(chunk_keys(6), [0] * 6)
        assert reserved is not None
        return PromotionAccount(Counters(), residency), residency, reserved[0]

    def test_every_promotion_ends_in_exactly_one_class(self) -> None:
        account, residency, slots = self.account()
        counters = account._counters
        assert account.started(slots) == 6 * 64
        residency.hold(slots)
        account.consumed(slots[:1])
        account.failed(slots[1:2])
        residency.unhold(slots[2:5])
        for slot, tag in ((2, PromotionTag.NOT_TAKEN), (3, PromotionTag.CANCELLED), (4, PromotionTag.EXPIRED)):
            account.released(slots[slot : slot + 1], tag)
        assert counters.promotions_open == 4
        account.dropped(slots)
        account.dropped(slots)
        found = (counters.consumed, counters.failed, counters.not_taken, counters.cancelled, counters.expired)
        assert found == (1, 1, 2, 1, 1)
        assert counters.promoted == 6
        assert counters.promotions_open == 0
        assert counters.consumed_bytes == 64

    def test_what_somebody_still_holds_is_not_released(self) -> None:
        account, residency, slots = self.account()
        account.started(slots)
        residency.hold(slots)
        residency.hold(slots)
        residency.unhold(slots)
        account.released(slots, PromotionTag.CANCELLED)
        assert (residency.tag[slots] == PromotionTag.OPEN).all()

    def test_a_later_load_uses_what_was_not_taken_before(self) -> None:
        account, _, slots = self.account()
        account.started(slots)
        account.released(slots, PromotionTag.CANCELLED)
        account.consumed(slots)
        assert account._counters.consumed == 6
        assert account._counters.cancelled == 0


def test_a_tier_filter_admits_by_name_medium_and_locality() -> None:
    tier = ScriptedTier(name="d", medium=Medium.NVME, locality=Locality.LOCAL)
    assert TierFilter().accepts(tier)
    assert TierFilter(names=frozenset({"d"}), media=frozenset({Medium.NVME})).accepts(tier)
    assert not TierFilter(names=frozenset({"x"})).accepts(tier)
    assert not TierFilter(media=frozenset({Medium.OBJECT})).accepts(tier)
    assert not TierFilter(localities=frozenset({Locality.SHARED})).accepts(tier)
