"""Which stores that are under way read blocks that a step may write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstrata.integrations.vllm.metadata import CopyJob, GroupCopy
from kvstrata.integrations.vllm.shapes import EngineShape


@dataclass(frozen=True, slots=True)
class Sources:
    """The blocks that a store reads. `volatile`: among them a state that its own request goes on to change."""

    blocks: frozenset[int]
    volatile: bool

    @classmethod
    def of(cls, shape: EngineShape, copies: Sequence[GroupCopy]) -> Sources:
        """The sources of a store's copies."""
        return cls(
            frozenset(block for copy in copies for block in copy.blocks),
            any(shape.groups[copy.group].recurrent for copy in copies),
        )

    def endangered(self, fresh: frozenset[int]) -> bool:
        """Whether a step that gives these blocks to new owners may write what is read."""
        return self.volatile or not self.blocks.isdisjoint(fresh)


def new_owners(output: Any, loads: Sequence[CopyJob]) -> frozenset[int]:
    """Blocks that may be written in a step by somebody who did not have them before it."""
    found: set[int] = set()
    for request in getattr(output, "scheduled_new_reqs", ()):
        _add(found, request.block_ids)
    cached = getattr(output, "scheduled_cached_reqs", None)
    for blocks in () if cached is None else cached.new_block_ids:
        _add(found, blocks)
    for copy in getattr(output, "kv_cache_block_copies", None) or ():  # glossary: allow
        found.add(copy.dst_block_id)
    for job in loads:
        for group in job.groups:
            found.update(group.blocks)
    return frozenset(found)


def _add(found: set[int], tables: Iterable[Iterable[int]] | None) -> None:
    for table in tables or ():
        found.update(table)
