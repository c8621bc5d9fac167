"""The fs tier's index: order, accounts, and the cost of a large trim."""

from __future__ import annotations

import pytest

from kvstrata.testing import chunk_keys
from kvstrata.tiers.common.index import Index
from kvstrata.tiers.fs.find import Found

NAMES = chunk_keys(8)


def filled(limit: int | None = 100, count: int = 5, size: int = 10) -> Index:
    index = Index(limit)
    for name in NAMES[:count]:
        index.add(name, size)
    return index


def recount(index: Index) -> int:
    files = [*index.entries.values(), *index.fresh.values()]
    return sum(entry.allocated for entry in files) + sum(index.strays.values())


def test_accounts_follow_every_change() -> None:
    index = filled()
    index.add(NAMES[0], 30)  # a new version takes the place of the old one
    index.add(NAMES[5], 10, fresh=True)
    index.add_stray("left.tmp", 7)
    index.add(b"n" * 16 + NAMES[6], 5)
    assert index.held == recount(index) == 92
    assert index.evictable == 75
    assert (len(index), index.hidden, index.room, index.excess) == (6, 1, 8, 0)
    index.settle([NAMES[5]])
    assert index.evictable == 85
    index.drop_stray("left.tmp")
    index.drop_stray("left.tmp")
    victims = index.condemn([NAMES[0], NAMES[7], NAMES[1]])
    assert [(victim.name, victim.allocated) for victim in victims] == [(NAMES[0], 30), (NAMES[1], 10)]
    assert index.dying == {NAMES[0], NAMES[1]}
    assert index.held == recount(index) == 45
    index.bury(NAMES[0], None)
    index.bury(NAMES[1], 10)
    assert index.held == recount(index) == 55
    assert index.dying == set()
    assert index.peak == 92


def test_victims_are_the_coldest_and_never_fresh() -> None:
    index = filled()
    index.add(NAMES[5], 10, fresh=True)
    index.touch([NAMES[0], NAMES[1]])
    assert index.victims(25) == [NAMES[2], NAMES[3], NAMES[4]]
    assert index.victims(0) == []
    assert index.victims(1000) == [NAMES[2], NAMES[3], NAMES[4], NAMES[1], NAMES[0]]


def test_a_job_settles_with_its_tail_coldest() -> None:
    index = filled(count=1)
    for name in NAMES[1:4]:
        index.add(name, 10, fresh=True)
    index.settle(NAMES[1:4])
    assert list(index.entries) == [NAMES[0], NAMES[3], NAMES[2], NAMES[1]]


def test_versions_differ() -> None:
    index = filled(count=1)
    first = index.get(NAMES[0])
    index.add(NAMES[0], 10)
    second = index.get(NAMES[0])
    assert first is not None
    assert second is not None
    assert first.generation != second.generation


@pytest.mark.slow
def test_many_entries_are_trimmed_in_one_pass() -> None:
    count, size = 200_000, 4096
    index = Index(190_000 * size)
    index.load(Found(number.to_bytes(36, "big"), size, number) for number in range(count))
    assert index.excess == 10_000 * size
    victims = index.condemn(index.victims(index.excess))
    assert len(victims) == 10_000
    assert victims[0].name == (0).to_bytes(36, "big")
    assert index.excess == 0
