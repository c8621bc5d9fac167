"""What the `kvstrata bench` commands share: options that are checked, tables, JSON files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvstrata.errors import ConfigError


def positive(option: str, text: str) -> int:
    """A whole number above 0, or a clear error."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value <= 0:
        raise ConfigError(f"{option}: expected a whole number above 0, got {text!r}")
    return value


def show(table: Table) -> None:
    """Print a table."""
    Console().print(table)


def note(text: str) -> None:
    """One line for people, beside the table."""
    Console(stderr=True).print(text, markup=False, highlight=False)


def write_json(json_file: Path | None, value: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> None:
    """Write a result where the user asked for it."""
    if json_file is None:
        return
    try:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
    except OSError as error:
        raise ConfigError(f"--json {json_file}: {error.strerror}") from None


def read_rows(json_file: Path) -> list[dict[str, Any]]:
    """The rows of an earlier run; none if there is no such file."""
    try:
        return msgspec.json.decode(json_file.read_bytes(), type=list[dict[str, Any]])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--json {json_file}: {error}") from None
