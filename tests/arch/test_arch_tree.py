"""The architecture of the tree as it is: layers, purity, words, sizes, exports, names."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import checkers
import pytest

FILES = dict(checkers.modules())


def tracked_files() -> list[Path]:
    """Files that belong to the repository; all text files below it where git does not know."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=checkers.ROOT,
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout.decode()
        names = [name for name in listed.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        top = ("src", "tests", "docs", "bench", "tools", "examples")
        found = [path for folder in top for path in (checkers.ROOT / folder).rglob("*")]
        names = [path.relative_to(checkers.ROOT).as_posix() for path in found if path.suffix in TEXT]
    return [checkers.ROOT / name for name in names if (checkers.ROOT / name).is_file()]


TEXT = {".py", ".md", ".toml", ".sh", ".json", ".yml", ".yaml", ".txt", ""}


@pytest.mark.parametrize(
    "check",
    [
        checkers.layer_complaints,
        checkers.purity_complaints,
        checkers.guarded_module_complaints,
        checkers.size_complaints,
        checkers.docstring_complaints,
        checkers.export_complaints,
    ],
)
def test_every_source_file_passes(check: Callable[[str, str], list[str]]) -> None:
    assert len(FILES) > 20
    assert [complaint for path, text in FILES.items() for complaint in check(path, text)] == []


def test_every_word_is_the_one_of_the_glossary() -> None:
    strays = checkers.glossary((checkers.ROOT / "docs/glossary.md").read_text(encoding="utf-8"))
    assert len(strays) > 10
    assert [
        complaint for path, text in FILES.items() for complaint in checkers.glossary_complaints(path, text, strays)
    ] == []


def test_nothing_names_a_machine_or_a_registry() -> None:
    complaints = []
    for path in tracked_files():
        name = path.relative_to(checkers.ROOT).as_posix()
        if path.suffix in TEXT and name != "tests/arch/test_arch_checkers.py" and name != "tests/arch/checkers.py":
            complaints += checkers.place_complaints(name, path.read_text(encoding="utf-8", errors="replace"))
    assert complaints == []


def test_test_files_have_names_of_their_own() -> None:
    names = [path.relative_to(checkers.ROOT).as_posix() for path in (checkers.ROOT / "tests").rglob("*.py")]
    assert len(names) > 5
    assert checkers.duplicate_names(names) == []
    assert [name for name in names if name.endswith("__init__.py")] == []


@pytest.mark.scenario_104
def test_every_module_imports_without_an_engine_and_without_a_thread() -> None:
    names = [f"kvstrata.{path.removesuffix('.py').replace('/', '.')}" for path in FILES]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    program = (
        "import importlib, sys, threading\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "heavy = {'torch', 'vllm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""
    assert done.returncode == 0
