"""Instruments of the fs tier: damage for tests."""

from __future__ import annotations

import os

from kvstrata.tiers.common.record import HEADER_BYTES
from kvstrata.tiers.fs.files import close_quietly
from kvstrata.tiers.fs.place import Folders, Place, file_name
from kvstrata.types import OffloadKey


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
