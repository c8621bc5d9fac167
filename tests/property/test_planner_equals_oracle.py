"""The planner against brute force, on random layouts, holes, unknowns, computed prefixes and byte limits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvstrata.layout.groups import Layout
from kvstrata.layout.planner import Decision, resolve
from kvstrata.testing.layouts import random_layout, random_presence
from kvstrata.testing.oracle import completions, oracle
from kvstrata.types import I8, Presence

BATCHES = range(8)
CASES = 250


def sets_of(flags: list[I8], value: int) -> list[frozenset[int]]:
    return [frozenset(np.flatnonzero(f == value).tolist()) for f in flags]


def loads(decision: Decision) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(lo, hi)) for lo, hi in decision.ranges)


def random_case(rng: np.random.Generator, unknown: float = 0.0) -> tuple[Layout, list[I8], int, int]:
    layout = random_layout(rng)
    total = int(rng.integers(1, 130))
    computed = int(rng.integers(0, total + 1)) if rng.random() < 0.5 else 0
    return layout, random_presence(rng, layout, total, unknown=unknown), computed, total


@pytest.mark.parametrize("batch", BATCHES)
def test_known_presence_gives_the_oracle_s_boundary_and_chunks(batch: int) -> None:
    rng = np.random.default_rng([1, batch])
    hits = 0
    for _ in range(CASES):
        layout, flags, computed, total = random_case(rng)
        decision = resolve(layout, flags, computed, total)
        wanted = oracle(layout, sets_of(flags, Presence.PRESENT), computed, total)
        assert decision.decided
        assert (decision.boundary, loads(decision)) == (wanted.boundary, wanted.load), (layout, flags, computed, total)
        assert decision.why
        assert not any(len(chunks) for chunks in decision.probe)
        assert decision.passes <= len(layout.groups)
        hits += decision.boundary > computed
    assert hits > CASES // 10  # the cases are not all misses


@pytest.mark.parametrize("batch", BATCHES)
def test_a_byte_limit_gives_the_oracle_s_boundary_and_chunks(batch: int) -> None:
    rng = np.random.default_rng([2, batch])
    for _ in range(CASES):
        layout, flags, computed, total = random_case(rng)
        limit = int(rng.integers(0, 600)) if rng.random() < 0.9 else int(rng.integers(-1, 3))
        decision = resolve(layout, flags, computed, total, byte_limit=limit)
        wanted = oracle(layout, sets_of(flags, Presence.PRESENT), computed, total, byte_limit=limit)
        assert (decision.boundary, loads(decision)) == (wanted.boundary, wanted.load), (layout, flags, computed, total)
        assert decision.passes <= len(layout.groups) * decision.rounds


@pytest.mark.parametrize("batch", BATCHES)
def test_a_given_limit_stands_for_the_default(batch: int) -> None:
    rng = np.random.default_rng([3, batch])
    for _ in range(CASES // 4):
        layout, flags, computed, total = random_case(rng)
        limit = int(rng.integers(0, total + 1))
        decision = resolve(layout, flags, computed, total, limit=limit)
        wanted = oracle(layout, sets_of(flags, Presence.PRESENT), computed, total, limit=limit)
        assert (decision.boundary, loads(decision)) == (wanted.boundary, wanted.load)


@pytest.mark.parametrize("batch", BATCHES)
def test_unknowns_are_decided_exactly_when_every_completion_agrees(batch: int) -> None:
    rng = np.random.default_rng([4, batch])
    seen = {True: 0, False: 0}
    for _ in range(CASES // 4):
        layout = random_layout(rng, groups=4)
        total = int(rng.integers(1, 50))
        computed = int(rng.integers(0, total)) if rng.random() < 0.3 else 0
        flags = random_presence(rng, layout, total, unknown=float(rng.choice([0.03, 0.1, 0.2])))
        byte_limit = int(rng.integers(0, 300)) if rng.random() < 0.3 else None
        present, unknown = sets_of(flags, Presence.PRESENT), sets_of(flags, Presence.UNKNOWN)
        if sum(len(chunks) for chunks in unknown) > 8:
            continue
        answers = {
            oracle(layout, sets, computed, total, byte_limit=byte_limit) for sets in completions(present, unknown)
        }
        decision = resolve(layout, flags, computed, total, byte_limit=byte_limit)
        assert decision.decided == (len(answers) == 1), (layout, flags, computed, total)
        seen[decision.decided] += 1
        if decision.decided:
            (answer,) = answers
            assert (decision.boundary, loads(decision)) == (answer.boundary, answer.load)
        else:
            assert decision.boundary == computed
            assert not any(loads(decision))
            assert decision.possible == max(answer.boundary for answer in answers)
    assert min(seen.values()) > 3


@pytest.mark.parametrize("batch", BATCHES)
def test_answering_probes_round_by_round_decides_within_groups_plus_refuted_boundaries(batch: int) -> None:
    rng = np.random.default_rng([5, batch])
    for _ in range(CASES // 4):
        layout, truth, computed, total = random_case(rng)
        known = [flags.copy() for flags in truth]
        hidden = float(rng.choice([0.2, 0.5, 1.0]))
        for flags in known:
            flags[rng.random(len(flags)) < hidden] = Presence.UNKNOWN
        byte_limit = int(rng.integers(50, 600)) if rng.random() < 0.3 else None
        rounds, refuted, before = 0, 0, math.inf
        decision = resolve(layout, known, computed, total, byte_limit=byte_limit)
        while not decision.decided:
            refuted += decision.possible < before
            before = decision.possible
            check_probe(layout, known, computed, decision)
            for g, chunks in enumerate(decision.probe):
                known[g][chunks] = truth[g][chunks]
            rounds += 1
            decision = resolve(layout, known, computed, total, byte_limit=byte_limit)
        wanted = oracle(layout, sets_of(truth, Presence.PRESENT), computed, total, byte_limit=byte_limit)
        assert (decision.boundary, loads(decision)) == (wanted.boundary, wanted.load)
        refuted -= decision.boundary == before  # the last one that was open may have turned out true
        assert rounds <= len(layout.groups) + refuted


def check_probe(layout: Layout, known: list[I8], computed: int, decision: Decision) -> None:
    """All that is probed is unknown and needed by the best possible boundary; something is probed."""
    needed = layout.needed_ranges(decision.possible, computed)
    count = 0
    for g, chunks in enumerate(decision.probe):
        lo, hi = needed[g]
        assert all(lo <= chunk < hi for chunk in chunks)
        assert (known[g][chunks] == Presence.UNKNOWN).all()
        assert len(set(chunks.tolist())) == len(chunks)
        count += len(chunks)
    assert count
