"""The table of scenarios, the marks of the tests and the list of numbers agree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import checkers
import pytest

TABLE = checkers.ROOT / "docs" / "scenarios.md"
NOT_HERE = "Does not apply: "
OPEN = "Open: "

_ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
_NAME = re.compile(r"`(tests/[\w/]+\.py::\w+(?:::\w+)?)`")
_MARK = re.compile(r"scenario_(\d+)")


def rows(text: str) -> dict[int, str]:
    """What the table says of each number."""
    found = [(int(number), cell.strip()) for number, _, cell in _ROW.findall(text)]
    assert len(found) == len(dict(found)), "a number stands twice"
    return dict(found)


def marked(root: Path) -> dict[int, set[str]]:
    """The tests that carry each number's mark."""
    found: dict[int, set[str]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        for name, node in _tests(ast.parse(path.read_text(encoding="utf-8"))):
            for decorator in node.decorator_list:
                for number in _MARK.findall(ast.unparse(decorator)):
                    found.setdefault(int(number), set()).add(f"{path.relative_to(root)}::{name}")
    return found


def _tests(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, node
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}::{inner.name}", inner
        elif isinstance(node, ast.FunctionDef):
            yield node.name, node


def faults(table: dict[int, str], marks: dict[int, set[str]]) -> list[str]:
    """Where table and marks say different things."""
    found = []
    for number, cell in table.items():
        named, carrying = set(_NAME.findall(cell)), marks.get(number, set())
        said = cell.startswith((NOT_HERE, OPEN))
        if said and carrying:
            found.append(f"{number}: is said to have no test, and has {sorted(carrying)}")
        elif not said and not named:
            found.append(f"{number}: names neither a test nor a reason")
        else:
            found += [f"{number}: {name} does not carry the mark" for name in sorted(named - carrying)]
            found += [f"{number}: {name} is missing in the table" for name in sorted(carrying - named)]
    return found + [f"{number}: has a mark and no row" for number in sorted(marks.keys() - table.keys())]


def test_the_table_and_the_marks_agree() -> None:
    table = rows(TABLE.read_text(encoding="utf-8"))
    assert list(table) == sorted(table)
    assert faults(table, marked(checkers.ROOT)) == []


def test_the_numbers_are_those_of_the_list() -> None:
    lists = [parent / "shared" / "SCENARIOS.md" for parent in checkers.ROOT.parents]
    found = next((path for path in lists if path.is_file()), None)
    if found is None:
        pytest.skip("the list of scenarios lies beside the checkout only where the project is developed")
    numbers = re.findall(r"^### (\d+)\.", found.read_text(encoding="utf-8"), re.MULTILINE)
    assert list(rows(TABLE.read_text(encoding="utf-8"))) == [int(number) for number in numbers]


def test_what_does_not_agree_is_found() -> None:
    table = {
        1: "`tests/unit/test_a.py::test_x`",
        2: NOT_HERE + "no such thing",
        3: "",
        4: "`tests/unit/test_a.py::test_y`",
    }
    marks = {
        1: {"tests/unit/test_a.py::test_z"},
        2: {"tests/unit/test_a.py::test_z"},
        4: {"tests/unit/test_a.py::test_y"},
        5: {"x"},
    }
    assert [fault.split(":")[0] for fault in faults(table, marks)] == ["1", "1", "2", "3", "5"]
