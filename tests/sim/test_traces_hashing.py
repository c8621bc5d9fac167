"""Keys of a trace's chunks: equal exactly when the prefix is, whatever the size of a chunk."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from kvstrata.sim.hashing import BlockHasher
from kvstrata.sim.traces import Request, Trace
from kvstrata.types import KEY_BYTES, key_group


def request(tokens: int, *ids: int) -> Request:
    return Request(0, 0.0, tokens, 1, np.array(ids, dtype=np.int64))


def hasher(*, seed: int = 0, source: str = "mooncake", tokens_per_id: int = 512) -> BlockHasher:
    return BlockHasher(Trace("t", source, tokens_per_id, ()), seed)


def test_the_rule_in_the_docs() -> None:
    key = hasher(seed=7).keys(request(1024, 3, 5), (384,))[0][1]
    text = b"kvstrata replay block hash 1" + (8).to_bytes(4, "big") + b"mooncake" + (7).to_bytes(8, "big")
    text += (512).to_bytes(4, "big") + (5).to_bytes(8, "big") + (767 - 512).to_bytes(8, "big")
    assert key == hashlib.blake2b(text, digest_size=32).digest() + (0).to_bytes(4, "big")
    assert len(key) == KEY_BYTES


def test_only_whole_chunks_of_the_prompt_have_a_key() -> None:
    keys = hasher().keys(request(1000, 1, 2), (128, 512, 1024, 16))
    assert [len(group) for group in keys] == [7, 1, 0, 62]
    assert [key_group(group[0]) for group in keys if group] == [0, 1, 3]


@pytest.mark.parametrize("tokens", [16, 96, 128, 384, 512, 768])
def test_chunks_are_equal_as_far_as_the_ids_are(tokens: int) -> None:
    one = hasher().keys(request(2048, 1, 2, 3, 4), (tokens,))[0]
    other = hasher().keys(request(2000, 1, 2, 8, 9), (tokens,))[0]
    same = 1024 // tokens
    assert one[:same] == other[:same]
    assert not set(one[same:]) & set(other[same:])


def test_all_keys_of_a_request_differ() -> None:
    keys = hasher().keys(request(2048, 1, 2, 3, 4), (16, 16, 512))
    flat = [key for group in keys for key in group]
    assert len(set(flat)) == len(flat)
    assert [key[:-4] for key in keys[0]] == [key[:-4] for key in keys[1]]


def test_seed_source_and_run_length_keep_traces_apart() -> None:
    makers = (hasher(), hasher(seed=1), hasher(seed=-1), hasher(source="built-in"), hasher(tokens_per_id=64))
    prompts = [request(512, 1) for _ in makers[:-1]] + [request(512, *range(8))]
    keys = [maker.keys(prompt, (64,))[0][0] for maker, prompt in zip(makers, prompts, strict=True)]
    assert len(set(keys)) == len(keys)
