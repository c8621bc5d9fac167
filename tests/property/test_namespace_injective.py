"""Identity: no two different sets of values give the same bytes, and every field counts."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.errors import ConfigError
from kvstrata.layout import namespace
from kvstrata.layout.namespace import (
    EngineIdentity,
    GroupIdentity,
    ParallelShape,
    RequestScope,
    encode,
    engine_digest,
    request_scope,
    require_durable,
    scoped_hash,
)

GROUP = GroupIdentity(
    "sliding_window", (("retained_extra_tokens", "0"), ("window", "128")), (2, 16, 8, 64), ("l.0",), 128
)
ENGINE = EngineIdentity(
    model="openai/gpt-oss-20b",
    revision="main",
    weights_digest=b"w",
    kv_dtype="bfloat16",
    kv_scales="",
    groups=(GROUP,),
    configuration=(("rope_theta", "150000"),),
    parallel=ParallelShape(),
    block_hash="sha256_cbor",
    hash_seed="0",
    tokens_per_hash=16,
    engine="vllm 0.32",
    kv_layout="NHD",
    epoch=b"e",
)

SAMPLE = settings(derandomize=True, deadline=None, max_examples=80)
small = st.sampled_from(["", "a", "b", "ab", "aa", "s", "i1", "\0", "é", "\ud800"])
atoms = st.one_of(
    st.none(), st.booleans(), st.integers(-12, 12), small, small.map(lambda s: s.encode("utf-8", "replace"))
)
values = st.recursive(atoms, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)
groups = st.builds(
    GroupIdentity,
    small,
    st.tuples(st.tuples(small, small)),
    st.tuples(st.integers(1, 3)),
    st.tuples(small),
    st.integers(1, 3),
)
engines = st.builds(
    EngineIdentity,
    **dict.fromkeys(("model", "revision", "kv_dtype", "kv_scales", "block_hash", "engine", "kv_layout"), small),
    weights_digest=st.binary(max_size=2),
    epoch=st.binary(max_size=2),
    groups=st.lists(groups, min_size=1, max_size=2).map(tuple),
    configuration=st.lists(st.tuples(small, small), max_size=2).map(tuple),
    parallel=st.one_of(st.none(), st.builds(ParallelShape, st.integers(1, 2), st.integers(1, 2))),
    hash_seed=st.one_of(st.none(), small),
    tokens_per_hash=st.integers(1, 3),
)
scopes = st.builds(RequestScope, small, small, st.binary(max_size=2), st.lists(small, max_size=2).map(tuple))


def same(one: Any, two: Any) -> bool:
    """Equal, and of the same types all the way down (True is not 1 here)."""
    if type(one) is not type(two):
        return False
    if isinstance(one, tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def decode(data: bytes) -> tuple[Any, bytes]:
    """Reads one value back, and what is left: that this can be written is why the encoding is injective."""
    letter, size = data[:1], int.from_bytes(data[1:9], "big")
    body, rest = data[9 : 9 + size], data[9 + size :]
    if letter == b"n":
        return None, rest
    if letter == b"t":
        return body == b"1", rest
    if letter == b"i":
        return int(body), rest
    if letter == b"s":
        return body.decode("utf-8", "surrogatepass"), rest
    if letter == b"b":
        return body, rest
    items = []
    while body:
        item, body = decode(body)
        items.append(item)
    if letter == b"l":
        return tuple(items), rest
    assert letter == b"f"
    return getattr(namespace, items[0])(**dict(zip(items[1::2], items[2::2], strict=True))), rest


@SAMPLE
@given(values, values)
def test_different_values_have_different_encodings(one: Any, two: Any) -> None:
    assert (encode(one) == encode(two)) == same(one, two)
    assert same(decode(encode(one)), (one, b""))


@SAMPLE
@given(engines, engines)
def test_different_engines_have_different_digest_inputs(one: EngineIdentity, two: EngineIdentity) -> None:
    assert (encode(one) == encode(two)) == (one == two)
    assert decode(encode(one)) == (one, b"")


@SAMPLE
@given(scopes, scopes)
def test_different_scopes_have_different_bytes(one: RequestScope, two: RequestScope) -> None:
    assert (request_scope(one) == request_scope(two)) == (one == two)


def other(value: Any) -> Any:
    if isinstance(value, str | bytes | int):
        return value + type(value)(b"x" if isinstance(value, bytes) else 1)
    if isinstance(value, tuple):
        return (*value, value[-1])
    assert isinstance(value, msgspec.Struct)
    return None


@pytest.mark.parametrize("field", EngineIdentity.__struct_fields__)
def test_every_field_of_the_engine_changes_the_digest(field: str) -> None:
    changed = msgspec.structs.replace(ENGINE, **{field: other(getattr(ENGINE, field))})
    assert engine_digest(changed) != engine_digest(ENGINE)


@pytest.mark.parametrize("field", GroupIdentity.__struct_fields__)
def test_every_field_of_a_group_changes_the_digest(field: str) -> None:
    group = msgspec.structs.replace(GROUP, **{field: other(getattr(GROUP, field))})
    assert engine_digest(msgspec.structs.replace(ENGINE, groups=(group,))) != engine_digest(ENGINE)


def test_the_digest_is_blake2b_of_the_encoding_and_does_not_change_between_versions() -> None:
    assert engine_digest(ENGINE) == hashlib.blake2b(encode(ENGINE), digest_size=16).digest()
    assert engine_digest(ENGINE).hex() == "7bfb797cfcf39984aef195b08671a78f"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("revision", 3, "engine.revision: Expected `str`, got `int`"),
        ("tokens_per_hash", True, "engine.tokens_per_hash: Expected `int`, got `bool`"),
        ("tokens_per_hash", 0, "engine.tokens_per_hash: must be at least 1, got 0"),
        ("epoch", "text", "engine.epoch: Expected `bytes`, got `str`"),
        ("groups", (), "engine.groups: must have at least one group, got ()"),
        ("groups", (msgspec.structs.replace(GROUP, tokens_per_chunk=0),), "engine.groups[0].tokens_per_chunk: must be"),
        ("groups", (msgspec.structs.replace(GROUP, block_shape=("a",)),), "engine.groups[0].block_shape[0]: Expected"),
        ("model", object(), "engine: "),
    ],
)
def test_wrong_types_and_sizes_are_refused_by_field(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine_digest(msgspec.structs.replace(ENGINE, **{field: value}))
    assert str(error.value).startswith(message)


def test_keys_of_a_scope() -> None:
    plain = b"h" * 32
    assert scoped_hash(plain, request_scope(RequestScope())) == plain
    scopes = [RequestScope(adapter="a"), RequestScope(tenant_salt=b"a"), RequestScope(multimodal=("a",))]
    keys = {scoped_hash(plain, request_scope(scope)) for scope in scopes}
    assert len(keys) == 3
    assert {len(key) for key in keys} == {32}


def test_hashes_that_mean_other_tokens_elsewhere_are_refused_for_tiers_that_outlive_the_process() -> None:
    require_durable(ENGINE)
    with pytest.raises(ConfigError, match=r"^engine.block_hash: 'xxhash' is not collision resistant"):
        require_durable(msgspec.structs.replace(ENGINE, block_hash="xxhash"))
    with pytest.raises(ConfigError, match=r"^engine.hash_seed: the engine draws a random one"):
        require_durable(msgspec.structs.replace(ENGINE, hash_seed=None))
