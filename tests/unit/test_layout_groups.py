"""Groups, layouts, kinds and the builder: derived fields, and errors that name the field."""

from __future__ import annotations

import pytest

from kvstrata.errors import ConfigError
from kvstrata.layout.build import layout_from_dict
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds import ChunkedLocal, FullAttention, RecurrentState, SlidingWindow


def test_derived_fields() -> None:
    layout = Layout(
        (
            Group(ChunkedLocal(8), 4, chunk_bytes=7),
            Group(RecurrentState(), 6),
            Group(FullAttention(), 16, chunk_bytes=9),
        ),
        blocks_per_chunk=2,
        alignment_tokens=5,
    )
    assert layout.tokens_per_chunk == (8, 12, 32)
    assert layout.chunk_bytes == (7, 0, 9)
    assert layout.order == (2, 1, 0)
    assert (layout.kind_step, layout.boundary_step, layout.idle_step) == (12, 60, 0)
    assert not layout.all_full


def test_the_limit_is_n_only_if_every_group_is_full_and_loads_are_asynchronous() -> None:
    full = Layout((Group(FullAttention(), 16), Group(FullAttention(), 32, drafter=True)))
    assert full.limit(100) == 100
    assert full.limit(100, asynchronous=False) == 99
    assert Layout((Group(FullAttention(), 16), Group(SlidingWindow(4), 16))).limit(100) == 99


def test_steps_that_have_no_common_multiple_in_reach_stay_finite() -> None:
    primes = [1_000_003, 1_000_033, 1_000_037, 1_000_039]
    layout = Layout(tuple(Group(RecurrentState(), prime) for prime in primes))
    assert layout.boundary_step == 1 << 62


def test_ranges_of_a_boundary() -> None:
    layout = Layout((Group(FullAttention(), 4, drafter=True), Group(SlidingWindow(3), 2), Group(ChunkedLocal(8), 4)))
    assert layout.needed_ranges(8, 5) == ((1, 3), (3, 4), (2, 2))
    assert layout.consumed_ranges(8, 5) == ((1, 2), (3, 4), (0, 0))


def test_labels_and_parameters() -> None:
    layout = Layout((Group(SlidingWindow(4, 2), 16, drafter=True, name="mtp"), Group(RecurrentState("align"), 16)))
    assert [group.label for group in layout.groups] == ["mtp, sliding_window, drafter", "recurrent"]
    assert layout.parameters() == (
        {"kind": "sliding_window", "window": 4, "retained_extra_tokens": 2, "drafter": 1},
        {"kind": "recurrent", "mode": "align", "drafter": 0},
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"groups": []}, "groups: must have at least one group"),
        ({}, "groups: is missing"),
        ({"groups": [{"tokens_per_block": 16}]}, "groups[0].kind: is missing"),
        ({"groups": [{"kind": "full"}]}, "groups[0].tokens_per_block: is missing"),
        (
            {"groups": [{"kind": "fuller", "tokens_per_block": 16}]},
            "groups[0].kind: must be one of full, sliding_window",
        ),
        (
            {"groups": [{"kind": "full", "tokens_per_block": 0}]},
            "groups[0].tokens_per_block: must be at least 1, got 0",
        ),
        ({"groups": [{"kind": "full", "tokens_per_block": 1 << 40}]}, "groups[0].tokens_per_block: must be at most"),
        ({"groups": [{"kind": "full", "tokens_per_block": "x"}]}, "groups[0].tokens_per_block: Expected `int`"),
        ({"groups": [{"kind": "full", "tokens_per_block": 4, "size": 1}]}, "groups[0].size: is not a known field"),
        (
            {"groups": [{"kind": "full", "tokens_per_block": 4}, {"kind": "sliding_window", "tokens_per_block": 4}]},
            "groups[1].window: must be at least 1, got 0",
        ),
        (
            {"groups": [{"kind": "full", "tokens_per_block": 4, "window": -1}]},
            "groups[0].window: must be at least 0, got -1",
        ),
        ({"groups": [{"kind": "chunked_local", "tokens_per_block": 4}]}, "groups[0].chunk_tokens: must be at least 1"),
        (
            {"groups": [{"kind": "recurrent", "tokens_per_block": 4, "drafter": True}]},
            "groups[0].drafter: a recurrent group cannot be a drafter",
        ),
        (
            {"groups": [{"kind": "chunked_local", "chunk_tokens": 4, "tokens_per_block": 4, "drafter": True}]},
            "groups[0].drafter: a chunked_local group cannot be a drafter",
        ),
        (
            {"groups": [{"kind": "full", "tokens_per_block": 4}], "blocks_per_chunk": 0},
            "blocks_per_chunk: must be at least 1, got 0",
        ),
        (
            {"groups": [{"kind": "full", "tokens_per_block": 4}], "alignment_tokens": -2},
            "alignment_tokens: must be at least 1, got -2",
        ),
    ],
)
def test_bad_layouts_are_refused_by_field(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        layout_from_dict(fields)
    assert str(error.value).startswith(message)


def test_a_layout_from_json_fields() -> None:
    fields = {
        "groups": [
            {"kind": "full", "tokens_per_block": 16, "drafter": True},
            {"kind": "sliding_window", "tokens_per_block": 8, "window": 128, "retained_extra_tokens": 4},
            {"kind": "chunked_local", "tokens_per_block": 8, "chunk_tokens": 64},
            {"kind": "recurrent", "tokens_per_block": 32},
        ],
        "blocks_per_chunk": 2,
        "alignment_tokens": 4,
    }
    groups = (
        Group(FullAttention(), 16, drafter=True),
        Group(SlidingWindow(128, 4), 8),
        Group(ChunkedLocal(64), 8),
        Group(RecurrentState(), 32),
    )
    assert layout_from_dict(fields) == Layout(groups, 2, 4)


def test_kinds_refuse_impossible_parameters() -> None:
    with pytest.raises(ConfigError, match=r"^window: must be a whole number, got True"):
        SlidingWindow(True)
    with pytest.raises(ConfigError, match=r"^retained_extra_tokens: must be at least 0, got -1"):
        SlidingWindow(4, -1)
    with pytest.raises(ConfigError, match=r"^mode: must be align, all or none, got 'some'"):
        RecurrentState("some")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^groups\[0\].chunk_bytes: must be at least 0"):
        Layout((Group(FullAttention(), 4, chunk_bytes=-1),))
