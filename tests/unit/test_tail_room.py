"""Tail room: bytes behind every chunk that one tier may use, and nobody else has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.config import config_from_dict
from kvstrata.core.pages import affordable_tail_room, make_geometry
from kvstrata.core.residency import Residency
from kvstrata.core.settings import CoreConfig
from kvstrata.core.tail_room import share_tail_room
from kvstrata.errors import ConfigError, InternalError
from kvstrata.integrations.vllm.settings import VllmSettings
from kvstrata.integrations.vllm.stack import Stack
from kvstrata.policy.lru import LRU
from kvstrata.testing.clock import ManualClock
from kvstrata.testing.node import Node, one_group
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.memory import MemoryTier
from kvstrata.types import Capabilities, TierJob

ROOM = 128
CHUNK = 16384
TOKENS = 16


class RoomyTier(MemoryTier):
    """Scribbles over all the room that it is given, in every job."""

    def __init__(self, name: str = "roomy", wanted: int = ROOM) -> None:
        super().__init__(name=name)
        self.capabilities = Capabilities(sync_probe=True, tail_room=wanted)
        self.given = -1
        self.scribbled = 0

    def open(self, context: TierContext) -> None:
        self._primary, self.given = context.region, context.tail_room
        super().open(context)

    def _scribble(self, job: TierJob, work: Callable[[TierJob], None]) -> None:
        for offset, length in zip(job.offsets, job.lengths, strict=True):
            room = self._primary[offset + length : offset + length + self.given]
            assert len(room) == self.given, "the room lies in primary"
            room[:] = b"\xff" * self.given
            self.scribbled += self.given
        work(job)

    def submit_load(self, job: TierJob) -> None:
        self._scribble(job, super().submit_load)

    def submit_store(self, job: TierJob) -> None:
        self._scribble(job, super().submit_store)


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=3),
    alignment=st.sampled_from([1, 8, 512]),
    room=st.integers(0, 300),
    count=st.integers(3, 40),
)
def test_no_slot_reaches_into_the_room_of_another(sizes: list[int], alignment: int, room: int, count: int) -> None:
    capacity = count * (max(sizes) + room + alignment)
    residency = Residency(capacity, sizes, LRU(), alignment=alignment, tail_room=room)
    for number in range(2 * count):
        taken = residency.reserve([b"%036d" % number], [number % len(sizes)])
        if taken is not None:
            residency.publish(taken[0])
    residency.check()
    used = np.flatnonzero(residency.state)
    used = used[np.argsort(residency.offset[used])]
    starts, ends = residency.offset[used], residency.offset[used] + residency.length[used] + room
    assert len(used)
    assert (starts[1:] >= ends[:-1]).all()
    assert ends[-1] <= capacity


def test_the_recount_finds_a_chunk_that_reaches_into_its_tail_room() -> None:
    residency = Residency(64 * 1024, [1000], LRU(), alignment=512, tail_room=24)
    taken = residency.reserve([b"%036d" % 1], [0])
    assert taken is not None
    residency.check()
    residency.table.length[taken[0]] = 1001
    residency.reserved_bytes += 1
    with pytest.raises(InternalError, match="too long"):
        residency.check()


def test_tail_room_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="tail room"):
        make_geometry(4096, [64], 1, -1)


@pytest.mark.parametrize(
    ("sizes", "capacity", "room"),
    [
        ([1 << 20], 1 << 30, ROOM),
        ([1 << 18], 1 << 30, ROOM),
        ([1 << 17], 1 << 30, 0),  # a page of 4 KiB is 3 % of it
        ([4000], 1 << 30, 0),
        ([3968], 1 << 30, ROOM),  # alignment leaves it anyway
        ([1 << 20, 4096], 1 << 30, 0),
        ([1 << 20], 1 << 20, 0),  # primary is as large as one chunk
        ([1 << 20, 1 << 20], (2 << 20) + 4096, 0),
    ],
)
def test_tail_room_is_taken_where_it_costs_little(sizes: list[int], capacity: int, room: int) -> None:
    assert affordable_tail_room(ROOM, capacity, sizes, 4096) == room


def test_the_first_tier_that_wants_it_has_it_alone() -> None:
    config = CoreConfig(capacity_bytes=1 << 30, alignment=4096)
    tiers: list[Any] = [MemoryTier(), RoomyTier("one"), RoomyTier("two", 64)]
    given, shares = share_tail_room(config, [1 << 20], tiers)
    assert shares == [0, ROOM, 0]
    assert given.tail_room == ROOM
    assert share_tail_room(config, [4096], tiers) == (config, [0, 0, 0])
    assert share_tail_room(config, [1 << 20], []) == (config, [])


def test_what_a_tier_writes_into_its_room_is_in_nobodys_chunk() -> None:
    roomy = RoomyTier()
    with Node(one_group(CHUNK, TOKENS), [MemoryTier(), roomy], chunks=32) as node:
        assert node.config.tail_room == roomy.given == ROOM
        for turn in range(4):  # more than primary holds; `load` compares every byte
            node.store(f"prompt-{turn}", 16 * TOKENS)
        for turn in range(4):
            assert node.load(f"prompt-{turn}", 16 * TOKENS) == 16 * TOKENS
            node.forget()
        assert roomy.scribbled
        node.settle()
        node.check_idle()


@pytest.mark.parametrize(("chunk", "room"), [(1 << 20, ROOM), (4096, 0)])
def test_an_engine_gives_the_room_to_one_tier_and_its_trial_keeps_within(chunk: int, room: int) -> None:
    tiers = {"one": RoomyTier("one"), "two": RoomyTier("two")}
    named = [{"type": "memory", "name": name} for name in tiers]
    settings = VllmSettings(config_from_dict({"primary": {"size": 16 << 20}, "tiers": named}))
    stack = Stack(
        one_group(chunk, TOKENS), settings, bytes(16), clock=ManualClock(), make=lambda entry, _: tiers[entry.name]
    ).open()
    try:
        assert [tier.given for tier in tiers.values()] == [room, 0]
        assert stack.core_config.tail_room == room
        assert stack.troubles == {}
        assert (tiers["one"].scribbled > 0) is bool(room)
    finally:
        stack.close()
