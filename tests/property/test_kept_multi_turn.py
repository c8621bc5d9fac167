"""What is stored loses nothing: each next turn hits as much as if all chunks had been stored.

The accelerator's cache is emptied between turns. The store is a plain set of chunks per group, the hit comes from the
oracle, and only chunks whose bytes the accelerator holds (loaded or computed in this turn) can be stored.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvstrata.layout.cursor import StoreCursor
from kvstrata.layout.groups import Layout
from kvstrata.layout.kept import default_keep_interval, kept_boundaries, stored_chunks
from kvstrata.layout.presets import PRESETS
from kvstrata.testing.layouts import random_layout
from kvstrata.testing.oracle import oracle

Sets = list[set[int]]


class Conversation:
    """Turns of one chat on one layout, with a store that loses nothing and a twin in which everything is stored."""

    def __init__(self, layout: Layout, interval: int, *, generated_too: bool) -> None:
        self.layout, self.interval, self.generated_too = layout, interval, generated_too
        self.kept: Sets = [set() for _ in layout.groups]
        self.everything: Sets = [set() for _ in layout.groups]
        self.hit = self.stored_to = 0

    def turn(self, rng: np.random.Generator, prompt: int, generated: int) -> None:
        """Prefill and decode one turn from the last hit on, storing step by step."""
        final, end = self.hit, prompt + generated
        total = None if self.generated_too else prompt
        cursor = StoreCursor(self.layout, prompt, self.interval, total=total)
        self.store(cursor.advance(final))
        while final < end:
            step = int(rng.integers(1, 200)) if final < prompt else int(rng.integers(1, 4))
            final = min(final + step, prompt if final < prompt else end)
            self.store(cursor.advance(final))
        self.store(cursor.advance(final, finished=True))
        self.stored_to = end if self.generated_too else prompt
        for g, tokens in enumerate(self.layout.tokens_per_chunk):
            self.everything[g].update(chunk for chunk in range(self.stored_to // tokens) if self.has(g, chunk))

    def store(self, chunks: tuple[np.ndarray, ...]) -> None:
        for g, some in enumerate(chunks):
            self.kept[g].update(chunk for chunk in some.tolist() if self.has(g, chunk))

    def has(self, g: int, chunk: int) -> bool:
        """The accelerator has the whole chunk: it was loaded for the hit, or computed after it."""
        lo, hi = self.layout.consumed_ranges(self.hit, 0)[g] if self.hit else (0, 0)
        return lo <= chunk < hi or chunk * self.layout.tokens_per_chunk[g] >= self.hit

    def next_hit(self, prompt: int) -> tuple[int, int]:
        """The hit of the next turn, and the one if every whole chunk of the stored range had been stored."""
        self.hit = oracle(self.layout, self.kept, 0, prompt).boundary
        return self.hit, oracle(self.layout, self.everything, 0, prompt).boundary


def joint_at(layout: Layout, stored_to: int, prompt: int) -> int:
    """The largest joint boundary of a stored range that a prompt can be given."""
    whole = [set(range(stored_to // tokens)) for tokens in layout.tokens_per_chunk]
    return oracle(layout, whole, 0, prompt).boundary


def play(layout: Layout, rng: np.random.Generator, first: int, turns: int, interval: int) -> int:
    generated_too = bool(rng.random() < 0.5)
    chat = Conversation(layout, interval, generated_too=generated_too)
    prompt, hits = first, 0
    for _ in range(turns):
        generated = int(rng.integers(0, 40))
        chat.turn(rng, prompt, generated)
        # One new token makes the end of the stored range the very limit of the next turn.
        prompt += generated + int(rng.choice([1, 1, 2, rng.integers(1, 60)]))
        hit, wanted = chat.next_hit(prompt)
        assert hit == wanted, (layout, prompt)
        if not any(group.kind.name == "chunked_local" for group in layout.groups):
            # A chunk that a free boundary of chunked local attention cuts in two is never whole again; others are.
            assert hit == joint_at(layout, chat.stored_to, prompt)
        hits += hit > 0
    return hits


@pytest.mark.parametrize("batch", range(4))
def test_random_layouts_lose_no_next_turn(batch: int) -> None:
    rng = np.random.default_rng([10, batch])
    hits = 0
    for _ in range(50):
        layout = random_layout(rng, groups=8)
        hits += play(layout, rng, int(rng.integers(1, 250)), 3, int(rng.integers(1, 120)))
    assert hits > 60


@pytest.mark.scenario_143
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("chunk_tokens", [128, 100])
def test_presets_lose_no_next_turn(name: str, chunk_tokens: int) -> None:
    rng = np.random.default_rng([11, chunk_tokens])
    layout = PRESETS[name].layout(chunk_tokens)
    assert play(layout, rng, 5000, 5, default_keep_interval(layout)) == 5


@pytest.mark.parametrize("batch", range(4))
def test_a_request_that_shares_a_prefix_hits_at_least_the_boundary_of_the_last_interval(batch: int) -> None:
    rng = np.random.default_rng([12, batch])
    for _ in range(40):
        layout = random_layout(rng, groups=5)
        interval, total = int(rng.integers(1, 100)), int(rng.integers(1, 300))
        junction = int(rng.integers(1, total + 1))
        kept = kept_boundaries(layout, total, total, total, interval, [junction], finished=True)
        chunks = stored_chunks(layout, kept, total, finished=True)
        everything = [set(range(total // tokens)) for tokens in layout.tokens_per_chunk]
        aligned = layout.alignment_tokens
        for mark in {interval * int(rng.integers(1, 6)), junction}:
            if mark > total:
                continue
            # What is at or below the mark, with the limit out of the way so that alignment counts.
            wanted = oracle(layout, everything, 0, total, limit=mark // aligned * aligned).boundary
            shared = [
                {c for c in some.tolist() if c * tokens < mark + tokens} for some, tokens in pairs(layout, chunks)
            ]
            assert oracle(layout, shared, 0, total, limit=mark // aligned * aligned).boundary == wanted
            assert wanted in (0, *kept)


def pairs(layout: Layout, chunks: tuple[np.ndarray, ...]) -> list[tuple[np.ndarray, int]]:
    return list(zip(chunks, layout.tokens_per_chunk, strict=True))


@pytest.mark.parametrize("batch", range(4))
def test_every_kept_boundary_is_joint_and_the_chunks_are_exactly_what_they_consume(batch: int) -> None:
    rng = np.random.default_rng([13, batch])
    for _ in range(60):
        layout = random_layout(rng, groups=5)
        total, final = int(rng.integers(1, 250)), int(rng.integers(1, 250))
        finished = bool(rng.random() < 0.5)
        end = None if rng.random() < 0.5 else total
        kept = kept_boundaries(layout, end, total, final, int(rng.integers(1, 90)), finished=finished)
        chunks = stored_chunks(layout, kept, final, total=end, finished=finished)
        needed: Sets = [set() for _ in layout.groups]
        reach = final if end is None else min(end, final)
        for boundary in kept:
            whole = [set(range(reach // tokens)) for tokens in layout.tokens_per_chunk]
            assert oracle(layout, whole, 0, boundary + 1, limit=boundary).boundary == boundary
            for g, (lo, hi) in enumerate(layout.needed_ranges(boundary, 0)):
                needed[g].update(range(lo, hi))
        for g, group in enumerate(layout.groups):
            if not group.kind.stores_all:
                assert set(chunks[g].tolist()) == needed[g]
            assert all((chunk + 1) * layout.tokens_per_chunk[g] <= reach for chunk in chunks[g])


@pytest.mark.parametrize("batch", range(6))
def test_the_cursor_adds_up_to_the_definition_and_names_each_chunk_once(batch: int) -> None:
    rng = np.random.default_rng([14, batch])
    for _ in range(60):
        layout = random_layout(rng, groups=5)
        prompt, interval = int(rng.integers(1, 200)), int(rng.integers(1, 90))
        total = None if rng.random() < 0.5 else int(rng.integers(1, prompt + 1))
        junctions = rng.integers(1, prompt + 1, size=int(rng.integers(0, 3))).tolist()
        cursor = StoreCursor(layout, prompt, interval, total=total, junctions=junctions)
        seen: Sets = [set() for _ in layout.groups]
        final = 0
        for _ in range(int(rng.integers(1, 25))):
            final += int(rng.integers(0, 40))
            quiet = final < cursor.next_at
            gather(seen, chunks := cursor.advance(final))
            assert not (quiet and any(len(some) for some in chunks))
            kept = kept_boundaries(layout, total, prompt, final, interval, junctions)
            assert seen == as_sets(stored_chunks(layout, kept, final, total=total))
        gather(seen, cursor.advance(final, finished=True))
        kept = kept_boundaries(layout, total, prompt, final, interval, junctions, finished=True)
        assert seen == as_sets(stored_chunks(layout, kept, final, total=total, finished=True))
        assert not any(len(some) for some in cursor.advance(final + 100))


def gather(seen: Sets, chunks: tuple[np.ndarray, ...]) -> None:
    for have, some in zip(seen, chunks, strict=True):
        fresh = some.tolist()
        assert fresh == sorted(set(fresh))
        assert not have.intersection(fresh)
        have.update(fresh)


def as_sets(chunks: tuple[np.ndarray, ...]) -> Sets:
    return [set(some.tolist()) for some in chunks]
