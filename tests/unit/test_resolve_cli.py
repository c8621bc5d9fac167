"""`kvstrata resolve`: its JSON in and out, many cases by line, and bad input told in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from kvstrata.cli.app import run
from kvstrata.cli.resolve import MAX_CHUNK, resolve
from kvstrata.layout.groups import Layout
from kvstrata.testing.layouts import random_layout, random_presence
from kvstrata.testing.oracle import oracle
from kvstrata.types import Presence

GROUPS = [
    {"kind": "full", "tokens_per_block": 16},
    {"kind": "sliding_window", "tokens_per_block": 16, "window": 33},
]


def case(**changes: Any) -> dict[str, Any]:
    fields = {
        "layout": {"groups": GROUPS},
        "prompt_tokens": 65,
        "present": {"0": [0, 1, 2, 3], "1": [2, 3]},
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not None}


def ask(*arguments: str) -> int:
    app = typer.Typer(add_completion=False)
    app.command()(resolve)
    return run(app, list(arguments))


def answer(tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: object) -> dict[str, Any]:
    path = tmp_path / "case.json"
    path.write_text(json.dumps(fields, indent=1), encoding="utf-8")
    assert ask(str(path)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    parsed: dict[str, Any] = json.loads(out)
    return parsed


def test_a_decided_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = answer(tmp_path, capsys, case())
    assert said.pop("why")
    assert said == {
        "decided": True,
        "boundary": 64,
        "load": {"0": [0, 1, 2, 3], "1": [2, 3]},
        "probe": {"0": [], "1": []},
    }


def test_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = answer(tmp_path, capsys, case(computed_tokens=16, present={}))
    assert "group 0 (full)" in said.pop("why")
    assert said == {"decided": True, "boundary": 16, "load": {"0": [], "1": []}, "probe": {"0": [], "1": []}}


def test_an_undecided_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = answer(
        tmp_path, capsys, case(computed_tokens=5, present={"0": [0, 1, 2, 3], "1": [2]}, unknown={"1": [3, 0]})
    )
    assert said.pop("why").startswith("undecided, so nothing is loaded yet: boundary 64 is the best still possible")
    assert said == {"decided": False, "boundary": 5, "load": {"0": [], "1": []}, "probe": {"0": [], "1": [3]}}


def test_all_fields_of_the_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = {"window": 128, "retained_extra_tokens": 0, "chunk_tokens": 32, "drafter": False}
    kinds = ["full", "sliding_window", "chunked_local", "recurrent"]
    layout = {
        "groups": [{"kind": kind, "tokens_per_block": 16, **every} for kind in kinds],
        "blocks_per_chunk": 1,
        "alignment_tokens": 1,
    }
    fields = {
        "layout": layout,
        "prompt_tokens": 64,
        "computed_tokens": 0,
        "present": {"0": [0, 1, 2], "1": [0, 1, 2], "2": [], "3": [2]},
        "unknown": {"2": [2]},
    }
    assert answer(tmp_path, capsys, fields)["probe"] == {"0": [], "1": [], "2": [2], "3": []}
    fields["present"] = {"0": [0, 1, 2], "1": [0, 1, 2], "2": [2], "3": [2]}
    fields["unknown"] = {}
    said = answer(tmp_path, capsys, fields)
    assert (said["boundary"], said["load"]) == (48, {"0": [0, 1, 2], "1": [0, 1, 2], "2": [2], "3": [2]})


def test_listed_chunks_are_facts_and_those_out_of_reach_play_no_role(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = {"groups": [{"kind": "full", "tokens_per_block": 16}]}
    fields = {"layout": full, "prompt_tokens": 20, "present": {"0": [0, 1, 1, 10**15]}}
    assert answer(tmp_path, capsys, fields)["boundary"] == 20
    drafter = {"groups": [{"kind": "full", "tokens_per_block": 16, "drafter": True}]}
    fields = {"layout": drafter, "prompt_tokens": 32, "present": {"0": [0, 1, 2]}}
    assert answer(tmp_path, capsys, fields)["boundary"] == 32


def test_huge_prompts_with_few_chunks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = {"groups": [{"kind": kind, "tokens_per_block": 1, "window": 5} for kind in ("full", "sliding_window")]}
    fields = {"layout": layout, "prompt_tokens": 10**12, "present": {"0": [0, 1, 2], "1": [0, 1, 2]}}
    assert answer(tmp_path, capsys, fields)["boundary"] == 3


def spec_of(layout: Layout) -> dict[str, Any]:
    groups = [
        {
            "kind": group.kind.name,
            "tokens_per_block": group.tokens_per_block,
            "drafter": group.drafter,
            **{name: value for name, value in group.kind.parameters.items() if name != "mode"},
        }
        for group in layout.groups
    ]
    return {
        "groups": groups,
        "blocks_per_chunk": layout.blocks_per_chunk,
        "alignment_tokens": layout.alignment_tokens,
    }


def test_1500_cases_by_line_equal_the_oracle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(21)
    lines, wanted = [], []
    for _ in range(1500):
        layout, total = random_layout(rng), int(rng.integers(1, 100))
        computed = int(rng.integers(0, total + 1)) if rng.random() < 0.3 else 0
        there = [np.flatnonzero(f == Presence.PRESENT).tolist() for f in random_presence(rng, layout, total)]
        present = {str(g): chunks for g, chunks in enumerate(there)}
        fields = {"layout": spec_of(layout), "prompt_tokens": total, "computed_tokens": computed, "present": present}
        lines.append(json.dumps(fields))
        wanted.append(oracle(layout, there, computed, total))
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join([*lines[:700], "", *lines[700:]]), encoding="utf-8")
    assert ask("--lines", str(path)) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(answers) == 1500
    for said, want in zip(answers, wanted, strict=True):
        assert said["decided"]
        assert said["boundary"] == want.boundary
        assert said["load"] == {str(g): list(chunks) for g, chunks in enumerate(want.load)}


def test_a_bad_line_stops_with_its_number_after_the_answers_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cases.jsonl"
    bad = json.dumps(case(prompt_tokens=None))
    path.write_text("\n".join([json.dumps(case()), "", bad, json.dumps(case())]), encoding="utf-8")
    assert ask("--lines", str(path)) == 2
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1
    assert err == f"kvstrata: {path}:3: prompt_tokens: is missing\n"


def with_group(**changes: Any) -> dict[str, Any]:
    return case(layout={"groups": [GROUPS[0], {**GROUPS[1], **changes}]})


BAD = [
    (case(layout=None), "layout: is missing"),
    (case(layout=[]), "layout: Expected `object`, got `array`"),
    (case(layout={}), "layout.groups: is missing"),
    (case(layout={"groups": GROUPS, "size": 1}), "layout.size: is not a known field"),
    (case(layout={"groups": GROUPS, "blocks_per_chunk": 0}), "layout.blocks_per_chunk: must be at least 1, got 0"),
    (case(layout={"groups": GROUPS, "alignment_tokens": 1 << 60}), "layout.alignment_tokens: must be at most"),
    (case(colour="red"), "colour: is not a known field"),
    (case(prompt_tokens="65"), "prompt_tokens: Expected `int`, got `str`"),
    (case(prompt_tokens=65.5), "prompt_tokens: Expected `int`, got `float`"),
    (case(prompt_tokens=True), "prompt_tokens: Expected `int`, got `bool`"),
    (case(prompt_tokens=-1), "prompt_tokens: must be at least 0, got -1"),
    (case(prompt_tokens=10**30), "prompt_tokens: must be at most"),
    (case(computed_tokens=-1), "computed_tokens: must be at least 0, got -1"),
    (case(computed_tokens=66), "computed_tokens: must be at most prompt_tokens (65), got 66"),
    (with_group(kind="window"), "layout.groups[1].kind: must be one of full, sliding_window, chunked_local, recurrent"),
    (with_group(window=0), "layout.groups[1].window: must be at least 1, got 0"),
    (with_group(window=-4), "layout.groups[1].window: must be at least 0, got -4"),
    (with_group(window="big"), "layout.groups[1].window: Expected `int`, got `str`"),
    (with_group(retained_extra_tokens=-1), "layout.groups[1].retained_extra_tokens: must be at least 0, got -1"),
    (with_group(kind="chunked_local"), "layout.groups[1].chunk_tokens: must be at least 1, got 0"),
    (with_group(tokens_per_block=0), "layout.groups[1].tokens_per_block: must be at least 1, got 0"),
    (with_group(drafter=1), "layout.groups[1].drafter: Expected `bool`, got `int`"),
    (with_group(kind="recurrent", drafter=True), "layout.groups[1].drafter: a recurrent group cannot be a drafter"),
    (
        with_group(kind="chunked_local", chunk_tokens=8, drafter=True),
        "layout.groups[1].drafter: a chunked_local group cannot be a drafter",
    ),
    (case(present=[]), "present: Expected `object`, got `array`"),
    (case(present={"0": 3}), "present.0: Expected `array`, got `int`"),
    (case(present={"0": [0, "1"]}), "present.0[1]: Expected `int`, got `str`"),
    (case(present={"0": [0, -1]}), "present.0[1]: must be at least 0, got -1"),
    (case(present={"2": []}), "present.2: must be the index of a group, 0 to 1"),
    (case(unknown={"01": []}), "unknown.01: must be the index of a group, 0 to 1"),
    (case(unknown={"1": [3]}), "unknown.1: chunk 3 is listed as present too"),
    (
        case(prompt_tokens=1 << 40, present={"0": [MAX_CHUNK + 1]}),
        f"present.0: chunk {MAX_CHUNK + 1} is beyond {MAX_CHUNK}, the highest that may be listed",
    ),
    ([], "Expected `object`, got `array`"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_cases_are_told_by_file_and_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: object, message: str
) -> None:
    path = tmp_path / "case.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    assert ask(str(path)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvstrata: {path}: {message}")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON: Input data was truncated"),
        (b"{", "not JSON: Input data was truncated"),
        (b"hello", "not JSON: JSON is malformed"),
        (b'{"a\xff": 1}', "not JSON: Invalid UTF-8"),
        (b'{\n"layout":\n,\n}', "not JSON: JSON is malformed: invalid character (byte 12), line 3"),
        (
            b'{"layout": {"groups": []}, "prompt_tokens": 1, "present": {"0": ' + b"[" * 99_999 + b"]" * 99_999 + b"}}",
            "not a case",
        ),
    ],
    ids=["empty", "cut", "text", "utf8", "line", "deep"],
)
def test_what_is_not_json_is_told_by_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes, message: str
) -> None:
    path = tmp_path / "case.json"
    path.write_bytes(data)
    assert ask(str(path)) == 2
    assert capsys.readouterr().err.startswith(f"kvstrata: {path}: {message}")


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(str(tmp_path / "none.json")) == 2
    assert capsys.readouterr().err == f"kvstrata: {tmp_path / 'none.json'}: cannot be read: No such file or directory\n"
    assert ask("--lines", str(tmp_path)) == 2
    assert "cannot be read: Is a directory" in capsys.readouterr().err


def test_one_of_case_and_lines_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["case.json", "--lines", "cases.jsonl"]):
        assert ask(*arguments) == 2
        assert capsys.readouterr().err == "kvstrata: resolve: give CASE.json or --lines FILE, one of them\n"
