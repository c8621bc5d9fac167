"""The wall between kvstrata and the engine: whatever goes wrong inside, the engine gets a harmless answer."""

from __future__ import annotations

import functools
import logging
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("vllm.kvstrata")
"""Below vLLM's own logger, so that its lines appear where the engine's do."""


class Shield:
    """Counts and logs faults: each place and type of error once, with its trace."""

    def __init__(self, side: str) -> None:
        self._side = side
        self.faults: Counter[str] = Counter()
        """How often each place failed."""

    @property
    def total(self) -> int:
        """All faults."""
        return sum(self.faults.values())

    def caught(self, place: str, error: BaseException) -> None:
        """Record an error that ended a call early."""
        known = f"{place}: {type(error).__name__}"
        self.faults[known] += 1
        if self.faults[known] == 1:
            trace = "".join(traceback.format_exception(error))
            _log.error("kvstrata (%s) failed in %s; the engine goes on without it there.\n%s", self._side, place, trace)


class Shielded(Protocol):
    """An object with a shield."""

    shield: Shield


S = TypeVar("S", bound=Shielded)


def shielded(
    default: Callable[[], Any],
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Make a method answer `default()` when it raises, after recording where."""

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self.shield.caught(method.__name__, error)
                answer: R = default()
                return answer

        return call

    return decorate
