"""The rows of `bench resolve`: both sides of each workload, and what of a row is not as it must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvstrata.bench.peer import SECONDS_PER_KEY, Peer, StandAlone, scaled, scaled_figures
from kvstrata.bench.resolve import Prepared, Side, best, measure, measure_with_threads
from kvstrata.bench.workloads import Workload
from kvstrata.runtime.clock import SystemClock

RUNS = 5
AGREEMENT = 0.20
"""How far vLLM's figures may be from those of the stand-alone script."""
MORE_RUNS = 5
"""How often more both are measured before they count as apart: other work on the machine moves single runs."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Budget:
    """How much time one row may take; seconds."""

    vllm_s: float = 60.0
    """vLLM's side in all, `runs` runs here and as many in the script: beyond it the row is scaled."""
    scaled_s: float = 6.0
    """What vLLM's side may take then, on fewer requests, at least one: cost and counts are linear in them."""
    own_s: float = 4.0
    """Ours: beyond it fewer runs are made, at least one."""
    runs: int = RUNS

    def requests(self, workload: Workload) -> int:
        """How many of the workload's requests vLLM's side can be measured with."""
        one = workload.keys_per_request * SECONDS_PER_KEY * self.runs * 2
        if workload.requests * one <= self.vllm_s:
            return workload.requests
        return max(1, min(workload.requests - 1, int(self.scaled_s / one)))


@dataclass(frozen=True, slots=True)
class Sides:
    """Who is measured beside kvstrata: nobody, or vLLM and its check."""

    peer: Peer | None = None
    alone: StandAlone | None = None
    threads: bool = True


def measure_row(prepared: Prepared, sides: Sides, budget: Budget) -> Row:
    """One row; with "error" instead of figures if something went wrong."""
    workload = prepared.workload
    row: Row = {
        "layout": workload.layout_name,
        "presence": workload.presence,
        "requests": workload.requests,
        "tokens": workload.tokens,
        "keys": workload.requests * workload.keys_per_request,
        "scaled": False,
    }
    try:
        own = repeat(lambda: measure(prepared, sync_probe=True), budget.runs, budget.own_s)
        row["kvstrata"] = own.as_row()
        late = repeat(lambda: measure(prepared, sync_probe=False), budget.runs, budget.own_s)
        row["late_probes"] = {"kvstrata": late.as_row()}
        if sides.peer is not None:
            _add_peer(row, prepared, own, sides.peer, sides.alone, budget)
        if sides.threads:
            _add_threads(row, prepared, sides.peer, budget)
    except Exception as error:  # one row that fails must not hide the others
        row["error"] = f"{type(error).__name__}: {error}"
    return row


def repeat(run: Callable[[], Side], runs: int, most_s: float) -> Side:
    """The best of some runs; fewer, at least one, if they would take longer than `most_s`."""
    clock = SystemClock()
    began = clock.monotonic()
    done: list[Side] = []
    while len(done) < runs:
        done.append(run())
        spent = clock.monotonic() - began
        if spent * (len(done) + 1) / len(done) > most_s:
            break
    return best(done)


def _add_peer(row: Row, prepared: Prepared, own: Side, peer: Peer, alone: StandAlone | None, budget: Budget) -> None:
    """vLLM's side, beside its stand-alone script on the same prompts."""
    workload, requests = prepared.workload, budget.requests(prepared.workload)
    factor = workload.requests / requests
    theirs = _in_turn(row, prepared, requests, peer, alone, budget.runs)
    row["scaled"] = factor > 1
    row["vllm"] = scaled(theirs, factor).as_row()
    row["vllm"]["measured_requests"] = requests
    row["submit_ratio"] = round(row["vllm"]["submit_s"] / own.submit_s, 2)
    row["step_ratio"] = round(row["vllm"]["step_s"] / own.step_s, 2)
    late = row["late_probes"]
    late["submit_ratio"] = round(row["vllm"]["submit_s"] / late["kvstrata"]["submit_s"], 2)


def _in_turn(row: Row, prepared: Prepared, requests: int, peer: Peer, alone: StandAlone | None, least: int) -> Side:
    """vLLM's best here and, as the check, in the stand-alone script: run by run in turn, so that both meet the same
    machine; some more runs if they are apart after `least`."""
    theirs: list[Side] = []
    seconds: dict[str, float] = {}
    while len(theirs) < least + MORE_RUNS:
        theirs.append(peer.run(prepared, requests))
        if alone is not None:
            told = alone.run(prepared.workload, requests, 1)
            seconds = {name: min(told[name], seconds.get(name, told[name])) for name in ("submit_s", "step_s")}
        if len(theirs) < least:
            continue
        side = best(theirs)
        ratios = {name: getattr(side, name) / value for name, value in seconds.items()}
        if all(abs(ratio - 1.0) <= AGREEMENT for ratio in ratios.values()):
            break
    if seconds:
        row["baseline"] = {**seconds, **{f"{name[:-2]}_ratio": round(ratio, 3) for name, ratio in ratios.items()}}
    return side


def _add_threads(row: Row, prepared: Prepared, peer: Peer | None, budget: Budget) -> None:
    """Once with tiers that answer on a thread of their own; vLLM's side on as many requests as its other runs."""
    row["executors"] = {"kvstrata": measure_with_threads(prepared)}
    if peer is not None:
        requests = budget.requests(prepared.workload)
        told = peer.run_with_threads(prepared, requests)
        row["executors"]["vllm"] = scaled_figures(told, prepared.workload.requests / requests) | {
            "measured_requests": requests
        }


def complaints(row: Mapping[str, Any]) -> list[str]:
    """What of a row fails the run."""
    name = f"{row['layout']}/{row['presence']}/{row['requests']}/{row['tokens']}"
    if "error" in row:
        return [f"{name}: {row['error']}"]
    own, found = row["kvstrata"], []
    if own["promoted"] != own["consumed"]:
        found.append(f"{name}: promoted {own['promoted']}, consumed {own['consumed']}")
    for what in ("submit", "step"):
        ratio = row.get("baseline", {}).get(f"{what}_ratio", 1.0)
        if abs(ratio - 1.0) > AGREEMENT:
            found.append(f"{name}: vLLM's {what} time is {ratio} of the stand-alone script's")
    if "vllm" in row and own["cpu_s"] > row["vllm"]["cpu_s"]:
        found.append(f"{name}: {own['cpu_s']:.6f} s of CPU, vLLM {row['vllm']['cpu_s']:.6f}")
    return found
