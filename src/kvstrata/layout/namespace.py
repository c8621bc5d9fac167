"""Identity: everything besides the tokens that changes a chunk's bytes.

Two parts. The *engine digest* is in every record that a tier keeps: a record of another digest is foreign. The
*request scope* is hashed into the keys of one request, where the engine's block hash lacks it.

Both are made from one encoding in which every value carries its type and its length, and every field its name, so
that no two different sets of values give the same bytes (`encode`). The digest is BLAKE2b with 16 bytes: a fast hash
that is not collision resistant would let one namespace be built to look like another.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias, TypeVar

import msgspec

from kvstrata.errors import ConfigError
from kvstrata.layout.build import field_error
from kvstrata.layout.kinds.base import require, require_count

FORMAT = 1
"""Version of kvstrata's own rules of identity and of chunk bytes; a new one fences off all older records."""

ENGINE_DIGEST_BYTES = 16

RESISTANT_HASHES = frozenset({"sha256", "sha256_cbor", "sha512", "blake2b", "blake3"})
"""Block hash algorithms that are collision resistant."""

Pairs: TypeAlias = tuple[tuple[str, str], ...]
Value: TypeAlias = "None | bool | int | str | bytes | tuple[Value, ...] | msgspec.Struct"
_T = TypeVar("_T", bound=msgspec.Struct)


class GroupIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One group: which layers, how attended, in which shape."""

    kind: str
    parameters: Pairs
    """All of the kind's parameters as text, sorted by name."""
    block_shape: tuple[int, ...]
    layer_names: tuple[str, ...]
    tokens_per_chunk: int


class ParallelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the model is cut over ranks; it changes which bytes one rank's shard has."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: bool = False


class EngineIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What makes the bytes of an engine its own. To be taken before anything rewrites the engine's configuration.

    Give `weights_digest` when it is known, `revision` otherwise; `parallel=None` says that the bytes are rank-free.
    `hash_seed=None` says that the engine draws a random one at each start. `configuration` has RoPE and everything
    else in the engine's configuration that changes KV, as text, sorted by name. `epoch` is the random value that
    `reset_cache(content_invalid)` renews.
    """

    model: str
    revision: str
    weights_digest: bytes
    kv_dtype: str
    kv_scales: str
    groups: tuple[GroupIdentity, ...]
    configuration: Pairs
    parallel: ParallelShape | None
    block_hash: str
    hash_seed: str | None
    tokens_per_hash: int
    engine: str
    kv_layout: str
    epoch: bytes
    format: int = FORMAT


class RequestScope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What makes the bytes of a request its own, as far as the engine's block hash does not tell it.

    Fields that the block hash covers already stay empty.
    """

    adapter: str = ""
    adapter_version: str = ""
    tenant_salt: bytes = b""
    multimodal: tuple[str, ...] = ()


def engine_digest(identity: EngineIdentity) -> bytes:
    """The 16-byte digest of the engine part; raises `ConfigError` naming a field of the wrong type or size."""
    identity = _checked(identity, "engine")
    require(bool(identity.groups), "engine.groups", identity.groups, "must have at least one group")
    require_count("engine.tokens_per_hash", identity.tokens_per_hash, 1)
    for index, group in enumerate(identity.groups):
        require_count(f"engine.groups[{index}].tokens_per_chunk", group.tokens_per_chunk, 1)
    return hashlib.blake2b(encode(identity), digest_size=ENGINE_DIGEST_BYTES).digest()


def request_scope(scope: RequestScope) -> bytes:
    """The bytes that stand for `scope` in a request's keys: empty if nothing is set, else its encoding."""
    scope = _checked(scope, "scope")
    return b"" if scope == RequestScope() else encode(scope)


def scoped_hash(block_hash: bytes, scope: bytes) -> bytes:
    """`block_hash` with the bytes of `request_scope` hashed in; unchanged for an empty scope, else 32 bytes."""
    if not scope:
        return block_hash
    return hashlib.blake2b(encode((scope, block_hash)), digest_size=32).digest()


def require_durable(identity: EngineIdentity) -> None:
    """Raise `ConfigError` unless keys mean the same in every process: for tiers that outlive it or are shared."""
    if identity.block_hash not in RESISTANT_HASHES:
        raise ConfigError(
            f"engine.block_hash: {identity.block_hash!r} is not collision resistant; tiers that outlive the process "
            f"or are shared need one of {', '.join(sorted(RESISTANT_HASHES))}"
        )
    if identity.hash_seed is None:
        raise ConfigError(
            "engine.hash_seed: the engine draws a random one at each start, so keys of another process mean other "
            "tokens; give it a fixed seed for tiers that outlive the process or are shared"
        )


def encode(value: Value) -> bytes:
    """The bytes of `value`: a type letter, the length of what follows as 8 bytes big endian, then the content.

    Reading it back leaves no choice at any byte, so different values have different encodings. Strings are UTF-8,
    numbers decimal; structs hold their class name and then name and value of each field.
    """
    if value is None:
        return _tagged(b"n", b"")
    if isinstance(value, bool):
        return _tagged(b"t", b"1" if value else b"0")
    if isinstance(value, int):
        return _tagged(b"i", str(value).encode())
    if isinstance(value, str):
        return _tagged(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return _tagged(b"b", value)
    if isinstance(value, tuple):
        return _tagged(b"l", b"".join(encode(item) for item in value))
    parts = [encode(type(value).__name__)]
    for name in value.__struct_fields__:
        parts += [encode(name), encode(getattr(value, name))]
    return _tagged(b"f", b"".join(parts))


def _tagged(letter: bytes, content: bytes) -> bytes:
    return letter + len(content).to_bytes(8, "big") + content


def _checked(value: _T, where: str) -> _T:
    """A copy with all types verified: a number given as text would silently make another namespace."""
    try:
        plain = msgspec.to_builtins(value, builtin_types=(bytes,))
        return msgspec.convert(plain, type(value), strict=True, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise ConfigError(field_error(str(error), where)) from None
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from None
