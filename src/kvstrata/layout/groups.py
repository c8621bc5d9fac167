"""Groups and the layout: what the planner knows about a model's KV cache."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvstrata.errors import ConfigError
from kvstrata.layout.kinds.base import NEVER, Kind, require_count
from kvstrata.types import I64

Range = tuple[int, int]
"""Chunks or tokens [lo, hi)."""

MAX_TOKENS = 1 << 40
"""Largest token count that a layout or a request may name; beyond it a size is taken for a mistake."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share one block table: same kind, same block size.

    `chunk_bytes` is the payload of one whole chunk over all ranks (for a recurrent group the state at its end); 0
    where bytes play no role. `replicated`: the bytes are the same on every rank and are stored once. `Layout`
    validates.
    """

    kind: Kind
    tokens_per_block: int
    drafter: bool = False
    chunk_bytes: int = 0
    name: str = ""
    replicated: bool = False

    @property
    def label(self) -> str:
        """The words for this group in messages."""
        kind = self.kind.name + (", drafter" if self.drafter else "")
        return f"{self.name}, {kind}" if self.name else kind


@dataclass(frozen=True, slots=True)
class Layout:
    """All groups of a model and how blocks form chunks. Errors name the field, as `groups[1].tokens_per_block`.

    The derived fields are computed once: resolving is done per request.
    """

    groups: tuple[Group, ...]
    blocks_per_chunk: int = 1
    alignment_tokens: int = 1

    tokens_per_chunk: tuple[int, ...] = field(init=False)
    chunk_bytes: tuple[int, ...] = field(init=False)
    order: tuple[int, ...] = field(init=False)
    """Group indices, cheapest bound first: prefix kinds, then kinds that always consume, then the others."""
    all_full: bool = field(init=False)
    """Every group is full attention."""
    kind_step: int = field(init=False)
    """Every boundary is a multiple of this, the limit itself included; 0 if no boundary exists."""
    boundary_step: int = field(init=False)
    """Every boundary other than the limit is a multiple of this (`kind_step` and the alignment)."""
    idle_step: int = field(init=False)
    """At its multiples no group consumes anything, so they are no boundaries; 0 if some group always does."""

    def __post_init__(self) -> None:
        self._validate()
        spans = tuple(group.tokens_per_block * self.blocks_per_chunk for group in self.groups)
        kinds = [group.kind for group in self.groups]
        steps = [kind.step(tokens) for kind, tokens in zip(kinds, spans, strict=True)]
        kind_step = _capped_lcm(steps)
        idle_step = _capped_lcm([kind.free_step for kind in kinds])
        order = sorted(range(len(kinds)), key=lambda g: (not kinds[g].prefix, kinds[g].free_step > 0))
        for name, value in (
            ("tokens_per_chunk", spans),
            ("chunk_bytes", tuple(group.chunk_bytes for group in self.groups)),
            ("order", tuple(order)),
            ("kind_step", kind_step),
            ("boundary_step", _capped_lcm([kind_step, self.alignment_tokens])),
            ("idle_step", idle_step),
            ("all_full", all(kind.prefix for kind in kinds)),
        ):
            object.__setattr__(self, name, value)

    def _validate(self) -> None:
        if not self.groups:
            raise ConfigError("groups: must have at least one group")
        require_count("blocks_per_chunk", self.blocks_per_chunk, 1, 1 << 20)
        require_count("alignment_tokens", self.alignment_tokens, 1, MAX_TOKENS)
        for index, group in enumerate(self.groups):
            where = f"groups[{index}]"
            require_count(f"{where}.tokens_per_block", group.tokens_per_block, 1, 1 << 30)
            require_count(f"{where}.chunk_bytes", group.chunk_bytes, 0, 1 << 50)
            if group.drafter and not group.kind.may_draft:
                raise ConfigError(f"{where}.drafter: a {group.kind.name} group cannot be a drafter")

    def limit(self, total: int, asynchronous: bool = True) -> int:
        """The largest boundary that a request of `total` tokens may be given.

        `total` itself only if every group is full attention and the engine loads asynchronously, because it then
        steps back by itself to compute the last token; otherwise one less.
        """
        return total if self.all_full and asynchronous else total - 1

    def needed_ranges(self, boundary: int, computed: int) -> tuple[Range, ...]:
        """Per group the chunks [lo, hi) that must be present for `boundary`: consumed ones, and a drafter's next.

        The caller guarantees 0 <= computed < boundary, and that every group can stop there.
        """
        ranges = []
        for group, tokens in zip(self.groups, self.tokens_per_chunk, strict=True):
            lo, hi = group.kind.consumed_at(boundary, computed, tokens)
            ranges.append((lo, hi + group.drafter))
        return tuple(ranges)

    def consumed_ranges(self, boundary: int, computed: int) -> tuple[Range, ...]:
        """Per group the chunks [lo, hi) that `boundary` consumes, (0, 0) for none; duties as `needed_ranges`."""
        return self.loaded_part(self.needed_ranges(boundary, computed))

    def loaded_part(self, needed: Sequence[Range]) -> tuple[Range, ...]:
        """Of what a boundary needs, what it consumes: not a drafter's next chunk."""
        return tuple(
            (lo, hi - group.drafter) if lo < hi - group.drafter else (0, 0)
            for group, (lo, hi) in zip(self.groups, needed, strict=True)
        )

    def needed(self, g: int, boundaries: I64, computed: int) -> tuple[I64, I64]:
        """`Kind.consumed` of group g, with a drafter's next chunk."""
        group = self.groups[g]
        lo, hi = group.kind.consumed(boundaries, computed, self.tokens_per_chunk[g])
        return lo, hi + group.drafter

    def parameters(self) -> tuple[Mapping[str, int | str], ...]:
        """Per group, all that the namespace must tell apart besides layer names and shapes."""
        return tuple(
            {"kind": group.kind.name, **group.kind.parameters, "drafter": int(group.drafter)} for group in self.groups
        )


def _capped_lcm(values: list[int]) -> int:
    """Least common multiple, 0 if any value is 0; kept inside int64, beyond every token count."""
    return min(math.lcm(*values), NEVER)
