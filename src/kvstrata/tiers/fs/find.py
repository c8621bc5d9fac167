"""Finds the files that an earlier owner of the fs tier's directory left. Runs on workers."""

from __future__ import annotations

import contextlib
import re
import stat
from dataclasses import dataclass

from kvstrata.tiers.common.index import Name
from kvstrata.tiers.common.record import HEADER_BYTES, check_header
from kvstrata.tiers.fs.files import cause_of, close_quietly
from kvstrata.tiers.fs.place import DIRECTORY_FLAGS, NAMESPACE_BYTES, READ_FLAGS, Folders, Place, file_name
from kvstrata.types import KEY_BYTES, FailCause, OffloadKey

_NAMESPACE_NAME = re.compile(f"[0-9a-f]{{{2 * NAMESPACE_BYTES}}}")
_FAN_NAME = re.compile("[0-9a-f]{2}")
_KEY_NAME = re.compile(f"[0-9a-f]{{{2 * KEY_BYTES}}}")


@dataclass(frozen=True, slots=True)
class Found:
    """One file that a scan found: what it is called, what it takes, when it was last used."""

    name: Name
    allocated: int
    mtime_ns: int


def list_folders(place: Place) -> list[tuple[str, str]]:
    """All (namespace, fan-out) directories of our form. Raises `OSError`."""
    found = []
    for namespace in place.files.names(place.root_fd):
        if not _NAMESPACE_NAME.fullmatch(namespace):
            continue
        try:
            fd = place.files.open(namespace, DIRECTORY_FLAGS, dir_fd=place.root_fd)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            if cause_of(error) is FailCause.FOREIGN:
                continue
            raise
        try:
            fans = [fan for fan in place.files.names(fd) if _FAN_NAME.fullmatch(fan)]
        finally:
            close_quietly(place.files, fd)
        found += [(namespace, fan) for fan in fans]
        if not fans and namespace != place.identity.namespace.hex():
            with contextlib.suppress(OSError):
                place.files.rmdir(namespace, place.root_fd)
    return found


def scan_folder(folders: Folders, namespace: str, fan: str) -> list[Found]:
    """All files of our form in one fan-out directory. Raises `OSError`.

    Of the tier's own namespace the headers are read, so that what a probe shows is what a load would accept.
    """
    place = folders.place
    try:
        folder = folders.at(namespace, fan)
    except (FileNotFoundError, NotADirectoryError):
        return []
    names = place.files.names(folder)
    own = namespace == place.identity.namespace.hex()
    if not names and not own:
        with contextlib.suppress(OSError):
            place.files.rmdir(fan, folders.at(namespace))
    found = []
    for file in names:
        if _KEY_NAME.fullmatch(file) and file.startswith(fan):
            one = _scan_file(place, folder, bytes.fromhex(namespace), bytes.fromhex(file), own=own)
            if one is not None:
                found.append(one)
    return found


def _scan_file(place: Place, folder: int, namespace: bytes, key: OffloadKey, *, own: bool) -> Found | None:
    """One file; None if it is gone or no plain file. Raises `OSError` if not even its size can be had."""
    try:
        status = place.files.stat(file_name(key), folder)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.mode):
        return None
    name = key if own and _acceptable(place, folder, key, status.size) else namespace + key
    return Found(name, place.footprint(status.size, status.allocated), status.mtime_ns)


def _acceptable(place: Place, folder: int, key: OffloadKey, size: int) -> bool:
    """Whether the header is intact, ours, and fits the size. A passing error leaves the verdict to the load."""
    head = bytearray(HEADER_BYTES)
    try:
        fd = place.files.open(file_name(key), READ_FLAGS, dir_fd=folder)
        try:
            count = place.files.read(fd, [head], 0)
        finally:
            close_quietly(place.files, fd)
    except OSError as error:
        return cause_of(error) in (FailCause.IO_ERROR, FailCause.TIMEOUT)
    header = check_header(head[:count], place.identity, key)
    return not isinstance(header, FailCause) and size == HEADER_BYTES + header.payload_bytes
