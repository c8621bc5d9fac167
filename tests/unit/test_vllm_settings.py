"""What operators and clients may say, and which vLLM is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstrata.errors import ConfigError
from kvstrata.integrations.vllm.options import read_wishes
from kvstrata.integrations.vllm.settings import default_directory, disabled, read_settings
from kvstrata.integrations.vllm.stack import tier_options
from kvstrata.integrations.vllm.versions import require_supported, series


@pytest.mark.scenario_115
def test_one_size_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = read_settings({"size": "1MiB"})
    (tier,) = settings.config.tiers
    assert settings.config.primary.size == 1 << 20
    assert (tier.type, tier.options["path"]) == ("disk", str(tmp_path / "kvstrata"))
    assert 0 < tier.options["limit"] <= 10 << 20


def test_a_place_and_a_limit() -> None:
    (tier,) = read_settings({"size": "1MiB", "dir": "/x/y", "limit": "2GB"}).config.tiers
    assert tier.options == {"path": "/x/y", "limit": 2_000_000_000}
    (tier,) = read_settings({"size": "1MiB", "dir": "/x/y", "limit": "unlimited"}).config.tiers
    assert tier.options == {"path": "/x/y"}


def test_a_file_in_their_stead(tmp_path: Path) -> None:
    file = tmp_path / "kv.toml"
    file.write_text('[primary]\nsize = "2MiB"\n[[tiers]]\ntype = "memory"\n')
    settings = read_settings({"config": str(file), "store": "all", "blocks_per_chunk": 4})
    assert settings.config.primary.size == 2 << 20
    assert [tier.name for tier in settings.config.tiers] == ["memory"]
    assert (settings.store, settings.blocks_per_chunk) == ("all", 4)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"sizes": 1}, "kv_connector_extra_config.sizes: unknown option"),
        ({"size": "much"}, "kv_connector_extra_config.primary.size"),
        ({"size": 1, "primary": {}}, "size: give either"),
        ({"tiers": [], "dir": "/x"}, "tiers: give either"),
        ({"config": "/nowhere.toml", "size": 1}, "size: stands in the file"),
        ({"config": "/nowhere.toml"}, "cannot be read"),
        ({"store": "some"}, "store: expected one of prompt, all, none"),
        ({"blocks_per_chunk": 0}, "blocks_per_chunk: expected a number from 1"),
        ({"canary": 1}, "canary: expected true or false"),
        ({"tiers": [{"type": "disk"}, {"type": "disk"}]}, "already the name"),
    ],
)
def test_what_is_wrong_is_named(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_settings(extra)


def test_the_off_switch() -> None:
    assert not disabled({})
    assert not disabled({"KVSTRATA_DISABLE": "0"})
    assert disabled({"KVSTRATA_DISABLE": "1"})
    assert default_directory({"HOME": "/h"}) == Path("/h/.cache/kvstrata")


def test_sizes_of_tiers_may_be_text() -> None:
    assert tier_options({"dir": "/d", "limit": "1KiB", "width": 3}, "t") == {"path": "/d", "limit": 1024, "width": 3}


def test_clients_can_only_narrow() -> None:
    def read(wish: Any, store: str = "prompt") -> Any:
        return read_wishes({"kvstrata": wish}, store, may_load=True, wait_s=2.0)

    assert read("off").off
    assert read({"store": "all"}).store == "prompt"
    assert read({"store": "none"}).options.may_store is False
    assert read({"load_tiers": ["a"]}).options.load_tiers.names == {"a"}
    assert read({"max_load_tokens": 5}).options.max_hit_tokens == 5
    assert read({"wait_s": 0.5}).options.total_s == 0.5
    assert read({"wait_s": 9.0}).options.total_s is None
    assert read_wishes(None, "all", may_load=False, wait_s=0).options.may_load is False


@pytest.mark.parametrize(
    "wish", [3, {"what": 1}, {"store": "x"}, {"max_load_tokens": -1}, {"wait_s": "a"}, {"load_tiers": "disk"}]
)
def test_what_a_client_writes_never_raises(wish: Any) -> None:
    wishes = read_wishes({"kvstrata": wish}, "prompt", may_load=True, wait_s=2.0)
    assert wishes.complaint
    assert not wishes.off


def test_other_versions_are_refused_by_name() -> None:
    assert require_supported("0.32.0+cpu") == "0.32.0+cpu"
    assert series("0.32.1.dev3") == "0.32"
    with pytest.raises(
        ConfigError, match=r"vLLM 0\.29\.1 is not supported.*Supported: 0\.30\.x, 0\.31\.x, 0\.32\.x\. "
    ):
        require_supported("0.29.1")
