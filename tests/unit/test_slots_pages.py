"""How primary is cut into pages, and how columns follow what is carved."""

from __future__ import annotations

import numpy as np
import pytest

from kvstrata.core.pages import choose_page_bytes, make_geometry
from kvstrata.core.residency import Residency
from kvstrata.errors import ConfigError
from kvstrata.policy.lru import LRU


def keys(start: int, count: int) -> list[bytes]:
    return [b"%036d" % number for number in range(start, start + count)]


def test_unlike_sizes_share_primary_without_padding() -> None:
    residency = Residency(2_020_000, [100, 1900], LRU())
    assert residency.reserve(keys(0, 1000), [0] * 1000) is not None
    assert residency.reserve(keys(1000, 1000), [1] * 1000) is not None
    assert residency.statistics().evicted == 0
    assert residency.reserved_bytes == 2_000_000
    residency.check()


@pytest.mark.parametrize("sizes", [[100, 1900], [1000, 1900], [64, 48, 4096], [96, 160, 700, 1200], [33, 77, 1001]])
def test_rounding_wastes_little(sizes: list[int]) -> None:
    page = choose_page_bytes(100_000_000, sorted(sizes))
    assert page >= max(sizes)
    assert max(page % size for size in sizes) / page < 0.02


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 7, 97, 1000])
def test_one_size_loses_no_slot(slots: int) -> None:
    geometry = make_geometry(slots * 4096 + 4095, [4096, 4096])
    assert geometry.pages * geometry.classes[0].per_page == slots
    assert geometry.class_of == (0, 0)


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_tiny_primaries_keep_pages_for_every_large_chunk(slots: int) -> None:
    geometry = make_geometry(slots * 1900, [100, 1900])
    assert geometry.pages * geometry.classes[1].per_page == slots


def test_slots_are_aligned_and_true_lengths_kept() -> None:
    residency = Residency(64 * 512, [700, 100], LRU(), alignment=512)
    taken = residency.reserve(keys(0, 4), [0, 1, 0, 1])
    assert taken is not None
    slots = taken[0]
    assert (residency.offset[slots] % 512 == 0).all()
    assert residency.length[slots].tolist() == [700, 100, 700, 100]
    assert residency.waste_bytes >= (1024 - 700) * 2 + (512 - 100) * 2
    residency.check()


@pytest.mark.parametrize(
    ("capacity", "sizes", "alignment", "what"),
    [
        (99, [10, 100], 1, "99 bytes cannot hold one chunk of group 1 \\(100 bytes\\)"),
        (600, [600], 512, "cannot hold one chunk of group 0 \\(1024 bytes\\)"),
        (0, [1], 1, "cannot hold"),
        (100, [], 1, "no groups"),
        (100, [10, 0], 1, "group 1 has chunks of 0 bytes"),
        (100, [10], 0, "alignment"),
        (100, [1] * 40_000, 1, "40000 groups"),
    ],
)
def test_impossible_sizes_are_refused_by_name(capacity: int, sizes: list[int], alignment: int, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        make_geometry(capacity, sizes, alignment)


def test_an_endless_primary_costs_what_is_carved() -> None:
    residency = Residency(1 << 62, [4 << 20, 64], LRU())
    assert residency.reserve(keys(0, 3), [0, 0, 0]) is not None
    assert residency.table.rows < 300
    assert len(residency.state) < 300
    residency.check()


def test_columns_of_wildly_different_sizes_stay_bounded_by_what_is_carved() -> None:
    residency = Residency(8 * (4 << 20), [4 << 20, 64], LRU())
    small = 4 << 20 >> 6
    for turn in range(40):
        group = turn % 2
        taken = residency.reserve(keys(turn * 10, 8 if group == 0 else 1), [group] * (8 if group == 0 else 1))
        assert taken is not None
        residency.publish(taken[0])
    assert residency.table.rows <= 8 + small  # one page of small ones at a time, its rows used again
    residency.check()


def test_one_call_gets_neighbours() -> None:
    residency = Residency(100 * 512, [512], LRU())
    for start in range(0, 100, 20):
        taken = residency.reserve(keys(start, 20), [0] * 20)
        assert taken is not None
        assert np.diff(residency.offset[taken[0]]).tolist() == [512] * 19
        residency.publish(taken[0])
    taken = residency.reserve(keys(100, 20), [0] * 20)
    assert taken is not None
    assert taken[1] == keys(0, 20)[::-1]
    assert np.diff(residency.offset[taken[0]]).tolist() == [512] * 19
