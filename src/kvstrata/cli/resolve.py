"""`kvstrata resolve`: explains one decision of the planner, or many.

The input is JSON; `Case` has its fields. The output is one JSON object per case with the keys decided, boundary,
load, probe and why; load and probe have every group's index as a string. What a case lists as present or unknown is
taken as a fact, also for a partly filled last chunk; chunks that no boundary of the prompt can need are ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TextIO

import msgspec
import numpy as np
import typer

from kvstrata.errors import ConfigError
from kvstrata.layout.build import LayoutSpec, field_error, layout_from_spec
from kvstrata.layout.groups import MAX_TOKENS, Layout
from kvstrata.layout.kinds.base import require_count
from kvstrata.layout.planner import Decision
from kvstrata.layout.planner import resolve as decide
from kvstrata.types import I8, I64, Presence

MAX_CHUNK = (1 << 27) - 1
"""Highest chunk index that a case may list and a boundary could need: presence is an array up to it."""


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One case. `present` and `unknown` map a group index, as a string, to lists of chunk indices."""

    layout: LayoutSpec
    prompt_tokens: int
    computed_tokens: int = 0
    present: dict[str, msgspec.Raw] = {}
    unknown: dict[str, msgspec.Raw] = {}


_CASES = msgspec.json.Decoder(Case, strict=True)
_INDICES = msgspec.json.Decoder(list[int], strict=True)


class Answer(msgspec.Struct, frozen=True):
    """What is printed for one case."""

    decided: bool
    boundary: int
    load: dict[str, list[int]]
    probe: dict[str, list[int]]
    why: str


def resolve(
    case: Annotated[Path | None, typer.Argument(metavar="CASE.json", help="The case, a JSON file.")] = None,
    lines: Annotated[
        Path | None, typer.Option("--lines", metavar="FILE", help="Many cases, one JSON object per line.")
    ] = None,
) -> None:
    """Explain which boundary a request gets and which chunks it loads, or which chunks to probe next."""
    resolve_command(case, lines, sys.stdout)


def resolve_command(case: Path | None, lines: Path | None, out: TextIO) -> None:
    """Answer the case in the file `case`, or those in `lines` in order, one JSON line each.

    Bad input raises a `ConfigError` that names file, line and field; the answers of the lines before it stand.
    """
    if (case is None) == (lines is None):
        raise ConfigError("resolve: give CASE.json or --lines FILE, one of them")
    try:
        if case is not None:
            _write(out, _located(str(case), case.read_bytes()))
        elif lines is not None:
            with lines.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        _write(out, _located(f"{lines}:{number}", line))
    except OSError as error:
        raise ConfigError(f"{case or lines}: cannot be read: {error.strerror or error}") from None


def _located(place: str, data: bytes) -> Answer:
    """`answer_case`, with the place put before the message of an error."""
    try:
        return answer_case(data)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def _write(out: TextIO, answer: Answer) -> None:
    out.write(msgspec.json.encode(answer).decode() + "\n")


def answer_case(data: bytes) -> Answer:
    """The answer to one case; a `ConfigError` names the field."""
    case = _decode(data)
    layout = _layout(case.layout)
    require_count("prompt_tokens", case.prompt_tokens, 0, MAX_TOKENS)
    require_count("computed_tokens", case.computed_tokens, 0)
    if case.computed_tokens > case.prompt_tokens:
        raise ConfigError(
            f"computed_tokens: must be at most prompt_tokens ({case.prompt_tokens}), got {case.computed_tokens}"
        )
    presence = _presence(layout, case)
    return _answer(decide(layout, presence, case.computed_tokens, case.prompt_tokens))


def _decode(data: bytes) -> Case:
    try:
        return _CASES.decode(data)
    except msgspec.ValidationError as error:
        raise ConfigError(field_error(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not JSON: {error}{_line_of(str(error), data)}") from None
    except RecursionError:
        raise ConfigError("not a case: nested too deeply") from None


def _line_of(message: str, data: bytes) -> str:
    """Where in a file of several lines the decoder stopped, if its message says at which byte."""
    _, found, rest = message.partition("(byte ")
    if not found or data.count(b"\n") < 2:
        return ""
    line = data.count(b"\n", 0, int(rest.rstrip(")"))) + 1
    return f", line {line}"


def _layout(spec: LayoutSpec) -> Layout:
    try:
        return layout_from_spec(spec)
    except ConfigError as error:
        raise ConfigError(f"layout.{error}") from None


def _presence(layout: Layout, case: Case) -> list[I8]:
    """One presence array per group, as long as its last listed chunk that a boundary could need."""
    useful = [-(-case.prompt_tokens // tokens) for tokens in layout.tokens_per_chunk]  # a drafter's next one included
    present = _chunks("present", case.present, useful)
    unknown = _chunks("unknown", case.unknown, useful)
    arrays = []
    for g, (there, open_) in enumerate(zip(present, unknown, strict=True)):
        both = np.intersect1d(there, open_)
        if len(both):
            raise ConfigError(f"unknown.{g}: chunk {both[0]} is listed as present too")
        flags = np.zeros(int(max(there.max(initial=-1), open_.max(initial=-1))) + 1, dtype=np.int8)
        flags[there] = Presence.PRESENT
        flags[open_] = Presence.UNKNOWN
        arrays.append(flags)
    return arrays


def _chunks(field: str, lists: Mapping[str, msgspec.Raw], useful: Sequence[int]) -> list[I64]:
    """Per group the listed chunks that are useful: up to `useful[g]`, included."""
    chunks: list[I64] = [np.zeros(0, dtype=np.int64)] * len(useful)
    for key, raw in lists.items():
        if key not in map(str, range(len(useful))):
            raise ConfigError(f"{field}.{key}: must be the index of a group, 0 to {len(useful) - 1}")
        g = int(key)
        listed = np.array([chunk for chunk in _indices(f"{field}.{key}", raw) if chunk <= useful[g]], dtype=np.int64)
        if listed.max(initial=0) > MAX_CHUNK:
            raise ConfigError(
                f"{field}.{key}: chunk {listed.max()} is beyond {MAX_CHUNK}, the highest that may be listed"
            )
        chunks[g] = listed
    return chunks


def _indices(field: str, raw: msgspec.Raw) -> list[int]:
    try:
        listed = _INDICES.decode(raw)
    except msgspec.ValidationError as error:
        raise ConfigError(field_error(str(error), field)) from None
    for position, chunk in enumerate(listed):
        if chunk < 0:
            raise ConfigError(f"{field}[{position}]: must be at least 0, got {chunk}")
    return listed


def _answer(decision: Decision) -> Answer:
    return Answer(
        decided=decision.decided,
        boundary=decision.boundary,
        load={str(g): list(range(lo, hi)) for g, (lo, hi) in enumerate(decision.ranges)},
        probe={str(g): chunks.tolist() for g, chunks in enumerate(decision.probe)},
        why=decision.why,
    )
