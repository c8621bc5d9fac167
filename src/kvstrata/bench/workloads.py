"""Workloads of `kvstrata bench resolve`: layouts, patterns of presence, and the keys of numbered prompts.

The block hash of a prompt's hash block `i` is sha256 of "PROMPT:i"; `bench/vllm_lookup.py` makes the same ones.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds import FullAttention, RecurrentState, SlidingWindow
from kvstrata.types import OffloadKey, make_key

CHUNK_BYTES = 64
"""Payload of a chunk: the core's cost does not depend on it."""


def _full(tokens: int) -> Group:
    return Group(FullAttention(), tokens, chunk_bytes=CHUNK_BYTES)


def _sliding(tokens: int, window: int) -> Group:
    return Group(SlidingWindow(window), tokens, chunk_bytes=CHUNK_BYTES)


LAYOUTS: dict[str, Layout] = {
    "plain": Layout((_full(16),)),
    "sliding": Layout((_full(16), _sliding(16, 128))),
    "five-to-one": Layout((_full(16), *(_sliding(16, 1024) for _ in range(5)))),
    "mla-windows": Layout((_full(256), *(_sliding(64, 128) for _ in range(3)), _sliding(16, 16), _sliding(32, 32))),
    "recurrent": Layout((_full(528), *(Group(RecurrentState(), 528, chunk_bytes=CHUNK_BYTES) for _ in range(3)))),
}
"""One full-attention group, and: nothing, one window, five windows, several small windows, three recurrent states."""

Here = Callable[[bool, int, int, int], bool]
"""Whether a tier has a chunk: is its group a prefix group, chunk index, chunks of the group, first token."""

PRESENCES: dict[str, Here] = {
    "all": lambda prefix, i, n, at: True,
    "none": lambda prefix, i, n, at: False,
    "three-quarters": lambda prefix, i, n, at: i < n * 3 // 4,
    "window-holes": lambda prefix, i, n, at: i < n * 3 // 4 if prefix else i % 3 != 0,
    "windows-in-front": lambda prefix, i, n, at: prefix or at < 1024,
}
"""All below; nothing; the first three quarters; of these the prefix and two of three window chunks; windows only
within the first 1024 tokens."""

REQUESTS = (1, 20, 200)
TOKENS = (8_192, 32_768, 131_072)


@dataclass(frozen=True, slots=True)
class Workload:
    """One row: `requests` prompts of `tokens` tokens each, none of them in primary."""

    layout_name: str
    presence: str
    requests: int
    tokens: int

    @property
    def layout(self) -> Layout:
        """The layout of that name."""
        return LAYOUTS[self.layout_name]

    @property
    def name(self) -> str:
        """What `--rows` filters by."""
        return f"{self.layout_name}/{self.presence}/{self.requests}/{self.tokens}"

    @property
    def prompts(self) -> tuple[str, int, int]:
        """What its keys follow from."""
        return self.layout_name, self.requests, self.tokens

    @property
    def keys_per_request(self) -> int:
        """Keys of one prompt, all groups."""
        return sum(self.tokens // tpc for tpc in self.layout.tokens_per_chunk)

    def hashes(self) -> list[list[bytes]]:
        """The block hashes of every prompt."""
        return [prompt_hashes(prompt, self.tokens // hash_tokens(self.layout)) for prompt in range(self.requests)]

    def present(self, keys: Sequence[Sequence[OffloadKey]]) -> Iterator[OffloadKey]:
        """Which of one prompt's keys the tier has."""
        here = PRESENCES[self.presence]
        for group, tpc, chunks in zip(self.layout.groups, self.layout.tokens_per_chunk, keys, strict=True):
            for i, key in enumerate(chunks):
                if here(group.kind.prefix, i, len(chunks), i * tpc):
                    yield key


def table(names: str = "") -> list[Workload]:
    """Every workload whose name contains `names`, all of them for "". Parts of a name between commas: any of them."""
    every = [
        Workload(layout, presence, requests, tokens)
        for requests in REQUESTS
        for tokens in TOKENS
        for layout in LAYOUTS
        for presence in PRESENCES
    ]
    wanted = [part.strip() for part in names.split(",") if part.strip()]
    return [row for row in every if not wanted or any(_matches(row.name, part) for part in wanted)]


def _matches(name: str, pattern: str) -> bool:
    """Compare part by part; `*` or an empty part matches all, missing parts too."""
    return all(part in ("", "*", own) for part, own in zip(pattern.split("/"), name.split("/"), strict=False))


def hash_tokens(layout: Layout) -> int:
    """Tokens of one hash block: what all chunks are multiples of."""
    return math.gcd(*layout.tokens_per_chunk)


@functools.lru_cache(maxsize=512)
def prompt_hashes(prompt: int, count: int) -> list[bytes]:
    """The first `count` block hashes of a numbered prompt."""
    return [hashlib.sha256(b"%d:%d" % (prompt, i)).digest() for i in range(count)]


def keys_of(layout: Layout, hashes: Sequence[bytes]) -> list[list[OffloadKey]]:
    """The keys of a prompt's whole chunks, per group."""
    step = hash_tokens(layout)
    return [
        [make_key(block_hash, group) for block_hash in hashes[tpc // step - 1 :: tpc // step]]
        for group, tpc in enumerate(layout.tokens_per_chunk)
    ]
