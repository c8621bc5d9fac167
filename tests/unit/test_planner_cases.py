"""The planner on cases that people can check by hand: the worked examples, costs in passes, and the sentences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvstrata.layout import search
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds import ChunkedLocal, FullAttention, RecurrentState, SlidingWindow
from kvstrata.layout.planner import Decision, resolve
from kvstrata.layout.presets import PRESETS
from kvstrata.layout.spans import Spans, one_span
from kvstrata.testing.layouts import random_layout, random_presence
from kvstrata.testing.oracle import oracle
from kvstrata.types import I8, Presence

A, U, P = Presence.ABSENT, Presence.UNKNOWN, Presence.PRESENT


def flags(*values: int) -> I8:
    return np.array(values, dtype=np.int8)


def filled(layout: Layout, total: int, value: Presence = P) -> list[I8]:
    return [np.full(total // tokens, value, dtype=np.int8) for tokens in layout.tokens_per_chunk]


def probes(decision: Decision) -> list[list[int]]:
    return [chunks.tolist() for chunks in decision.probe]


def test_the_worked_example_loads_8_of_68_chunks() -> None:
    window = Group(SlidingWindow(2 * 16 + 1), 16)
    layout = Layout((Group(FullAttention(), 128), window, window))
    decision = resolve(layout, filled(layout, 512), 0, 513)
    assert (decision.boundary, decision.ranges) == (512, ((0, 4), (30, 32), (30, 32)))
    assert decision.chunks == 8


def test_the_worked_example_with_unknown_keys_probes_what_it_loads() -> None:
    window = Group(SlidingWindow(2 * 16 + 1), 16)
    layout = Layout((Group(FullAttention(), 128), window, window))
    presence = filled(layout, 512, U)
    first = resolve(layout, presence, 0, 513)
    assert probes(first) == [[0, 1, 2, 3], [], []]  # the prefix first: it bounds what the windows are asked about
    presence[0][:] = [P, P, P, A]
    second = resolve(layout, presence, 0, 513)
    assert probes(second) == [[], [22, 23], [22, 23]]
    for group in (1, 2):
        presence[group][22:24] = P
    third = resolve(layout, presence, 0, 513)
    assert (third.decided, third.boundary, third.ranges) == (True, 384, ((0, 3), (22, 24), (22, 24)))


def test_every_third_window_chunk_missing_loads_nothing() -> None:
    layout = Layout((Group(FullAttention(), 16), Group(SlidingWindow(64), 16)))
    presence = filled(layout, 8192)
    presence[1][::3] = A
    decision = resolve(layout, presence, 0, 8192)
    assert (decision.decided, decision.boundary, decision.chunks) == (True, 0, 0)


def test_a_partly_filled_last_chunk_counts_where_it_is_listed() -> None:
    layout = Layout((Group(FullAttention(), 16),))
    assert resolve(layout, [flags(P, P)], 0, 20).boundary == 20
    assert resolve(layout, [flags(P)], 0, 20).boundary == 16


def test_a_drafter_s_next_chunk_must_be_present_but_is_not_loaded() -> None:
    layout = Layout((Group(FullAttention(), 4, drafter=True),))
    decision = resolve(layout, [flags(P, P, P)], 0, 12)
    assert (decision.boundary, decision.ranges) == (8, ((0, 2),))
    open_ = resolve(layout, [flags(P, P, U)], 0, 12)
    assert probes(open_) == [[2]]
    assert not open_.decided


def test_chunked_local_alone_has_no_boundary_at_its_multiples() -> None:
    layout = Layout((Group(ChunkedLocal(8), 4),))
    assert resolve(layout, [flags(P, P, A)], 0, 12).boundary == 7
    # With another group beside it the multiple is a boundary, and costs this group nothing.
    both = Layout((Group(ChunkedLocal(8), 4), Group(FullAttention(), 4)))
    decision = resolve(both, [flags(A, A), flags(P, P)], 0, 12)
    assert (decision.boundary, decision.ranges) == (8, ((0, 0), (0, 2)))


def test_windows_of_one_token_consume_nothing_and_give_no_hit() -> None:
    layout = Layout((Group(SlidingWindow(1), 4),))
    decision = resolve(layout, [flags(P, P, P)], 0, 12)
    assert (decision.decided, decision.boundary) == (True, 0)


def test_recurrent_mode_none_has_no_boundary() -> None:
    layout = Layout((Group(RecurrentState("none"), 4), Group(FullAttention(), 4)))
    decision = resolve(layout, filled(layout, 40), 0, 40)
    assert (decision.decided, decision.boundary) == (True, 0)
    assert "mode none" in decision.why


def test_128k_tokens_in_30_groups_take_at_most_one_pass_per_group_and_round() -> None:
    """At every pattern of presence; the time is in the benchmark, not here."""
    total = 131_072
    sizes = [16, 24, 32, 40, 48, 16, 20, 64, 10, 16] * 3
    kinds = [FullAttention()] * 3 + [SlidingWindow(128 * (i % 5 + 1)) for i in range(22)]
    kinds += [RecurrentState(), RecurrentState(), *[ChunkedLocal(8192)] * 3]
    groups = [Group(kind, size, chunk_bytes=100) for kind, size in zip(kinds, sizes, strict=True)]
    groups[25], groups[26] = replace(groups[25], tokens_per_block=16), replace(groups[26], tokens_per_block=32)
    layout = Layout(tuple(groups))
    rng = np.random.default_rng(7)
    holes = filled(layout, total)
    for group in holes[3:]:
        group[rng.random(len(group)) < 0.02] = A
    for presence in (filled(layout, total), filled(layout, total, U), holes):
        decision = resolve(layout, presence, 0, total)
        assert decision.rounds == 1
        assert decision.passes <= 30
        limited = resolve(layout, presence, 0, total, byte_limit=1_000_000)
        assert limited.passes <= 30 * limited.rounds
        assert limited.rounds <= 5


def test_huge_prompts_cost_what_is_known_of_them() -> None:
    total = 1 << 40
    for kinds in ([FullAttention()], [SlidingWindow(1 << 30), FullAttention()], [ChunkedLocal(2), ChunkedLocal(3)]):
        layout = Layout(tuple(Group(kind, 1, chunk_bytes=1) for kind in kinds))
        few = [np.full(6, P, dtype=np.int8) for _ in kinds]
        there = [set(range(6)) for _ in kinds]
        for byte_limit in (None, 2):
            decision = resolve(layout, few, 0, total, byte_limit=byte_limit)
            assert decision.boundary == oracle(layout, there, 0, total, limit=9, byte_limit=byte_limit).boundary
        assert resolve(layout, [flags()] * len(kinds), 5, total).boundary == 5
    aligned = Layout((Group(FullAttention(), 1), Group(ChunkedLocal(2), 1)), alignment_tokens=1 << 35)
    assert resolve(aligned, [flags(P), flags(P)], 0, total).boundary == 0


def test_free_boundaries_and_byte_limits_are_searched_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiny rounds the outcome is the same; memory per round is what the constants bound."""
    monkeypatch.setattr(search, "_POINTS", 3)
    monkeypatch.setattr(search, "_CANDIDATES", 2)
    rng = np.random.default_rng(11)
    most = 0
    for _ in range(150):
        layout = random_layout(rng, groups=4)
        total = int(rng.integers(1, 100))
        presence = random_presence(rng, layout, total)
        limit = int(rng.integers(0, 400)) if rng.random() < 0.7 else None
        decision = resolve(layout, presence, 0, total, byte_limit=limit)
        there = [set(np.flatnonzero(group == P).tolist()) for group in presence]
        assert decision.boundary == oracle(layout, there, 0, total, byte_limit=limit).boundary
        assert decision.passes <= len(layout.groups) * decision.rounds
        most = max(most, decision.rounds)
    assert most > 3


SENTENCES = [
    (
        Layout((Group(FullAttention(), 4),)),
        [flags(P, P)],
        0,
        8,
        {},
        "all 2 chunks that it consumes are present, and it is the limit",
    ),
    (
        Layout((Group(FullAttention(), 4), Group(SlidingWindow(5), 4, name="local"))),
        [flags(P, P, P, P), flags(P, P, A, P)],
        0,
        16,
        {},
        "boundary 8: all 3 chunks that it consumes are present; group 1 (local, sliding_window) rules out boundary 15, "
        "for it needs chunk 2 (tokens 8 to 12), which is absent",
    ),
    (
        Layout((Group(FullAttention(), 4), Group(RecurrentState(), 4))),
        [flags(P, P), flags(P, P)],
        0,
        8,
        {},
        "boundary 4: all 2 chunks that it consumes are present, and none between it and the limit 7 suits",
    ),
    (Layout((Group(FullAttention(), 4),)), [flags(A, P)], 2, 8, {}, "no boundary above the 2 computed tokens: group 0"),
    (Layout((Group(FullAttention(), 4),)), [flags(P, P)], 8, 8, {}, "the limit 8 is not above the 8 computed tokens"),
    (Layout((Group(RecurrentState(), 16),)), [flags(P)], 0, 8, {}, "no boundary: none between 0 and 7 suits"),
    (Layout((Group(ChunkedLocal(8), 4),)), [flags()], 0, 8, {}, "no boundary"),
    (
        Layout((Group(FullAttention(), 4, chunk_bytes=10),)),
        [flags(P, P)],
        0,
        8,
        {"byte_limit": 15},
        "boundary 4: the 1 chunk that it consumes is present; boundary 8 would take more than the byte limit of 15",
    ),
    (
        Layout((Group(FullAttention(), 4, chunk_bytes=10),)),
        [flags(P)],
        0,
        8,
        {"byte_limit": 5},
        "more than the byte limit of 5",
    ),
    (
        Layout((Group(FullAttention(), 4),)),
        [flags(P, U)],
        0,
        8,
        {},
        "undecided, so nothing is loaded yet: boundary 8 is the best still possible, "
        "and 1 chunk that it needs is unknown, in group 0 (full)",
    ),
]


@pytest.mark.parametrize(("layout", "presence", "computed", "total", "more", "words"), SENTENCES)
def test_why_names_who_cut_the_boundary_and_where(
    layout: Layout, presence: list[I8], computed: int, total: int, more: dict[str, int], words: str
) -> None:
    assert words in resolve(layout, presence, computed, total, **more).why


def test_spans_behave_as_sets() -> None:
    rng = np.random.default_rng(5)

    def random_set() -> tuple[Spans, set[int]]:
        members = np.flatnonzero(rng.random(40) < rng.random())
        breaks = np.flatnonzero(np.diff(members) > 1)
        starts = np.concatenate([members[:1], members[breaks + 1]])
        ends = np.concatenate([members[breaks], members[-1:]])
        return Spans(starts, ends), set(members.tolist())

    def members_of(spans: Spans) -> set[int]:
        return {t for s, e in zip(spans.starts.tolist(), spans.ends.tolist(), strict=True) for t in range(s, e + 1)}

    for _ in range(200):
        (one, ones), (two, twos) = random_set(), random_set()
        assert members_of(one.intersect(two)) == ones & twos
        assert members_of(one.clip(7, 20)) == ones & set(range(7, 21))
        assert one.holds(np.arange(40)).tolist() == [t in ones for t in range(40)]
    assert len(one_span(3, 2)) == 0
    assert not one_span(3, 2).holds(np.array([3])).any()


PRESET_BYTES = {
    # Bytes of 128 tokens per group, computed by hand from the models' configurations.
    "plain": [32 * 2 * 8 * 128 * 2 * 128],
    "sliding": [12 * 2 * 8 * 64 * 2 * 128] * 2,
    "five-to-one": [8 * 2 * 8 * 256 * 2 * 128] * 6,
    "mla": [61 * 576 * 2 * 128],
    "recurrent": [12 * 2 * 2 * 256 * 2 * 128] + [12 * (32 * 128 * 128 + 3 * 8192) * 2] * 3,
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_models_real_bytes(name: str) -> None:
    preset = PRESETS[name]
    layout = preset.layout()
    assert list(layout.chunk_bytes) == PRESET_BYTES[name]
    assert set(layout.tokens_per_chunk) == {128}
    assert layout.blocks_per_chunk == 8
    assert preset.model
    assert preset.description
    odd = preset.layout(100)
    assert (odd.groups[0].tokens_per_block, odd.blocks_per_chunk) == (4, 25)


def test_bytes_per_token_of_the_plain_preset() -> None:
    assert PRESETS["plain"].bytes_per_token == 131_072
