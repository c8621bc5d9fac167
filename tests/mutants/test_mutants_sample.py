"""The mutation check sees: a few deliberate bugs here, all in `make mutants`; and what is an error of the harness."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import mutant_harness as harness
import pytest

LIST = Path(__file__).parent / "mutants.toml"
KINDS = (
    "grants and queue", "clocks and silence", "reset generations", "quarantine and pacing", "planner", "store rule",
    "disk index and reclaim", "recovery", "verification", "copies and fences",
)  # fmt: skip
SAMPLE = ("a load is not pinned", "a window is one token short", "a header block is believed anywhere")


def test_the_list_has_enough_of_every_kind() -> None:
    mutants = harness.read_list(LIST)
    kinds = Counter(mutant.kind for mutant in mutants)
    assert len(mutants) >= 40
    assert set(kinds) == set(KINDS)
    assert min(kinds.values()) >= 4
    assert len({mutant.name for mutant in mutants}) == len(mutants)


def test_every_old_text_is_there_once() -> None:
    for mutant in harness.read_list(LIST):
        harness.mutated(mutant)


def test_a_second_list_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"name": "mine", "file": "src/kvstrata/types.py", "old": "a", "new": "b"}
    for name, text in (("more.json", json.dumps([entry])), ("more.toml", "[[mutant]]\n" + toml(entry))):
        (tmp_path / name).write_text(text, encoding="utf-8")
        monkeypatch.setenv(harness.ENVIRONMENT, str(tmp_path / name))
        assert harness.given_lists([str(LIST)])[-1] == harness.Mutant("mine", "", "types.py", "a", "b")


def toml(entry: dict[str, str]) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in entry.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_deliberate_bug_is_caught(name: str) -> None:
    (mutant,) = [mutant for mutant in harness.read_list(LIST) if mutant.name == name]
    (verdict,) = harness.check([mutant], seeds=10)
    assert verdict.outcome == "caught", verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "why"),
    [
        (harness.Mutant("not there", "", "core/loads.py", "no such text", ""), "is there 0 times"),
        (harness.Mutant("twice", "", "core/loads.py", "self", "self2"), "times"),
        (
            harness.Mutant("no program", "", "core/clocks.py", "min(passed, self._gap)", "min(passed, "),
            "SyntaxError",
        ),
        (
            harness.Mutant("no name", "", "core/clocks.py", "min(passed, self._gap)", "min(passed, gap)"),
            "NameError",
        ),
        (harness.Mutant("not run", "", "primary/region.py", "if size < 1:", "if size < 2:"), "not executed"),
    ],
    ids=lambda value: value.name if isinstance(value, harness.Mutant) else "",
)
def test_what_is_no_mutant_is_an_error(mutant: harness.Mutant, why: str) -> None:
    (verdict,) = harness.check([mutant], seeds=1)
    assert verdict.outcome == "error"
    assert why in verdict.why
