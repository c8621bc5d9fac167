"""The built-in workload: seeded requests of multi-turn chat, agents with tools, and questions on shared documents.

It has the shape of a trace, so the replay treats it as one. Three things are drawn on purpose: a turn that follows
soon (served by the accelerator's own cache), one that follows later (primary), and one that comes back after a long
pause (the tier below). Docs: `docs/replay.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstrata.errors import ConfigError
from kvstrata.sim.traces import Request, Trace
from kvstrata.types import I64

TOKENS_PER_ID = 64
DEFAULT_REQUESTS = 1500

_POOL = 200
"""Sessions that are open at a time."""
_SOON = 0.35
"""Share of turns that go to one of the last `_RECENT` sessions."""
_LATE = 0.3
"""Share of turns that go to the session that was put aside first, once `_ASIDE` are."""
_ASIDE = 300
_RECENT = 6
_PUT_ASIDE = 0.45
"""Share of turns after which the session is put aside."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What one kind of session looks like; ranges are [low, high) in tokens, `turns` in requests."""

    name: str
    weight: float
    shared: int
    """How many different prefixes the sessions of this kind begin with."""
    prefix: tuple[int, int]
    turns: tuple[int, int]
    question: tuple[int, int]
    answer: tuple[int, int]


SHAPES = (
    Shape("chat", 0.5, 4, (400, 1500), (2, 9), (30, 600), (60, 700)),
    Shape("agent", 0.3, 3, (2500, 5000), (4, 13), (300, 4000), (30, 300)),
    Shape("document", 0.2, 200, (6000, 30000), (1, 4), (20, 120), (100, 500)),
)


@dataclass(slots=True)
class _Session:
    """One conversation in progress."""

    number: int
    shape: Shape
    prefix: int
    prefix_tokens: int
    tokens: int
    turns_left: int


class _Ids:
    """Gives an id to each run of tokens: shared while the run lies in a shared prefix, the session's own after it."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], int] = {}

    def of(self, session: _Session) -> I64:
        """The ids of the session's present prompt. A last, partly filled run has an id for this very length."""
        shared = session.prefix_tokens // TOKENS_PER_ID
        whole, rest = divmod(session.tokens, TOKENS_PER_ID)
        shared = min(shared, whole)
        names: list[tuple[object, ...]] = [(session.shape.name, session.prefix, run) for run in range(shared)]
        names += [(session.number, run) for run in range(shared, whole)]
        if rest:
            names.append((session.number, whole, session.tokens))
        known = self._known
        return np.array([known.setdefault(name, len(known)) for name in names], dtype=np.int64)


def builtin_workload(requests: int = DEFAULT_REQUESTS, seed: int = 0) -> Trace:
    """`requests` requests; the same seed gives the same ones, and a shorter workload is the start of a longer one."""
    if requests < 1:
        raise ConfigError(f"requests: {requests} must be at least 1")
    return Trace("built-in workload", "built-in", TOKENS_PER_ID, tuple(_Builder(seed).take(requests)))


class _Builder:
    """Opens sessions, draws whose turn it is, and writes down what that turn asks."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.Generator(np.random.PCG64(seed & ((1 << 64) - 1)))
        self._ids = _Ids()
        self._prefixes = {
            shape.name: self._rng.integers(shape.prefix[0], shape.prefix[1], size=shape.shared).tolist()
            for shape in SHAPES
        }
        self._weights = np.cumsum([shape.weight for shape in SHAPES]).tolist()
        self._opened = 0
        self._pool: list[_Session] = []
        self._aside: list[_Session] = []
        self._recent: list[_Session] = []

    def take(self, count: int) -> list[Request]:
        """The first `count` requests."""
        now = 0.0
        out = []
        for index in range(count):
            now += float(self._rng.exponential(0.5))
            out.append(self._turn(index, now))
        return out

    def _turn(self, index: int, now: float) -> Request:
        session = self._next_session()
        session.tokens += self._draw(session.shape.question)
        answer = self._draw(session.shape.answer)
        request = Request(index, now, session.tokens, answer, self._ids.of(session))
        session.tokens += answer
        session.turns_left -= 1
        self._put_back(session)
        return request

    def _next_session(self) -> _Session:
        while len(self._pool) < _POOL:
            self._pool.append(self._open())
        luck = float(self._rng.random())
        if luck < _SOON and self._recent:
            return self._pick(self._recent)
        if luck > 1.0 - _LATE and len(self._aside) > _ASIDE:
            return self._aside.pop(0)
        return self._pick(self._pool)

    def _put_back(self, session: _Session) -> None:
        """Where the session waits for its next turn, if it has one."""
        if session.turns_left <= 0:
            return
        if float(self._rng.random()) < _PUT_ASIDE:
            self._aside.append(session)
            return
        self._recent.append(session)
        if len(self._recent) > _RECENT:
            self._pool.append(self._recent.pop(0))

    def _open(self) -> _Session:
        luck = float(self._rng.random()) * self._weights[-1]
        shape = next(shape for shape, bound in zip(SHAPES, self._weights, strict=True) if luck < bound)
        prefix = int(self._rng.integers(shape.shared))
        tokens = int(self._prefixes[shape.name][prefix])
        self._opened += 1
        return _Session(self._opened, shape, prefix, tokens, tokens, self._draw(shape.turns))

    def _pick(self, sessions: list[_Session]) -> _Session:
        return sessions.pop(int(self._rng.integers(len(sessions))))

    def _draw(self, bounds: tuple[int, int]) -> int:
        return int(self._rng.integers(bounds[0], bounds[1]))
