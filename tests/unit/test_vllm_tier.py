"""Whose chunks `KVStrataTier` may find: the namespace is made from the engine's whole configuration, or it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstrata.errors import ConfigError
from kvstrata.integrations.vllm import tier
from kvstrata.integrations.vllm.tier import callers_configuration, spec_namespace


@pytest.fixture(autouse=True)
def _version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "require_supported", lambda: "0.32.0")


def told() -> Any:
    """What vLLM tells a tier."""
    return SimpleNamespace(
        model=SimpleNamespace(name="maker/model", dtype="bfloat16"),
        parallel=SimpleNamespace(world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
        groups=(SimpleNamespace(tokens_per_block=16, layer_names=("a", "b")),),
        worker_kv_bytes_per_block=4096,
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        kv_cache_layout="NHD",
    )


def engine(rope: float = 1e4, revision: str | None = None) -> Any:
    hf = SimpleNamespace(to_dict=lambda: {"rope_theta": rope})
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf, dtype="bfloat16", seed=0, revision=revision),
        load_config=SimpleNamespace(load_format="auto"),
    )


def test_what_vllm_does_not_tell_is_part_of_the_namespace() -> None:
    spaces = [
        spec_namespace(told(), "", engine()),
        spec_namespace(told(), "", engine(rope=5e5)),
        spec_namespace(told(), "", engine(revision="b")),
        spec_namespace(told(), "words", engine()),
        spec_namespace(told(), "words", None),
    ]
    assert len(set(spaces)) == len(spaces)
    assert spec_namespace(told(), "", engine()) == spaces[0]


def test_without_a_configuration_and_words_it_refuses() -> None:
    with pytest.raises(ConfigError, match=r'does not show its tiers .* option "identity"'):
        spec_namespace(told(), "", None)


def test_the_configuration_is_that_of_the_connector_that_makes_the_tier() -> None:
    def connector(vllm_config: Any) -> Any:
        return specification()

    def specification() -> Any:
        return callers_configuration()

    mine = engine()
    assert connector(mine) is mine
    assert connector(SimpleNamespace(model_config=None)) is None
    assert callers_configuration() is None
