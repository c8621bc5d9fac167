"""The index against a dictionary, its collisions, and what a record costs."""

from __future__ import annotations

import numpy as np
import pytest

from kvstrata.testing.tier_harness import chunk_key, chunk_keys
from kvstrata.tiers.disk.index import Index, hashes_of, keys_of, words_of


def insert(index: Index, keys: list[bytes], segment: int = 1) -> None:
    count = len(keys)
    numbers = np.arange(count)
    index.insert(words_of(keys), np.zeros((count, 2), np.uint64), segment, numbers, numbers)


def test_found_are_those_that_were_inserted() -> None:
    index = Index()
    keys = chunk_keys(5000)
    insert(index, keys)
    assert len(index) == 5000
    rows = index.find(words_of(keys))
    assert index.offset[rows].tolist() == list(range(5000))
    assert keys_of(index.key[rows]) == keys
    assert (index.find(words_of(chunk_keys(5000, start=10_000))) == -1).all()
    assert [index.find_key(key) for key in keys] == rows.tolist()
    assert {index.find_key(key) for key in chunk_keys(50, start=10_000)} == {-1}
    assert index.find(words_of([])).tolist() == []


def test_keys_of_several_groups_share_no_place() -> None:
    index = Index()
    keys = [chunk_key(n, group=g) for n in range(300) for g in range(40)]
    insert(index, keys)
    assert (index.find(words_of(keys)) >= 0).all()
    assert len(np.unique(hashes_of(words_of(keys)))) == len(keys)


def test_keys_that_are_no_hashes_work_too() -> None:
    index = Index()
    keys = [n.to_bytes(36, "big") for n in range(3000)]
    insert(index, keys)
    assert (index.find(words_of(keys)) >= 0).all()
    index.delete(index.find(words_of(keys[::2])))
    assert ((index.find(words_of(keys)) >= 0) == np.arange(3000) % 2).all()


def test_deleted_rows_are_used_again_and_the_table_stays_clean() -> None:
    index = Index()
    for turn in range(60):
        keys = chunk_keys(400, start=turn * 400)
        insert(index, keys, segment=turn)
        if turn:
            index.delete(index.rows_of_segment(turn - 1))
    assert len(index) == 400
    assert index.row_bound <= 1200
    assert len(index._table) <= 4096
    assert (index.find(words_of(keys)) >= 0).all()


def test_equal_tags_of_unlike_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.tiers.disk.index.hashes_of", lambda words: np.full(len(words), 12345, np.uint64))
    index = Index()
    keys = chunk_keys(40)
    insert(index, keys)
    assert index.offset[index.find(words_of(keys))].tolist() == list(range(40))
    assert (index.find(words_of(chunk_keys(5, start=100))) == -1).all()
    index.delete(index.find(words_of(keys[10:20])))
    found = index.find(words_of(keys))
    assert [n for n in range(40) if found[n] < 0] == list(range(10, 20))


def test_a_record_costs_at_most_130_bytes() -> None:
    index = Index()
    insert(index, chunk_keys(100_000))
    columns = (index.key, index.digest, index.segment, index.offset, index.length, index.stamp, index._table)
    per_row = sum(column.nbytes // len(column) for column in columns[:-1])
    assert per_row == 68
    assert per_row + index._table.nbytes / len(index) <= 130


def test_a_tag_that_looks_like_an_empty_or_a_deleted_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The marks of places are small numbers, and so are some tags."""
    for tag in (0, 1, 2):
        same = np.uint64(tag)
        monkeypatch.setattr("kvstrata.tiers.disk.index.hashes_of", lambda words, h=same: np.full(len(words), h))
        index = Index()
        keys = chunk_keys(12)
        assert index.find(words_of(keys)).tolist() == [-1] * 12
        insert(index, keys)
        assert index.offset[index.find(words_of(keys))].tolist() == list(range(12))
        index.delete(index.find(words_of(keys[:11])))
        assert (index.find(words_of(keys)) >= 0).tolist() == [False] * 11 + [True]
        assert index.find(words_of(chunk_keys(12, start=50))).tolist() == [-1] * 12


def test_keys_of_which_one_comes_twice_are_not_reserved_as_new_ones() -> None:
    index = Index(16)
    insert(index, chunk_keys(5))
    words = words_of([*chunk_keys(40, start=100), chunk_keys(1, start=117)[0]])
    assert index.reserve_absent(words, 7, hashes_of(words)) is None
    assert (len(index), index.pending) == (5, 0)
    rows = index.reserve_absent(words[:40], 7, hashes_of(words[:40]))
    assert rows is not None
    assert index.find(words[:40]).tolist() == rows.tolist()
    assert index.find(words_of(chunk_keys(5))).tolist() == list(range(5))


def test_what_comes_twice_in_a_crowd_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of one home place, more than the first look reaches: the same key is met on the way, and all go again."""
    monkeypatch.setattr("kvstrata.tiers.disk.index.hashes_of", lambda words: words[:, 0].astype(np.uint64) << 8)
    index = Index(64)
    keys = chunk_keys(30)
    words = words_of(keys)
    hashes = words[:, 0].astype(np.uint64) << np.uint64(8)  # all of home place 0, and each has its own tag
    for twice in ([3, 3], [0, 29, 0], [*range(30), 17]):
        picked = np.array(twice)
        assert index.reserve_absent(words[picked], 7, hashes[picked]) is None
        assert (index.taken, index.pending, index._deleted) == (0, 0, 0)
        assert not index._table.any()
    rows = index.reserve_absent(words, 7, hashes)
    assert rows is not None
    assert index.find(words).tolist() == rows.tolist()
    assert index.reserve_absent(words[29:], 7, hashes[29:]) is None


def test_a_table_that_is_emptied_is_as_it_was_and_not_built_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index(4000)
    insert(index, chunk_keys(3000))
    table = index._table
    for turn in range(1, 20):
        index.delete(index.live_rows())
        assert not index._table.any()
        insert(index, chunk_keys(3000, start=turn * 3000))
    assert index._table is table


def test_a_key_far_from_its_home_place_is_not_taken_for_a_new_one() -> None:
    index = Index(16)
    near = [key for key in chunk_keys(2000) if int(index._home(hashes_of(words_of([key])))[0]) == 3]
    held, new = near[:16], near[16:18]  # sixteen in a row from place 3 on: twice as far as the first look reaches
    insert(index, held, 1)
    assert index._home(hashes_of(words_of(held))).tolist() == [3] * 16
    for key in held:
        words = words_of([key])
        assert index.reserve_absent(words, 7, hashes_of(words)) is None
    words = words_of(new)
    rows = index.reserve_absent(words, 7, hashes_of(words))
    assert rows is not None
    assert index.find(words_of(near[:18])).tolist() == [*range(16), *rows.tolist()]
    assert index.find_held(words_of(near[:18])).tolist() == [*range(16), -1, -1]
