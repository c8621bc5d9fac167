"""Accelerator memory of the simulated engine: paged blocks with a prefix cache that overflows.

Blocks are given out, hashed and reused in runs of one chunk, so that hits here and in the tiers have one grain. All
groups share one pool of bytes. A block of a finished request stays cached until its room is needed: the longest
unused goes first, and of one request the tail before the head. Full-attention and chunked-local groups keep every
whole chunk of a prompt; window and recurrent groups keep what a kept boundary consumes, as an engine with sparse
retention does, and free the rest while they compute.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstrata.errors import InternalError
from kvstrata.layout.groups import Layout
from kvstrata.layout.planner import resolve
from kvstrata.types import I8, OffloadKey, Presence

Ranges = tuple[tuple[int, int], ...]


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request in accelerator memory."""

    keys: Sequence[Sequence[OffloadKey]]
    kept: Sequence[Sequence[int]]
    """Per group the chunks that stay cached after the request, in token order."""
    total: int
    """Prompt tokens."""
    spare: int
    """Output tokens, which get blocks but no key."""
    held: dict[OffloadKey, None] = field(default_factory=dict)
    """Keys whose blocks this request refers to, in the order in which it got them."""
    reserved: int = 0
    """Bytes that are set aside for blocks without a key."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What the engine's own cache has of a request: `tokens`, and the chunks per group that make them up."""

    tokens: int
    ranges: Ranges


class Accelerator:
    """The pool. `version` changes whenever what is cached changes, so that a look-up need not be repeated."""

    def __init__(self, layout: Layout, capacity_bytes: int) -> None:
        self._layout = layout
        self._bytes = layout.chunk_bytes
        self._tokens = layout.tokens_per_chunk
        self._grain = min(group.tokens_per_block for group in layout.groups)
        self._size = {group.to_bytes(4, "big"): size for group, size in enumerate(layout.chunk_bytes)}
        self._refs: dict[OffloadKey, int] = {}
        self._idle: OrderedDict[OffloadKey, None] = OrderedDict()  # cached, nobody refers to it; oldest first
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self.evicted = 0
        self.version = 0

    @property
    def chunks_held(self) -> int:
        """Cached chunks, in use or not."""
        return len(self._refs)

    def need(self, total: int, spare: int, kept: Sequence[Sequence[int]]) -> int:
        """Bytes that a request needs at most, whatever of it is cached."""
        groups = range(len(self._bytes))
        return sum(self._group_need(group, total + spare, len(kept[group]), windows=3) for group in groups)

    def computed(self, table: BlockTable) -> Computed:
        """The largest boundary that the cached blocks allow: at most total - 1, a multiple of the smallest block."""
        limit = (table.total - 1) // self._grain * self._grain
        empty = Computed(0, ((0, 0),) * len(self._bytes))
        presence = [self._presence(keys) for keys in table.keys]
        if limit <= 0 or not any(len(found) and found.any() for found in presence):
            return empty
        decision = resolve(self._layout, presence, 0, table.total, limit=limit)
        return Computed(decision.boundary, tuple(decision.ranges)) if decision.boundary > 0 else empty

    def admit(self, table: BlockTable, computed: Computed) -> bool:
        """Refer to the cached blocks and set the rest of the request's room aside; False if there is no room."""
        hit = list(_keys_in(table.keys, computed.ranges))
        self._refer(hit)
        table.held = dict.fromkeys(hit)
        need = 0
        for group, (low, high) in enumerate(computed.ranges):
            kept = sum(1 for index in table.kept[group] if not low <= index < high)
            need += self._group_need(group, table.total + table.spare, kept, windows=2)
            if self._layout.groups[group].kind.stores_all:
                need -= (high - low) * self._bytes[group]
        if not self._make_room(need):
            self._forget(table)
            return False
        table.reserved = need
        self._use(need)
        return True

    def fill(self, table: BlockTable, chunks: Iterable[tuple[int, int]]) -> None:
        """Blocks of these (group, chunk index) now hold their tokens: they are cached under their keys."""
        refs, held = self._refs, table.held
        for group, index in chunks:
            key = table.keys[group][index]
            if key in held:
                continue
            held[key] = None
            table.reserved -= self._bytes[group]
            if key not in refs:
                refs[key] = 1
                self.version += 1
            else:  # somebody else computed the same chunk meanwhile: one block is enough
                self._refer((key,))
                self.used_bytes -= self._bytes[group]
        if table.reserved < 0:
            self._use(-table.reserved)
            table.reserved = 0

    def release(self, table: BlockTable) -> None:
        """The request is done: its blocks stay cached until their room is needed."""
        self.used_bytes -= table.reserved
        table.reserved = 0
        self._forget(table)

    def check(self) -> None:
        """Recount; raises `InternalError` if the counters are wrong."""
        cached = sum(self._size[key[-4:]] for key in self._refs)
        if cached > self.used_bytes or {key for key, refs in self._refs.items() if not refs} != set(self._idle):
            raise InternalError("the simulated accelerator lost count of its blocks")

    def _group_need(self, group: int, tokens: int, kept: int, windows: int) -> int:
        """Bytes of one group for a request of `tokens` tokens of which `kept` chunks stay cached.

        A window (or state) may be there three times: as it was found cached, as it was loaded, and as it runs.
        """
        per_chunk = self._tokens[group]
        whole = -(-tokens // per_chunk)
        kind = self._layout.groups[group].kind
        if kind.stores_all:
            return whole * self._bytes[group]
        low, high = kind.consumed(np.array([whole * per_chunk], dtype=np.int64), 0, per_chunk)
        return (kept + windows * (int(high[0] - low[0]) + 1)) * self._bytes[group]

    def _presence(self, keys: Sequence[OffloadKey]) -> I8:
        found = np.fromiter(map(self._refs.__contains__, keys), dtype=np.int8, count=len(keys))
        return found * np.int8(Presence.PRESENT)

    def _refer(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            self._refs[key] += 1
            self._idle.pop(key, None)

    def _forget(self, table: BlockTable) -> None:
        """Give the references back, the tail of the prompt first."""
        refs = self._refs
        for key in reversed(table.held):
            refs[key] -= 1
            if not refs[key]:
                self._idle[key] = None
        table.held = {}

    def _make_room(self, need: int) -> bool:
        """Evict what was unused the longest until `need` bytes are free; evicts nothing if that cannot be."""
        excess = self.used_bytes + need - self.capacity_bytes
        if excess <= 0:
            return True
        victims = []
        for key in self._idle:
            victims.append(key)
            excess -= self._size[key[-4:]]
            if excess <= 0:
                break
        if excess > 0:
            return False
        for key in victims:
            del self._idle[key], self._refs[key]
            self.used_bytes -= self._size[key[-4:]]
        self.evicted += len(victims)
        self.version += 1
        return True

    def _use(self, size: int) -> None:
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)


def _keys_in(keys: Sequence[Sequence[OffloadKey]], ranges: Ranges) -> Iterable[OffloadKey]:
    """The keys of these chunks, group by group."""
    for group, (low, high) in enumerate(ranges):
        yield from keys[group][low:high]
