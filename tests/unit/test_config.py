"""Configuration: what is right is read, what is wrong is one line that names the place."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstrata.config import ByteSize, Config, Section, config_from_dict, load_config, parse_size, section
from kvstrata.core.settings import CoreConfig
from kvstrata.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("256MB", 256_000_000),
        ("2GiB", 2 * 2**30),
        ("2 gib", 2 * 2**30),
        ("1.5kB", 1500),
        ("1k", 1000),
        ("1Ki", 1024),
        ("3TB", 3 * 10**12),
        ("1PiB", 2**50),
        ("4096", 4096),
        ("4096B", 4096),
        (" 7B ", 7),
        (4096, 4096),
        (2**63 - 1, 2**63 - 1),
        ("unlimited", None),
        ("Unlimited", None),
    ],
)
def test_a_size_is_read(text: object, size: int | None) -> None:
    assert parse_size(text, "--disk") == size


@pytest.mark.parametrize(
    "text",
    ["", "MB", "12 parsecs", "-1", "-5GB", "1e3", "0x10", "nan", "inf", "2GB 3MB", "1,5GB", "٣MB", "2iB", "1.5", "0",
     "0MB", 0, -1, 1.5, True, None, [], 2**63, "9999999999PB"],
)  # fmt: skip
def test_nonsense_is_no_size_and_the_option_is_named(text: object) -> None:
    with pytest.raises(ConfigError, match=r"^--disk: "):
        parse_size(text, "--disk")


def test_an_empty_configuration_is_all_defaults() -> None:
    config = config_from_dict({})
    assert config == dataclasses_free_default()
    assert config.primary.size == 256_000_000
    assert config.core.stall_s == 2.0
    assert config.tiers == ()


def dataclasses_free_default() -> Config:
    return Config(core=CoreConfig(capacity_bytes=256_000_000))


def test_everything_can_be_set() -> None:
    config = config_from_dict(
        {
            "primary": {"size": "1GiB"},
            "core": {"stall_s": 0, "policy": "s3fifo", "max_requests": 5},
            "tiers": [{"type": "fs", "name": "disk", "dir": "/x", "limit": "2GB"}, {"type": "memory"}],
        }
    )
    assert config.primary.size == 2**30
    assert config.core.capacity_bytes == 2**30
    assert (config.core.stall_s, config.core.policy, config.core.max_requests) == (0, "s3fifo", 5)
    assert [(tier.type, tier.name) for tier in config.tiers] == [("fs", "disk"), ("memory", "memory")]
    assert config.tiers[0].options == {"dir": "/x", "limit": "2GB"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "configuration: expected a table of options, got a list"),
        ({"primry": {}}, "primry: unknown option; did you mean 'primary'?"),
        ({"zzz": {}}, "zzz: unknown option; known are primary, core, tiers"),
        ({3: {}}, "configuration: option names are text, got 3"),
        ({"primary": 3}, "primary: expected a table of options, got 3"),
        ({"primary": {"sizes": 3}}, "primary.sizes: unknown option; did you mean 'size'?"),
        ({"primary": {"size": "unlimited"}}, "primary.size: must be a size, not unlimited"),
        ({"primary": {"size": "-3"}}, "primary.size: '-3' is no size"),
        ({"core": {"capacity_bytes": 3}}, "core.capacity_bytes: unknown option"),
        ({"core": {"stall_ms": 3}}, "core.stall_ms: unknown option; did you mean 'stall_s'?"),
        ({"core": {"stall_s": "2"}}, "core.stall_s: expected a finite number, got '2'"),
        ({"tiers": {}}, "tiers: expected a list, got a table"),
        ({"tiers": ["fs"]}, "tiers[0]: expected a table of options, got text"),
        ({"tiers": [{"name": "x"}]}, "tiers[0]: object missing required field `type`"),
        ({"tiers": [{"type": ""}]}, "tiers[0].type: must not be empty"),
        ({"tiers": [{"type": 3}]}, "tiers[0].type: expected `str`, got `int`"),
        ({"tiers": [{"type": "fs", "name": "primary"}]}, "tiers[0].name: 'primary' is the host-memory tier"),
        ({"tiers": [{"type": "fs"}, {"type": "fs"}]}, "tiers[1].name: 'fs' is already the name of another tier"),
    ],
)
def test_what_is_wrong_is_named(data: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict(data)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_tier_checks_its_own_options() -> None:
    class Options(Section):
        dir: str
        limit: ByteSize | None = None

    assert section(Options, {"dir": "/x", "limit": "1kB"}, "tiers[0]").limit == 1000
    assert section(Options, {"dir": "/x", "limit": None}, "tiers[0]").limit is None
    with pytest.raises(ConfigError, match=r"^tiers\[0\]\.limt: unknown option; did you mean 'limit'\?"):
        section(Options, {"dir": "/x", "limt": 1}, "tiers[0]")
    with pytest.raises(ConfigError, match=r"^tiers\[0\]\.dir: expected `str`, got `int`"):
        section(Options, {"dir": 1}, "tiers[0]")


def test_json_toml_and_yaml_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text('{"primary": {"size": 4096}}')
    (tmp_path / "a.toml").write_text("[primary]\nsize = 4096\n")
    (tmp_path / "a.yml").write_text("primary: {size: 4096}\n")
    assert load_config(tmp_path / "a.json") == load_config(str(tmp_path / "a.toml"))
    seen: list[str] = []

    def safe_load(text: str) -> object:
        seen.append(text)
        return {"primary": {"size": 4096}}

    monkeypatch.setitem(sys.modules, "yaml", SimpleNamespace(safe_load=safe_load, YAMLError=ValueError))
    assert load_config(tmp_path / "a.yml").primary.size == 4096
    assert seen == ["primary: {size: 4096}\n"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.ini", "x", "expected a file that ends in .json, .toml, .yaml, .yml"),
        ("a.json", '{"primary":\n nonsense}', "line 2, column 2: is not JSON: Expecting value"),
        ("a.json", '{"primary": {"size": 1, "size": 2}}', "size: is given twice"),
        ("a.json", '{"core": {"stall_s": NaN}}', "NaN is no number in JSON"),
        ("a.json", "[" * 100_000, "is nested too deeply"),
        ("a.json", '{"core": {"stall_s": -1}}', "core.stall_s: -1 must be at least 0"),
        ("a.toml", "x = = 1", "is not TOML: Invalid value (at line 1, column 5)"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == f"{path}: {message}"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read: No such file"):
        load_config(tmp_path / "none.json")
    (tmp_path / "latin.json").write_bytes(b'{"\xff": 1}')
    with pytest.raises(ConfigError, match=r"latin\.json: is not UTF-8 text \(byte 2\)"):
        load_config(tmp_path / "latin.json")


def test_yaml_without_its_package_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yaml").write_text("{}")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"a\.yaml: YAML needs the package PyYAML"):
        load_config(tmp_path / "a.yaml")


def test_bad_yaml_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def safe_load(_: str) -> object:
        raise ValueError("bad\n  at line 1")

    monkeypatch.setitem(sys.modules, "yaml", SimpleNamespace(safe_load=safe_load, YAMLError=ValueError))
    (tmp_path / "a.yaml").write_text("{}")
    with pytest.raises(ConfigError, match=r"a\.yaml: is not YAML: bad at line 1$"):
        load_config(tmp_path / "a.yaml")


def test_structures_are_frozen() -> None:
    config = config_from_dict({})
    with pytest.raises(AttributeError):
        config.primary.size = ByteSize(3)  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.core.stall_s = 3.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("promotion_share", 1.1),
        ("promotion_share", -0.1),
        ("store_reserve", "0.1"),
        ("inflight_share", math.nan),
        ("stall_s", -1),
        ("total_s", math.inf),
        ("min_rate_bytes_per_s", 0),
        ("silence_s", 0),
        ("job_idle_s", True),
        ("max_fetch_rounds", 0),
        ("max_fetch_rounds", 2.0),
        ("max_verdicts", False),
        ("alignment", 0),
        ("capacity_bytes", -1),
        ("policy", ""),
        ("policy", 3),
        ("breaker_open_s", 61.0),
        ("backoff_s", 61.0),
    ],
)
def test_the_core_refuses_an_impossible_setting_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}: "):
        CoreConfig(**{field: value})


def test_a_clock_of_zero_is_allowed() -> None:
    assert CoreConfig(stall_s=0, total_s=0).stall_s == 0
