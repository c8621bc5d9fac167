"""A bounded memory of texts by name."""

from __future__ import annotations

from collections import OrderedDict

MAX_REMEMBERED = 65_536


class Memo(OrderedDict[str, str]):
    """At most `MAX_REMEMBERED` texts, the oldest forgotten first. Used by several workers: each step is one call."""

    def note(self, name: str, value: str) -> None:
        """Remember a text."""
        self[name] = value
        while len(self) > MAX_REMEMBERED:
            try:
                self.popitem(last=False)
            except KeyError:
                return
