"""The architecture checks, as functions from source text to complaints; the tests beside run them over the tree."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "kvstrata"
SOURCE = ROOT / "src" / PACKAGE

_BASE = frozenset({"types", "errors"})
_CORE = _BASE | {"layout", "policy", "core"}
_OUTER = _CORE | {"config", "primary", "tiers", "transfer"}
_RUNTIME = _OUTER | {"runtime", "observe"}

LAYERS: Mapping[str, frozenset[str]] = {
    "": frozenset(),  # kvstrata/__init__.py
    "types": frozenset({"errors"}),
    "errors": frozenset(),
    "layout": _BASE,
    "policy": _BASE,
    "core": _BASE | {"layout", "policy"},
    "config": _CORE,
    "primary": _CORE | {"config"},
    "tiers": _CORE | {"config"},
    "transfer": _CORE | {"config"},
    "observe": _CORE | {"config"},
    "runtime": _OUTER,
    "testing": _RUNTIME,
    "testing.simulation": _RUNTIME | {"testing", "integrations"},  # it drives both sides of the connector
    "sim": _RUNTIME | {"testing"},
    "integrations": _RUNTIME,
    "bench": _RUNTIME,
    "cli": _RUNTIME | {"testing", "sim", "integrations", "bench"},
    "__main__": frozenset({"cli"}),
}
"""Package or module below kvstrata -> the others that it may import."""

PURE = ("types", "errors", "layout", "policy", "core")
"""Where nothing of the outside world may be known: no engine, clock, thread, file or socket."""

IMPURE_MODULES = frozenset(
    (
        "time",
        "datetime",
        "random",
        "secrets",
        "threading",
        "_thread",
        "queue",
        "asyncio",
        "concurrent",
        "multiprocessing",
        "subprocess",
        "signal",
        "socket",
        "select",
        "ssl",
        "http",
        "urllib",
        "os",
        "io",
        "pathlib",
        "tempfile",
        "shutil",
        "glob",
        "fcntl",
        "mmap",
        "torch",
        "vllm",
        "logging",
    )
)
IMPURE_CALLS = frozenset({"open", "input", "print"})

GUARDED_MODULES = frozenset({"time", "random", "threading", "_thread"})
GUARDED_MODULES_AT: Mapping[str, frozenset[str]] = {
    "time": frozenset({"runtime/clock.py"}),
    "random": frozenset({"sim/", "testing/"}),
    "threading": frozenset({"runtime/executor.py"}),
    "_thread": frozenset(),
}
"""Modules that only these files (or folders) may import. `random` only seeded: see `unseeded_random`."""

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60


@dataclass(frozen=True, slots=True)
class Import:
    """One import: the absolute dotted name of what is imported, and where."""

    name: str
    line: int


@functools.cache
def parse(text: str) -> ast.Module:
    """The syntax tree of a file; every check asks for it again."""
    return ast.parse(text)


def modules() -> Iterator[tuple[str, str]]:
    """Path below the package, and text, of each source file."""
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), path.read_text(encoding="utf-8")


def part_of(path: str) -> str:
    """The package or module below kvstrata that a file belongs to; "" for kvstrata/__init__.py."""
    if path.startswith("testing/simulation/"):
        return "testing.simulation"
    first = path.split("/")[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imports(path: str, text: str) -> list[Import]:
    """All imports of a file, also those inside functions; relative ones made absolute."""
    folder = [PACKAGE, *path.split("/")[:-1]]
    found: list[Import] = []
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*folder[: len(folder) - node.level + 1], *([base] if base else [])])
            found += [Import(f"{base}.{alias.name}", node.lineno) for alias in node.names]
    return found


def layer_complaints(path: str, text: str) -> list[str]:
    """Imports that go upwards or sideways."""
    part = part_of(path)
    if part not in LAYERS:
        return [f"{path}: {part!r} has no place in the layers"]
    complaints = []
    for found in imports(path, text):
        names = found.name.split(".")
        if names[0] != PACKAGE:
            continue
        target = "testing.simulation" if names[1:3] == ["testing", "simulation"] else ".".join(names[1:2])
        if target not in LAYERS:  # a name of kvstrata/__init__.py itself
            continue
        if target != part and target not in LAYERS[part]:
            complaints.append(f"{path}:{found.line}: {part or PACKAGE} must not import {target}")
    return complaints


def purity_complaints(path: str, text: str) -> list[str]:
    """Knowledge of the outside world in a pure layer."""
    if part_of(path) not in PURE:
        return []
    complaints = [
        f"{path}:{found.line}: a pure layer must not import {found.name.split('.')[0]}"
        for found in imports(path, text)
        if found.name.split(".")[0] in IMPURE_MODULES
    ]
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            complaints.append(f"{path}:{node.lineno}: a pure layer must not call {node.func.id}()")
    return complaints


def guarded_module_complaints(path: str, text: str) -> list[str]:
    """Clocks, threads and randomness outside the modules that own them."""
    complaints = []
    for found in imports(path, text):
        top = found.name.split(".")[0]
        if top in GUARDED_MODULES and not any(
            path == place or (place.endswith("/") and path.startswith(place)) for place in GUARDED_MODULES_AT[top]
        ):
            complaints.append(f"{path}:{found.line}: {top} may be imported only in {places(top)}")
    return complaints + unseeded_random(path, text)


def places(module: str) -> str:
    """Where a guarded module may be imported, in words."""
    return ", ".join(sorted(GUARDED_MODULES_AT[module])) or "no file"


def unseeded_random(path: str, text: str) -> list[str]:
    """Uses of randomness without a seed: `random.random()`, `Random()`, `numpy.random.default_rng()`."""
    complaints = []
    for node in ast.walk(parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        makes = name.split(".")[-1] in {"Random", "default_rng"}
        if (makes and not node.args and not node.keywords) or (
            not makes and re.fullmatch(r"(np\.|numpy\.)?random\.[a-z_]+", name)
        ):
            complaints.append(f"{path}:{node.lineno}: {name}() is not seeded")
    return complaints


def size_complaints(path: str, text: str) -> list[str]:
    """Files and functions that are too long to be about one subject."""
    complaints = []
    lines = text.count("\n")
    if lines > MAX_FILE_LINES:
        complaints.append(f"{path}: {lines} lines, at most {MAX_FILE_LINES}")
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                complaints.append(f"{path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    return complaints


def docstring_complaints(path: str, text: str) -> list[str]:
    """Modules, and public classes and functions at their top, without a docstring."""
    tree = parse(text)
    complaints = []
    if tree.body and ast.get_docstring(tree) is None:
        complaints.append(f"{path}: no docstring")
    for node in tree.body:
        defines = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if defines and not node.name.startswith("_") and ast.get_docstring(node) is None:
            complaints.append(f"{path}:{node.lineno}: {node.name} has no docstring")
    return complaints


def export_complaints(path: str, text: str) -> list[str]:
    """Names in `__all__` that the module does not define."""
    tree = parse(text)
    defined: set[str] = set()
    exported: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
            if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                exported = list(ast.literal_eval(node.value)) if node.value is not None else []
    return [f"{path}: __all__ names {name!r}, which is not there" for name in exported if name not in defined]


@dataclass(frozen=True, slots=True)
class Stray:
    """A word that must not be used for an idea, and the word that must."""

    word: str
    instead: str

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the stray in identifiers (snake and camel case) and in prose."""
        parts = [re.escape(part) for part in self.word.lower().split()]
        body = r"[ _-]?".join(parts)
        return re.compile(rf"(?<![a-z0-9]){body}(?:s|es)?(?![a-z0-9])")


def glossary(text: str) -> list[Stray]:
    """The strays of a glossary: a table with the columns word, means, never."""
    strays: list[Stray] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3 or not line.lstrip().startswith("|") or cells[0] in ("word", "") or set(cells[0]) <= {"-"}:
            continue
        for stray in filter(None, (word.strip(" `") for word in cells[2].split(","))):
            strays.append(Stray(stray, cells[0].strip("` ")))
    return strays


def glossary_complaints(path: str, text: str, strays: Iterable[Stray]) -> list[str]:
    """Strays in names, comments and docstrings. A line that ends in `# glossary: allow` is left out."""
    complaints = []
    rules = [(stray, stray.pattern) for stray in strays]
    every = re.compile("|".join(pattern.pattern for _, pattern in rules) or "$^")
    for number, line in enumerate(text.splitlines(), 1):
        plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", line).lower()
        if not every.search(plain) or line.rstrip().endswith("# glossary: allow"):
            continue
        for stray, pattern in rules:
            if pattern.search(plain):
                complaints.append(f"{path}:{number}: say {stray.instead!r}, not {stray.word!r}")
    return complaints


_MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|work|Users|private)/[\w.-]+")
_HOSTS = re.compile(r"\b(?:[\w-]+\.)*(?:pypi\.org|pythonhosted\.org|npmjs\.org|crates\.io|debian\.org|ubuntu\.com)\b")
_ADDRESS = re.compile(r"\b(?:10\.\d+|192\.168|172\.(?:1[6-9]|2\d|3[01]))\.\d+\.\d+\b")


def place_complaints(path: str, text: str) -> list[str]:
    """Traces of one machine: absolute paths of a person's or a build's folder, registry hosts, private addresses."""
    complaints = []
    for number, line in enumerate(text.splitlines(), 1):
        for what, pattern in (("machine path", _MACHINE_PATH), ("registry host", _HOSTS), ("address", _ADDRESS)):
            if match := pattern.search(line):
                complaints.append(f"{path}:{number}: {what} {match.group()}")
    return complaints


def duplicate_names(paths: Iterable[str]) -> list[str]:
    """Test files with one name in several folders: without packages the second one would shadow the first."""
    seen: dict[str, str] = {}
    complaints = []
    for path in sorted(paths):
        name = path.split("/")[-1]
        if name in seen and name != "conftest.py":
            complaints.append(f"{path} has the name of {seen[name]}")
        seen.setdefault(name, path)
    return complaints
