"""kvstrata's side of `bench resolve`: one workload through driver and core, by the calls that a connector makes.

A step is one poll per waiting request and the end of the schedule. Timed is the engine's thread, in wall time: until
every fetch is handed to the tier, then one step while nothing arrives, then what it takes until every hit is
reported. Keys are built, and requests known, before.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from kvstrata.bench.machine import cpu_s
from kvstrata.bench.tiers import IndexTier
from kvstrata.bench.workloads import CHUNK_BYTES, Workload, keys_of
from kvstrata.core.manager import TieringOffloadingManager
from kvstrata.core.settings import CoreConfig
from kvstrata.errors import StateError
from kvstrata.runtime.clock import SystemClock
from kvstrata.runtime.driver import Driver
from kvstrata.runtime.executor import Signal, ThreadExecutor
from kvstrata.runtime.guard import GuardedTier
from kvstrata.tiers.base import TierContext
from kvstrata.types import OffloadKey

BLOCK_STEPS = 20
"""Waiting steps that are timed as one; the best of several such blocks counts."""
BLOCKS = 5
MOST_STEPS = 10_000
PATIENCE_S = 3600.0
"""No clock may run out while a benchmark waits on purpose."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a row. Seconds of the engine's thread; chunks and keys as counts."""

    submit_s: float
    """All steps until every fetch is submitted."""
    step_s: float
    """One later step, all requests polled, nothing to be done."""
    promoted: int
    consumed: int
    probed: int
    first_s: float
    """The first step."""
    fetch_s: float
    """The step that submits the last fetch."""
    ready_s: float
    """All steps from the first poll until every hit is reported, waiting steps left out."""
    cpu_s: float
    """The process's CPU time of these steps, its other threads included."""
    runs: int = 1

    def as_row(self) -> dict[str, object]:
        """For the JSON."""
        return asdict(self)


def best(runs: Sequence[Side]) -> Side:
    """Each figure's best of several runs; counts must not differ."""
    counts = {(run.promoted, run.consumed, run.probed) for run in runs}
    if len(counts) != 1:
        raise StateError(f"runs of one workload differ in promoted, consumed, probed: {sorted(counts)}")
    seconds = {name: min(getattr(run, name) for run in runs) for name in _SECONDS}
    return Side(promoted=runs[0].promoted, consumed=runs[0].consumed, probed=runs[0].probed, runs=len(runs), **seconds)


_SECONDS = ("submit_s", "step_s", "first_s", "fetch_s", "ready_s", "cpu_s")


class Prepared:
    """The keys of a workload: made once, used by every run, and by the `like` ones that only differ in presence."""

    def __init__(self, workload: Workload, like: Prepared | None = None) -> None:
        self.workload = workload
        self.keys: list[list[list[OffloadKey]]] = (
            like.keys if like is not None and like.workload.prompts == workload.prompts else _keys(workload)
        )
        self.present: set[OffloadKey] = set()
        for keys in self.keys:
            self.present.update(workload.present(keys))


def _keys(workload: Workload) -> list[list[list[OffloadKey]]]:
    return [keys_of(workload.layout, hashes) for hashes in workload.hashes()]


def waiting_config(chunks: int) -> CoreConfig:
    """A primary that holds so many chunks, all of which may be promoted at once, and clocks that do not run out."""
    return CoreConfig(
        capacity_bytes=(chunks + 64) * CHUNK_BYTES,
        promotion_share=1.0,
        store_reserve=0.0,
        inflight_share=1.0,
        stall_s=PATIENCE_S,
        total_s=PATIENCE_S,
        silence_s=PATIENCE_S,
        job_idle_s=PATIENCE_S,
        job_total_s=PATIENCE_S,
    )


class Engine:
    """The engine's thread: polls what waits, ends the step, and is timed."""

    def __init__(self, prepared: Prepared, *, sync_probe: bool, executor: ThreadExecutor | None = None) -> None:
        self.workload = workload = prepared.workload
        self._clock = SystemClock()
        self.tier = IndexTier("index", sync_probe=sync_probe, executor=executor)
        self.tier.index = prepared.present
        self.tier.held = executor is None
        chunks = workload.requests * workload.keys_per_request
        config = waiting_config(chunks)
        self.core = TieringOffloadingManager(workload.layout, config, [guard := GuardedTier(self.tier)])
        self.driver = Driver(self.core, [guard], self._clock, strict=True)
        context = TierContext(
            memoryview(bytearray(0)), b"benchmark-spaces", 1, self._clock, executor or _NoExecutor(), self.driver.wake
        )
        guard.open(context)
        self.names = [str(request) for request in range(workload.requests)]
        with self.driver.step() as core:
            for name, keys in zip(self.names, prepared.keys, strict=True):
                core.add_request(name, keys)
        self.waiting = list(self.names)
        self.hits: dict[str, int] = {}
        self.spent_s = 0.0
        self.cpu_s = 0.0

    def step(self, names: Sequence[str]) -> float:
        """One scheduler step in which these requests are polled; returns and adds up its seconds."""
        total, driver = self.workload.tokens, self.driver
        cpu, began = cpu_s(), self._clock.monotonic()
        answers = [driver.poll(name, 0, total).hit for name in names]
        driver.end_step()
        took = self._clock.monotonic() - began
        self.spent_s += took
        self.cpu_s += cpu_s() - cpu
        self.hits.update((name, hit) for name, hit in zip(names, answers, strict=True) if hit is not None)
        return took

    def step_waiting(self) -> float:
        """A step of those that have no answer yet."""
        took = self.step(self.waiting)
        self.waiting = [name for name in self.waiting if name not in self.hits]
        return took

    def consume(self) -> int:
        """Take every hit and report its load as done; returns the chunks that were loaded."""
        loaded = 0
        with self.driver.step() as core:
            for name in self.names:
                plan = core.take(name, self.hits[name])
                if plan is not None:
                    loaded += len(plan.slots)
                    core.complete_load(plan.job_id)
        return loaded


class _NoExecutor:
    """Nothing is ever given to it."""

    def submit(self, task: Callable[[], None]) -> None:
        raise StateError("a tier without a thread has nothing to run")

    def wait_idle(self, timeout: float) -> bool:
        return True

    def close(self, timeout: float) -> bool:
        return True


def measure(prepared: Prepared, *, sync_probe: bool) -> Side:
    """One run with a tier that answers without a thread."""
    engine = Engine(prepared, sync_probe=sync_probe)
    gc.collect()
    steps = _submit(engine)
    submit_s, submit_cpu = engine.spent_s, engine.cpu_s
    step_s = _waiting_step(engine)
    engine.spent_s = engine.cpu_s = 0.0
    engine.tier.release()
    while engine.waiting:
        engine.step_waiting()
    counters = engine.core.statistics()
    consumed = engine.consume()
    return Side(
        submit_s=submit_s,
        step_s=step_s,
        promoted=counters.counters.promoted,
        consumed=consumed,
        probed=counters.tiers["index"].probed,
        first_s=steps[0],
        fetch_s=steps[-1],
        ready_s=submit_s + engine.spent_s,
        cpu_s=submit_cpu + engine.cpu_s,
    )


def _submit(engine: Engine) -> list[float]:
    """Steps until every request has submitted its fetch or has its answer; their seconds."""
    steps: list[float] = []
    while engine.waiting and len(steps) < MOST_STEPS:
        steps.append(engine.step_waiting())
        if engine.core.statistics().fetching == len(engine.waiting):
            return steps
    if engine.waiting:
        raise StateError(f"{len(engine.waiting)} requests have not submitted their fetch in {len(steps)} steps")
    return steps


def _waiting_step(engine: Engine) -> float:
    """Seconds of one step in which nothing arrives: the best of several blocks, each the mean of its steps."""
    names = engine.waiting or engine.names
    blocks = []
    for _ in range(BLOCKS):
        engine.spent_s = 0.0
        for _ in range(BLOCK_STEPS):
            engine.step(names)
        blocks.append(engine.spent_s / BLOCK_STEPS)
    return min(blocks)


def measure_with_threads(prepared: Prepared, pause_s: float = 0.001) -> dict[str, object]:
    """One run with the driver's thread, and a tier that answers probes and loads on a thread of its own.

    The engine's thread steps every `pause_s`; its time in the steps is what counts.
    """
    executor = ThreadExecutor("bench-tier")
    engine = Engine(prepared, sync_probe=False, executor=executor)
    rest = Signal()
    gc.collect()
    engine.driver.start()
    steps, cpu = 0, cpu_s()
    try:
        while engine.waiting and steps < MOST_STEPS:
            engine.step_waiting()
            steps += 1
            if engine.waiting:
                rest.wait(pause_s)
    finally:
        engine.driver.stop()
        executor.close(5.0)
    cpu = cpu_s() - cpu
    promoted = engine.core.statistics().counters.promoted
    consumed = engine.consume() if not engine.waiting else -1
    return {"ready_s": engine.spent_s, "steps": steps, "cpu_s": cpu, "promoted": promoted, "consumed": consumed}
