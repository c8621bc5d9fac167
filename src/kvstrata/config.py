"""Configuration: read once from a file or a dictionary into frozen, strict structures.

An unknown key, a wrong type or an impossible value is a `ConfigError` that names the file and the option. Nothing
else in kvstrata reads user configuration.

    {"primary": {"size": "8GiB"},
     "core": {"stall_s": 1.0, "policy": "s3fifo"},
     "tiers": [{"type": "fs", "name": "disk", "dir": "/var/cache/kv", "limit": "200GB"},
               {"type": "object", "url": "s3://bucket/kv", "cascade": false}]}
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from kvstrata.core.settings import CoreConfig
from kvstrata.errors import ConfigError

MAX_SIZE = 2**63 - 1
"""Largest size in bytes that is taken for one."""

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?(?:(?P<prefix>[kmgtp])(?P<binary>i?))?(?P<unit>b?)", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4, "p": 5}

_DERIVED = frozenset({"capacity_bytes", "alignment", "tail_room", "no_cascade"})
"""Fields of `CoreConfig` that follow from other settings and are no options."""

S = TypeVar("S", bound="Section")


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections: frozen, and an unknown option is an error."""


class ByteSize(int):
    """A size in bytes; in a file a whole number, or text such as "256MB" (10**6) or "2GiB" (2**30)."""


class PrimaryConfig(Section, frozen=True):
    """The host-memory tier."""

    size: ByteSize = ByteSize(256_000_000)
    """Bytes of host memory, all of them really taken at start."""


class TierConfig(Section, frozen=True):
    """One secondary tier. Tiers are asked in the order in which they are listed."""

    type: str
    """Which tier: "memory", "fs", or the name under which another one is registered."""
    name: str = ""
    """How metrics, filters and messages call it; the type if left out. Unique."""
    cascade: bool = True
    """Whether what is stored goes to it too; a tier without is only read."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """All other options of the entry; the tier checks them."""

    def __post_init__(self) -> None:
        if not self.type:
            raise ConfigError("type: must not be empty")
        if not self.name:
            msgspec.structs.force_setattr(self, "name", self.type)
        if self.name == "primary":
            raise ConfigError("name: 'primary' is the host-memory tier; choose another name")


class Config(Section, frozen=True):
    """All of a configuration."""

    primary: PrimaryConfig = msgspec.field(default_factory=PrimaryConfig)
    core: CoreConfig = msgspec.field(default_factory=CoreConfig)
    tiers: tuple[TierConfig, ...] = ()


def load_config(path: str | Path) -> Config:
    """The configuration in a `.json`, `.toml`, `.yaml` or `.yml` file. YAML needs PyYAML.

    Raises `ConfigError` that names the file, and the line or the option.
    """
    path = Path(path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path}: expected a file that ends in {', '.join(sorted(_READERS))}")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    try:
        return config_from_dict(reader(text))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: is nested too deeply") from error


def config_from_dict(data: object) -> Config:
    """The configuration in a dictionary of plain values. Raises `ConfigError` that names the option."""
    table = _table(data, "configuration")
    _refuse_unknown(table, Config.__struct_fields__, "")
    primary = section(PrimaryConfig, table.get("primary", {}), "primary")
    tiers = _tiers(table.get("tiers", []))
    read_only = frozenset(tier.name for tier in tiers if not tier.cascade)
    return Config(primary=primary, core=_core(table.get("core", {}), primary.size, read_only), tiers=tiers)


def section(kind: type[S], data: object, option: str) -> S:
    """`data` as the section `kind`; a tier checks its own options by this. `option` is where it stands."""
    table = _table(data, option)
    _refuse_unknown(table, kind.__struct_fields__, option)
    try:
        return msgspec.convert(table, kind, dec_hook=_decode)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `")
        field = place.rstrip("`").removeprefix("$")
        raise ConfigError(f"{option}{field}: {text[:1].lower()}{text[1:]}") from error


def parse_size(value: object, option: str) -> int | None:
    """Bytes for a size: a whole number, or text such as "256MB" (10**6), "2GiB" (2**30), "4096" or "unlimited" (None).

    Raises `ConfigError` that names `option` for anything else, and for zero.
    """
    if isinstance(value, str):
        if value.strip().lower() == "unlimited":
            return None
        size = _size_of_text(value.strip(), option)
    elif isinstance(value, int) and not isinstance(value, bool):
        size = Decimal(value)
    else:
        _no_size(value, option)
    if size != int(size):
        raise ConfigError(f"{option}: {value!r} is no whole number of bytes")
    if size < 1:
        raise ConfigError(f"{option}: {value!r} must be at least 1 byte")
    if size > MAX_SIZE:
        raise ConfigError(f"{option}: {value!r} is above {MAX_SIZE} bytes")
    return int(size)


def _size_of_text(text: str, option: str) -> Decimal:
    match = _SIZE.fullmatch(text)
    if match is None or not text.isascii():
        _no_size(text, option)
    prefix = match["prefix"]
    power: int = _POWERS[prefix.lower()] if prefix else 0
    factor: int = (1024 if match["binary"] else 1000) ** power
    return Decimal(match["number"]) * factor


def _no_size(value: object, option: str) -> NoReturn:
    raise ConfigError(f'{option}: {value!r} is no size; write for example 256MB, 2GiB, 4096 or "unlimited"')


def _decode(kind: type, value: object) -> object:
    if kind is not ByteSize:
        raise TypeError(f"no values of {kind.__name__} here")
    try:
        size = parse_size(value, "size")
    except ConfigError as error:
        raise ValueError(str(error).removeprefix("size: ")) from error
    if size is None:
        raise ValueError("must be a size, not unlimited")
    return ByteSize(size)


def _core(data: object, capacity: int, read_only: frozenset[str]) -> CoreConfig:
    table = _table(data, "core")
    _refuse_unknown(
        table, [field.name for field in dataclasses.fields(CoreConfig) if field.name not in _DERIVED], "core"
    )
    try:
        return CoreConfig(capacity_bytes=capacity, no_cascade=read_only, **table)
    except ConfigError as error:
        raise ConfigError(f"core.{error}") from error


def _tiers(data: object) -> tuple[TierConfig, ...]:
    if not isinstance(data, list | tuple):
        raise ConfigError(f"tiers: expected a list, got {_kind(data)}")
    tiers: list[TierConfig] = []
    for number, entry in enumerate(data):
        option = f"tiers[{number}]"
        table = dict(_table(entry, option))
        known = {name: table.pop(name) for name in ("type", "name", "cascade") if name in table}
        try:
            tier = section(TierConfig, {**known, "options": table}, option)
        except ConfigError as error:
            text = str(error)
            raise ConfigError(text if text.startswith(option) else f"{option}.{text}") from error
        if any(tier.name == other.name for other in tiers):
            raise ConfigError(f"{option}.name: {tier.name!r} is already the name of another tier")
        tiers.append(tier)
    return tuple(tiers)


def _table(data: object, option: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{option}: expected a table of options, got {_kind(data)}")
    for key in data:
        if not isinstance(key, str):
            raise ConfigError(f"{option}: option names are text, got {key!r}")
    return data


def _refuse_unknown(table: Mapping[str, Any], known: Iterable[str], option: str) -> None:
    known = list(known)
    for name in table:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
            raise ConfigError(f"{option}{'.' if option else ''}{name}: unknown option{hint}")


def _kind(value: object) -> str:
    return {dict: "a table", list: "a list", str: "text", type(None): "nothing"}.get(type(value), repr(value))


# readers


def _read_json(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(f"line {error.lineno}, column {error.colno}: is not JSON: {error.msg}") from error
    except ValueError as error:  # a number with thousands of digits
        raise ConfigError(f"is not JSON: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ConfigError(f"{key}: is given twice")
        table[key] = value
    return table


def _no_constant(name: str) -> NoReturn:
    raise ConfigError(f"{name} is no number in JSON")


def _read_toml(text: str) -> object:
    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOML's own errors, and a number with thousands of digits
        raise ConfigError(f"is not TOML: {error}") from error


def _read_yaml(text: str) -> object:
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError("YAML needs the package PyYAML; or write it as JSON or TOML") from error
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError) as error:
        # The package raises what Python raises for a date that does not exist, or a number with too many digits.
        raise ConfigError(f"is not YAML: {' '.join(str(error).split())}") from error


_READERS: dict[str, Callable[[str], object]] = {
    ".json": _read_json,
    ".toml": _read_toml,
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
}
