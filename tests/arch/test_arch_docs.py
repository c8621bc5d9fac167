"""What the documents point at is there: links, recipes of make, and tests by name."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import checkers
import pytest

DOCUMENTS = sorted([*checkers.ROOT.glob("*.md"), *(checkers.ROOT / "docs").glob("*.md")])

_LINK = re.compile(r"\]\((?!https?://)([^)#]+)")
_TEST = re.compile(r"((?:tests|src)/[\w/]+\.py)(?:::(\w+))?")
_RECIPE = re.compile(r"`(?:\w+=\S+ )?make ([a-z]+)\b")
_SOURCE = re.compile(r"`(src/kvstrata/[\w/.]+)`")


def missing_links(folder: Path, text: str) -> list[str]:
    """Relative links that lead nowhere."""
    return [target for target in _LINK.findall(text) if not (folder / target).exists()]


def missing_tests(root: Path, text: str) -> list[str]:
    """Tests and checks named by path, or path and name, that do not exist."""
    missing = []
    for path, name in _TEST.findall(text):
        file = root / path
        if not file.is_file():
            missing.append(path)
        elif name and name not in defined_names(file.read_text(encoding="utf-8")):
            missing.append(f"{path}::{name}")
    return missing


@functools.cache
def defined_names(text: str) -> set[str]:
    """Names of all classes and functions, and of what is assigned at the top (a state machine's test case)."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def missing_recipes(makefile: str, text: str) -> list[str]:
    """Recipes of make that a text names and the Makefile lacks."""
    recipes = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    return [name for name in _RECIPE.findall(text) if name not in recipes]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_points_at_is_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    makefile = (checkers.ROOT / "Makefile").read_text(encoding="utf-8")
    assert missing_links(path.parent, text) == []
    assert missing_tests(checkers.ROOT, text) == []
    assert missing_recipes(makefile, text) == []
    assert [name for name in _SOURCE.findall(text) if not (checkers.ROOT / name).exists()] == []


def test_the_invariants_are_all_there() -> None:
    text = (checkers.ROOT / "docs/invariants.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (\d+) \|", text, re.MULTILINE) == [str(number) for number in range(1, 19)]


DRAWN = ("tests/property/", "tests/sim/test_simulation", "tests/fault/test_disk_power_cut.py")
"""Tests there draw their histories, by Hypothesis or from seeds."""


def without_drawn_test(text: str) -> list[int]:
    """The invariants of a table that name no test which draws its histories."""
    rows = re.findall(r"^\| (\d+) \| .* \| ([^|]*) \|$", text, re.MULTILINE)
    return [int(number) for number, where in rows if not any(f"`{place}" in where for place in DRAWN)]


def test_every_invariant_names_a_test_that_draws_its_histories() -> None:
    assert without_drawn_test((checkers.ROOT / "docs/invariants.md").read_text(encoding="utf-8")) == []
    table = "| 1 | a | `tests/unit/test_a.py::test_x` |\n| 2 | b | `tests/property/test_b.py::test_y` |\n"
    assert without_drawn_test(table) == [1]


def test_what_points_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_a.py").write_text("def test_here():\n    pass\nTestCase = 3\n")
    assert missing_links(tmp_path, "[a](tests/test_a.py#x) [b](gone.md) [c](https://x.y/z)") == ["gone.md"]
    named = "tests/test_a.py::test_here tests/test_a.py::TestCase tests/test_a.py::test_gone tests/test_b.py"
    assert missing_tests(tmp_path, named) == ["tests/test_a.py::test_gone", "tests/test_b.py"]
    assert missing_recipes("test: x\n", "`make test`, `make gone` and `PYTHON=3 make test`") == ["gone"]
