"""The scheduler side by itself: a request's way, what fails on it, and that nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import vllm_kit as kit

from kvstrata.integrations.vllm.metadata import JobReport, RankGreeting, StepReport
from kvstrata.integrations.vllm.scheduler import NO_JOB, SchedulerSide

SHAPE = kit.shape_of(kit.group(kit.full()))


@pytest.fixture
def side() -> Iterator[SchedulerSide]:
    made = kit.side(SHAPE)
    yield made
    made.close()
    assert dict(made.shield.faults) == {}


def serve(side: SchedulerSide, request: kit.FakeRequest, table: list[int]) -> Any:
    """One step that computes all of a request; its stores are done. Returns the work."""
    side.allocated(request, [[]], 0)
    rest = request.num_tokens - request.num_computed_tokens
    work = side.build_work(kit.output({request.request_id: rest}, {request.request_id: (table,)}))
    side.update(StepReport(stores=[JobReport(job.job_id, True) for job in work.stores]))
    request.num_computed_tokens = request.num_tokens
    return work


def stored(side: SchedulerSide, tokens: list[int]) -> None:
    first = kit.FakeRequest("first", tokens)
    side.new_request(first)
    assert side.matched(first, 0) == (0, False)
    serve(side, first, [1, 2, 3, 4])
    side.finished(first, ([1, 2, 3, 4],))


def pins(side: SchedulerSide) -> int:
    return int(side.stack.driver.call(lambda manager: manager.statistics()).primary.pinned_bytes)


def test_what_one_request_leaves_the_next_one_loads(side: SchedulerSide) -> None:
    stored(side, list(range(70)))
    second = kit.FakeRequest("second", list(range(70)))
    side.new_request(second)
    assert side.matched(second, 0) == (64, True)
    side.allocated(second, [kit.blocks(9, 8, 7, 6, 5)], 64)
    work = side.build_work(kit.output({}, {}))
    (job,) = work.loads
    assert job.valid
    assert [copy.blocks for copy in job.groups] == [[9, 8, 7, 6]]
    assert side.pending
    assert side.sources_of("second") == {"primary": 64}
    side.update(StepReport(loads=[JobReport(job.job_id, True)]))
    assert not side.pending
    assert pins(side) == 0
    side.allocated(second, [kit.blocks(9, 8, 7, 6, 5)], 0)  # the second call, when it is scheduled
    side.finished(second, ([9, 8, 7, 6, 5],))
    story = side.archive.last("second")
    assert story is not None
    assert (story.cause, story.hit, story.taken) == ("hit", 64, 64)


def test_only_whole_final_chunks_of_the_prompt_are_stored(side: SchedulerSide) -> None:
    request = kit.FakeRequest("r", list(range(100)), prompt=70)
    side.new_request(request)
    side.matched(request, 0)
    work = side.build_work(kit.output({"r": 40}, {"r": ([1, 2, 3],)}))
    assert [copy.blocks for job in work.stores for copy in job.groups] == [[1, 2]]
    request.num_computed_tokens = 40
    work = side.build_work(kit.output({"r": 60}, {"r": ([1, 2, 3, 4, 5, 6],)}))
    assert [copy.blocks for job in work.stores for copy in job.groups] == [[3, 4]]
    side.finished(request, ([1, 2, 3, 4, 5, 6],))
    assert side.build_work(kit.output({}, {})).early == []


def test_in_mode_all_the_rest_is_stored_when_the_request_ends() -> None:
    side = kit.side(SHAPE, store="all")
    request = kit.FakeRequest("r", list(range(20)))
    side.new_request(request)
    side.matched(request, 0)
    serve(side, request, [1, 2])
    request.tokens += list(range(500, 530))
    request.hash_up()
    request.num_computed_tokens = 49
    side.finished(request, ([1, 2, 3, 4],))
    (job,) = side.build_work(kit.output({}, {})).early
    assert [copy.blocks for copy in job.groups] == [[2, 3]]
    assert side.pending
    side.update(StepReport(stores=[JobReport(job.job_id, True)]))
    assert not side.pending
    side.close()


def test_a_failed_load_is_told_and_not_offered_again(side: SchedulerSide) -> None:
    stored(side, list(range(70)))
    request = kit.FakeRequest("r", list(range(70)))
    side.new_request(request)
    side.matched(request, 0)
    side.allocated(request, [kit.blocks(9, 8, 7, 6, 5)], 64)
    (job,) = side.build_work(kit.output({}, {})).loads
    side.update(StepReport(loads=[JobReport(job.job_id, False)]))
    assert side.matched(request, 0) == (0, False)
    side.allocated(request, [[]], 0)
    side.finished(request, ([],))
    story = side.archive.last("r")
    assert story is not None
    assert story.cause == "load_failed"
    assert pins(side) == 0


@pytest.mark.scenario_117
@pytest.mark.parametrize("state", ["new", "ready", "allocated", "loading"])
def test_an_abort_leaves_no_pin(side: SchedulerSide, state: str) -> None:
    stored(side, list(range(70)))
    request = kit.FakeRequest("r", list(range(70)))
    side.new_request(request)
    jobs = []
    if state != "new":
        side.matched(request, 0)
    if state in ("allocated", "loading"):
        side.allocated(request, [kit.blocks(9, 8, 7, 6, 5)], 64)
    if state == "loading":
        jobs = side.build_work(kit.output({}, {})).loads
    side.finished(request, ([],))
    jobs = jobs or side.build_work(kit.output({}, {})).loads
    assert len(jobs) == (state in ("allocated", "loading"))
    side.update(StepReport(loads=[JobReport(job.job_id, True) for job in jobs]))
    assert pins(side) == 0
    assert not side.pending


def test_a_request_that_is_off_or_must_not_read_is_left_alone(side: SchedulerSide) -> None:
    stored(side, list(range(70)))
    off = kit.FakeRequest("off", list(range(70)), kv_transfer_params={"kvstrata": "off"})
    blind = kit.FakeRequest("blind", list(range(70)), skip_reading_prefix_cache=True)
    for request in (off, blind):
        side.new_request(request)
        assert side.matched(request, 0) == (0, False)
        side.finished(request, ([],))
    causes = [story.cause for story in side.archive.all()[-2:]]
    assert causes == ["off", "not_allowed"]


def test_a_part_of_the_hit_is_taken_or_none(side: SchedulerSide) -> None:
    stored(side, list(range(70)))
    for taken, cause in ((32, "partly_taken"), (0, "not_taken")):
        request = kit.FakeRequest(f"r{taken}", list(range(70)))
        side.new_request(request)
        side.matched(request, 0)
        side.allocated(request, [kit.blocks(9, 8, 7, 6, 5)], taken)
        loads = side.build_work(kit.output({}, {})).loads
        assert [copy.blocks for job in loads for copy in job.groups] == ([[9, 8]] if taken else [])
        side.update(StepReport(loads=[JobReport(job.job_id, True) for job in loads]))
        side.finished(request, ([],))
        story = side.archive.last(request.request_id)
        assert story is not None
        assert story.cause == cause
    assert pins(side) == 0


def test_an_error_while_a_load_is_planned_is_a_failed_load() -> None:
    side = kit.side(SHAPE)
    stored(side, list(range(70)))
    request = kit.FakeRequest("r", list(range(70)))
    side.new_request(request)
    side.matched(request, 0)
    side.allocated(request, [], 64)  # no table for the group
    (job,) = side.build_work(kit.output({}, {})).loads
    assert not job.valid
    assert side.shield.total == 1
    side.update(StepReport(loads=[JobReport(job.job_id, False)]))
    assert side.matched(request, 0) == (0, False)  # and never again
    side.finished(request, ([],))
    assert pins(side) == 0
    assert not side.pending
    side.close()


def test_a_load_for_a_request_that_is_not_known_is_a_failed_load(side: SchedulerSide) -> None:
    side.allocated(kit.FakeRequest("stranger", [1]), [[]], 16)
    (job,) = side.build_work(kit.output({}, {})).loads
    assert (job.job_id, job.valid) == (NO_JOB, False)
    side.update(StepReport(loads=[JobReport(NO_JOB, False)]))
    assert not side.pending


def test_states_are_stored_only_where_the_engine_hands_them_off() -> None:
    shape = kit.shape_of(kit.group(kit.full()), kit.group(kit.mamba()))
    side = kit.side(shape)
    request = kit.FakeRequest("r", list(range(70)))
    side.new_request(request)
    side.matched(request, 0)
    tables = {"r": ([1, 2, 3, 4, 5], [0, 0, 0, 6, 7])}
    work = side.build_work(kit.output({"r": 70}, tables, {"r": [(1, 6, 64)]}))
    (job,) = work.stores
    assert {copy.group: copy.blocks for copy in job.groups} == {0: [1, 2, 3, 4], 1: [6]}
    side.update(StepReport(stores=[JobReport(job.job_id, True)]))
    side.finished(request, ([], []))
    again = kit.FakeRequest("s", list(range(70)))
    side.new_request(again)
    assert side.matched(again, 0) == (64, True)
    side.close()


@pytest.mark.scenario_44
def test_with_two_ranks_both_must_report() -> None:
    side = kit.side(kit.shape_of(kit.group(kit.full()), tensor=2))
    side.greet([RankGreeting(0, "", (512,)), RankGreeting(1, "", (512,))])
    assert not side.off
    request = kit.FakeRequest("r", list(range(70)))
    side.new_request(request)
    side.matched(request, 0)
    (job,) = side.build_work(kit.output({"r": 70}, {"r": ([1, 2, 3, 4, 5],)})).stores
    side.update(StepReport(stores=[JobReport(job.job_id, True)]))
    assert side.pending
    side.update(StepReport(stores=[JobReport(job.job_id, False)]))
    assert not side.pending
    again = kit.FakeRequest("s", list(range(70)))
    side.new_request(again)
    assert side.matched(again, 0) == (0, False)  # one rank's failed copy is a miss for both
    side.close()


@pytest.mark.parametrize(
    ("greetings", "words"),
    [
        ([RankGreeting(0, "canary: it died", (512,))], "canary"),
        ([RankGreeting(0, "", (100,))], "100"),
        ([], "1 of 1 ranks did not report"),
    ],
)
def test_a_rank_in_trouble_switches_everything_off(greetings: list[RankGreeting], words: str) -> None:
    side = kit.side(SHAPE)
    side.greet(greetings)
    assert words in side.off
    request = kit.FakeRequest("r", list(range(70)))
    side.new_request(request)
    assert side.matched(request, 0) == (0, False)
    assert side.build_work(kit.output({"r": 70}, {"r": ([1, 2, 3, 4, 5],)})).stores == []
    side.close()


def test_counters_are_told_as_gains(side: SchedulerSide) -> None:
    stored(side, list(range(70)))
    gains = side.gains()
    assert gains["stored_chunks"] == 4
    assert side.gains() == {}


def test_counting_a_step_looks_at_no_request(side: SchedulerSide, monkeypatch: pytest.MonkeyPatch) -> None:
    side.gains()
    manager, snapshots = side.stack.manager, []
    monkeypatch.setattr(manager, "statistics", lambda: snapshots.append(1))
    for number in range(50):
        side.new_request(kit.FakeRequest(f"r{number}", [number] * 40))
        side.gains()
    assert snapshots == []
    assert side.shield.total == 0


def test_with_windows_and_answers_the_end_of_the_prompt_and_of_the_answer_are_kept() -> None:
    shape = kit.shape_of(kit.group(kit.full()), kit.group(kit.sliding(17)), blocks_per_chunk=2)
    side = kit.side(shape, store="all")
    request = kit.FakeRequest("r", list(range(70)))
    side.new_request(request)
    side.matched(request, 0)
    side.allocated(request, [[], []], 0)
    table = list(range(1, 8))
    work = side.build_work(kit.output({"r": 70}, {"r": (table[:5], table[:5])}))
    side.update(StepReport(stores=[JobReport(job.job_id, True) for job in work.stores]))
    request.num_computed_tokens = 70
    for token in range(500, 530):  # the window's older blocks are given back on the way
        request.tokens.append(token)
        request.hash_up()
        first = max(request.num_computed_tokens - 16, 0) // 16
        window = [0] * first + table[first:7]
        work = side.build_work(kit.output({"r": 1}, {"r": (table, window)}))
        side.update(StepReport(stores=[JobReport(job.job_id, True) for job in work.stores]))
        request.num_computed_tokens += 1
    side.finished(request, (table, [0] * 4 + table[4:]))
    side.update(StepReport(stores=[JobReport(job.job_id, True) for job in side.build_work(kit.output({}, {})).early]))
    for tokens, hit in ((list(range(70)), 64), (request.tokens, 96)):
        again = kit.FakeRequest(f"again{hit}", tokens)
        side.new_request(again)
        assert side.matched(again, 0) == (hit, True)
        side.finished(again, ([], []))
    side.close()
