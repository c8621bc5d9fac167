"""Claims of parts: never above the limit of the place, never two writers, taken back only from the dead."""

from __future__ import annotations

import dataclasses
import subprocess

import pytest

from kvstrata.errors import ConfigError
from kvstrata.tiers.common.claims import (
    Claim,
    check_part,
    default_part,
    drop_claim,
    give_back,
    holds,
    is_provably_dead,
    list_claims,
    owner_of,
    take_part,
    this_process,
)


class DictPlace:
    """Entries in a dictionary; `before_names` runs in the middle of a taking, as another engine would."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.before_names = lambda: None

    def create(self, name: str, data: bytes) -> bool:
        return self.entries.setdefault(name, data) is data

    def replace(self, name: str, data: bytes) -> None:
        self.entries[name] = data

    def read(self, name: str) -> bytes | None:
        return self.entries.get(name)

    def delete(self, name: str) -> None:
        self.entries.pop(name, None)

    def names(self) -> list[str]:
        hook, self.before_names = self.before_names, lambda: None
        hook()
        return list(self.entries)


def test_claims_that_fit_are_taken_and_told() -> None:
    place = DictPlace()
    first, second = this_process(), this_process()
    assert take_part(place, Claim("a", 60, 100), first) is None
    assert take_part(place, Claim("b", 40, 100), second) is None
    assert sorted(list_claims(place), key=lambda claim: claim.part) == [Claim("a", 60, 100), Claim("b", 40, 100)]
    assert holds(place, "a", first)
    assert not holds(place, "a", second)


def test_a_claim_that_does_not_fit_is_refused_with_the_numbers_and_leaves_nothing() -> None:
    place = DictPlace()
    take_part(place, Claim("a", 60, 100), this_process())
    before = dict(place.entries)
    refusal = take_part(place, Claim("b", 41, 100), this_process())
    assert refusal is not None
    assert refusal.permanent
    for number in ("41", "60", "100", "--release"):
        assert number in refusal.text
    assert place.entries == before


def test_the_least_limit_that_anybody_states_counts() -> None:
    place = DictPlace()
    take_part(place, Claim("a", 60, 100), this_process())
    assert take_part(place, Claim("b", 60, 1000), this_process()) is not None
    assert take_part(place, Claim("b", 60, None), this_process()) is not None
    assert take_part(place, Claim("b", 40, None), this_process()) is None


@pytest.mark.parametrize(("mine", "other"), [(None, 10), (10, None)])
def test_a_part_without_limit_does_not_fit_into_a_place_with_one(mine: int | None, other: int | None) -> None:
    place = DictPlace()
    take_part(place, Claim("a", other, None), this_process())
    assert take_part(place, Claim("b", mine, 100), this_process()) is not None


def test_of_two_that_come_at_once_and_do_not_both_fit_at_most_one_stays() -> None:
    place = DictPlace()
    outcome = []
    place.before_names = lambda: outcome.append(take_part(place, Claim("b", 60, 100), this_process()))
    outcome.append(take_part(place, Claim("a", 60, 100), this_process()))
    assert sum(refusal is None for refusal in outcome) <= 1
    assert sum(claim.quota or 0 for claim in list_claims(place)) <= 100


def test_a_part_has_one_writer_until_it_is_given_back() -> None:
    place = DictPlace()
    first, second = this_process(), this_process()
    take_part(place, Claim("a", 60, None), first)
    refusal = take_part(place, Claim("a", 60, None), second)
    assert refusal is not None
    assert not refusal.permanent
    assert str(first.pid) in refusal.text
    give_back(place, "a", second)
    assert holds(place, "a", first), "only the owner gives back"
    give_back(place, "a", first)
    assert [claim.part for claim in list_claims(place)] == ["a"], "the claim outlives its writer"
    assert take_part(place, Claim("a", 70, None), second) is None
    assert list_claims(place) == [Claim("a", 70, None)]


def test_a_part_is_taken_back_from_a_dead_process_only() -> None:
    place = DictPlace()
    child = subprocess.Popen(["sleep", "60"])
    me = this_process()
    theirs = dataclasses.replace(me, pid=child.pid, started=_started(child.pid), token="other")
    assert take_part(place, Claim("a", 60, None), theirs) is None
    assert take_part(place, Claim("a", 60, None), me) is not None
    child.kill()
    child.wait()
    assert take_part(place, Claim("a", 60, None), me) is None
    assert owner_of(place, "a") == me


def _started(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[19]


def test_what_is_known_of_other_processes() -> None:
    me = this_process()
    assert not is_provably_dead(me)
    assert is_provably_dead(dataclasses.replace(me, started="1")), "the id was used again"
    assert is_provably_dead(dataclasses.replace(me, boot="another"))
    assert not is_provably_dead(dataclasses.replace(me, host="elsewhere", pid=1, started="1"))


def test_nonsense_in_the_place_is_no_owner_and_a_claim_without_limit() -> None:
    place = DictPlace()
    place.entries = {"a": b"\xff", "b": b"[1]", "b.owner": b"{}", "NOT A PART": b"{}"}
    assert list_claims(place) == [Claim("a", None, None), Claim("b", None, None)]
    assert owner_of(place, "b") is None
    assert take_part(place, Claim("c", 1, 100), this_process()) is not None
    assert take_part(place, Claim("b", 1, None), this_process()) is None


def test_a_dropped_claim_frees_its_quota() -> None:
    place = DictPlace()
    take_part(place, Claim("a", 100, 100), this_process())
    drop_claim(place, "a")
    assert place.entries == {}
    assert take_part(place, Claim("b", 100, 100), this_process()) is None


@pytest.mark.parametrize("name", ["", "A", "a/b", "a.owner", "-a", "a" * 64, 7])
def test_names_that_no_part_may_have(name: str) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.x\.part"):
        check_part(name, "tiers.x.part")


def test_the_default_name_is_a_name() -> None:
    assert check_part(default_part(), "part")


class InterruptedPlace(DictPlace):
    """Runs `hook` before the call number `at`: what another engine does in the middle of a taking."""

    def __init__(self) -> None:
        super().__init__()
        self.at = -1
        self.hook = lambda: None

    def _count(self) -> None:
        self.at -= 1
        if self.at == -1:
            self.hook()

    def create(self, name: str, data: bytes) -> bool:
        self._count()
        return super().create(name, data)

    def replace(self, name: str, data: bytes) -> None:
        self._count()
        super().replace(name, data)

    def read(self, name: str) -> bytes | None:
        self._count()
        return super().read(name)

    def names(self) -> list[str]:
        self._count()
        return super().names()


@pytest.mark.parametrize("at", range(12))
@pytest.mark.parametrize("left", ["dead owner", "dead follower", "nothing"])
def test_another_engine_in_the_middle_of_a_taking_never_makes_two_owners(at: int, left: str) -> None:
    place = InterruptedPlace()
    dead = dataclasses.replace(this_process(), started="1", token="dead")
    if left != "nothing":
        take_part(place, Claim("a", 1, None), dead)
    if left == "dead follower":
        place.entries["a.after-dead"] = place.entries["a.owner"].replace(b"dead", b"gone")
    owners = [dataclasses.replace(this_process(), token=f"t{i}") for i in range(2)]
    taken = []
    place.hook = lambda: taken.append(take_part(place, Claim("a", 1, None), owners[1]) is None)
    place.at = at
    taken.append(take_part(place, Claim("a", 1, None), owners[0]) is None)
    assert sum(taken) == 1
    assert sum(holds(place, "a", owner) for owner in owners) == 1
    assert [name for name in place.entries if ".after-" in name] == []
