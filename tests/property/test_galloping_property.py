"""Tiers whose probes gallop against brute force: equal where prefix chains are monotonic, correct everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from kvstrata.core.settings import CoreConfig
from kvstrata.layout.groups import Layout
from kvstrata.testing import ScriptedTier
from kvstrata.testing.layouts import random_layout
from kvstrata.testing.oracle import fits, oracle
from kvstrata.testing.stack import CoreStack
from kvstrata.types import Capabilities

BATCHES = range(6)
CASES = 60
KINDS = (
    Capabilities(sync_probe=False, probe_cost_s=0.02),
    Capabilities(sync_probe=False, probe_cost_s=0.02, max_batch=3, shared=True),
    Capabilities(sync_probe=False),
    Capabilities(sync_probe=True),
)


def ladder(rng: np.random.Generator) -> list[ScriptedTier]:
    """One to three tiers, at least one of which gallops, in any order."""
    kinds = [0, *rng.integers(0, len(KINDS), size=rng.integers(0, 3)).tolist()]
    rng.shuffle(kinds)
    return [ScriptedTier(name=f"tier{i}", capabilities=KINDS[kind]) for i, kind in enumerate(kinds)]


def some_chunks(rng: np.random.Generator, layout: Layout, total: int, *, monotonic: bool) -> list[set[int]]:
    """Chunks that are somewhere; in prefix groups the leading ones, if asked."""
    found = []
    for group, tpc in zip(layout.groups, layout.tokens_per_chunk, strict=True):
        count = total // tpc
        if monotonic and group.kind.prefix:
            found.append(set(range(int(rng.choice([count, rng.integers(0, count + 1)])))))
        else:
            density = float(rng.choice([0.5, 0.9, 0.97, 1.0]))
            found.append(set(np.flatnonzero(rng.random(count) < density).tolist()))
    return found


def spread_over(
    rng: np.random.Generator,
    stack: CoreStack,
    tiers: list[ScriptedTier],
    keys: list[list[bytes]],
    sets: list[set[int]],
    *,
    monotonic: bool,
) -> None:
    """Each chunk is in at least one tier, and in others by chance.

    If asked, what tiers that gallop have of a prefix group is a leading part of what there is.
    """
    for g, chunks in enumerate(sets):
        home = int(rng.integers(len(tiers)))
        leading = monotonic and stack.layout.groups[g].kind.prefix
        for t, tier in enumerate(tiers):
            if t == home:
                mine = chunks
            elif leading and tier.capabilities.probe_cost_s:
                mine = {i for i in chunks if i < int(rng.integers(0, len(keys[g]) + 1))}
                mine = {i for i in chunks if i < len(mine)}
            else:
                mine = {i for i in chunks if rng.random() < 0.5}
            if not monotonic and t == home and len(tiers) > 1:
                mine = {i for i in mine if rng.random() < 0.7 or not any(keys[g][i] in other.held for other in tiers)}
            tier.put([keys[g][i] for i in sorted(mine)], length=stack.layout.chunk_bytes[g])


def run(rng: np.random.Generator, stack: CoreStack, tiers: list[ScriptedTier], computed: int, total: int) -> int:
    """Poll until answered, ending probes and loads in random order and parts; the hit."""
    for _ in range(3000):
        answer = stack.poll("a", computed, total)
        if answer.hit is not None:
            return answer.hit
        pending = [p for tier in tiers for p in [*tier.probes, *tier.loads]]
        for one in rng.permutation(len(pending))[: int(rng.integers(1, len(pending) + 1)) if pending else 0].tolist():
            pending[one].finish()
        stack.pump()
        stack.wait(0.0005)
    raise AssertionError("never answered")


def make(
    rng: np.random.Generator, *, monotonic: bool
) -> tuple[CoreStack, list[ScriptedTier], list[set[int]], int, int]:
    layout = random_layout(rng, groups=4)
    total = int(rng.integers(1, 400))
    computed = int(rng.integers(0, total)) if rng.random() < 0.4 else 0
    tiers = ladder(rng)
    config = CoreConfig(
        capacity_bytes=400_000, promotion_share=1.0, store_reserve=0.0, inflight_share=float(rng.choice([1.0, 0.002]))
    )
    stack = CoreStack(layout, tiers, config=config, checked=False)
    sets = some_chunks(rng, layout, total, monotonic=monotonic)
    spread_over(rng, stack, tiers, stack.add("a", total), sets, monotonic=monotonic)
    return stack, tiers, sets, computed, total


@pytest.mark.parametrize("batch", BATCHES)
def test_monotonic_chains_give_the_oracle_s_boundary(batch: int) -> None:
    rng = np.random.default_rng([31, batch])
    hits = 0
    for case in range(CASES):
        stack, tiers, sets, computed, total = make(rng, monotonic=True)
        hit = run(rng, stack, tiers, computed, total)
        wanted = oracle(stack.layout, sets, computed, total)
        assert computed + hit == wanted.boundary, (batch, case)
        hits += hit > 0
        stack.core.check()
    assert hits > CASES // 5


@pytest.mark.parametrize("batch", BATCHES)
def test_any_presence_gives_a_correct_hit_within_three_rounds(batch: int) -> None:
    rng = np.random.default_rng([32, batch])
    equal = hits = 0
    for case in range(CASES):
        stack, tiers, sets, computed, total = make(rng, monotonic=False)
        hit = run(rng, stack, tiers, computed, total)
        wanted = oracle(stack.layout, sets, computed, total)
        assert computed + hit <= wanted.boundary, (batch, case)
        if hit:
            assert fits(stack.layout, [frozenset(s) for s in sets], computed, computed + hit) is not None, (batch, case)
        assert stack.core._core.requests.require("a").rounds <= 3
        equal += computed + hit == wanted.boundary
        hits += hit > 0
        stack.core.check()
    assert hits > CASES // 10
    assert equal > CASES // 2
