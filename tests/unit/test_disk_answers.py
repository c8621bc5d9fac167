"""How the I/O process sends answers and when it rings for them: an engine that looks by itself is left in peace."""

from __future__ import annotations

import fcntl
import os
import select
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvstrata.runtime.disk_worker import _HOLD_BELL_S, _HOLD_S, _OFTEN, _Outbox
from kvstrata.testing.clock import ManualClock
from kvstrata.tiers.disk import process
from kvstrata.tiers.disk.process import READ_BYTES, CountedPipe, Frames
from kvstrata.tiers.disk.tasks import Answers, Done


class Loop:
    """Says whether loads, and stores, are still under way."""

    more = True

    def follow(self, *, load: bool) -> bool:
        return self.more


class Pipes:
    """An outbox, and the engine's ends of its pipes."""

    def __init__(self) -> None:
        self.clock, self.loop = ManualClock(), Loop()
        self._answers, answers_in = os.pipe()
        self._bell, bell_in = os.pipe()
        for end in (self._answers, self._bell, bell_in):
            os.set_blocking(end, False)
        fcntl.fcntl(bell_in, fcntl.F_SETPIPE_SZ, 4096)
        fcntl.fcntl(answers_in, fcntl.F_SETPIPE_SZ, 4 * READ_BYTES)
        self._ends = (self._answers, answers_in, self._bell, bell_in)
        self.sent = memoryview(bytearray(16)).cast("Q")
        self.outbox = _Outbox(CountedPipe(answers_in, self.sent), bell_in, self.clock)
        self._next = 0
        self._heard = False

    def report(self) -> None:
        self._next += 1
        self.outbox.report(Done(self._next), True)

    def flush(self, *, at_once: bool = False) -> float:
        return self.outbox.flush(self.loop, at_once=at_once)  # type: ignore[arg-type]

    def fetch(self, *, deaf: bool = False) -> list[int]:
        """The tasks whose answers have come. `deaf`: nothing has heard the bell yet, if it was rung."""
        try:
            messages = Frames().feed(os.read(self._answers, READ_BYTES))
        except BlockingIOError:
            return []
        heard, self._heard = self._heard or bool(select.select([self._bell], [], [], 0)[0]), False
        self.sent[1] = deaf or not heard
        items = [each for message in messages for each in msgspec.msgpack.decode(message, type=Answers).items]
        return [done.task_id for done in items]

    def rings(self) -> int:
        try:
            rings = len(os.read(self._bell, 4096))
        except BlockingIOError:
            return 0
        self._heard = bool(select.select([self._answers], [], [], 0)[0])
        return rings

    def busy(
        self, ticks: int, tick_s: float, *, answer: int, look: tuple[int, int], alone: Callable[[int], bool]
    ) -> tuple[list[int], int]:
        """An engine that looks by itself, in ticks `n % look[0] == look[1]`, beside an answer every so many ticks.

        Returns the tasks whose answers it has seen, and how often it was rung for.
        """
        seen, rings = [], 0
        for tick in range(ticks):
            if tick % answer == 0:
                self.loop.more = not alone(tick)
                self.report()
            self.flush()
            if tick % look[0] == look[1]:
                seen += self.fetch()
                rings += self.rings()
            self.clock.advance(tick_s)
        return seen, rings

    def seconds_until_rung(self) -> float:
        """From an answer on, with nobody who looks."""
        self.report()
        waited, rest = 0.0, self.flush()
        while not self.rings():
            waited += rest
            self.clock.advance(rest)
            rest = self.flush()
        return waited

    def close(self) -> None:
        for end in self._ends:
            os.close(end)


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    made = Pipes()
    yield made
    made.close()


def test_an_answer_that_no_other_follows_is_sent_and_rung_for_at_once(pipes: Pipes) -> None:
    pipes.loop.more = False
    pipes.report()
    pipes.flush()
    assert (pipes.fetch(), pipes.rings()) == ([1], 1)
    pipes.loop.more = True
    pipes.report()
    pipes.flush(at_once=True)
    assert (pipes.fetch(), pipes.rings()) == ([2], 1)


def test_the_first_of_many_waits_for_others_and_then_for_the_engine(pipes: Pipes) -> None:
    pipes.report()
    assert pipes.flush() == pytest.approx(_HOLD_S)
    pipes.clock.advance(_HOLD_S)
    pipes.report()
    assert pipes.flush() == pytest.approx(_HOLD_S)
    assert pipes.rings() == 0
    pipes.clock.advance(_HOLD_S)
    pipes.report()
    pipes.flush()
    assert (pipes.fetch(), pipes.rings()) == ([1, 2, 3], 1)


def test_the_answer_of_the_last_load_does_not_wait_for_other_work(pipes: Pipes) -> None:
    loop = pipes.loop
    assert not pipes.outbox.pressing(loop)  # type: ignore[arg-type]
    pipes.outbox.report(Done(1), False)
    loop.more = False
    assert not pipes.outbox.pressing(loop)  # type: ignore[arg-type]
    pipes.report()
    assert pipes.outbox.pressing(loop)  # type: ignore[arg-type]
    loop.more = True
    assert not pipes.outbox.pressing(loop)  # type: ignore[arg-type]


def test_an_engine_that_looks_by_itself_is_not_rung_for(pipes: Pipes) -> None:
    # A quarter of a millisecond each; the engine looks every two and a half.
    seen, rings = pipes.busy(1000, _HOLD_S / 4, answer=1, look=(10, 6), alone=lambda tick: False)
    assert rings <= 1
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) > 980


def test_an_engine_that_looks_by_itself_is_not_rung_for_when_answers_are_few(pipes: Pipes) -> None:
    # Half a millisecond each; an answer every six, now and then alone, a look every one.
    seen, rings = pipes.busy(400, _HOLD_S / 2, answer=12, look=(2, 1), alone=lambda tick: tick % 48 == 24)
    assert rings <= 1
    assert seen == list(range(1, 35))


def test_an_engine_that_always_looks_by_itself_has_time_for_answers_that_come_alone(pipes: Pipes) -> None:
    # Half a millisecond each; an answer every two and a half, most of them alone, a look every two.
    seen, rings = pipes.busy(400, _HOLD_S / 2, answer=5, look=(4, 3), alone=lambda tick: tick >= 100)
    assert rings <= 1
    assert seen == list(range(1, 81))
    pipes.clock.advance(1.0)
    waits = []
    for _ in range(3):  # it sleeps now: that is noticed once
        waits.append(pipes.seconds_until_rung())
        pipes.fetch()
    assert waits == pytest.approx([_HOLD_BELL_S, 0.0, 0.0])


def test_a_bell_that_was_rung_for_nothing_does_not_bring_on_the_next_one(pipes: Pipes) -> None:
    """A busy engine's other thread hears it only later than the engine looks by itself."""
    pipes.loop.more = False
    rings = 0
    for _ in range(100):
        pipes.report()
        pipes.flush()
        pipes.clock.advance(2 * _HOLD_S)
        pipes.flush()
        assert pipes.fetch(deaf=True)
        rings += pipes.rings()
    assert rings <= _OFTEN + 1


def test_an_engine_that_looks_by_itself_no_more_is_rung_for_late_only_once(pipes: Pipes) -> None:
    for _ in range(3):
        pipes.report()
        pipes.clock.advance(pipes.flush())
        pipes.flush()
        assert pipes.fetch()
        pipes.clock.advance(_HOLD_BELL_S)
        pipes.flush()
    assert pipes.rings() == 0
    pipes.loop.more = False
    waits = []
    for _ in range(3):
        waits.append(pipes.seconds_until_rung())
        assert pipes.fetch()
    assert waits == pytest.approx([_HOLD_S, 0.0, 0.0])


def test_a_load_that_somebody_waits_for_is_rung_for_soon_although_answers_before_it_were_not(pipes: Pipes) -> None:
    for _ in range(2):  # it comes by itself
        pipes.report()
        pipes.clock.advance(pipes.flush())
        pipes.flush()
        assert pipes.fetch()
    pipes.report()
    pipes.clock.advance(pipes.flush())
    assert pipes.flush() == pytest.approx(_HOLD_BELL_S)
    pipes.loop.more = False
    pipes.report()
    assert pipes.flush() == pytest.approx(_HOLD_S)
    pipes.clock.advance(_HOLD_S)
    pipes.flush()
    assert (pipes.rings(), len(pipes.fetch())) == (1, 2)


def test_an_engine_that_does_not_come_is_rung_for_once_until_it_does(pipes: Pipes) -> None:
    for _ in range(1000):
        pipes.report()
        pipes.flush()
        pipes.clock.advance(_HOLD_S / 4)
    assert pipes.rings() == 1
    assert len(pipes.fetch()) > 900
    for _ in range(8):
        pipes.report()
        pipes.flush()
        pipes.clock.advance(_HOLD_S / 4)
    pipes.flush()
    assert pipes.rings() == 1


def test_what_an_engine_that_came_by_itself_leaves_is_rung_for_in_time(pipes: Pipes) -> None:
    for _ in range(2):
        pipes.report()
        pipes.flush()
        pipes.clock.advance(_HOLD_S)
        pipes.flush()
        assert pipes.fetch()
    pipes.report()
    pipes.flush()
    pipes.clock.advance(_HOLD_S)
    assert pipes.flush() == pytest.approx(_HOLD_BELL_S)
    assert pipes.rings() == 0
    pipes.clock.advance(_HOLD_BELL_S)
    pipes.flush()
    assert pipes.rings() == 1
    assert pipes.fetch() == [3]


def test_a_bell_that_nobody_hears_does_not_stop_the_process(pipes: Pipes) -> None:
    pipes.loop.more = False
    for _ in range(5000):  # more than a pipe takes
        pipes.report()
        pipes.flush()
        if not pipes._next % 64:
            pipes.fetch()
    assert pipes.rings() > 0


def test_every_piece_is_counted_before_the_next_one_may_wait_for_room(pipes: Pipes) -> None:
    """A reader that looks only when the count has changed always makes room for what is still to come."""
    pipes.outbox._pipe.send(bytes(3 * READ_BYTES // 2))
    assert pipes.sent[0] == 2
    pipes.report()
    assert pipes.sent[0] == 2
    pipes.flush(at_once=True)
    assert pipes.sent[0] == 3


def test_each_ring_is_one_call_of_the_thread_that_listens() -> None:
    """After each call it takes the interpreter from a thread that may be busy."""
    calls, woken = [], []
    ends: list[int] = []
    bell_in, bell = process._bell(ends, [])
    child = process._Child.__new__(process._Child)
    child.bell, child._seen, child._counts = bell, 0, memoryview(bytearray(16)).cast("Q")
    child._context = SimpleNamespace(wake=lambda: (woken.append(1), os.close(ends.pop())))  # type: ignore[assignment]
    systems = (os.read.__module__, select.__name__)

    def note(_: Any, event: str, called: Any) -> None:
        if event == "c_call" and called.__module__ in systems and called.__name__ != "close":
            calls.append(called.__name__)

    os.write(bell_in, b"!")
    sys.setprofile(note)
    try:
        with pytest.raises(IndexError):  # by the second wake: nothing is left to close
            child._listen()
    finally:
        sys.setprofile(None)
    assert child.silent
    assert (calls, len(woken)) == (["read", "read"], 2)
