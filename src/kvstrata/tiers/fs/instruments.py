"""Instruments of the fs tier: its self-test, and damage for tests."""

from __future__ import annotations

import os
from typing import Protocol

from kvstrata.tiers.fs.files import close_quietly
from kvstrata.tiers.fs.place import Folders, Place, file_name
from kvstrata.tiers.fs.record import HEADER_BYTES
from kvstrata.types import BLOCK_HASH_BYTES, FailCause, OffloadKey, make_key

SELF_TEST_KEY = make_key(b"kvstrata self-test".ljust(BLOCK_HASH_BYTES, b"\0"), 0xFFFFFFFF)
SELF_TEST_BYTES = 256


class _Testable(Protocol):
    name: str

    def run_quietly(self, key: OffloadKey, buffer: memoryview, *, load: bool) -> list[FailCause | None] | None: ...

    def remove_quietly(self, key: OffloadKey) -> None: ...


def run_self_test(tier: _Testable) -> str | None:
    """Write, read back, compare, remove. None if all is well, else one line."""
    tier.remove_quietly(SELF_TEST_KEY)
    written = bytes(range(SELF_TEST_BYTES))
    buffer = bytearray(written)
    said = _run(tier, "write", buffer, load=False)
    if said is None:
        buffer[:] = bytes(SELF_TEST_BYTES)
        said = _run(tier, "read", buffer, load=True)
    if said is None and buffer != written:
        said = f"{tier.name} failed its self-test: other bytes came back than were written"
    tier.remove_quietly(SELF_TEST_KEY)
    return said


def _run(tier: _Testable, what: str, buffer: bytearray, *, load: bool) -> str | None:
    result = tier.run_quietly(SELF_TEST_KEY, memoryview(buffer), load=load)
    if result is None:
        return f"{tier.name} failed its self-test: the {what} did not end"
    if result != [None]:
        causes = ", ".join(str(cause) for cause in result) or "refused"
        return f"{tier.name} failed its self-test: {what}: {causes}"
    return None


def flip_payload_byte(place: Place, key: OffloadKey) -> bool:
    """Alter the middle byte of a stored payload in place, size and time unchanged; False if that cannot be done."""
    try:
        with Folders(place) as folders:
            fd = place.files.open(file_name(key), os.O_RDWR | os.O_NOFOLLOW, dir_fd=folders.of(key))
            try:
                status = place.files.fstat(fd)
                length = status.size - HEADER_BYTES
                if length < 1:
                    return False
                byte = bytearray(1)
                place.files.read(fd, [byte], HEADER_BYTES + length // 2)
                place.files.write(fd, [bytes([byte[0] ^ 0xFF])], HEADER_BYTES + length // 2)
                place.files.set_mtime(fd, status.mtime_ns)
            finally:
                close_quietly(place.files, fd)
    except OSError:
        return False
    return True
