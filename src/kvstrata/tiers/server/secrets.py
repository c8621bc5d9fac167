"""Secrets by reference: where they are, never what they are. A configuration holds references only.

env:NAME      the environment variable NAME
file:/PATH    the content of a file, without the white space around it
"""

from __future__ import annotations

import os
from pathlib import Path

from kvstrata.errors import ConfigError


def read_secret(reference: str, option: str) -> str:
    """What a reference stands for. Raises `ConfigError`, which never repeats what was given as a value."""
    kind, _, where = reference.partition(":")
    if kind == "env" and where:
        value = os.environ.get(where, "")
        if not value:
            raise ConfigError(f"{option}: the environment variable {where} is not set")
        return value
    if kind == "file" and where:
        return read_secret_file(where, option).strip()
    raise ConfigError(f"{option}: write env:NAME or file:/PATH; a secret itself has no place in a configuration")


def read_secret_file(path: str, option: str) -> str:
    """The text of a file that holds secrets. Raises `ConfigError` without any of it."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ConfigError(f"{option}: {path}: {why}") from None
