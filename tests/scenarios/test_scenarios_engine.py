"""Scenarios about the engine's side: what is stored and loaded of a request, ranks, settings, throughput."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vllm_kit as kit

import kvstrata.sim.replay as replay
from kvstrata.config import config_from_dict
from kvstrata.core.messages import RequestOptions
from kvstrata.errors import ConfigError
from kvstrata.integrations.vllm.metadata import JobReport, StepReport
from kvstrata.integrations.vllm.options import read_wishes
from kvstrata.integrations.vllm.scheduler import SchedulerSide
from kvstrata.integrations.vllm.settings import read_settings
from kvstrata.integrations.vllm.shapes import engine_shape
from kvstrata.integrations.vllm.stack import ladder_doubts
from kvstrata.sim.accelerator import Accelerator
from kvstrata.sim.cost import Channel, CostModel
from kvstrata.sim.engine import Active, NoCache, SimulatedEngine
from kvstrata.sim.stack import Stack
from kvstrata.sim.traces import Request, Trace
from kvstrata.sim.workloads import builtin_workload
from kvstrata.testing.clock import ManualClock
from kvstrata.transfer.numpy_copy import NumpyCopier

SHAPE = kit.shape_of(kit.group(kit.full()))


def step(side: SchedulerSide, request: kit.FakeRequest, table: Sequence[int], *, done: bool = True) -> Any:
    """One step that computes the rest of a request; its stores are done. Returns the work."""
    rest = request.num_tokens - request.num_computed_tokens
    work = side.build_work(kit.output({request.request_id: rest}, {request.request_id: (list(table),)}))
    if done:
        side.update(StepReport(stores=[JobReport(job.job_id, True) for job in work.stores]))
    request.num_computed_tokens = request.num_tokens
    return work


def begin(side: SchedulerSide, name: str, tokens: list[int], **fields: Any) -> kit.FakeRequest:
    """A request that was asked about and has found nothing."""
    request = kit.FakeRequest(name, tokens, **fields)
    side.new_request(request)
    assert side.matched(request, 0) == (0, False)
    side.allocated(request, [[]], 0)
    return request


@pytest.mark.scenario_92
def test_by_default_the_prompt_is_stored_and_the_answer_is_not() -> None:
    side = kit.side(SHAPE)
    request = begin(side, "r", list(range(160)))  # ten blocks
    stored = [len(copy.blocks) for job in step(side, request, range(1, 11)).stores for copy in job.groups]
    for token in range(160):  # ten blocks of answer
        request.tokens.append(1000 + token)
        request.hash_up()
        work = step(side, request, range(1, 22))
        stored += [len(copy.blocks) for job in work.stores for copy in job.groups]
    side.finished(request, (list(range(1, 22)),))
    early = side.build_work(kit.output({}, {})).early
    assert sum(stored) + len(early) == 10
    assert side.stack.driver.call(lambda manager: manager.statistics()).counters.stored == 10
    side.close()


@pytest.mark.scenario_28
def test_a_store_without_room_is_never_made_up_from_a_block_that_has_a_new_owner() -> None:
    side = kit.side(SHAPE, size=2 * 512 + 512)  # three chunks of primary, two of them pinned below
    first = begin(side, "first", list(range(32)))
    step(side, first, [1, 2])
    side.finished(first, ([1, 2],))
    reader = kit.FakeRequest("reader", list(range(40)))
    side.new_request(reader)
    assert side.matched(reader, 0) == (32, True)
    side.allocated(reader, [kit.blocks(8, 9)], 32)
    loads = side.build_work(kit.output({}, {})).loads
    second = begin(side, "second", list(range(500, 532)))
    work = step(side, second, [3, 4])
    assert [copy.blocks for job in work.stores for copy in job.groups] == [[3]], "no room for block 4"
    key = side._records["second"].chain  # what was not stored is known by its key
    assert key is not None
    side.update(StepReport(loads=[JobReport(job.job_id, True) for job in loads]))  # room again
    side.finished(reader, ([8, 9],))
    third = begin(side, "third", list(range(900, 932)))  # block 4 has a new owner now
    for job in step(side, third, [4, 5]).stores:
        assert job.request_id == "third"
    second.tokens.append(7)
    assert step(side, second, [3, 6, 7]).stores == [], "what was missed is not stored from elsewhere"
    again = kit.FakeRequest("again", list(range(500, 540)))
    side.new_request(again)
    assert side.matched(again, 0)[0] in (0, 16)
    side.close()


@pytest.mark.scenario_120
def test_the_source_of_a_store_is_the_block_that_holds_the_position_now() -> None:
    side = kit.side(SHAPE)
    request = begin(side, "r", list(range(64)))
    request.num_computed_tokens = 0
    work = side.build_work(kit.output({"r": 32}, {"r": ([1, 2],)}))
    assert [copy.blocks for job in work.stores for copy in job.groups] == [[1, 2]]
    stored = list(work.stores)
    request.num_computed_tokens = 32
    # A boundary was committed: the engine moved what lies at positions 2 and 3 to other blocks.
    work = side.build_work(kit.output({"r": 32}, {"r": ([1, 2, 9, 8],)}))
    assert [copy.blocks for job in work.stores for copy in job.groups] == [[9, 8]]
    side.update(StepReport(stores=[JobReport(job.job_id, True) for job in [*stored, *work.stores]]))
    side.close()


@pytest.mark.scenario_120
def test_a_state_is_stored_from_the_block_that_the_engine_hands_off() -> None:
    side = kit.side(kit.shape_of(kit.group(kit.full()), kit.group(kit.mamba())))
    request = kit.FakeRequest("r", list(range(70)))
    side.new_request(request)
    side.matched(request, 0)
    tables = {"r": ([1, 2, 3, 4, 5], [0, 0, 0, 6, 7])}  # position 3 holds block 6, which is stale
    work = side.build_work(kit.output({"r": 70}, tables, {"r": [(1, 11, 64)]}))
    (job,) = work.stores
    assert {copy.group: copy.blocks for copy in job.groups}[1] == [11]
    side.update(StepReport(stores=[JobReport(job.job_id, True)]))
    side.close()


@pytest.mark.scenario_83
def test_ranks_on_several_hosts_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="nnodes_within_dp=2: ranks on several hosts"):
        engine_shape(kit.engine(2, nnodes_within_dp=2), kit.caches(kit.group(kit.full())), 1, 16)


@pytest.mark.scenario_90
def test_an_unknown_kind_is_refused_by_name_and_chunked_local_is_known() -> None:
    with pytest.raises(ConfigError, match="SinkFullAttentionSpec is a kind of KV cache that kvstrata does not support"):
        kit.shape_of(kit.group(kit.spec("SinkFullAttentionSpec")))
    shape = kit.shape_of(kit.group(kit.spec("ChunkedLocalAttentionSpec", attention_chunk_size=100)))
    assert shape.groups[0].kind.name == "chunked_local"


@pytest.mark.scenario_107
def test_of_four_ranks_one_writes_a_replicated_group_and_each_loads_its_bytes() -> None:
    from test_vllm_worker import Bench, copy, loads

    from kvstrata.integrations.vllm.metadata import CopyJob, StepWork

    shape = engine_shape(kit.engine(4), kit.caches(kit.group(kit.spec("MLAAttentionSpec")), kv_tp_replicas=4), 1, 16)
    assert shape.layout().chunk_bytes == (shape.rank_bytes(0),), "once, not four times"
    ranks = [Bench(shape, rank) for rank in range(4)]
    for rank in ranks:
        rank.worker.after_forward(StepWork(stores=[CopyJob(1, "r", copy([3], 1024))]))
    assert [bool(any(rank.primary)) for rank in ranks] == [True, False, False, False]
    written = bytes(ranks[0].primary)
    for rank in ranks:
        rank.primary[:] = written  # it is one region in a running engine
        rank.worker.start_loads(loads(CopyJob(2, "r", copy([4], 1024))))
        assert rank.worker.results() == ({"r"}, set())
        stored = np.concatenate([layer[3] for layer in ranks[0].arrays[0]]).tobytes()
        assert np.concatenate([layer[4] for layer in rank.arrays[0]]).tobytes() == stored


@pytest.mark.scenario_114
def test_what_a_client_misspells_is_said() -> None:
    wishes = read_wishes({"kvstrata": {"load_tier": ["disk"], "load_tiers": "disk"}}, "prompt", may_load=True, wait_s=2)
    assert "load_tier: unknown" in wishes.complaint
    assert "load_tiers: expected a list of names" in wishes.complaint
    assert wishes.options == RequestOptions()


@pytest.mark.scenario_114
def test_a_tier_that_does_not_exist_is_said(caplog: pytest.LogCaptureFixture) -> None:
    side = kit.side(SHAPE, tiers=({"type": "memory", "name": "near"},))
    parameters = {"kvstrata": {"load_tiers": ["near", "object"]}}
    side.new_request(kit.FakeRequest("r", list(range(40)), kv_transfer_params=parameters))
    assert "no tier is called 'object'" in caplog.text
    side.close()


@pytest.mark.scenario_115
def test_one_size_is_all_that_has_to_be_given() -> None:
    settings = read_settings({"size": "8GiB"})
    assert settings.config.primary.size == 8 << 30
    assert len(settings.config.tiers) == 1
    assert config_from_dict({"primary": {"size": "1GiB"}}).tiers == ()


@pytest.mark.scenario_132
def test_a_tier_that_is_smaller_than_what_lies_above_it_is_warned_of() -> None:
    table = {
        "primary": {"size": "8GiB"},
        "tiers": [{"type": "disk", "name": "disk", "path": "/x", "limit": "4GiB"}, {"type": "memory", "name": "m"}],
    }
    (line,) = ladder_doubts(config_from_dict(table))
    assert str(4 << 30) in line
    assert str(8 << 30) in line
    table["tiers"] = [{"type": "disk", "name": "disk", "path": "/x", "limit": "80GiB"}]
    assert ladder_doubts(config_from_dict(table)) == []


# throughput and no-op, under the simulated engine


class Deaf(Stack):
    """A cache that is there and never gets anything."""

    def store(self, active: Active, chunks: Sequence[tuple[int, int]]) -> None:
        """Nothing is stored."""


def watch(accelerator: Accelerator) -> list[tuple[str, Any]]:
    """Everything that the engine does with its blocks from now on."""
    log: list[tuple[str, Any]] = []
    for name in ("computed", "admit", "fill", "release"):
        method = getattr(accelerator, name)

        def noted(*args: Any, _name: str = name, _method: Any = method) -> Any:
            args = tuple(list(arg) if _name == "fill" and i == 1 else arg for i, arg in enumerate(args))
            answer = _method(*args)
            log.append((_name, answer))
            return answer

        setattr(accelerator, name, noted)
    return log


@pytest.mark.scenario_26
@pytest.mark.parametrize("model", ["plain", "sliding"])
def test_an_engine_with_an_empty_cache_does_exactly_what_one_without_does(model: str) -> None:
    trace = builtin_workload(40, seed=5)
    settings = replay.ReplaySettings(model=model, tier="memory", concurrency=8)
    made = replay.Model(settings.model, settings.chunk_tokens, settings.payload_scale)
    plan = replay.make_plan(made, trace, settings.seed)
    room = replay.accelerator_bytes(made, trace, settings.costs)
    runs = []
    for empty in (False, True):
        accelerator = Accelerator(made.real, room)
        log = watch(accelerator)
        cache: Any = NoCache()
        clock = ManualClock()
        with replay.ExitStack() as resources:
            if empty:
                whole = replay.make_stack(settings, made, trace, plan, settings.costs, resources)
                whole.__class__ = Deaf
                cache = resources.enter_context(whole)
                clock = whole.clock
            served = SimulatedEngine(plan, settings.costs, cache, clock, accelerator, 8).run(trace.requests)
        runs.append((served, [entry for entry in log if entry[0] != "computed"]))
    assert runs[0] == runs[1]
    assert any(one.computed_tokens for one in runs[0][0])


def conversations(count: int, turns: int, tokens: int = 4096) -> Trace:
    """`count` prompts that each come back `turns` times, one after the other: all but the first time is reuse."""
    requests = []
    for index in range(count * turns):
        ids = np.arange(tokens // 64, dtype=np.int64) + 10_000 * (index % count)
        requests.append(Request(index, 0.0, tokens, 20, ids))
    return Trace("conversations", "tests", 64, tuple(requests))


SMALL = CostModel(accelerator_tokens=10_000)


def makespan(trace: Trace, concurrency: int, channel: Channel | None, primary: int = 64_000) -> tuple[float, int]:
    """Seconds in which the simulated engine serves all of it, with a tier of these rates or without one; promotions."""
    costs = dataclasses.replace(SMALL, channel=channel)
    settings = replay.ReplaySettings(tier="memory", concurrency=concurrency, primary_bytes=primary, costs=costs)
    made = replay.Model(settings.model, settings.chunk_tokens, settings.payload_scale)
    plan = replay.make_plan(made, trace, settings.seed)
    accelerator = Accelerator(made.real, replay.accelerator_bytes(made, trace, settings.costs))
    with replay.ExitStack() as resources:
        cache: Any = NoCache()
        clock, promoted = ManualClock(), 0
        if channel is not None:
            cache = resources.enter_context(replay.make_stack(settings, made, trace, plan, settings.costs, resources))
            clock = cache.clock
        begun = clock.monotonic()
        engine = SimulatedEngine(plan, settings.costs, cache, clock, accelerator, concurrency)
        assert len(engine.run(trace.requests)) == len(trace.requests)
        taken = clock.monotonic() - begun
        if channel is not None:
            promoted = cache.manager.statistics().counters.promoted
    return taken, promoted


@pytest.mark.scenario_94
@pytest.mark.slow
@pytest.mark.parametrize(("concurrency", "rates"), [(8, (5e6, 20e6, 60e6, 300e6)), (4, (5e6,))])
def test_a_slow_tier_costs_no_throughput(concurrency: int, rates: tuple[float, ...]) -> None:
    trace = conversations(12, 30)  # more than nine tenths of it is reuse
    without, _ = makespan(trace, concurrency, None)
    for rate in rates:
        taken, promoted = makespan(trace, concurrency, Channel(rate, rate, 0.01))
        assert promoted > 0, "the tier was asked"
        assert taken <= 1.02 * without, (rate, taken, without)


@pytest.mark.scenario_94
def test_a_fast_tier_pays_off() -> None:
    trace = conversations(12, 10)
    without, _ = makespan(trace, 4, None)
    taken, promoted = makespan(trace, 4, Channel(20e9, 20e9, 0.0001), primary=400_000)
    assert promoted > 0
    assert taken < 0.8 * without


@pytest.mark.scenario_95
def test_hits_of_a_replay_are_tokens_that_were_not_computed() -> None:
    settings = replay.ReplaySettings(tier="memory", concurrency=4, primary_bytes=640_000, costs=SMALL)
    made = replay.run_replay(settings, conversations(12, 3))
    external = sum(one.external_tokens for one in made.served)
    assert external > 0
    assert made.report.hit_tokens == sum(one.computed_tokens for one in made.served) + external
    assert all(one.hit_tokens < one.prompt_tokens for one in made.served), "the last token is always computed"
    assert sum(tier.hit_tokens for tier in made.report.tiers.values()) == made.report.hit_tokens


@pytest.mark.scenario_104
def test_nothing_of_a_replay_needs_an_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in ("torch", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    trace = builtin_workload(10, seed=1)
    for tier in ("memory", "fs", "disk"):
        settings = replay.ReplaySettings(tier=tier, directory=tmp_path / tier if tier != "memory" else None)
        assert replay.run_replay(settings, trace).report.requests == 10
    assert NumpyCopier.__module__.startswith("kvstrata")
