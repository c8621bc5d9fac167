"""Makes every method of some objects raise, one after the other: what uses them must live with each.

The methods are found by looking at the objects, so that one that is added later is struck too.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any


class StruckError(Exception):
    """What a struck method raises."""


class Striker:
    """Wraps the public methods of `owners` (instances by name). `restore` takes everything back.

    A method is known as "owner.method". `called` counts calls of methods that are not struck, `struck` those that
    raised.
    """

    def __init__(self, owners: Mapping[str, object]) -> None:
        self.called: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self._target = ""
        self._wrapped: list[tuple[object, str]] = []
        for name, owner in owners.items():
            for method, _ in inspect.getmembers(type(owner), inspect.isfunction):
                if not method.startswith("_"):
                    self._wrap(owner, method, f"{name}.{method}")

    def _wrap(self, owner: object, method: str, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(real)
        def call(*arguments: Any, **named: Any) -> Any:
            if self._target == name:
                self.struck[name] += 1
                raise StruckError(name)
            self.called[name] += 1
            return real(*arguments, **named)

        vars(owner)[method] = call
        self._wrapped.append((owner, method))

    def strike(self, name: str) -> None:
        """From now on this method raises at every call, and no other one does."""
        self._target = name

    def heal(self) -> None:
        """No method raises."""
        self._target = ""

    def restore(self) -> None:
        """Take the wrappers off."""
        self.heal()
        for owner, method in self._wrapped:
            vars(owner).pop(method, None)
        self._wrapped.clear()
