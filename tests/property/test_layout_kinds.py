"""What every attention kind promises to the planner: held against the oracle's table, for each chunk and boundary."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvstrata.layout.groups import Group
from kvstrata.layout.kinds import ChunkedLocal, FullAttention, Kind, RecurrentState, SlidingWindow
from kvstrata.testing.oracle import consumed_by

KINDS: list[Kind] = [
    FullAttention(),
    SlidingWindow(1),
    SlidingWindow(2),
    SlidingWindow(9),
    SlidingWindow(16, retained_extra=5),
    SlidingWindow(1, retained_extra=3),
    ChunkedLocal(1),
    ChunkedLocal(6),
    ChunkedLocal(16),
    RecurrentState(),
    RecurrentState("align"),
    RecurrentState("none"),
]
CASES = [
    pytest.param(
        kind, tokens, computed, id=f"{kind.name}-{'-'.join(map(str, kind.parameters.values()))}-{tokens}-{computed}"
    )
    for kind, tokens, computed in itertools.product(KINDS, (1, 3, 4, 16), (0, 1, 7, 16))
]
TOP = 70


def boundaries_of(kind: Kind, tokens: int, computed: int) -> np.ndarray:
    every = np.arange(computed + 1, TOP, dtype=np.int64)
    return every[kind.allowed(every, tokens)]


@pytest.mark.parametrize(("kind", "tokens", "computed"), CASES)
def test_consumed_is_the_table(kind: Kind, tokens: int, computed: int) -> None:
    group = Group(kind, tokens)
    boundaries = boundaries_of(kind, tokens, computed)
    lo, hi = kind.consumed(boundaries, computed, tokens)
    for boundary, first, last in zip(boundaries.tolist(), lo.tolist(), hi.tolist(), strict=True):
        assert list(range(first, last)) == consumed_by(group, tokens, computed, boundary)
        assert last == -(-boundary // tokens)
    refused = set(range(computed + 1, TOP)) - set(boundaries.tolist())
    assert all(consumed_by(group, tokens, computed, boundary) is None for boundary in refused)
    step = kind.step(tokens)
    assert all((boundary % step == 0) if step else False for boundary in boundaries.tolist())
    assert (np.diff(lo[lo < hi]) >= 0).all()


@pytest.mark.parametrize(("kind", "tokens", "computed"), CASES)
def test_earliest_is_the_inverse_of_consumed(kind: Kind, tokens: int, computed: int) -> None:
    boundaries = boundaries_of(kind, tokens, computed)
    lo, hi = kind.consumed(boundaries, computed, tokens)
    chunks = np.arange(computed // tokens, TOP // tokens + 1, dtype=np.int64)
    for chunk, earliest in zip(chunks.tolist(), kind.earliest(chunks, computed, tokens).tolist(), strict=True):
        for boundary, first, last in zip(boundaries.tolist(), lo.tolist(), hi.tolist(), strict=True):
            if first < last or (kind.free_step == 1 and kind.may_draft):
                assert (first >= chunk) == (boundary >= earliest)


@pytest.mark.parametrize(("kind", "tokens", "computed"), CASES)
def test_free_step_tells_where_nothing_is_consumed(kind: Kind, tokens: int, computed: int) -> None:
    boundaries = boundaries_of(kind, tokens, computed)
    lo, hi = kind.consumed(boundaries, computed, tokens)
    free = boundaries % kind.free_step == 0 if kind.free_step else np.zeros(len(boundaries), dtype=bool)
    assert ((lo >= hi) == free).all()


@pytest.mark.parametrize(("kind", "tokens", "computed"), CASES)
def test_between_two_edges_the_largest_boundary_needs_the_least(kind: Kind, tokens: int, computed: int) -> None:
    edges = kind.edges(computed, TOP - 1, tokens).tolist()
    assert edges == sorted(set(edges))
    assert all(computed < edge < TOP for edge in edges)
    group = Group(kind, tokens)
    for low, high in itertools.pairwise([computed, *edges, TOP - 1]):
        needs = [consumed_by(group, tokens, computed, boundary) for boundary in range(low + 1, high + 1)]
        real = [set(chunks) for chunks in needs if chunks is not None]
        for before, after in itertools.pairwise(real):
            assert after <= before
            assert bool(after) == bool(before)


def test_edges_of_a_window_of_boundaries_are_those_of_the_whole_range() -> None:
    for kind in KINDS:
        whole = kind.edges(0, 200, 6).tolist()
        parts = [edge for low in range(0, 200, 25) for edge in kind.edges(low, low + 25, 6).tolist()]
        assert parts == whole
