"""Many seeds: what they reached, and which failed.

python -m kvstrata.testing.simulation 1000 --from 0 --jobs 2
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import signal
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from statistics import median
from types import FrameType

from kvstrata.testing.coverage import Coverage
from kvstrata.testing.simulation.faults import KINDS
from kvstrata.testing.simulation.legal import LEGAL
from kvstrata.testing.simulation.run import Outcome, SimulationError, simulate

BLOCK = 20
"""Seeds that one process runs before it reports."""
MOST_CPU_S = 60
"""Seconds of work after which a seed counts as hanging; it takes less than one."""
HANGS = "no end after"
MOST_SHOWN = 1
"""Failing seeds whose trace is shown."""


@dataclass(slots=True)
class Sums:
    """What a number of seeds amounted to."""

    outcomes: list[Outcome] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)
    struck: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0

    def add(self, other: Sums) -> None:
        """Take over what another process has run."""
        self.outcomes += other.outcomes
        self.failures += other.failures
        self.coverage.add(other.coverage)
        self.struck.update(other.struck)
        self.cpu_s += other.cpu_s

    def closing_line(self, first: int) -> str:
        """One line: seeds, violations, medians of the seeds with a promotion, speed, faults, pairs."""
        counted = [outcome for outcome in self.outcomes if outcome.promoted]
        seeds = len(self.outcomes) + len(self.failures)
        parts = [f"soak: {seeds} seeds from {first}, {len(self.failures)} violations"]
        if counted:
            names = ("steps", "core_steps", "requests", "promoted", "consumed")
            middle = ", ".join(
                f"{median(getattr(each, name) for each in counted):g} {name.replace('_', ' ')}" for name in names
            )
            parts.append(f"median of the {len(counted)} seeds with a promotion: {middle}")
        steps, core_steps = (sum(getattr(each, name) for each in self.outcomes) for name in ("steps", "core_steps"))
        cpu = max(self.cpu_s, 1e-9)
        parts.append(
            f"{steps} steps, {steps / cpu:.0f} per second and core ({core_steps} of the core, {core_steps / cpu:.0f})"
        )
        least = min(KINDS, key=lambda kind: self.struck[kind])
        parts.append(
            f"{sum(self.struck[kind] > 0 for kind in KINDS)} of {len(KINDS)} kinds of fault, "
            f"least often {least}: {self.struck[least]}"
        )
        parts.append(self.coverage.summary(LEGAL))
        return "; ".join(parts)


def run_seeds(seeds: Iterable[int]) -> Sums:
    """Run these seeds in this process."""
    sums = Sums()
    gc.freeze()  # what is imported stays; a seed makes little that refers to itself
    gc.set_threshold(50_000, 20, 50)
    begun = os.times()
    signal.signal(signal.SIGVTALRM, _too_long)
    for seed in seeds:
        signal.setitimer(signal.ITIMER_VIRTUAL, MOST_CPU_S)
        try:
            sums.outcomes.append(simulate(seed, sums.coverage, struck=sums.struck, shorten=False))
        except Exception as error:
            sums.failures.append((seed, f"{type(error).__name__}: {error}"))
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    ended = os.times()
    sums.cpu_s = ended.user + ended.system - begun.user - begun.system
    return sums


def _until_told() -> None:
    """A worker leaves the answer to an interrupt to who has started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _too_long(_: int, frame: FrameType | None) -> None:
    where = "".join(traceback.format_stack(frame, 12))
    raise AssertionError(f"{HANGS} {MOST_CPU_S} s of work, in\n{where}")


def soak(first: int, count: int, jobs: int = 1, minutes: float = 0.0) -> Sums:
    """Run `count` seeds from `first` on, in so many processes; no more are begun after `minutes`, if that is not 0.

    An interrupt ends it with what is done so far.
    """
    blocks = [range(at, min(at + BLOCK, first + count)) for at in range(first, first + count, BLOCK)]
    sums, end = Sums(), os.times().elapsed + 60 * minutes
    context = multiprocessing.get_context("fork")
    with suppress(KeyboardInterrupt), context.Pool(jobs, _until_told) if jobs > 1 else nullcontext() as pool:
        while blocks and not (minutes and os.times().elapsed > end):
            batch, blocks = blocks[: 4 * jobs], blocks[4 * jobs :]
            for part in pool.imap_unordered(run_seeds, batch) if pool is not None else map(run_seeds, batch):
                for seed, text in part.failures:
                    print(f"seed {seed}: {text}", flush=True)
                sums.add(part)
    return sums


def show(seed: int) -> None:
    """Print the shortest trace that is found for a failing seed."""
    try:
        simulate(seed)
    except SimulationError as error:
        print(error)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 if any seed failed."""
    parser = argparse.ArgumentParser(prog="python -m kvstrata.testing.simulation", description=__doc__)
    parser.add_argument("seeds", type=int, help="how many")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no more seeds after this")
    parser.add_argument("--table", action="store_true", help="print what struck how often")
    chosen = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    sums = soak(chosen.first, chosen.seeds, chosen.jobs, chosen.minutes)
    short = [seed for seed, text in sorted(sums.failures) if HANGS not in text]  # many runs that hang take for ever
    for seed in short[:MOST_SHOWN]:
        show(seed)
    if chosen.table:
        print(sums.coverage.table(LEGAL))
        print("\n".join(f"{sums.struck[kind]:>10} {kind}" for kind in KINDS))
    print(sums.closing_line(chosen.first))
    return 1 if sums.failures else 0
