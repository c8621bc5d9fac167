"""Request traces: what one is, and a strict reader for the Mooncake format.

A trace says how long each request is and what its prompt shares with others, never what its tokens are: every run of
`tokens_per_id` prompt tokens has an id, and equal ids mean equal tokens *and* an equal prefix before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from kvstrata.errors import ConfigError
from kvstrata.types import I64

MOONCAKE_TOKENS_PER_ID = 512
MAX_PROMPT_TOKENS = 1 << 24
"""Longest prompt, and longest output, that a trace may state; above it a line is taken for damaged."""
MAX_ID = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace. `ids[j]` stands for prompt tokens [j*tokens_per_id, (j+1)*tokens_per_id); the last one
    may cover fewer."""

    index: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    ids: I64


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival. `source` keeps the ids of one kind of trace apart from another's."""

    name: str
    source: str
    tokens_per_id: int
    requests: tuple[Request, ...]

    @property
    def prompt_tokens(self) -> int:
        """Sum of all prompts."""
        return sum(request.prompt_tokens for request in self.requests)

    def first(self, count: int | None) -> Trace:
        """The trace of the first `count` requests; all of them for None."""
        requests = self.requests if count is None else self.requests[:count]
        return Trace(self.name, self.source, self.tokens_per_id, requests)


class _Line(msgspec.Struct, frozen=True):
    """One line of a Mooncake trace; other fields are ignored."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


_decoder = msgspec.json.Decoder(_Line)


def read_mooncake(path: Path, limit: int | None = None) -> Trace:
    """The trace in `path`: a JSON object a line with `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.

    At most `limit` requests are read. Raises `ConfigError`, naming file, line and field, for a line that is not such
    an object, for a number of ids that does not fit `input_length`, and for an id whose prefix differs from the one
    that it had before (which would break what ids mean).
    """
    try:
        with path.open("rb") as file:
            requests = tuple(_read_lines(str(path), file, limit))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not requests:
        raise ConfigError(f"{path}: holds no request")
    return Trace(path.name, "mooncake", MOONCAKE_TOKENS_PER_ID, requests)


def _read_lines(name: str, lines: Iterable[bytes], limit: int | None) -> Iterator[Request]:
    """One request per line that is not blank."""
    parents: dict[int, int] = {}
    index = 0
    for number, line in enumerate(lines, start=1):
        if limit is not None and index >= limit:
            return
        if not line.strip():
            continue
        yield _read_line(f"{name}:{number}", line, index, parents)
        index += 1


def _read_line(place: str, line: bytes, index: int, parents: dict[int, int]) -> Request:
    try:
        fields = _decoder.decode(line)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: {_plain(str(error))}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: not a JSON object: {error}") from None
    except RecursionError:
        raise ConfigError(f"{place}: is nested too deeply") from None
    if not 0.0 <= fields.timestamp < float("inf"):
        raise ConfigError(f"{place}: timestamp: {fields.timestamp} is not a time in ms")
    for field, value, low in (("input_length", fields.input_length, 1), ("output_length", fields.output_length, 0)):
        if not low <= value <= MAX_PROMPT_TOKENS:
            raise ConfigError(f"{place}: {field}: {value} is not between {low} and {MAX_PROMPT_TOKENS}")
    expected = -(-fields.input_length // MOONCAKE_TOKENS_PER_ID)
    if len(fields.hash_ids) != expected:
        raise ConfigError(
            f"{place}: hash_ids: {len(fields.hash_ids)} ids, but input_length {fields.input_length} has {expected} "
            f"runs of {MOONCAKE_TOKENS_PER_ID} tokens"
        )
    _check_prefixes(place, fields.hash_ids, parents)
    return Request(
        index=index,
        arrival_s=fields.timestamp / 1000.0,
        prompt_tokens=fields.input_length,
        output_tokens=fields.output_length,
        ids=np.array(fields.hash_ids, dtype=np.int64),
    )


def _check_prefixes(place: str, ids: list[int], parents: dict[int, int]) -> None:
    """Refuse ids out of range, and an id that follows another one than it did before."""
    previous = -1
    for position, run in enumerate(ids):
        if not 0 <= run <= MAX_ID:
            raise ConfigError(f"{place}: hash_ids[{position}]: {run} is not between 0 and {MAX_ID}")
        if parents.setdefault(run, previous) != previous:
            raise ConfigError(f"{place}: hash_ids[{position}]: id {run} stood for another prefix before")
        previous = run


def _plain(message: str) -> str:
    """A decoder's message in the words of a trace line."""
    return message.replace("Object missing required field", "lacks the field").replace(" - at `$.", " - in `")
