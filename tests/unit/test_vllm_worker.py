"""The worker side by itself: every load that was handed over is reported once, whatever the copier does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import vllm_kit as kit

from kvstrata.integrations.vllm.metadata import CopyJob, GroupCopy, StepReport, StepWork
from kvstrata.integrations.vllm.shapes import EngineShape
from kvstrata.integrations.vllm.share import Attached, attach, publish, region_name, withdraw
from kvstrata.integrations.vllm.worker import MAX_DEAF, WorkerSide
from kvstrata.primary.region import SharedRegion
from kvstrata.transfer.numpy_copy import NumpyCopier
from kvstrata.transfer.pieces import Done, Piece

SHAPE = kit.shape_of(kit.group(kit.full()), blocks_per_chunk=2)


class Bench:
    """A worker over NumPy arrays."""

    def __init__(self, shape: EngineShape = SHAPE, rank: int = 0) -> None:
        self.arrays = [
            [np.random.default_rng([g, i]).integers(0, 256, (16, layer.page), dtype=np.uint8) for i, layer in
             enumerate(group.layers)]
            for g, group in enumerate(shape.groups)
        ]  # fmt: skip
        self.primary = bytearray(1 << 16)
        self.copier: Any = NumpyCopier(self.arrays, np.frombuffer(self.primary, np.uint8))
        self.worker = WorkerSide(
            shape,
            rank,
            "engine",
            canary=False,
            mapper=lambda engine: Attached(memoryview(self.primary), None),
            make=lambda layers, view, unit, clock: self.copier,
        )
        self.worker.register({}, 16)  # no tensors: the copier has its own arrays
        self.worker._trouble = ""
        assert self.worker.greet().trouble == ""

    def report(self) -> StepReport:
        found = self.worker.report()
        return StepReport() if found is None else found


def copy(blocks: Sequence[int], chunk: int = 0) -> list[GroupCopy]:
    return [GroupCopy(0, list(blocks), [chunk] * len(blocks), list(range(len(blocks))))]


def loads(*jobs: CopyJob) -> StepWork:
    return StepWork(loads=list(jobs))


def test_a_store_and_a_load_through_primary() -> None:
    bench = Bench()
    bench.worker.after_forward(StepWork(stores=[CopyJob(1, "r", copy([3, 4], 4096))]))
    bench.worker.start_loads(loads(CopyJob(2, "s", copy([8, 9], 4096))))
    assert bench.worker.results() == ({"s"}, set())
    report = bench.report()
    assert [(job.job_id, job.ok) for job in report.stores] == [(1, True)]
    assert [(job.job_id, job.ok) for job in report.loads] == [(2, True)]
    for layer in bench.arrays[0]:
        assert (layer[[8, 9]] == layer[[3, 4]]).all()
    assert bench.worker.report() is None
    assert bench.worker.results() == (set(), set())


def test_a_load_that_is_not_valid_copies_nothing_and_has_failed() -> None:
    bench = Bench()
    before = bench.arrays[0][0].copy()
    bench.worker.start_loads(loads(CopyJob(1, "r", copy([8, 9]), valid=False)))
    assert bench.worker.results() == ({"r"}, {"r"})
    assert [job.ok for job in bench.report().loads] == [False]
    assert (bench.arrays[0][0] == before).all()


def test_a_copy_that_fails_is_a_failed_load() -> None:
    bench = Bench()
    bench.worker.start_loads(loads(CopyJob(1, "r", copy([99])), CopyJob(2, "s", copy([3]))))
    assert bench.worker.results() == ({"r", "s"}, {"r"})


@pytest.mark.parametrize("method", ["load", "store", "wait"])
def test_a_copier_that_raises_is_a_failed_job(method: str) -> None:
    bench = Bench()

    def broken(*_: Any) -> None:
        raise OSError("broken")

    setattr(bench.copier, method, broken)
    work = StepWork(
        early=[CopyJob(3, "t", copy([5]))], loads=[CopyJob(1, "r", copy([3]))], stores=[CopyJob(2, "s", copy([4]))]
    )
    bench.worker.before_forward(work)
    bench.worker.start_loads(work)
    bench.worker.after_forward(work)
    assert bench.worker.results() == ({"r"}, {"r"} if method == "load" else set())
    report = bench.report()
    assert [(job.job_id, job.ok) for job in report.stores] == [(3, method != "store"), (2, method != "store")]
    assert report.faults
    assert bench.report().faults == []  # told once


class Deaf:
    """Takes jobs and never says that they ended."""

    def __init__(self) -> None:
        self.waited: list[int] = []

    def load(self, job_id: int, pieces: Sequence[Piece]) -> None:
        pass

    store = load

    def finished(self) -> list[Done]:
        raise OSError("deaf")

    def wait(self, job_ids: Sequence[int]) -> None:
        self.waited += job_ids

    def close(self) -> None:
        pass


def test_a_copier_that_does_not_answer_is_given_up() -> None:
    bench = Bench()
    bench.worker._copier = deaf = Deaf()
    bench.worker.start_loads(loads(CopyJob(1, "r", copy([3]))))
    bench.worker.after_forward(StepWork(stores=[CopyJob(2, "s", copy([4]))]))
    received = [bench.worker.results() for _ in range(MAX_DEAF + 1)]
    assert received[:-1] == [(set(), set())] * MAX_DEAF
    assert received[-1] == ({"r"}, {"r"})
    assert deaf.waited == [1, 2]
    assert [(job.job_id, job.ok) for job in bench.report().stores] == [(2, False)]


def test_ranks_have_parts_of_their_own() -> None:
    shape = kit.shape_of(kit.group(kit.full()), tensor=2)
    first, second = Bench(shape, 0), Bench(shape, 1)
    for bench in (first, second):
        bench.worker.after_forward(StepWork(stores=[CopyJob(1, "r", copy([3], 1024))]))
    part = shape.rank_bytes(0)
    mine = np.concatenate([layer[3] for layer in first.arrays[0]]).tobytes()
    assert bytes(first.primary[1024 : 1024 + part]) == mine
    assert bytes(second.primary[1024 + part : 1024 + 2 * part]) == mine
    assert not any(second.primary[: 1024 + part])


def test_what_is_the_same_on_all_ranks_is_stored_by_the_first() -> None:
    shape = kit.engine_shape(
        kit.engine(2), kit.caches(kit.group(kit.spec("MLAAttentionSpec")), kv_tp_replicas=2), 1, 16
    )
    second = Bench(shape, 1)
    second.worker.after_forward(StepWork(stores=[CopyJob(1, "r", copy([3], 1024))]))
    assert not any(second.primary)
    assert [(job.job_id, job.ok) for job in second.report().stores] == [(1, True)]
    second.worker.start_loads(loads(CopyJob(2, "r", copy([4], 1024))))
    assert second.worker.results() == ({"r"}, set())


def test_a_rank_that_cannot_map_primary_fails_what_it_is_given() -> None:
    worker = WorkerSide(SHAPE, 0, "nowhere", canary=False)
    worker._trouble = ""
    assert "was not found" in worker.greet().trouble
    worker.start_loads(loads(CopyJob(1, "r", copy([3]))))
    worker.after_forward(StepWork(stores=[CopyJob(2, "s", copy([4]))]))
    assert worker.results() == ({"r"}, {"r"})


def test_primary_is_found_in_this_process() -> None:
    with SharedRegion(4096, name=region_name("here")) as region:
        publish("here", region)
        attached = attach("here")
        attached.view[5] = 77
        assert region.view[5] == 77
        withdraw("here")
        del attached


@pytest.mark.scenario_33
def test_primary_is_found_by_a_process_that_this_one_started() -> None:
    program = (
        "from kvstrata.integrations.vllm.share import attach\n"
        "attached = attach('afar')\n"
        "attached.view[7] = attached.view[6] + 1\n"
        "attached.close()\n"
    )
    with SharedRegion(4096, name=region_name("afar")) as region:
        region.view[6] = 41
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        assert done.stderr == ""
        assert region.view[7] == 42


def test_a_store_whose_fence_fails_is_dropped() -> None:
    """Its blocks are written by the step that should have come behind the copy."""
    bench = Bench()
    ended: list[Done] = []

    def broken(job_ids: object) -> None:
        raise OSError("broken")

    bench.copier.store = lambda job_id, pieces: None  # type: ignore[method-assign]
    bench.copier.finished = lambda: [ended.pop() for _ in list(ended)]  # type: ignore[method-assign]
    bench.copier.wait = broken  # type: ignore[method-assign]
    bench.worker.after_forward(StepWork(stores=[CopyJob(1, "r", copy([3])), CopyJob(2, "r", copy([4]))]))
    bench.worker.before_forward(StepWork(fences=[1]))
    ended += [Done(2, ok=True), Done(1, ok=True)]
    assert sorted((job.job_id, job.ok) for job in bench.report().stores) == [(1, False), (2, True)]
