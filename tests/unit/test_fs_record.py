"""The bytes of one chunk's file: a golden record, and what each damaged byte of it means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from kvstrata.tiers.common.record import HEADER_BYTES, Header, Identity, check_header, make_header
from kvstrata.types import FailCause

IDENTITY = Identity(b"0123456789abcdef", 0x1122334455667788)
KEY = bytes(range(32)) + (3).to_bytes(4, "big")
PAYLOAD = b"kvstrata" * 4
DIGEST = xxhash.xxh3_128_digest(PAYLOAD)
GOLDEN = """
    00000000  4b 56 53 54 52 41 54 41 01 00 80 00 01 00 00 00
    00000010  30 31 32 33 34 35 36 37 38 39 61 62 63 64 65 66
    00000020  88 77 66 55 44 33 22 11 00 01 02 03 04 05 06 07
    00000030  08 09 0a 0b 0c 0d 0e 0f 10 11 12 13 14 15 16 17
    00000040  18 19 1a 1b 1c 1d 1e 1f 00 00 00 03 00 00 00 00
    00000050  20 00 00 00 00 00 00 00 81 6a 1f d3 e0 96 dd a4
    00000060  74 53 67 0e df 7c 95 3d 00 00 00 00 00 00 00 00
    00000070  00 00 00 00 00 00 00 00 54 c6 7c 21 01 de 6a 5f
    00000080  6b 76 73 74 72 61 74 61 6b 76 73 74 72 61 74 61
    00000090  6b 76 73 74 72 61 74 61 6b 76 73 74 72 61 74 61
"""
HEADER = make_header(IDENTITY, KEY, len(PAYLOAD), DIGEST)


def golden_bytes() -> bytes:
    return b"".join(bytes.fromhex(line.split("  ", 1)[1]) for line in map(str.strip, GOLDEN.strip().splitlines()))


def test_the_golden_record() -> None:
    assert golden_bytes() == HEADER + PAYLOAD
    assert check_header(golden_bytes()[:HEADER_BYTES], IDENTITY, KEY) == Header(len(PAYLOAD), DIGEST)


def test_the_format_document_shows_the_golden_record() -> None:
    document = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    assert GOLDEN.strip("\n") in document


@pytest.mark.parametrize("position", range(HEADER_BYTES))
def test_every_flipped_byte_is_seen(position: int) -> None:
    damaged = bytearray(HEADER)
    damaged[position] ^= 0x10
    expected = FailCause.FOREIGN if position in (8, 9) else FailCause.CORRUPT
    assert check_header(damaged, IDENTITY, KEY) is expected


@pytest.mark.parametrize(
    ("identity", "key"),
    [
        (replace(IDENTITY, namespace=b"another-digest-x"), KEY),
        (replace(IDENTITY, layout_tag=5), KEY),
        (IDENTITY, KEY[:-4] + (4).to_bytes(4, "big")),
    ],
)
def test_another_namespace_layout_or_key_is_foreign(identity: Identity, key: bytes) -> None:
    assert check_header(HEADER, identity, key) is FailCause.FOREIGN


def test_an_unknown_version_is_foreign_whatever_its_checksum() -> None:
    newer = bytearray(HEADER)
    newer[8] = 2
    assert check_header(newer, IDENTITY, KEY) is FailCause.FOREIGN


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1])
def test_a_short_header_has_the_wrong_size(length: int) -> None:
    assert check_header(HEADER[:length], IDENTITY, KEY) is FailCause.WRONG_SIZE


def test_a_zeroed_header_is_corrupt() -> None:
    assert check_header(bytes(HEADER_BYTES), IDENTITY, KEY) is FailCause.CORRUPT
