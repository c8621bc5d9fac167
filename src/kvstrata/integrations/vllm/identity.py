"""The engine digest from the engine's configuration: everything besides tokens that changes a chunk's bytes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstrata.integrations.vllm.shapes import EngineShape
from kvstrata.layout.namespace import (
    EngineIdentity,
    GroupIdentity,
    Pairs,
    ParallelShape,
    RequestScope,
    engine_digest,
    request_scope,
)

KV_LAYOUT_VERSION = 1
"""How a chunk is made of blocks, layers and ranks (transfer/pieces.py); another arrangement gets another number."""

SAMPLES = 16
SAMPLE_BYTES = 64 * 1024
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
VOLATILE = frozenset({"_name_or_path", "transformers_version", "architectures"})
"""Parts of a model's configuration that say nothing about its KV."""


def engine_identity(vllm_config: Any, cache_config: Any, shape: EngineShape, version: str) -> EngineIdentity:
    """The identity of an engine. Reads files of a model that lies in a local directory."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    dtype = model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype
    return EngineIdentity(
        model=str(model.model) if not os.path.isdir(model.model) else "local directory",
        revision=str(model.revision or ""),
        weights_digest=weights_sample(Path(model.model)) if os.path.isdir(model.model) else b"",
        kv_dtype=_plain(dtype),
        kv_scales=_plain(getattr(cache, "calculate_kv_scales", None)),
        groups=tuple(_group(shape, g) for g in range(len(shape.groups))),
        configuration=engine_configuration(vllm_config),
        parallel=ParallelShape(tensor=shape.ranks),
        block_hash=str(cache.prefix_caching_hash_algo),
        hash_seed=hash_seed(str(cache.prefix_caching_hash_algo)),
        tokens_per_hash=shape.tokens_per_hash,
        engine=f"vllm {version}",
        kv_layout=f"{KV_LAYOUT_VERSION} {kv_layout(vllm_config, cache_config)}",
        epoch=b"",
    )


def hash_seed(algorithm: str, environment: Mapping[str, str] | None = None) -> str | None:
    """The seed of the engine's block hashes; None if it draws a random one."""
    environment = os.environ if environment is None else environment
    seed = environment.get("PYTHONHASHSEED")
    if seed is not None:
        return f"given {seed}"
    return "fixed" if algorithm.startswith("sha") else None


def kv_layout(vllm_config: Any, cache_config: Any) -> str:
    """How the engine arranges the bytes inside a block, as far as its configuration tells."""
    device = getattr(vllm_config.device_config, "device_type", "")
    attention = getattr(vllm_config, "attention_config", None)
    parts = {
        "device": device,
        "layout": getattr(cache_config, "kv_cache_layout", None),
        "set": os.environ.get("VLLM_KV_CACHE_LAYOUT"),
        "backend": getattr(attention, "backend", None),  # glossary: allow
        "backend_set": os.environ.get("VLLM_ATTENTION_BACKEND"),  # glossary: allow
    }
    return json.dumps({name: _plain(value) for name, value in parts.items()}, sort_keys=True)


def _group(shape: EngineShape, g: int) -> GroupIdentity:
    group = shape.groups[g]
    parameters = {name: str(value) for name, value in group.kind.parameters.items()}
    parameters |= {"drafter": str(group.drafter), "replicated": str(group.replicated), "spec": group.spec}
    return GroupIdentity(
        kind=group.kind.name,
        parameters=tuple(sorted(parameters.items())),
        block_shape=(group.tokens_per_block, group.block_bytes),
        layer_names=tuple(layer.name for layer in group.layers),
        tokens_per_chunk=group.tokens_per_block * shape.blocks_per_chunk,
    )


def engine_configuration(vllm_config: Any) -> Pairs:
    """What of the engine's configuration changes KV, besides shapes: the model's own, overrides applied, and types."""
    model = vllm_config.model_config
    values = {
        "model_dtype": _plain(model.dtype),
        "quantization": _plain(getattr(model, "quantization", None)),
        "load_format": _plain(getattr(vllm_config.load_config, "load_format", None)),
        "seed": _plain(model.seed) if str(getattr(vllm_config.load_config, "load_format", "")) == "dummy" else "",
        "code_revision": _plain(getattr(model, "code_revision", None)),
        "hf": model_configuration(model.hf_config),
        "speculative": _speculative(getattr(vllm_config, "speculative_config", None)),
        "lora": _plain(getattr(vllm_config, "lora_config", None) is not None),
    }
    return tuple(sorted(values.items()))


def model_configuration(hf_config: Any) -> str:
    """All of a model's configuration (RoPE included) as text, overrides applied."""
    table = {name: value for name, value in hf_config.to_dict().items() if name not in VOLATILE}
    return json.dumps(table, sort_keys=True, default=str)


def _speculative(config: Any) -> str:
    if config is None:
        return ""
    names = ("method", "model", "num_speculative_tokens", "revision")
    return json.dumps({name: _plain(getattr(config, name, None)) for name in names}, sort_keys=True)


def _plain(value: object) -> str:
    return str(value).removeprefix("torch.")


def weights_sample(folder: Path) -> bytes:
    """A digest of a model's weight files: names, sizes, and samples spread over each of them.

    Weights that were trained differ in every tensor, so samples tell two versions apart without reading all of them.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.suffix not in WEIGHT_SUFFIXES or not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{len(path.name)}:{path.name}:{size}:".encode())
        with path.open("rb") as file:
            for at in sorted({max(size - SAMPLE_BYTES, 0) * i // (SAMPLES - 1) for i in range(SAMPLES)}):
                file.seek(at)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


def namespace_of(identity: EngineIdentity) -> bytes:
    """The 16 bytes that stand for the identity."""
    return engine_digest(identity)


def scope_of(request: Any) -> bytes:
    """What of a request changes its bytes and is not in the engine's block hashes.

    vLLM hashes adapter names, multimodal identifiers and salts into its block hashes; an adapter's content is missing.
    """
    adapter = getattr(request, "lora_request", None)
    if adapter is None:
        return b""
    path = str(getattr(adapter, "lora_path", "") or "")
    return request_scope(RequestScope(adapter=str(adapter.lora_name), adapter_version=_adapter_version(path)))


def _adapter_version(path: str) -> str:
    folder = Path(path)
    return weights_sample(folder).hex() if path and folder.is_dir() else path
