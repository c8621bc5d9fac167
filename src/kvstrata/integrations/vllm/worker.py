"""The worker side: copies between the engine's KV tensors and primary. Called by the model runner, in its thread.

In one step, in this order: `before_forward` (stores from blocks that were given back, fences), the model runs,
`start_loads`, `after_forward` (stores), `results` and `report`.

Whatever goes wrong, each load that was handed over is reported once, as failed if need be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvstrata.errors import ConfigError
from kvstrata.integrations.vllm.canary import Canary
from kvstrata.integrations.vllm.metadata import CopyJob, JobReport, RankGreeting, StepReport, StepWork
from kvstrata.integrations.vllm.shapes import EngineShape
from kvstrata.integrations.vllm.share import Attached, attach
from kvstrata.integrations.vllm.shield import Shield, shielded
from kvstrata.runtime.clock import SystemClock
from kvstrata.transfer.base import Copier
from kvstrata.transfer.pieces import Done, Piece
from kvstrata.transfer.torch_copier import make_copier
from kvstrata.transfer.torch_views import LayerBytes, layer_bytes

MAX_DEAF = 3
"""After so many calls in which the copier failed to say what has ended, what is under way counts as failed."""

MakeCopier = Callable[[Sequence[Sequence[LayerBytes]], memoryview, int, Callable[[], float]], Copier]


class WorkerSide:
    """One rank's worker side.

    `regroup` gives a layer's tensor with the engine's blocks as first dimension (kernels may cut them smaller).
    `mapper` maps primary; `make` makes the copier from the layers' bytes, primary, and what all places are multiples
    of.
    """

    def __init__(
        self,
        shape: EngineShape,
        rank: int,
        engine_id: str,
        *,
        canary: bool = True,
        regroup: Callable[[Any, int], Any] = lambda cache, blocks: cache,
        mapper: Callable[[str], Attached] = attach,
        make: MakeCopier = make_copier,
        faults: Shield | None = None,
    ) -> None:
        self.shield = Shield(f"worker side, rank {rank}") if faults is None else faults
        self._shape = shape
        self._rank = rank
        self._engine_id = engine_id
        self._canary = canary
        self._regroup = regroup
        self._mapper = mapper
        self._make = make
        self._layers: list[list[LayerBytes]] = []
        self._blocks = 0
        self._attached: Attached | None = None
        self._copier: Copier | None = None
        self._trouble = "the engine registered no KV cache"
        self._loading: dict[int, str] = {}
        self._storing: set[int] = set()
        self._spoilt: set[int] = set()
        """Stores under way whose blocks were written meanwhile: their fence failed."""
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._report = StepReport()
        self._told = 0
        self._deaf = 0
        """How often in a row the copier did not say what has ended."""

    # -- before serving

    @shielded(lambda: None)
    def register(self, caches: Mapping[str, Any], blocks: int) -> None:
        """The engine's KV tensors by layer, of `blocks` blocks each."""
        self._blocks = blocks
        try:
            self._layers = [
                [
                    layer_bytes(layer.name, self._regroup(caches[layer.name], blocks), blocks, layer.page)
                    for layer in group.layers
                ]
                for group in self._shape.groups
            ]
        except (ConfigError, KeyError) as error:
            self._trouble = f"its KV tensors cannot be used: {error}"
            return
        self._trouble = ""

    def greet(self) -> RankGreeting:
        """Map primary, let the canary sing, and tell how it went."""
        try:
            self._attach()
        except Exception as error:
            self.shield.caught("greet", error)
            self._trouble = f"{type(error).__name__}: {error}"
        sizes = tuple(self._shape.rank_bytes(g) for g in range(len(self._shape.groups)))
        return RankGreeting(self._rank, self._trouble, sizes)

    def _attach(self) -> None:
        if self._copier is not None or self._trouble:
            return
        self._attached = self._mapper(self._engine_id)
        self._copier = self._make(self._layers, self._attached.view, self._place_unit(), SystemClock().monotonic)
        if self._canary:
            canary = Canary(self._shape, self._layers, self._attached.view, self._blocks)
            self._trouble = canary.sing(self._copier, self._rank) or ""

    def _place_unit(self) -> int:
        """What every place of a block in primary is a whole multiple of."""
        sizes = [self._shape.rank_bytes(g) for g in range(len(self._shape.groups))]
        sizes += [group.block_bytes for group in self._shape.groups]
        return int(np.gcd.reduce([512, *sizes]))

    # -- in a step

    def before_forward(self, work: StepWork) -> None:
        """Copy what comes from blocks that may be written in this step; order what is under way before it."""
        if self._copier is None and not self._trouble and (work.early or work.loads or work.stores):
            self.greet()  # an engine that asks for no greeting
        for job in work.early:
            self._store(job)
        fenced = [*(job.job_id for job in work.early), *work.fences]
        try:
            if self._copier is not None and fenced:
                self._collect()
                self._copier.wait(fenced)
        except Exception as error:
            self.shield.caught("before_forward", error)
            self._spoilt.update(self._storing.intersection(fenced))

    def start_loads(self, work: StepWork) -> None:
        """Begin this step's loads."""
        for job in work.loads:
            try:
                if not job.valid or self._copier is None or self._trouble:
                    self._load_ended(job.job_id, job.request_id, ok=False)
                    continue
                pieces = self._pieces(job)
                self._loading[job.job_id] = job.request_id
                self._copier.load(job.job_id, pieces)
            except Exception as error:
                self.shield.caught("start_loads", error)
                self._loading.pop(job.job_id, None)
                self._load_ended(job.job_id, job.request_id, ok=False)

    def after_forward(self, work: StepWork) -> None:
        """Begin this step's stores."""
        for job in work.stores:
            self._store(job)

    def _store(self, job: CopyJob) -> None:
        try:
            if self._copier is None or self._trouble:
                self._report.stores.append(JobReport(job.job_id, ok=False))
                return
            pieces = self._pieces(job, storing=True)
            if not pieces:
                self._report.stores.append(JobReport(job.job_id, ok=True))
                return
            self._storing.add(job.job_id)
            self._copier.store(job.job_id, pieces)
        except Exception as error:
            self.shield.caught("store", error)
            self._storing.discard(job.job_id)
            self._report.stores.append(JobReport(job.job_id, ok=False))

    def _pieces(self, job: CopyJob, *, storing: bool = False) -> list[Piece]:
        """What this rank copies of a job. Of groups that are the same on all ranks only the first one stores."""
        pieces = []
        for copy in job.groups:
            group = self._shape.groups[copy.group]
            if storing and group.replicated and self._rank:
                continue
            part = 0 if group.replicated else self._rank * self._shape.rank_bytes(copy.group)
            places = np.array(copy.chunks, dtype=np.int64) + part
            places += np.array(copy.inside, dtype=np.int64) * group.block_bytes
            pieces.append(Piece(copy.group, np.array(copy.blocks, dtype=np.int64), places))
        return pieces

    # -- what comes back

    def _collect(self) -> None:
        try:
            ended = [] if self._copier is None else self._copier.finished()
            self._deaf = 0
        except Exception as error:
            self.shield.caught("finished", error)
            self._deaf += 1
            ended = self._give_up() if self._deaf > MAX_DEAF else []
        for done in ended:
            self._ended(done)

    def _give_up(self) -> list[Done]:
        """The copier does not say any more what has ended: order all copies before what comes, and call them failed."""
        open_jobs = [*self._loading, *self._storing]
        try:
            if self._copier is not None:
                self._copier.wait(open_jobs)
        except Exception as error:
            self.shield.caught("wait", error)
        return [Done(job_id, ok=False) for job_id in open_jobs]

    def _ended(self, done: Done) -> None:
        request_id = self._loading.pop(done.job_id, None)
        if request_id is not None:
            self._load_ended(done.job_id, request_id, ok=done.ok)
            self._report.load_bytes += done.size
            self._report.load_seconds += done.seconds
        elif done.job_id in self._storing:
            self._storing.discard(done.job_id)
            ok = done.ok and done.job_id not in self._spoilt
            self._spoilt.discard(done.job_id)
            self._report.stores.append(JobReport(done.job_id, ok))
            self._report.store_bytes += done.size
            self._report.store_seconds += done.seconds

    def _load_ended(self, job_id: int, request_id: str, *, ok: bool) -> None:
        self._report.loads.append(JobReport(job_id, ok))
        self._received.add(request_id)
        if not ok:
            self._failed.add(request_id)

    def results(self) -> tuple[set[str], set[str]]:
        """Requests whose load has ended since the last call, and those of them whose load failed."""
        self._collect()
        received, self._received = self._received, set()
        failed, self._failed = self._failed, set()
        return received, failed

    def report(self) -> StepReport | None:
        """What there is to say of jobs since the last call, None if nothing."""
        self._collect()
        if self.shield.total > self._told:
            self._report.faults.append(f"rank {self._rank}: {self.shield.total} faults: {dict(self.shield.faults)}")
            self._told = self.shield.total
        if self._report.empty:
            return None
        report, self._report = self._report, StepReport()
        return report

    @property
    def trouble(self) -> str:
        """Why this rank copies nothing; empty if it does."""
        return self._trouble

    @shielded(lambda: None)
    def close(self) -> None:
        """Let copies end and let go of primary."""
        copier, self._copier = self._copier, None
        if copier is not None:
            copier.close()
        attached, self._attached = self._attached, None
        if attached is not None:
            attached.close()
