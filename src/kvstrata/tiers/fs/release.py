"""Frees a part of a shared directory whose engine does not come back: `kvstrata fsck DIRECTORY --release PART`."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from kvstrata.errors import ConfigError
from kvstrata.tiers.common.claims import PlaceError, check_gone, check_part, drop_claim, list_claims
from kvstrata.tiers.common.record import Identity
from kvstrata.tiers.fs.files import PRIVATE, RealFileSystem
from kvstrata.tiers.fs.place import PARTS, TEMPORARY, TEMPORARY_NAME
from kvstrata.tiers.fs.shared_client import SharedClient
from kvstrata.tiers.server.client import ClientSetup
from kvstrata.types import KEY_BYTES

_RECORD = re.compile(f"[0-9a-f]{{32}}/[0-9a-f]{{2}}/[0-9a-f]{{{2 * KEY_BYTES}}}")


@dataclass(frozen=True, slots=True)
class Released:
    """What was freed. `kept` are files in the part that are not kvstrata's, or that would not go."""

    part: str
    files: int
    bytes: int
    kept: tuple[str, ...]


def release_part(path: str, part: str, *, this_host_only: bool = True) -> Released:
    """Delete a part's chunks, then its claim. Raises `ConfigError` if there is no such part or it may be in use.

    An owner on this host that still runs is never overridden; one on another host only if `this_host_only` is False,
    because nothing can be known of it from here.
    """
    check_part(part, "--release")
    client = SharedClient(path, RealFileSystem(), PRIVATE, 0)
    if not (Path(path) / PARTS).is_dir():
        raise ConfigError(f"{path}: is no directory of parts")
    try:
        client.open(ClientSetup(Identity(bytes(16), 0), "", False, 5.0))
        folder = Path(path) / PARTS / part
        if not folder.is_dir() and part not in {claim.part for claim in list_claims(client.claims)}:
            raise ConfigError(f"{path}: there is no part {part}")
        check_gone(client.claims, part, this_host_only=this_host_only)
        count, size, kept = _delete_files(folder)
        if not kept:
            drop_claim(client.claims, part)
    except PlaceError as error:
        raise ConfigError(str(error)) from error
    finally:
        client.close()
    return Released(part, count, size, tuple(kept))


def _delete_files(folder: Path) -> tuple[int, int, list[str]]:
    """Delete what is ours in a part; returns how many, their bytes, and what stays."""
    count = size = 0
    kept: list[str] = []
    for root, _, files in os.walk(folder, topdown=False, followlinks=False):
        for name in files:
            path = Path(root) / name
            inside = path.relative_to(folder).as_posix()
            status = path.lstat()
            ours = _RECORD.fullmatch(inside) or (inside == f"{TEMPORARY}/{name}" and TEMPORARY_NAME.fullmatch(name))
            if not ours or not stat.S_ISREG(status.st_mode):
                kept.append(inside)
                continue
            try:
                path.unlink()
            except OSError as error:
                kept.append(f"{inside} ({error.strerror})")
                continue
            count, size = count + 1, size + status.st_blocks * 512
        if not kept:
            Path(root).rmdir()
    return count, size, kept
