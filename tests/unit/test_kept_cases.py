"""The store rule on cases that people can check by hand, and the cost of a step in which nothing happens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstrata.layout.cursor import StoreCursor
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kept import default_keep_interval, joint_boundaries, kept_boundaries, stored_chunks, whole_chunks
from kvstrata.layout.kinds import ChunkedLocal, FullAttention, RecurrentState, SlidingWindow
from kvstrata.layout.presets import PRESETS

FULL, WINDOW = Group(FullAttention(), 48), Group(SlidingWindow(33), 16)
HYBRID = Layout((FULL, WINDOW))


def lists(chunks: tuple[object, ...]) -> list[list[int]]:
    return [some.tolist() for some in chunks]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("layout", "interval"),
    [
        (Layout((Group(FullAttention(), 16),)), 1024),
        (Layout((Group(FullAttention(), 100),)), 1100),
        (Layout((Group(SlidingWindow(1024), 16), Group(FullAttention(), 48))), 4128),
        (PRESETS["sliding"].layout(), 1024),
        (PRESETS["five-to-one"].layout(), 4096),
    ],
)
def test_default_interval(layout: Layout, interval: int) -> None:
    assert default_keep_interval(layout) == interval


def test_boundaries_are_joint_not_rounded_group_by_group() -> None:
    # 100 tokens: two whole chunks of 48, six of 16. Rounded by itself the window would keep the end at 96 = 6 * 16;
    # with chunks of 40 in the full group its six chunks end at 80, which is where the window must be kept.
    layout = Layout((Group(FullAttention(), 40), WINDOW))
    assert kept_boundaries(layout, 100, 100, 100, None) == [80]
    assert lists(stored_chunks(layout, [80], 100)) == [[0, 1], [3, 4]]


def test_marks_of_interval_junction_and_end() -> None:
    assert kept_boundaries(HYBRID, 300, 300, 300, 100, [150]) == [100, 150, 200, 288]
    assert kept_boundaries(HYBRID, 300, 300, 250, 100, [150]) == [100, 150, 200]
    assert kept_boundaries(HYBRID, None, 300, 250, 100, [150]) == [100, 150, 200]
    assert kept_boundaries(HYBRID, None, 300, 250, 100, [150], finished=True) == [100, 150, 200, 240]


def test_the_limits_of_the_next_request_are_kept_unaligned() -> None:
    layout = Layout((FULL, WINDOW), alignment_tokens=64)
    # 288 = 6 * 48 = 18 * 16; the largest aligned joint boundary is 256.
    assert kept_boundaries(layout, 288, 288, 288, None) == [256, 287, 288]


def test_a_drafter_s_newest_chunk_waits_until_it_is_final() -> None:
    layout = Layout((replace(FULL, drafter=True), replace(WINDOW, drafter=True), WINDOW))
    assert whole_chunks(layout, None, 96) == [1, 5, 6]
    assert whole_chunks(layout, None, 97) == [2, 6, 6]
    assert whole_chunks(layout, None, 96, finished=True) == [2, 6, 6]
    assert whole_chunks(layout, 96, 500) == [2, 6, 6]
    assert kept_boundaries(layout, 96, 96, 96, None) == []
    assert kept_boundaries(layout, 96, 96, 97, None) == [48]
    assert lists(stored_chunks(layout, [48], 97, total=96)) == [[0, 1], [1, 2, 3], [1, 2]]


def test_chunked_local_may_be_past_its_last_whole_chunk_at_its_multiples() -> None:
    layout = Layout((Group(ChunkedLocal(10), 16), Group(SlidingWindow(5), 1)))
    assert joint_boundaries(layout, [25, 30, 31, 33], whole_chunks(layout, 31, 31)).tolist() == [20, 30, 30, 30]
    alone = Layout((Group(ChunkedLocal(10), 4),))
    assert joint_boundaries(alone, [0, 9, 10, 11], None).tolist() == [0, 9, 9, 11]
    assert joint_boundaries(alone, [33], whole_chunks(alone, 31, 31)).tolist() == [28]


def test_layouts_without_boundaries_keep_none() -> None:
    for layout in (Layout((Group(RecurrentState("none"), 4), FULL)), Layout((Group(SlidingWindow(1), 4),))):
        assert kept_boundaries(layout, 100, 100, 100, 10) == []
        cursor = StoreCursor(layout, 100, 10, total=100)
        cursor.advance(100)
        assert not any(map(len, cursor.advance(100, finished=True)))


def test_a_step_in_which_nothing_became_whole_costs_one_comparison() -> None:
    cursor = StoreCursor(HYBRID, 1000, 512)
    assert lists(cursor.advance(47)) == [[], []]
    assert cursor.next_at == 48
    assert cursor.advance(47) is cursor.advance(10)
    assert lists(cursor.advance(48)) == [[0], []]
    assert cursor.next_at == 96
    assert lists(cursor.advance(530)) == [list(range(1, 11)), [30, 31]]


def test_an_aborted_request_keeps_the_end_of_what_it_reached() -> None:
    cursor = StoreCursor(HYBRID, 1000, 512, total=1000)
    assert lists(cursor.advance(300)) == [list(range(6)), []]
    assert lists(cursor.advance(300, finished=True)) == [[], [16, 17]]
    assert not any(map(len, cursor.advance(2000)))
    cursor.keep(100)
    assert not any(map(len, cursor.advance(2000, finished=True)))


def test_a_junction_that_is_named_late_is_kept_too() -> None:
    cursor = StoreCursor(HYBRID, 1000, 512, total=600)
    cursor.advance(300)
    cursor.keep(96)
    assert cursor.next_at == 96
    assert lists(cursor.advance(300)) == [[], [4, 5]]
    cursor.keep(90)  # chunk 4 is there already
    assert lists(cursor.advance(300)) == [[], [3]]


def test_states_that_the_engine_hands_off_are_the_only_boundaries_of_mode_align() -> None:
    layout = Layout((Group(FullAttention(), 16), Group(RecurrentState("align"), 16), WINDOW))
    for total in (None, 400):
        cursor = StoreCursor(layout, 400, None, total=total, named_only=True, junctions=[32])
        assert lists(cursor.advance(100)) == [[0, 1, 2, 3, 4, 5], [1], [0, 1]]
        cursor.keep(112)
        assert lists(cursor.advance(112)) == [[6], [6], [5, 6]]
        assert lists(cursor.advance(399)) == [list(range(7, 24)), [], []]
        cursor.keep(384)
        assert lists(cursor.advance(399, finished=True)) == [[], [23], [22, 23]]
