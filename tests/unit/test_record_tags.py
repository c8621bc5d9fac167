"""Records with a secret: what is tagged, what is refused, and that the secret shows nowhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstrata.cli.doctor import examine
from kvstrata.config import config_from_dict
from kvstrata.errors import ConfigError
from kvstrata.testing.clock import ManualClock
from kvstrata.testing.tier_harness import TierHarness, chunk_keys
from kvstrata.tiers.common import record
from kvstrata.tiers.common.record import (
    HEADER_BYTES,
    NO_TAG,
    Header,
    Identity,
    check_header,
    check_payload,
    make_header,
    tag_key_of,
)
from kvstrata.tiers.fs import SharedFsTier
from kvstrata.types import FailCause

KEY, OTHER = chunk_keys(2)
PAYLOAD = b"what users said" * 40
CHUNK = 1000
WITH = Identity(b"n" * 16, 7, tag_key_of("sesame"))
WITHOUT = Identity(b"n" * 16, 7)


def sealed(identity: Identity, payload: bytes = PAYLOAD, key: bytes = KEY) -> bytes:
    return make_header(identity, key, len(payload), xxhash.xxh3_128_digest(payload), payload)


def judge(head: bytes, identity: Identity, payload: bytes = PAYLOAD, key: bytes = KEY) -> FailCause | None:
    header = check_header(head, identity, key)
    return header if isinstance(header, FailCause) else check_payload(header, identity, payload)


def again(head: bytes) -> bytes:
    """A header that was altered, with the checksum that anybody can make."""
    return head[:120] + xxhash.xxh3_64_intdigest(head[:120]).to_bytes(8, "little")


def test_what_the_secret_made_is_accepted() -> None:
    assert judge(sealed(WITH), WITH) is None
    assert sealed(WITH)[104:120] != NO_TAG
    assert judge(sealed(WITH), WITHOUT) is None  # whoever has no secret reads what others tagged


def test_what_has_no_tag_or_another_one_is_foreign() -> None:
    assert judge(sealed(WITHOUT), WITH) is FailCause.FOREIGN
    assert judge(sealed(Identity(b"n" * 16, 7, tag_key_of("other"))), WITH) is FailCause.FOREIGN


def test_another_payload_with_the_right_digest_is_foreign() -> None:
    """The digest can be made to fit by anybody; the tag cannot."""
    forged = b"what somebody else said"
    head = bytearray(sealed(WITH))
    head[80:88] = len(forged).to_bytes(8, "little")
    head[88:104] = xxhash.xxh3_128_digest(forged)
    assert judge(again(bytes(head)), WITH, forged) is FailCause.FOREIGN


@pytest.mark.parametrize("at", [20, 33, 45, 81, 90, 104, 119])
def test_a_header_that_was_altered_and_summed_again_is_refused(at: int) -> None:
    head = bytearray(sealed(WITH))
    head[at] ^= 1
    assert judge(again(bytes(head)), WITH) is not None


def test_a_record_under_another_key_is_foreign() -> None:
    head = bytearray(sealed(WITH))
    head[40:76] = OTHER
    assert judge(again(bytes(head)), WITH, key=OTHER) is FailCause.FOREIGN


def test_every_altered_byte_of_a_payload_is_found() -> None:
    head = sealed(WITH)
    for at in np.random.default_rng(3).integers(0, len(PAYLOAD), size=30).tolist():
        bad = PAYLOAD[:at] + bytes([PAYLOAD[at] ^ 1]) + PAYLOAD[at + 1 :]
        assert judge(head, WITH, bad) is FailCause.CORRUPT
        header = check_header(head, WITH, KEY)
        assert isinstance(header, Header)
        assert check_payload(header, WITH, bad, verify=False) is FailCause.FOREIGN  # the tag stands alone, too


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KV_TEST_SECRET", "sesame")
    assert "sesame" not in repr(WITH)
    assert WITH.tag_key is not None
    assert repr(WITH.tag_key) not in repr(WITH)
    tier = SharedFsTier(str(tmp_path), part="one", secret="env:KV_TEST_SECRET")
    assert "sesame" not in repr(vars(tier))
    with pytest.raises(ConfigError) as caught:
        TierHarness(SharedFsTier(str(tmp_path), part="two", secret="sesame"), chunk_bytes=CHUNK).open()
    assert "sesame" not in str(caught.value)


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(record.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"kvstrata\[secret\]"):
        tag_key_of("sesame")


# a tier


@pytest.fixture
def rigs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, TierHarness]]:
    monkeypatch.setenv("KV_TEST_SECRET", "sesame")
    made: dict[str, TierHarness] = {}
    for part, secret in (("one", "env:KV_TEST_SECRET"), ("two", "env:KV_TEST_SECRET"), ("three", "")):
        tier = SharedFsTier(str(tmp_path / "shared"), part=part, secret=secret)
        made[part] = TierHarness(tier, chunk_bytes=CHUNK, clock=ManualClock()).open()
    yield made
    for rig in made.values():
        rig.close()


def test_engines_with_the_secret_share_and_take_nothing_from_one_without(rigs: dict[str, TierHarness]) -> None:
    rigs["one"].store(chunk_keys(3))
    rigs["three"].store(chunk_keys(3, 10))
    rigs["two"].check_loaded(rigs["two"].load(chunk_keys(3)))
    assert set(rigs["two"].load(chunk_keys(3, 10)).causes) == {FailCause.FOREIGN}
    rigs["three"].check_loaded(rigs["three"].load(chunk_keys(3)))


def test_a_forged_record_in_a_part_is_a_miss(rigs: dict[str, TierHarness], tmp_path: Path) -> None:
    rigs["one"].store([KEY])
    path = next((tmp_path / "shared" / "parts" / "one").glob("*/*/*"))
    data = path.read_bytes()
    forged = os.urandom(len(data) - HEADER_BYTES)
    head = data[:88] + xxhash.xxh3_128_digest(forged) + data[104:]
    path.write_bytes(again(head[:HEADER_BYTES]) + forged)
    assert rigs["two"].load([KEY]).causes == [FailCause.FOREIGN]
    assert rigs["two"].store([KEY]).ok
    rigs["two"].check_loaded(rigs["two"].load([KEY]))


def test_a_restart_finds_its_own_tagged_records_and_hides_untagged_ones(
    rigs: dict[str, TierHarness], tmp_path: Path
) -> None:
    rigs["one"].store(chunk_keys(2))
    rigs["three"].store(chunk_keys(2, 10))
    for part, served in (("one", 2), ("three", 0)):
        rigs[part].close()
        tier = SharedFsTier(str(tmp_path / "shared"), part=part, secret="env:KV_TEST_SECRET")
        rig = TierHarness(tier, chunk_bytes=CHUNK, clock=ManualClock()).open()
        rig.settle()
        usage = tier.usage()
        assert usage.keys == served
        assert usage.bytes_held == 2 * 4096  # what is not served still counts
        rig.close()


def test_the_doctor_warns_of_a_shared_tier_without_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_TEST_SECRET", "sesame")
    entry = {"type": "fs", "path": str(tmp_path / "kv"), "part": "one", "limit": "1MB"}
    for secret, warned in (("", True), ("env:KV_TEST_SECRET", False)):
        config = config_from_dict({"primary": {"size": 1 << 20}, "tiers": [{**entry, "secret": secret}]})
        lines = [finding.line() for finding in examine(config)]
        assert any("not signed" in line for line in lines) is warned
        assert not any("sesame" in line for line in lines)
