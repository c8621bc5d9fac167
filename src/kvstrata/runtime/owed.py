"""What the core must learn and would not take: kept in order, and told again until it does.

A fact that raises in the core is not lost: a load that never counts as complete would hold its pins for ever. Facts on
one subject (a job, a request) keep their order; one that fails for good holds up only those on its own subject.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

RETRY_S = 0.25
"""Least time between two rounds of telling."""
MAX_OWED = 100_000
"""Most facts that are kept; the oldest is forgotten."""

Fact = Callable[[], object]


class Owed:
    """Facts by subject, oldest first. Not for several threads at a time."""

    def __init__(self, retry_s: float = RETRY_S, most: int = MAX_OWED) -> None:
        self._retry_s = retry_s
        self._facts: deque[tuple[Hashable, Fact]] = deque(maxlen=most)
        self._subjects: dict[Hashable, int] = {}
        self._due = 0.0

    def __len__(self) -> int:
        return len(self._facts)

    @property
    def due(self) -> float | None:
        """When they are told again; None if there are none."""
        return self._due if self._facts else None

    def holds(self, subject: Hashable) -> bool:
        """Whether something on this subject is owed, so that what follows has to wait behind it."""
        return subject in self._subjects

    def add(self, subject: Hashable, fact: Fact, now: float) -> None:
        """Keep a fact."""
        if not self._facts:
            self._due = now + self._retry_s
        elif len(self._facts) == self._facts.maxlen:
            self._forget(self._facts.popleft()[0])
        self._facts.append((subject, fact))
        self._subjects[subject] = self._subjects.get(subject, 0) + 1

    def tell(self, now: float) -> None:
        """Tell all of them again if that is due; those that still raise stay."""
        if not self._facts or now < self._due:
            return
        self._due = now + self._retry_s
        stuck: set[Hashable] = set()
        for _ in range(len(self._facts)):
            subject, fact = self._facts.popleft()
            if subject not in stuck:
                try:
                    fact()
                except Exception:  # it was recorded when it failed first
                    stuck.add(subject)
                else:
                    self._forget(subject)
                    continue
            self._facts.append((subject, fact))

    def _forget(self, subject: Hashable) -> None:
        left = self._subjects[subject] - 1
        if left:
            self._subjects[subject] = left
        else:
            del self._subjects[subject]
