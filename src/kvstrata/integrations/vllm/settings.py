"""What an operator sets for the connector: `kv_connector_extra_config`, read once, strictly.

{"size": "8GiB"}                                             primary of 8 GiB, a disk tier in the default folder
{"size": "8GiB", "dir": "/var/cache/kv", "limit": "200GB"}   the disk tier's place and limit
{"config": "/etc/kvstrata.toml"}                             everything from a file
{"primary": {...}, "core": {...}, "tiers": [...]}            as in a file
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstrata.config import ByteSize, Config, TierConfig, config_from_dict, load_config, parse_size
from kvstrata.errors import ConfigError

DISABLE = "KVSTRATA_DISABLE"
"""Environment variable; "1" makes the connector a no-op."""

STORE_MODES = ("prompt", "all", "none")
OWN = ("blocks_per_chunk", "store", "keep_interval", "canary", "records")
SHORT = ("size", "dir", "limit")
WHOLE = ("primary", "core", "tiers")
DISK_FACTOR = 10
"""Default limit of the default disk tier, as a multiple of primary; never more than half of what is free."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """The connector's settings. `keep_interval` None: as vLLM's retention interval says, else kvstrata's default."""

    config: Config
    blocks_per_chunk: int = 1
    store: str = "prompt"
    keep_interval: int | None = None
    canary: bool = True
    records: int = 1000
    """How many finished requests' records are kept."""


def disabled(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the operator switched kvstrata off."""
    return (os.environ if environment is None else environment).get(DISABLE, "") not in ("", "0")


def read_settings(extra: Mapping[str, Any]) -> VllmSettings:
    """The settings in `kv_connector_extra_config`; raises `ConfigError` that names the option."""
    known = (*OWN, *SHORT, *WHOLE, "config")
    for name in extra:
        if name not in known:
            raise ConfigError(f"kv_connector_extra_config.{name}: unknown option; known are {', '.join(known)}")
    return VllmSettings(
        config=_config(extra),
        blocks_per_chunk=_count(extra, "blocks_per_chunk", 1, 1 << 20),
        store=_choice(extra, "store", "prompt", STORE_MODES),
        keep_interval=_count(extra, "keep_interval", None, 1 << 40),
        canary=_switch(extra, "canary", True),
        records=_count(extra, "records", 1000, 1_000_000, least=0),
    )


def _config(extra: Mapping[str, Any]) -> Config:
    if "config" in extra:
        clash = [name for name in (*SHORT, *WHOLE) if name in extra]
        if clash:
            raise ConfigError(f"kv_connector_extra_config.{clash[0]}: stands in the file that `config` names already")
        return load_config(str(extra["config"]))
    if "size" in extra and "primary" in extra:
        raise ConfigError("kv_connector_extra_config.size: give either size or primary.size")
    if "tiers" in extra and ("dir" in extra or "limit" in extra):
        raise ConfigError("kv_connector_extra_config.tiers: give either tiers, or dir and limit")
    table = {name: extra[name] for name in WHOLE if name in extra}
    if "size" in extra:
        table["primary"] = {"size": extra["size"]}
    try:
        config = config_from_dict(table)
    except ConfigError as error:
        raise ConfigError(f"kv_connector_extra_config.{error}") from error
    if "tiers" in extra:
        return config
    folder = Path(str(extra["dir"])) if "dir" in extra else None
    tier = default_tier(config.primary.size, folder, extra.get("limit", ""), "kv_connector_extra_config.limit")
    return Config(primary=config.primary, core=config.core, tiers=(tier,))


def default_tier(primary: int, folder: Path | None, limit: object, option: str) -> TierConfig:
    """The disk tier below `primary` bytes where no tiers are configured; folder and limit unless given (None, "")."""
    path = default_directory() if folder is None else folder
    bytes_ = min(DISK_FACTOR * primary, _free_bytes(path) // 2) if limit == "" else parse_size(limit, option)
    options: dict[str, Any] = {"path": str(path)}
    if bytes_ is not None:
        options["limit"] = ByteSize(bytes_)
    return TierConfig(type="disk", name="disk", options=options)


def default_directory(environment: Mapping[str, str] | None = None) -> Path:
    """Where the disk tier lies unless told otherwise."""
    environment = os.environ if environment is None else environment
    base = environment.get("XDG_CACHE_HOME") or os.path.join(environment.get("HOME", "/tmp"), ".cache")
    return Path(base) / "kvstrata"


def _free_bytes(path: Path) -> int:
    """Free bytes of the device that the path will lie on."""
    for place in (path, *path.parents):
        try:
            status = os.statvfs(place)
        except OSError:
            continue
        return status.f_bavail * status.f_frsize
    return 0


def _count(extra: Mapping[str, Any], name: str, default: Any, most: int, least: int = 1) -> Any:
    value = extra.get(name, default)
    if value is default:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"kv_connector_extra_config.{name}: expected a number from {least} to {most}, got {value!r}")
    return value


def _choice(extra: Mapping[str, Any], name: str, default: str, choices: tuple[str, ...]) -> str:
    value = extra.get(name, default)
    if value not in choices:
        raise ConfigError(f"kv_connector_extra_config.{name}: expected one of {', '.join(choices)}, got {value!r}")
    return str(value)


def _switch(extra: Mapping[str, Any], name: str, default: bool) -> bool:
    value = extra.get(name, default)
    if not isinstance(value, bool):
        raise ConfigError(f"kv_connector_extra_config.{name}: expected true or false, got {value!r}")
    return value
