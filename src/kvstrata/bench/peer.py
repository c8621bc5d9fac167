"""vLLM's side of `bench resolve`: `bench/vllm_lookup.py`, in this process and, as the check, in one of its own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from kvstrata.bench.resolve import Prepared, Side
from kvstrata.bench.workloads import Workload
from kvstrata.errors import StateError

SCRIPT = Path(__file__).resolve().parents[3] / "bench" / "vllm_lookup.py"
"""Lies in the repository, not in the installed package."""

SECONDS_PER_KEY = 40e-6
"""What vLLM's side of one run takes at most; only for deciding how much fits into a budget."""

Groups = list[tuple[int, str, int]]


def groups_of(workload: Workload) -> Groups:
    """The layout in the script's words."""
    kinds = {"full": "full", "sliding_window": "sliding", "recurrent": "recurrent"}
    return [
        (tpc, kinds[group.kind.name], int(group.kind.parameters.get("window", 0)))
        for group, tpc in zip(workload.layout.groups, workload.layout.tokens_per_chunk, strict=True)
    ]


def why_not() -> str | None:
    """Why vLLM cannot be measured here; None if it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    return None if SCRIPT.is_file() else f"{SCRIPT.name} is part of the repository and not of the installed package"


class Peer:
    """vLLM 0.32's tiering manager and the lookup of its connector's scheduler, driven without an engine."""

    def __init__(self) -> None:
        spec = importlib.util.spec_from_file_location("vllm_lookup", SCRIPT)
        if spec is None or spec.loader is None:
            raise StateError(f"{SCRIPT.name} cannot be loaded")
        self._script: ModuleType = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._script)
        self.version: str = self._script.VERSION

    def run(self, prepared: Prepared, requests: int) -> Side:
        """One run with the first `requests` prompts of a workload."""
        workload = prepared.workload
        hashes = workload.hashes()[:requests]
        told = self._script.measure(groups_of(workload), hashes, prepared.present, workload.tokens)
        return Side(**told)

    def run_with_threads(self, prepared: Prepared, requests: int) -> dict[str, float]:
        """The same with a tier that answers on a thread of its own."""
        workload = prepared.workload
        hashes = workload.hashes()[:requests]
        told: dict[str, float] = self._script.measure_with_threads(
            groups_of(workload), hashes, prepared.present, workload.tokens
        )
        return told


class StandAlone:
    """The script as a program of its own; one process answers row after row."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise StateError(f"{SCRIPT.name} was started without pipes")
        self._to, self._from = self._process.stdin, self._process.stdout

    def run(self, workload: Workload, requests: int, runs: int) -> Mapping[str, Any]:
        """Best of some runs with the first `requests` prompts of a workload."""
        row = {
            "groups": groups_of(workload),
            "presence": workload.presence,
            "requests": requests,
            "tokens": workload.tokens,
            "runs": runs,
        }
        try:
            print(json.dumps(row), file=self._to, flush=True)
            line = self._from.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise StateError(f"{SCRIPT.name} ended with {self._process.wait()}")
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            raise StateError(f"{SCRIPT.name}: {told['error']}")
        return told

    def close(self) -> None:
        """End the program."""
        self._to.close()
        self._process.wait(timeout=60)


def scaled(side: Side, factor: float) -> Side:
    """What was measured on fewer requests, for all of them: vLLM's cost and counts are linear in requests."""
    seconds = {name: getattr(side, name) * factor for name in ("submit_s", "step_s", "first_s", "fetch_s", "ready_s")}
    return Side(
        **seconds,
        cpu_s=side.cpu_s * factor,
        promoted=round(side.promoted * factor),
        consumed=round(side.consumed * factor),
        probed=round(side.probed * factor),
        runs=side.runs,
    )


def scaled_figures(told: Mapping[str, float], factor: float) -> dict[str, float]:
    """The same for a run with threads. The steps stay: requests wait side by side."""
    counts = {name: round(told[name] * factor) for name in ("promoted", "consumed")}
    return {**told, **counts, "ready_s": told["ready_s"] * factor, "cpu_s": told["cpu_s"] * factor}
