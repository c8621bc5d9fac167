"""The mutation check: deliberate bugs, each put into a module as it is imported, and seeds until something sees it.

    python tests/mutants/mutant_harness.py tests/mutants/mutants.toml --seeds 300 --jobs 2

A list is TOML or JSON: tables `mutant` with `name`, `kind`, `file` (below src/kvstrata), `old` and `new`. A second list
comes from the environment variable KVSTRATA_MUTANTS. Each mutant runs in a process of its own, over a copy of the
module in memory; the tree is never written to. Nothing of kvstrata is imported here before the bug is in place.

A mutant is *caught* by a check that fails. It is an error of the harness if its old text is not there exactly once, if
its line was never executed, or if what it fails with is a name, type, syntax, attribute or import error.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

ENVIRONMENT = "KVSTRATA_MUTANTS"
SOURCE = Path(__file__).resolve().parents[2] / "src" / "kvstrata"
SEEDS = 300
MOST_CPU_S = 15
"""Seconds of work after which one run of a seed counts as hanging; it takes less than one."""
NOT_A_CATCH = ("NameError", "TypeError", "SyntaxError", "AttributeError", "ImportError", "UnboundLocalError",
               "ModuleNotFoundError", "IndentationError")  # fmt: skip
_MARK = "__mutant_reached__"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One deliberate bug."""

    name: str
    kind: str
    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant: `outcome` is caught, survived or error."""

    name: str
    kind: str
    outcome: str
    seed: int = -1
    why: str = ""


def read_list(path: Path) -> list[Mutant]:
    """The mutants of a file. Raises `ValueError` for what is not one."""
    text = path.read_text(encoding="utf-8")
    table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    entries = table if isinstance(table, list) else table.get("mutant", table.get("mutants"))
    if not isinstance(entries, list):
        raise ValueError(f"{path}: no list of mutants")
    return [_mutant(path, number, entry) for number, entry in enumerate(entries)]


def _mutant(path: Path, number: int, entry: object) -> Mutant:
    if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in ("file", "old", "new")):
        raise ValueError(f"{path}: entry {number} needs file, old and new")
    file = entry["file"].removeprefix("src/").removeprefix("kvstrata/")
    return Mutant(entry.get("name", f"{file} #{number}"), entry.get("kind", ""), file, entry["old"], entry["new"])


def given_lists(paths: Sequence[str]) -> list[Mutant]:
    """All mutants of these files and of the one that the environment names."""
    extra = os.environ.get(ENVIRONMENT)
    return [mutant for path in [*paths, *([extra] if extra else [])] for mutant in read_list(Path(path))]


# -- putting a bug into a module


def mutated(mutant: Mutant) -> tuple[str, int, int]:
    """The module's text with the bug, and the first and last line of what was changed. Raises `ValueError`."""
    text = (SOURCE / mutant.file).read_text(encoding="utf-8")
    count = text.count(mutant.old)
    if count != 1 or mutant.old == mutant.new:
        raise ValueError(f"its old text is there {count} times" if count != 1 else "it changes nothing")
    at = text.index(mutant.old)
    # Where old and new begin alike, the change is what differs.
    same = len(os.path.commonprefix([mutant.old, mutant.new]))
    tail = len(os.path.commonprefix([mutant.old[same:][::-1], mutant.new[same:][::-1]]))
    first = text.count("\n", 0, at + same) + 1
    last = first + mutant.new[same : len(mutant.new) - tail].count("\n")
    return text.replace(mutant.old, mutant.new), first, last


class _Marker(ast.NodeTransformer):
    """Puts a call before each innermost statement that has a changed line."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.marks = 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                setattr(node, name, list(self._marked(value)))
        return node

    def _marked(self, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for statement in body:
            inner = [child for child in ast.walk(statement) if isinstance(child, ast.stmt) and child is not statement]
            end = statement.end_lineno or statement.lineno
            if inner and isinstance(statement, ast.stmt):
                end = min(child.lineno for child in inner) - 1  # the head of a compound statement
                whole = statement.end_lineno or end
                deep = any(
                    child.lineno <= self.last and (child.end_lineno or child.lineno) >= self.first for child in inner
                )
                hit = not deep and statement.lineno <= self.last and whole >= self.first
            else:
                hit = statement.lineno <= self.last and end >= self.first
            first_of_all = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
            if hit and not first_of_all:
                self.marks += 1
                yield ast.copy_location(ast.Expr(ast.Call(ast.Name(_MARK, ast.Load()), [], [])), statement)
            yield statement


class _Loader(importlib.abc.Loader):
    def __init__(self, code: object, reached: Callable[[], None]) -> None:
        self._code, self._reached = code, reached

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The default one."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Run the altered code."""
        module.__dict__[_MARK] = self._reached
        exec(self._code, module.__dict__)  # type: ignore[arg-type]


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, path: Path, loader: _Loader, is_package: bool) -> None:
        self._name, self._path, self._loader, self._is_package = name, path, loader, is_package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Ours for the one module."""
        if fullname != self._name:
            return None
        folder = [str(self._path.parent)] if self._is_package else None
        return importlib.util.spec_from_file_location(
            fullname, self._path, loader=self._loader, submodule_search_locations=folder
        )


def install(mutant: Mutant) -> Callable[[], bool]:
    """From now on the module is imported with the bug; returns whether the changed line has been executed."""
    name = "kvstrata." + mutant.file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    if name in sys.modules:
        raise ValueError(f"{name} is imported already: the harness itself needs it")
    text, first, last = mutated(mutant)
    tree, marker = ast.parse(text), None
    for widen in range(4):  # a change that only takes lines away is marked at its neighbours
        marker = _Marker(max(first - widen, 1), last + widen)
        tree = ast.fix_missing_locations(marker.visit(ast.parse(text)))
        if marker.marks:
            break
    count = Counter[str]()
    path = SOURCE / mutant.file
    loader = _Loader(compile(tree, str(path), "exec"), lambda: count.update(["reached"]))
    sys.meta_path.insert(0, _Finder(name, path, loader, path.name == "__init__.py"))
    return lambda: count["reached"] > 0


# -- running seeds


def programmes() -> list[Callable[[int], object]]:
    """What one seed runs, the quick ones first."""
    from kvstrata.testing import stateful
    from kvstrata.testing.simulation.disk_walk import disk_walk
    from kvstrata.testing.simulation.run import simulate
    from kvstrata.testing.simulation.twins import twin_seed

    profiles = (stateful.WILD, stateful.STEADY, stateful.MIRROR, stateful.FOCUS)
    return [
        twin_seed,
        lambda seed: stateful.walk(seed, 60, stateful.SCENES, shorten=False),
        lambda seed: stateful.walk(seed, 90, profiles[seed % len(profiles)], shorten=False),
        disk_walk,
        lambda seed: simulate(seed, shorten=False),
    ]


def run_one(mutant: Mutant | None, first: int, seeds: int) -> Verdict:
    """Run seeds until something fails. Without a mutant: that nothing does."""
    name, kind = (mutant.name, mutant.kind) if mutant is not None else ("unmutated", "")
    try:
        reached = install(mutant) if mutant is not None else lambda: True
    except (ValueError, OSError, SyntaxError) as error:
        return Verdict(name, kind, "error", why=f"{type(error).__name__}: {error}")
    seed = first
    signal.signal(signal.SIGVTALRM, _too_long)
    try:
        runs = programmes()
        for seed in range(first, first + seeds):
            for run in runs:
                signal.setitimer(signal.ITIMER_VIRTUAL, MOST_CPU_S)
                run(seed)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        wrong = _wrong_kind(error)
        if wrong:
            return Verdict(name, kind, "error", seed, f"fails by {wrong}: {text}")
        if not reached():
            return Verdict(name, kind, "error", seed, f"fails, but its line was not executed: {text}")
        return Verdict(name, kind, "caught", seed, text)
    if not reached():
        return Verdict(name, kind, "error", seed, "its line was not executed")
    return Verdict(name, kind, "survived", seed)


def _too_long(*_: object) -> None:
    raise AssertionError(f"hangs: no end after {MOST_CPU_S} s of work")


def _wrong_kind(error: BaseException) -> str:
    """The name of an error that says that a mutant is no program, wherever in the chain of causes it is."""
    cause: BaseException | None = error
    while cause is not None:
        for kind in type(cause).__mro__:
            if kind.__name__ in NOT_A_CATCH:
                return type(cause).__name__
        cause = cause.__cause__
    return next((kind for kind in NOT_A_CATCH if f"{kind}(" in str(error) or f"{kind}:" in str(error)), "")


def _in_process(mutant: Mutant, first: int, seeds: int, timeout: float) -> Verdict:
    command = [sys.executable, __file__, "--one", json.dumps(asdict(mutant))]
    command += ["--from", str(first), "--seeds", str(seeds)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return Verdict(mutant.name, mutant.kind, "caught", why=f"hangs: no end after {timeout:g} s")
    try:
        return Verdict(**json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError, TypeError):
        return Verdict(mutant.name, mutant.kind, "error", why=(done.stderr or done.stdout).strip()[-300:])


def check(
    mutants: Sequence[Mutant], *, first: int = 0, seeds: int = SEEDS, jobs: int = 1, timeout: float = 300
) -> list[Verdict]:
    """All mutants, each in a process of its own."""
    with ThreadPoolExecutor(jobs) as pool:
        verdicts = []
        for verdict in pool.map(lambda mutant: _in_process(mutant, first, seeds, timeout), mutants):
            verdicts.append(verdict)
            print(
                f"{verdict.outcome:9} {verdict.kind:24} {verdict.name}: {verdict.why} (seed {verdict.seed})", flush=True
            )
    return verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 unless every mutant was caught and the unmutated run passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lists", nargs="*", help="files with mutants")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="mutants whose name or kind has this in it")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th mutant, from the i-th on")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.one:
        print(json.dumps(asdict(run_one(Mutant(**json.loads(chosen.one)), chosen.first, chosen.seeds))))
        return 0
    mutants = [m for m in given_lists(chosen.lists) if chosen.only in m.name or chosen.only in m.kind]
    part, parts = map(int, chosen.part.split("/"))
    mutants = mutants[part::parts]
    verdicts = check(mutants, first=chosen.first, seeds=chosen.seeds, jobs=chosen.jobs)
    last = max((verdict.seed for verdict in verdicts), default=0)
    plain = run_one(None, chosen.first, last - chosen.first + 1)
    counts = Counter(verdict.outcome for verdict in verdicts)
    said = "passes" if plain.outcome == "survived" else f"fails: {plain.why}"
    print(
        f"mutants: {counts['caught']} of {len(verdicts)} caught, {counts['survived']} survived, "
        f"{counts['error']} errors; the unmutated run of seeds {chosen.first} to {last} {said}"
    )
    return 0 if counts["caught"] == len(verdicts) and plain.outcome == "survived" else 1


if __name__ == "__main__":
    raise SystemExit(main())
