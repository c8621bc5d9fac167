"""The fs tier in a shared directory: parts and quotas, what is seen of others, modes, release of a part."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstrata.cli.app import build_app
from kvstrata.errors import ConfigError
from kvstrata.testing.clock import ManualClock
from kvstrata.testing.faulty_files import FaultyFileSystem
from kvstrata.testing.tier_harness import TierHarness, chunk_keys, payload_of
from kvstrata.tiers.common.claims import Owner, this_process
from kvstrata.tiers.fs import FsTier, SharedFsTier, make
from kvstrata.tiers.registry import make_tier
from kvstrata.types import FailCause, Presence

CHUNK = 1000
P, A = Presence.PRESENT, Presence.ABSENT
QUOTA = 100_000


class Rigs:
    """Engines over one directory; closed with the test."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.open: list[TierHarness] = []

    def __call__(self, part: str, *, files: FaultyFileSystem | None = None, **how: object) -> TierHarness:
        tier = SharedFsTier(str(self.place), part=part, files=files, **how)  # type: ignore[arg-type]
        rig = TierHarness(tier, chunk_bytes=CHUNK, clock=ManualClock()).open()
        self.open.append(rig)
        return rig


@pytest.fixture
def rigs(tmp_path: Path) -> Iterator[Rigs]:
    made = Rigs(tmp_path / "shared")
    yield made
    for rig in made.open:
        rig.close()


def record_of(place: Path, part: str, number: int = 0) -> Path:
    return sorted((place / "parts" / part).glob("*/*/*"))[number]


# sharing


@pytest.mark.scenario_129
def test_what_one_completes_the_other_sees_at_once(rigs: Rigs) -> None:
    one, two = rigs("one"), rigs("two")
    keys = chunk_keys(6)
    assert two.probe(keys) == [A] * 6
    one.store(keys[:3])
    assert two.probe(keys) == [P] * 3 + [A] * 3
    two.store(keys[3:])
    assert one.probe(keys) == [P] * 6
    for rig in (one, two):
        rig.check_loaded(rig.load(keys))
    assert one.tier.usage().keys == two.tier.usage().keys == 3


def test_a_part_whose_owner_is_gone_is_read_and_not_adopted(rigs: Rigs) -> None:
    one, two = rigs("one"), rigs("two")
    keys = chunk_keys(3)
    one.store(keys)
    one.close()
    assert two.probe(keys) == [P] * 3
    two.check_loaded(two.load(keys))
    two.tier.remove(keys)
    two.settle()
    assert two.probe(keys) == [P] * 3  # not two's to remove
    assert two.tier.usage().keys == 0


def test_a_copy_of_another_part_serves_what_is_bad_in_the_own(rigs: Rigs) -> None:
    one, two = rigs("one"), rigs("two")
    key = chunk_keys(1)
    one.store(key)
    two.store(key)
    path = record_of(rigs.place, "one")
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    one.check_loaded(one.load(key))


def test_no_lock_is_taken(rigs: Rigs) -> None:
    files = FaultyFileSystem()
    one = rigs("one", files=files)
    one.store(chunk_keys(3))
    assert one.load(chunk_keys(3)).ok
    assert not [call for call, _ in files.log if call == "try_lock"]


# quotas


@pytest.mark.scenario_16
def test_claims_never_exceed_the_limit_of_the_directory(rigs: Rigs) -> None:
    rigs("one", limit=QUOTA, shared_limit=2 * QUOTA)
    rigs("two", limit=QUOTA, shared_limit=2 * QUOTA)
    with pytest.raises(ConfigError, match=r"claims 100000 bytes, 2 other parts claim 200000 of 200000 bytes"):
        rigs("three", limit=QUOTA, shared_limit=2 * QUOTA)


@pytest.mark.scenario_103
def test_a_part_in_use_is_read_only_for_a_second_engine(rigs: Rigs) -> None:
    one, again = rigs("one"), rigs("one")
    keys = chunk_keys(2)
    one.store(keys)
    assert again.probe(keys) == [P, P]
    assert set(again.store(chunk_keys(2, 5)).causes) == {FailCause.REFUSED}
    assert "part one is written by process" in again.tier.notices[0]  # type: ignore[attr-defined]


def test_everything_that_lies_in_a_part_keeps_to_its_limit(rigs: Rigs) -> None:
    one = rigs("one", limit=QUOTA)

    def measure() -> None:
        parts, claims = rigs.place / "parts" / "one", rigs.place / "claims"
        files = [*parts.rglob("*"), *claims.glob("one*"), *claims.glob(".*")]
        assert sum(file.stat().st_blocks * 512 for file in files if file.is_file()) <= QUOTA

    one.checks.append(measure)
    for start in range(0, 60, 6):
        one.store(chunk_keys(6, start))
    assert 10 <= one.tier.usage().keys <= 20


def test_min_free_is_kept(rigs: Rigs) -> None:
    files = FaultyFileSystem()
    files.free_bytes = lambda: 50_000
    one = rigs("one", files=files, min_free=45_000)
    causes = one.store(chunk_keys(4)).causes
    assert causes == [None, FailCause.NO_SPACE, FailCause.NO_SPACE, FailCause.NO_SPACE]


# who may use it


def test_files_are_private_by_default(rigs: Rigs) -> None:
    rigs("one").store(chunk_keys(2))
    for path in (rigs.place, *rigs.place.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_mode_and_group_are_set_whatever_the_mask(rigs: Rigs) -> None:
    before = os.umask(0o077)
    try:
        rigs("one", mode="0660", group=os.getgid()).store(chunk_keys(2))
    finally:
        os.umask(before)
    for path in (rigs.place, *rigs.place.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o770 if path.is_dir() else 0o660), path
        assert path.stat().st_gid == os.getgid()


@pytest.mark.parametrize("mode", ["0666", "0644", "0700", "rw", 0o777, True])
def test_no_mode_lets_the_world_in(tmp_path: Path, mode: str | int) -> None:
    with pytest.raises(ConfigError, match="mode"):
        SharedFsTier(str(tmp_path), part="one", mode=mode)


def test_an_unknown_group_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-group"):
        SharedFsTier(str(tmp_path), part="one", group="no-such-group")


def test_a_directory_that_others_may_write_is_refused(rigs: Rigs) -> None:
    rigs.place.mkdir()
    rigs.place.chmod(0o777)
    with pytest.raises(ConfigError, match="written by everybody"):
        rigs("one")


def test_a_directory_that_its_group_may_write_needs_the_mode_that_says_so(rigs: Rigs) -> None:
    rigs.place.mkdir()
    rigs.place.chmod(0o770)
    with pytest.raises(ConfigError, match="written by its group"):
        rigs("one")
    assert rigs("one", mode="0660").store(chunk_keys(1)).ok


def test_one_engine_alone_and_parts_do_not_mix(rigs: Rigs, tmp_path: Path) -> None:
    rigs("one")
    with pytest.raises(ConfigError, match="shared by parts"):
        TierHarness(FsTier(str(rigs.place)), chunk_bytes=CHUNK).open()
    alone = TierHarness(FsTier(str(tmp_path / "alone")), chunk_bytes=CHUNK).open()
    with pytest.raises(ConfigError, match="one engine alone"):
        TierHarness(SharedFsTier(str(tmp_path / "alone"), part="one"), chunk_bytes=CHUNK).open()
    alone.close()


@pytest.mark.parametrize("part", ["", "Big", "a/b", "..", "x" * 64])
def test_a_part_needs_a_plain_name(tmp_path: Path, part: str) -> None:
    if part:
        with pytest.raises(ConfigError, match="part"):
            TierHarness(SharedFsTier(str(tmp_path / "p"), part=part), chunk_bytes=CHUNK).open()
    else:
        assert isinstance(make(str(tmp_path)), FsTier)  # without a part the directory is one engine's


def test_the_registry_makes_either_kind(tmp_path: Path) -> None:
    assert isinstance(make_tier("fs", path=str(tmp_path)), FsTier)
    assert isinstance(make_tier("fs", path=str(tmp_path), part="one"), SharedFsTier)
    with pytest.raises(ConfigError, match="no_such_option"):
        make_tier("fs", path=str(tmp_path), part="one", no_such_option=1)


def test_a_directory_that_cannot_be_made_is_an_error_at_open(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        TierHarness(SharedFsTier(str(tmp_path / "no" / "such"), part="one"), chunk_bytes=CHUNK).open()


# release


def fsck(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(), ["fsck", *arguments])
    return result.exit_code, result.output + (str(result.exception) if result.exception else "")


def test_a_released_part_gives_back_its_room_and_its_quota(rigs: Rigs) -> None:
    one = rigs("one", limit=QUOTA, shared_limit=QUOTA)
    one.store(chunk_keys(5))
    one.close()
    with pytest.raises(ConfigError, match="fsck --release"):
        rigs("two", limit=QUOTA, shared_limit=QUOTA)
    code, said = fsck(str(rigs.place), "--release", "one", "--json")
    assert code == 0
    assert json.loads(said)["files"] == 5
    two = rigs("two", limit=QUOTA, shared_limit=QUOTA)
    assert two.probe(chunk_keys(5)) == [A] * 5
    assert not (rigs.place / "parts" / "one").exists()
    assert not list((rigs.place / "claims").glob("one*"))


def test_a_part_in_use_is_not_released(rigs: Rigs) -> None:
    rigs("one")
    code, said = fsck(str(rigs.place), "--release", "one")
    assert code != 0
    assert "is written by process" in said


def test_a_part_of_another_host_needs_the_operator_s_word(rigs: Rigs) -> None:
    one = rigs("one")
    one.store(chunk_keys(2))
    one.close()
    claims = one.tier._shared.claims  # type: ignore[attr-defined]
    one.tier._shared._open_folders()  # type: ignore[attr-defined]
    mine = this_process()
    from kvstrata.tiers.common import claims as module

    other = Owner("another-host", mine.boot, mine.pid, mine.started, mine.token)
    claims.replace("one.owner", module._owner_bytes(other))
    assert fsck(str(rigs.place), "--release", "one")[0] != 0
    code, said = fsck(str(rigs.place), "--release", "one", "--force")
    assert code == 0, said
    assert "2 files" in said


def test_files_of_others_stay(rigs: Rigs) -> None:
    one = rigs("one")
    one.store(chunk_keys(2))
    one.close()
    (rigs.place / "parts" / "one" / "notes.txt").write_text("mine")
    code, said = fsck(str(rigs.place), "--release", "one")
    assert code == 3
    assert "notes.txt" in said
    assert (rigs.place / "parts" / "one" / "notes.txt").read_text() == "mine"


def test_an_unknown_part_is_named(rigs: Rigs, tmp_path: Path) -> None:
    rigs("one")
    assert "no part two" in fsck(str(rigs.place), "--release", "two")[1]
    (tmp_path / "other").mkdir()
    assert "no directory of parts" in fsck(str(tmp_path / "other"), "--release", "two")[1]


def test_payloads_follow_the_key(rigs: Rigs) -> None:
    one = rigs("one")
    keys = chunk_keys(3)
    one.store(keys)
    assert payload_of(keys[0], 4) != payload_of(keys[1], 4)
    assert record_of(rigs.place, "one").stat().st_size == 128 + CHUNK
