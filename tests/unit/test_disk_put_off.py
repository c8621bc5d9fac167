"""When upkeep comes: after tasks were handed over, and after the answers of loads, but never put off twice in turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_kit import Played

from kvstrata.primary.region import SharedRegion
from kvstrata.runtime.clock import SystemClock
from kvstrata.testing.executor import InlineExecutor
from kvstrata.testing.tier_harness import chunk_keys
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.disk import DiskTier, process
from kvstrata.tiers.disk.tasks import Forget, Task
from kvstrata.tiers.disk.upkeep import Upkeep
from kvstrata.types import Flushed, JobEnded, KeysDone, TierJob

CHUNK = 32_768
KEYS = chunk_keys(256)


class Rig:
    """A tier over a played process; `log` has what was sent and when upkeep came."""

    def __init__(self, child: Played, tier: DiskTier) -> None:
        self.child, self.tier = child, tier
        self.log: list[str] = []
        self.wakes = self.jobs = 0
        self.seen = 0  # bytes of tasks that `log` knows of

    def wake(self) -> None:
        self.wakes += 1

    def submit(self, *numbers: int, load: bool = False) -> None:
        self.jobs += 1
        keys = [KEYS[number] for number in numbers]
        job = TierJob(self.jobs, keys, [place * CHUNK for place in range(len(keys))], [CHUNK] * len(keys))
        (self.tier.submit_load if load else self.tier.submit_store)(job)

    def settle(self) -> None:
        for _ in range(20):
            self.answer()
            self.tier.poll()
        self.log.clear()
        self.wakes = 0

    def answer(self) -> list[Task | Forget]:
        self.seen = 0
        return self.child.answer()

    def ended(self) -> int:
        """Jobs that ended with this poll."""
        return sum(isinstance(event, JobEnded) for event in self.tier.poll())


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    child = Played()
    monkeypatch.setattr(process, "_Child", lambda *_: child)
    with SharedRegion(64 * CHUNK) as region:
        tier = DiskTier(path=str(tmp_path / "tier"), segment_bytes=1 << 20, io_process=True)
        rig = Rig(child, tier)
        context = TierContext(
            region.view, bytes(16), 1, SystemClock(), InlineExecutor(), rig.wake, region_fd=region.fileno()
        )
        tier.open(context)
        rig.submit(*range(16))
        rig.settle()
        send, want_spare = child.send, Upkeep.want_spare

        def sent() -> None:
            rig.log += ["sent"] if len(child.outbox) > rig.seen else []
            rig.seen = len(child.outbox)
            send()

        def wanted(self: Upkeep) -> bool:
            rig.log.append("upkeep")
            return want_spare(self)

        monkeypatch.setattr(child, "send", sent)
        monkeypatch.setattr(Upkeep, "want_spare", wanted)
        monkeypatch.setattr(Upkeep, "due", property(lambda self: True))
        yield rig
        child.ended = child.silent = True
        tier.close()


@pytest.mark.parametrize("load", [False, True])
def test_tasks_are_handed_over_before_upkeep(rig: Rig, load: bool) -> None:
    rig.submit(0 if load else 100, load=load)
    assert rig.log == ["sent", "upkeep"]
    rig.log.clear()
    rig.submit(1 if load else 101, load=load)  # the tier is busy: taken in with the next poll
    rig.tier.poll()
    assert rig.log == ["sent", "upkeep"]


def test_upkeep_is_put_off_behind_the_answer_of_a_load_and_asked_for(rig: Rig) -> None:
    rig.submit(0, load=True)
    rig.answer()
    rig.log.clear()
    assert (rig.ended(), rig.log, rig.wakes) == (1, [], 1)
    assert (rig.ended(), rig.log, rig.wakes) == (0, ["upkeep"], 1)


def test_upkeep_is_not_put_off_twice_in_turn(rig: Rig) -> None:
    turns = []
    for number in range(6):
        rig.submit(number, load=True)
        rig.answer()
        rig.log.clear()
        assert rig.ended() == 1
        turns.append("upkeep" in rig.log)
        rig.log.clear()
    assert turns == [False, True] * 3


def test_upkeep_is_not_put_off_behind_stores_or_when_there_is_none(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.submit(100)
    rig.answer()
    rig.log.clear()
    assert (rig.ended(), rig.log) == (1, ["upkeep"])
    monkeypatch.setattr(Upkeep, "due", property(lambda self: False))
    rig.submit(0, load=True)
    rig.answer()
    rig.wakes = 0
    rig.ended()
    assert rig.wakes == 0


@pytest.mark.parametrize("way", ["drain", "close"])
def test_what_was_put_off_is_done_before_the_tier_is_idle_or_closed(rig: Rig, way: str) -> None:
    rig.submit(0, load=True)
    rig.tier.flush()
    rig.answer()
    assert [type(event) for event in rig.tier.poll()] == [KeysDone, JobEnded]
    volume = rig.tier._volume
    assert volume is not None
    assert volume.put_off
    assert not volume.settled
    if way == "drain":
        assert rig.tier.drain(0.0)
        assert volume.idle
        assert [type(event) for event in rig.tier.poll()] == [Flushed]
    else:
        rig.child.ended = rig.child.silent = True
        rig.tier.close()
        assert rig.tier._volume is None
