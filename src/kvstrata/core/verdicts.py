"""What is remembered of keys that a tier failed to deliver (DESIGN section 3, rule 7).

A content verdict (wrong size, corrupt, foreign) stands until this process stores the key into that tier, or, in a
tier that others write, for a back-off. A passing verdict (I/O error, time-out, refused) stands for a back-off. Gone is
plain absence and leaves no verdict.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from kvstrata.types import I8, I64, FailCause, OffloadKey, Presence


class Verdicts:
    """Bounded memory of failed keys per tier; the oldest is forgotten first."""

    __slots__ = ("_backoff_max_s", "_backoff_s", "_kept", "_most")

    def __init__(self, most: int, backoff_s: float, backoff_max_s: float) -> None:
        self._kept: OrderedDict[tuple[int, OffloadKey], tuple[float, float]] = OrderedDict()
        self._most = most
        self._backoff_s = backoff_s
        self._backoff_max_s = backoff_max_s

    def __len__(self) -> int:
        return len(self._kept)

    def failed(self, tier: int, key: OffloadKey, cause: FailCause, *, shared: bool, now: float) -> None:
        """Note a failure; a repeated one doubles the back-off."""
        if not (cause.is_content or cause.is_passing):
            return
        until, backoff = math.inf, self._backoff_s
        if cause.is_passing or shared:
            old = self._kept.get((tier, key))
            backoff = self._backoff_s if old is None else min(old[1] * 2, self._backoff_max_s)
            until = now + backoff if old is None else max(now + backoff, old[0])  # a lasting verdict stays
        self._kept[(tier, key)] = (until, backoff)
        self._kept.move_to_end((tier, key))
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def stored(self, tier: int, keys: Sequence[OffloadKey]) -> None:
        """The keys were stored into the tier by this process: whatever was known is void."""
        for key in keys if self._kept else ():
            self._kept.pop((tier, key), None)

    def blocks(self, tier: int, key: OffloadKey, now: float) -> bool:
        """Whether the tier must not be asked for the key now.

        A verdict whose back-off has passed stays, so that the next failure doubles it.
        """
        kept = self._kept.get((tier, key))
        return kept is not None and now < kept[0]

    def mask(self, tier: int, keys: Sequence[OffloadKey], index: I64, answers: I8, now: float) -> None:
        """Set `answers[i]` to ABSENT where the verdict on `keys[index[i]]` still stands."""
        if self._kept:
            for i, k in enumerate(index.tolist()):
                if self.blocks(tier, keys[k], now):
                    answers[i] = Presence.ABSENT

    def clear(self) -> None:
        """Forget everything (a new generation)."""
        self._kept.clear()
