"""The protocol of an attention kind: which chunks a boundary consumes, and the inverse of that question.

To add a kind, write one class here in `layout/kinds/` that has the members of `Kind`, register it in
`layout/build.py`, and describe it in `kvstrata.testing.oracle`; the property tests then hold the two against each
other. The planner knows nothing else about kinds. What it relies on:

- A boundary T consumes one contiguous range of chunks per group, whose two ends never go down as T grows.
- The range ends with the chunk that holds token T - 1, unless T consumes nothing.
- Between two `edges` a larger T never needs a chunk that a smaller one does not.

All array members are vectorised: boundaries are int64 arrays of token counts, chunk numbers are int64 arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from kvstrata.errors import ConfigError
from kvstrata.types import I64, Bool

NEVER = 1 << 62
"""A token count that no request reaches; stands for "no boundary"."""


class Kind(Protocol):
    """One attention kind with its parameters; an immutable value."""

    @property
    def name(self) -> str:
        """The word for this kind in JSON and in messages."""
        ...

    @property
    def prefix(self) -> bool:
        """Consumes all chunks from the computed tokens on, so that the first missing one bounds every boundary."""
        ...

    @property
    def stores_all(self) -> bool:
        """Every whole chunk is stored; otherwise only those that a kept boundary consumes."""
        ...

    @property
    def may_draft(self) -> bool:
        """A drafter may run on top of this kind."""
        ...

    @property
    def free_step(self) -> int:
        """At each multiple of this token count a boundary consumes nothing here; 0: every boundary consumes some."""
        ...

    @property
    def parameters(self) -> Mapping[str, int | str]:
        """What, besides the name, tells this kind from others: goes into the namespace and into reports."""
        ...

    def step(self, tokens_per_chunk: int) -> int:
        """Boundaries are multiples of this; 0 if no boundary exists at all."""
        ...

    def allowed(self, boundaries: I64, tokens_per_chunk: int) -> Bool:
        """Which of `boundaries` this kind can stop at, whatever is present: the multiples of `step`."""
        ...

    def consumed(self, boundaries: I64, computed: int, tokens_per_chunk: int) -> tuple[I64, I64]:
        """The chunks `[lo, hi)` that each boundary consumes if the engine has the first `computed` tokens.

        The caller guarantees computed < T and `allowed` for every boundary. Where nothing is consumed, `lo` and `hi`
        both are the first chunk that begins at or after T.
        """
        ...

    def consumed_at(self, boundary: int, computed: int, tokens_per_chunk: int) -> tuple[int, int]:
        """`consumed` of one boundary, without an array."""
        ...

    def earliest(self, chunks: I64, computed: int, tokens_per_chunk: int) -> I64:
        """For each chunk c, the smallest T that consumes no chunk before c (`NEVER` if there is none).

        This is the inverse of `consumed`'s `lo`: for every allowed T > `computed` that consumes something,
        `lo(T) >= c` exactly when `T >= earliest(c)`. The result may lie at or below `computed`.
        """
        ...

    def edges(self, low: int, high: int, tokens_per_chunk: int) -> I64:
        """Ascending token counts in (low, high] after which what T consumes may grow.

        Between two of them (the right one included) the largest T needs a subset of what any other T needs, and
        consumes nothing only if all of them do.
        """
        ...


def ceil_div(values: I64, divisor: int) -> I64:
    """Rounded-up quotients."""
    return -(-values // divisor)


def multiples(step: int, low: int, high: int) -> I64:
    """The multiples of `step` in (low, high], ascending."""
    return np.arange(low // step + 1, high // step + 1, dtype=np.int64) * step


def require(ok: bool, name: str, value: object, rule: str) -> None:
    """Raise a `ConfigError` that names the field, unless `ok`."""
    if not ok:
        raise ConfigError(f"{name}: {rule}, got {value!r}")


def require_count(name: str, value: object, least: int, most: int = NEVER) -> None:
    """Raise a `ConfigError` that names the field, unless `value` is an int in [least, most]."""
    ok = isinstance(value, int) and not isinstance(value, bool)
    require(ok, name, value, "must be a whole number")
    require(isinstance(value, int) and value >= least, name, value, f"must be at least {least}")
    require(isinstance(value, int) and value <= most, name, value, f"must be at most {most}")
