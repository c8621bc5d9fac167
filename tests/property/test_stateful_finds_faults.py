"""The stateful machine is worth its time only if it finds what is wrong: faults are planted, and it must see each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstrata.core.breakers import Breaker
from kvstrata.core.cascades import Cascades
from kvstrata.core.clocks import WaitClock
from kvstrata.core.grants import Grants
from kvstrata.core.ledger import Job
from kvstrata.core.loads import Loads
from kvstrata.core.manager import TieringOffloadingManager
from kvstrata.core.presence import PresenceBook
from kvstrata.core.promotions import Promotions
from kvstrata.core.stores import Stores
from kvstrata.core.twophase import TwoPhaseDoor
from kvstrata.testing.profiles import Profile
from kvstrata.testing.stateful import MIRROR, STEADY, WILD, WalkError, soak, walk

Plant = Callable[[pytest.MonkeyPatch], None]


def no_pin_for_loads(patch: pytest.MonkeyPatch) -> None:
    accept = Loads._accept

    def without_pin(self: Loads, *args: Any) -> Job:
        job = accept(self, *args)
        self._core.residency.unpin(job.slots)
        return job

    patch.setattr(Loads, "_accept", without_pin)


def failed_stores_are_published(patch: pytest.MonkeyPatch) -> None:
    complete = Stores.complete
    patch.setattr(Stores, "complete", lambda self, job, ok, digests: complete(self, job, True, digests))


def slots_of_hung_reads_are_reused(patch: pytest.MonkeyPatch) -> None:
    def returned(self: Promotions, job: Job, slots: Any) -> None:
        self._core.residency.quarantine(slots)
        self._core.residency.requite(slots)

    patch.setattr(Promotions, "_quarantine", returned)


def share_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Grants, "_fits_share", lambda self, *args: True)


def younger_ones_pass(patch: pytest.MonkeyPatch) -> None:
    place = Grants.place
    patch.setattr(Grants, "place", lambda self, request, **kw: place(self, request, **{**kw, "new_slots": True}))


def clocks_do_not_run_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitClock, "deadline", lambda self: float("inf"))


def breakers_never_close(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Breaker, "_close", lambda self: None)


def one_chunk_too_few(patch: pytest.MonkeyPatch) -> None:
    gather = PresenceBook.gather

    def short(self: PresenceBook, *args: Any) -> Any:
        gathered = gather(self, *args)
        for presence in gathered.presence:
            presence[-1:] = 0
        return gathered

    patch.setattr(PresenceBook, "gather", short)


def cascades_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cascades, "offer", lambda self, *args: None)


def old_content_is_not_purged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cascades, "purge", lambda self, tier: None)


def evictions_are_not_told(patch: pytest.MonkeyPatch) -> None:
    def silent(self: TieringOffloadingManager, slots: Any, keys: Any) -> None:
        self._core.account.dropped(slots)

    patch.setattr(TieringOffloadingManager, "_evicted", silent)


def released_plans_stay_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TwoPhaseDoor, "release", lambda self, request, tag: None)


PLANTS: list[tuple[Plant, Profile]] = [
    (no_pin_for_loads, WILD),
    (failed_stores_are_published, WILD),
    (slots_of_hung_reads_are_reused, WILD),
    (share_is_ignored, STEADY),
    (younger_ones_pass, STEADY),
    (clocks_do_not_run_out, WILD),
    (breakers_never_close, WILD),
    (one_chunk_too_few, MIRROR),
    (cascades_are_forgotten, STEADY),
    (old_content_is_not_purged, WILD),
    (evictions_are_not_told, STEADY),
    (released_plans_stay_held, WILD),
]


@pytest.mark.parametrize(("plant", "profile"), PLANTS, ids=[plant.__name__ for plant, _ in PLANTS])
def test_planted_fault_is_found(plant: Plant, profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(200):
        try:
            walk(seed, 120, profile, shorten=False)
        except Exception:
            return
    pytest.fail(f"{plant.__name__} was not found")


def test_failure_is_shown_as_a_short_program(monkeypatch: pytest.MonkeyPatch) -> None:
    failed_stores_are_published(monkeypatch)
    with pytest.raises(WalkError) as caught:
        soak(range(60), 60)
    program = str(caught.value).splitlines()
    assert program[1].startswith("layout = ")
    assert len(program) < 60
