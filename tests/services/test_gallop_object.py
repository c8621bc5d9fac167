"""What resolving a long prefix costs an object store, counted at the server, with 20 ms for each request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from servers import S3Server
from services_stack import Place

from kvstrata.core.messages import RequestOptions
from kvstrata.core.settings import CoreConfig
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds import FullAttention, SlidingWindow
from kvstrata.testing.node import Node
from kvstrata.tiers.server.core import State
from kvstrata.types import I8, OffloadKey

CHUNKS = 2048
TOKENS = 16
WINDOW_CHUNKS = 8
BYTES = 64
FULL = Group(FullAttention(), TOKENS, chunk_bytes=BYTES)
WINDOWED = Group(SlidingWindow(WINDOW_CHUNKS * TOKENS), TOKENS, chunk_bytes=BYTES)


def count(place: Place, layout: Layout, seed: int) -> tuple[int, int, int, int]:
    """Cut and hit in chunks, existence requests at the server, and probes, each of which is one round trip."""
    server = place.server
    assert isinstance(server, S3Server)
    cut = int(np.random.default_rng(seed).integers(WINDOW_CHUNKS, CHUNKS))
    patient = CoreConfig(capacity_bytes=64 << 20, stall_s=60.0, total_s=60.0, cascade_queue=1 << 16)
    tier = place.make("mine", timeout_s=30.0)
    asked: list[int] = []
    probe = tier.probe

    def counted(keys: Sequence[OffloadKey]) -> I8 | int:
        asked.append(len(keys))
        return probe(keys)

    with Node(layout, [place.make("other", timeout_s=30.0)], config=patient) as writer:
        for end in (cut // 2, cut):  # no more at once than the tier queues
            writer.store("a", end * TOKENS, settle_s=120)
    tier.probe = counted  # type: ignore[method-assign]
    with Node(layout, [tier], config=patient) as node:
        node.wait_for(lambda: tier._state is State.READY, 30)  # type: ignore[attr-defined]  # it knows its own part
        server.behave(delay_s=0.02)
        hit = node.load("a", CHUNKS * TOKENS, RequestOptions(), within_s=120)
        heads = server.counts().get("HEAD", 0)
        node.check_idle()
    return cut, hit, heads, len(asked)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["object"], indirect=True)
@pytest.mark.parametrize("seed", [1, 4])
def test_a_prefix_of_2048_chunks_costs_few_existence_requests(place: Place, seed: int) -> None:
    cut, hit, heads, rounds = count(place, Layout((FULL,)), seed)
    assert hit == cut * TOKENS
    assert heads <= 40
    assert rounds <= 14


@pytest.mark.slow
@pytest.mark.parametrize("place", ["object"], indirect=True)
def test_two_windowed_groups_cost_two_windows_more_at_the_server(place: Place) -> None:
    cut, hit, heads, rounds = count(place, Layout((FULL, WINDOWED, WINDOWED)), 3)
    assert hit == cut * TOKENS
    assert heads <= 40 + 2 * (WINDOW_CHUNKS + 2)
    assert rounds <= 14
