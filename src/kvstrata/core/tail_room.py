"""Tail room: bytes behind every chunk of primary that one tier may use (`TierContext.tail_room`).

A record of a chunk is its payload and a header. Where the header can stand right behind the payload, both are one
transfer; where it cannot, they are two. Only one tier is given the room, since two may store from a slot at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvstrata.core.messages import TierPort
from kvstrata.core.pages import affordable_tail_room
from kvstrata.core.settings import CoreConfig


def share_tail_room(
    config: CoreConfig, chunk_bytes: Sequence[int], tiers: Sequence[TierPort]
) -> tuple[CoreConfig, list[int]]:
    """The settings of a core over `tiers`, and the tail room that each of them is opened with.

    The first tier that wants some has it, if primary can afford it; all others have none.
    """
    shares = [0] * len(tiers)
    wanted = [tier.capabilities.tail_room for tier in tiers]
    first = next((index for index, room in enumerate(wanted) if room), None)
    if first is not None:
        shares[first] = affordable_tail_room(wanted[first], config.capacity_bytes, chunk_bytes, config.alignment)
    return dataclasses.replace(config, tail_room=sum(shares)), shares
