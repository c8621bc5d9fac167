"""Runs of blocks, and the NumPy copier as the twin of all others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.transfer.numpy_copy import NumpyCopier
from kvstrata.transfer.pieces import Piece, runs, total_blocks, unit


def piece(blocks: list[int], places: list[int], group: int = 0) -> Piece:
    return Piece(group, np.array(blocks, np.int64), np.array(places, np.int64))


def test_neighbours_are_one_run_in_either_order() -> None:
    (run,) = runs(piece([7, 6, 5], [200, 100, 0]))
    assert (run.block, run.place, run.count, run.block_step, run.place_step) == (5, 0, 3, 1, 100)


def test_steps_that_change_begin_a_new_run() -> None:
    found = [(run.block, run.place, run.count) for run in runs(piece([1, 2, 3, 9], [0, 10, 20, 25]))]
    assert found == [(1, 0, 3), (9, 25, 1)]


def test_places_that_go_down_are_single_runs() -> None:
    assert [run.count for run in runs(piece([1, 2], [10, 0]))] == [1, 1]


def test_nothing_is_no_run() -> None:
    assert list(runs(piece([], []))) == []
    assert total_blocks([piece([1, 2], [0, 5]), piece([], [])]) == 2


def test_the_unit_divides_everything() -> None:
    assert unit([4096, 24]) == 8
    assert unit([4096, 6]) == 2
    assert unit([7]) == 1


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), unique_by=(lambda p: p[0], lambda p: p[1])))
def test_runs_are_the_same_pairs(pairs: list[tuple[int, int]]) -> None:
    found = [
        (run.block + i * run.block_step, run.place + i * run.place_step)
        for run in runs(piece([b for b, _ in pairs], [p * 8 for _, p in pairs]))
        for i in range(run.count)
    ]
    assert sorted(found) == sorted((b, p * 8) for b, p in pairs)


def test_a_store_and_a_load_bring_the_same_bytes_back() -> None:
    dice = np.random.default_rng(3)
    layers = [dice.integers(0, 256, (10, page), dtype=np.uint8) for page in (16, 24)]
    kept = [layer.copy() for layer in layers]
    primary = np.zeros(4096, np.uint8)
    copier = NumpyCopier([layers], primary)
    copier.store(1, [piece([3, 4, 8], [512, 1024, 40])])
    assert primary[512:528].tolist() == kept[0][3].tolist()
    assert primary[528:552].tolist() == kept[1][3].tolist()
    copier.load(2, [piece([1, 2, 0], [512, 1024, 40])])
    done = copier.finished()
    assert [(d.job_id, d.ok, d.size) for d in done] == [(1, True, 120), (2, True, 120)]
    for layer, before in zip(layers, kept, strict=True):
        assert (layer[[1, 2, 0]] == before[[3, 4, 8]]).all()
        assert (layer[3:] == before[3:]).all()
    assert copier.finished() == []


@pytest.mark.parametrize(("blocks", "places"), [([10], [0]), ([9, 10], [0, 40]), ([0], [4090]), ([0], [-1])])
def test_what_lies_outside_fails_and_touches_nothing(blocks: list[int], places: list[int]) -> None:
    layers = [np.ones((10, 16), np.uint8)]
    primary = np.zeros(4096, np.uint8)
    copier = NumpyCopier([layers], primary)
    copier.load(1, [piece(blocks[-1:], places[-1:])])
    assert [d.ok for d in copier.finished()] == [False]
    assert (layers[0] == 1).all()
