"""Ladders of real tiers: any order, the nearest that has it is read, filters, cascade per tier, by configuration."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstrata.config import Config, config_from_dict
from kvstrata.core.messages import RequestOptions, TierFilter
from kvstrata.errors import ConfigError
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds import FullAttention, SlidingWindow
from kvstrata.testing.node import Node, one_group
from kvstrata.tiers.base import Tier
from kvstrata.tiers.registry import make_tier
from kvstrata.types import Locality, Medium

TOKENS = 16
CHUNK = 4096
LAYOUT = one_group(CHUNK, TOKENS)


def entries(place: Path) -> dict[str, dict[str, Any]]:
    """One entry of each kind that needs no server."""
    return {
        "memory": {"type": "memory"},
        "disk": {"type": "disk", "path": str(place / "disk"), "limit": 64 << 20, "io_process": False},
        "fs": {"type": "fs", "path": str(place / "fs")},
        "shared": {"type": "fs", "name": "shared", "path": str(place / "shared"), "part": "one"},
        "object": {"type": "object", "url": f"file://{place / 'object'}", "part": "one"},
    }


def configure(*tiers: dict[str, Any], **core: Any) -> Config:
    return config_from_dict({"primary": {"size": 2048 * CHUNK}, "core": core, "tiers": list(tiers)})


def build(config: Config) -> list[Tier]:
    return [make_tier(entry.type, name=entry.name, **entry.options) for entry in config.tiers]


def node_of(config: Config, layout: Layout = LAYOUT) -> Node:
    return Node(layout, build(config), config=config.core)


def landed(node: Node) -> dict[str, int]:
    return {name: counters.landed for name, counters in node.statistics().tiers.items()}


def only(*names: str) -> RequestOptions:
    return RequestOptions(store_tiers=TierFilter(names=frozenset(names)))


ORDERS: Sequence[tuple[str, ...]] = [
    *itertools.permutations(("memory", "shared", "object")),
    ("disk", "shared", "object"),
    ("object", "fs", "disk"),
    ("shared", "disk", "memory", "object", "fs"),
]


@pytest.mark.parametrize("order", ORDERS, ids=",".join)
def test_any_order_stores_everywhere_and_reads_from_the_nearest_that_has_it(
    tmp_path: Path, order: tuple[str, ...]
) -> None:
    (tmp_path / "object").mkdir()
    table = entries(tmp_path)
    with node_of(configure(*(table[name] for name in order))) as node:
        node.store("a", 24 * TOKENS)
        assert {name: c.cascaded for name, c in node.statistics().tiers.items()} == dict.fromkeys(order, 24)
        for kept in order:  # one prompt per tier, that only this tier has
            node.store(kept, 24 * TOKENS, only(kept))
        node.forget()
        assert node.load("a", 24 * TOKENS) == 24 * TOKENS
        node.settle()
        instant = [name for name in order if name in ("memory", "disk", "fs")]
        if order[0] in instant:
            assert landed(node)[order[0]] == 24
        elif instant:  # a nearer tier that does not know yet does not delay one that does
            assert sum(landed(node).values()) == 24
        before = landed(node)
        for kept in order:
            assert node.load(kept, 24 * TOKENS) == 24 * TOKENS
        node.settle()
        assert {name: count - before[name] for name, count in landed(node).items()} == dict.fromkeys(order, 24)
        node.check_idle()


def test_parts_of_one_prompt_in_several_tiers_make_one_hit(tmp_path: Path) -> None:
    table = entries(tmp_path)
    with node_of(configure(table["memory"], table["shared"], table["disk"])) as node:
        node.store("a", 10 * TOKENS, only("memory"))
        node.forget()
        node.store("a", 25 * TOKENS, only("shared"))
        node.forget()
        node.store("a", 40 * TOKENS, only("disk"))
        node.forget()
        assert node.load("a", 60 * TOKENS) == 40 * TOKENS
        node.settle()
        assert landed(node)["memory"] == 10
        assert sum(landed(node).values()) == 40
        node.check_idle()


def test_hybrid_layouts_over_a_ladder_fetch_exactly_what_is_consumed(tmp_path: Path) -> None:
    layout = Layout(
        (
            Group(FullAttention(), TOKENS, chunk_bytes=CHUNK),
            Group(SlidingWindow(4 * TOKENS), TOKENS, chunk_bytes=1024),
            Group(SlidingWindow(4 * TOKENS), 4, chunk_bytes=512),
        )
    )
    table = entries(tmp_path)
    with node_of(configure(table["shared"], table["disk"]), layout) as node:
        node.store("a", 64 * TOKENS)
        node.forget()
        assert node.load("a", 64 * TOKENS) == 64 * TOKENS - 1
        node.settle()
        counters = node.statistics().counters
        assert counters.promoted == counters.consumed == 64 + 4 + 16
        node.check_idle()


# filters


FILTERS = {
    "by medium": (TierFilter(media=frozenset({Medium.SHARED_FS})), {"shared"}),
    "by locality": (TierFilter(localities=frozenset({Locality.LOCAL})), {"memory", "disk"}),
    "by both": (TierFilter(media=frozenset({Medium.CPU}), localities=frozenset({Locality.SHARED})), set()),
    "by name": (TierFilter(names=frozenset({"disk"})), {"disk"}),
    "none": (TierFilter(names=frozenset()), set()),
}


@pytest.mark.parametrize("what", FILTERS)
def test_a_load_filter_keeps_other_tiers_unasked(tmp_path: Path, what: str) -> None:
    admit, names = FILTERS[what]
    table = entries(tmp_path)
    config = configure(table["memory"], table["shared"], table["disk"])
    with node_of(config) as node:
        node.store("a", 8 * TOKENS)
        node.forget()
        hit = node.load("a", 8 * TOKENS, RequestOptions(load_tiers=admit))
        node.settle()
        assert hit == (8 * TOKENS if names else 0)
        for name, counters in node.statistics().tiers.items():
            assert bool(counters.probed or counters.landed) <= (name in names)


@pytest.mark.parametrize("what", FILTERS)
def test_a_store_filter_keeps_other_tiers_empty(tmp_path: Path, what: str) -> None:
    admit, names = FILTERS[what]
    table = entries(tmp_path)
    with node_of(configure(table["memory"], table["shared"], table["disk"])) as node:
        node.store("a", 8 * TOKENS, RequestOptions(store_tiers=admit))
        assert {name for name, c in node.statistics().tiers.items() if c.cascaded} == names


# cascade per tier


def test_a_tier_without_cascade_is_only_read(tmp_path: Path) -> None:
    table = entries(tmp_path)
    with node_of(configure(table["shared"])) as filling:
        filling.store("a", 8 * TOKENS)
    reading = {**table["shared"], "part": "two", "cascade": False}
    with node_of(configure(table["memory"], reading)) as node:
        node.store("b", 8 * TOKENS)
        assert {name: c.cascaded for name, c in node.statistics().tiers.items()} == {"memory": 8, "shared": 0}
        assert node.load("a", 8 * TOKENS) == 8 * TOKENS
        node.forget()
        node.load("b", 8 * TOKENS)
        node.settle()
        assert node.statistics().tiers["shared"].cascaded == 0
    assert not list((tmp_path / "shared" / "parts" / "two").glob("*/*/*"))


def test_cascade_must_be_true_or_false() -> None:
    assert configure({"type": "memory", "cascade": False}).core.no_cascade == {"memory"}
    assert configure({"type": "memory"}).core.no_cascade == frozenset()
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.cascade"):
        configure({"type": "memory", "cascade": "sometimes"})
    with pytest.raises(ConfigError, match=r"core\.no_cascade"):
        config_from_dict({"core": {"no_cascade": ["memory"]}})


def test_two_tiers_of_one_kind_need_names() -> None:
    with pytest.raises(ConfigError, match="already the name"):
        configure({"type": "memory"}, {"type": "memory"})
    assert len(configure({"type": "memory"}, {"type": "memory", "name": "second"}).tiers) == 2
