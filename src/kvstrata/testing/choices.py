"""Where a random test takes its decisions from: a seeded generator, a recording, or Hypothesis.

Rules ask for small whole numbers only; 0 is always the plainest choice, so that a recording can be shortened.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


class Choices:
    """A source of decisions; the others are made of `below`."""

    def below(self, bound: int) -> int:
        """A whole number in [0, bound)."""
        raise NotImplementedError

    def between(self, low: int, high: int) -> int:
        """A whole number in [low, high]."""
        return low + self.below(high - low + 1)

    def pick(self, values: Sequence[T]) -> T:
        """One of `values`; the first is the plainest."""
        return values[self.below(len(values))]

    def chance(self, percent: int) -> bool:
        """True in so many of a hundred cases; False is the plain choice."""
        return self.below(100) >= 100 - percent

    def some(self, values: Iterable[T]) -> list[T]:
        """A part of `values`, in order: all, a leading part, or any."""
        every = list(values)
        match self.below(3):
            case 0:
                return every
            case 1:
                return every[: self.below(len(every) + 1)]
        return [value for value in every if self.below(2)]


class RandomChoices(Choices):
    """Decisions of a seeded generator; `recorded` holds those taken since it was last cleared."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._ahead: list[float] = []
        self.recorded: list[int] = []

    def below(self, bound: int) -> int:
        """The next number of the generator."""
        if not self._ahead:
            self._ahead = self._rng.random(1024).tolist()
        value = int(self._ahead.pop() * bound)
        self.recorded.append(value)
        return value


class ReplayedChoices(Choices):
    """Decisions of a recording; 0 when it is at its end, the largest allowed where it is out of range."""

    def __init__(self, recorded: Sequence[int] = ()) -> None:
        self._left = list(reversed(recorded))

    def load(self, recorded: Sequence[int]) -> None:
        """Go on with another recording."""
        self._left = list(reversed(recorded))

    def below(self, bound: int) -> int:
        """The next number of the recording."""
        return min(self._left.pop(), bound - 1) if self._left else 0
