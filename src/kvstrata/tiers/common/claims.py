"""Claims of parts: who may write where in a place that several engines share, and how much.

Writers that take no locks cannot share one counter. So each engine writes, counts and evicts only inside its own
*part*, and reads all parts. A place keeps two small entries per part:

    PART          the claim: the quota of the part, and the limit of the whole place as the claimant knows it
    PART.owner    who writes the part now; made by an atomic create, gone after a clean end
    PART.after-*  who followed a dead owner, made by an atomic create, so that only one does

Only four primitives are needed of a place, one of them atomic: create if absent. The claim is made first and counted
afterwards: whoever finds the sum above the limit takes its own claim back. So claims never exceed the limit, and of
two that come at once and do not both fit, one or both are refused.

Nothing adopts by itself: a part whose owner is gone for good is read like any other, and freed by `kvstrata fsck
--release PART`. An engine that starts again under the name of its part takes it back if its former owner ended
cleanly, or is provably dead: it ran on this host, and its process is no more.
"""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvstrata.errors import ConfigError

OWNER = ".owner"
AFTER = ".after-"
MAX_FOLLOWERS = 16

_PART = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


class PlaceError(Exception):
    """A place could not be asked. `permanent`: only the operator can change that. One line, without secrets."""

    def __init__(self, text: str, *, permanent: bool = False) -> None:
        super().__init__(text)
        self.permanent = permanent


class ClaimPlace(Protocol):
    """Where the claims of one shared place lie. Methods may block; they raise `PlaceError` and nothing else."""

    def create(self, name: str, data: bytes) -> bool:
        """Make an entry, all or nothing; False, and nothing changed, if there is one of this name."""
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Make an entry, or give it new content. Only its owner calls this."""
        ...

    def read(self, name: str) -> bytes | None:
        """The content of an entry; None if there is none."""
        ...

    def delete(self, name: str) -> None:
        """Take an entry away; it may be gone already."""
        ...

    def names(self) -> list[str]:
        """The names of all entries."""
        ...


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, so that another one on the same host can tell whether it still runs."""

    host: str
    boot: str
    pid: int
    started: str
    """When the process began, as the kernel counts it: a process id alone is used again."""
    token: str
    """Random: two tiers of one process are two owners."""

    @property
    def is_here(self) -> bool:
        """Whether it ran on this host, so that more can be known of it."""
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True, slots=True)
class Claim:
    """The quota of one part in bytes (None: without limit), and the limit of the place that its writer was given."""

    part: str
    quota: int | None
    total: int | None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a part cannot be written now. `permanent`: nobody but the operator can change it."""

    text: str
    permanent: bool = False


def check_part(part: str, option: str) -> str:
    """A part's name as it may be used in paths and keys. Raises `ConfigError`."""
    if not isinstance(part, str) or not _PART.fullmatch(part):
        raise ConfigError(f"{option}: {part!r} must be 1 to 63 lower-case letters, digits, '-' or '_'")
    return part


def default_part() -> str:
    """This host's name as a part's name: right for one engine per host, with a host name that stays."""
    name = re.sub(r"[^a-z0-9_-]+", "-", socket.gethostname().lower()).strip("-_")
    return name[:63] or "engine"


def this_process() -> Owner:
    """The owner that this process is, with a new token."""
    return Owner(socket.gethostname(), _boot(), os.getpid(), _started(os.getpid()) or "", os.urandom(8).hex())


def is_provably_dead(owner: Owner) -> bool:
    """Whether a process that ran on this host is no more. Of other hosts nothing is known."""
    if not owner.is_here:
        return False
    if owner.boot != _boot():
        return bool(owner.boot)
    return _started(owner.pid) != owner.started


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When a process began, in ticks since the machine did; None if there is no such process."""
    try:
        # The second field is the program's name in brackets and may hold anything.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def take_part(place: ClaimPlace, claim: Claim, owner: Owner) -> Refusal | None:
    """Become the writer of a part and claim its quota; None if that worked. Raises `PlaceError`."""
    if not place.create(claim.part + OWNER, _owner_bytes(owner)):
        refusal = _take_over(place, claim.part, owner)
        if refusal is not None:
            return refusal
    former = place.read(claim.part)
    place.replace(claim.part, _claim_bytes(claim))
    refusal = _check_sum(claim, list_claims(place))
    if refusal is None:
        return None
    if former is None:
        place.delete(claim.part)
    else:
        place.replace(claim.part, former)
    give_back(place, claim.part, owner)
    return refusal


def _take_over(place: ClaimPlace, part: str, owner: Owner) -> Refusal | None:
    """Take the place of an owner that is provably dead. The right to follow each owner is an atomic create of its own.

    A follower that died before it was done is followed in turn.
    """
    found = former = owner_of(place, part)
    for _ in range(MAX_FOLLOWERS):
        if former is not None and not is_provably_dead(former):
            return Refusal(f"part {part} is written by {former}")
        right = f"{part}{AFTER}{former.token if former is not None else 'nobody'}"
        if place.create(right, _owner_bytes(owner)):
            if owner_of(place, part) != found:  # followed before we came, and the right to it cleared away since
                place.delete(right)
                break
            place.replace(part + OWNER, _owner_bytes(owner))
            for name in place.names():
                if name.startswith(part + AFTER):
                    place.delete(name)
            return None
        former = _owner_of(place.read(right))
    return Refusal(f"part {part} was taken by other engines at the same moment")


def _check_sum(mine: Claim, claims: list[Claim]) -> Refusal | None:
    """Refuse a claim that does not fit beside the others; the least limit that anybody states counts."""
    totals = [claim.total for claim in claims if claim.total is not None]
    if not totals:
        return None
    total = min(totals)
    others = [claim for claim in claims if claim.part != mine.part]
    taken = sum(claim.quota or 0 for claim in others)
    asked = "no limit" if mine.quota is None else f"{mine.quota} bytes"
    endless = mine.quota is None or any(claim.quota is None for claim in others)
    if not endless and taken + (mine.quota or 0) <= total:
        return None
    return Refusal(
        f"part {mine.part} claims {asked}, {len(others)} other parts claim {taken} of {total} bytes; "
        "a smaller limit, or kvstrata fsck --release of a part that nobody needs",
        permanent=True,
    )


def holds(place: ClaimPlace, part: str, owner: Owner) -> bool:
    """Whether `owner` still is the writer of a part. Raises `PlaceError`."""
    return owner_of(place, part) == owner


def give_back(place: ClaimPlace, part: str, owner: Owner) -> None:
    """End being the writer of a part. Its claim and its chunks stay. Raises `PlaceError`."""
    if holds(place, part, owner):
        place.delete(part + OWNER)


def check_gone(place: ClaimPlace, part: str, *, this_host_only: bool) -> None:
    """Raise `ConfigError` if a part may have a writer, `PlaceError` if that cannot be asked.

    An owner on this host that still runs is never overridden; one on another host only if `this_host_only` is False,
    because nothing can be known of it from here.
    """
    owner = owner_of(place, part)
    if owner is not None and not is_provably_dead(owner) and (this_host_only or owner.is_here):
        hint = "" if owner.is_here else "; if it is gone for good, say so with --force"
        raise ConfigError(f"part {part} is written by {owner}{hint}")


def drop_claim(place: ClaimPlace, part: str) -> None:
    """Free the quota of a part whose chunks were deleted. Raises `PlaceError`."""
    place.delete(part)
    for name in place.names():
        if name == part + OWNER or name.startswith(part + AFTER):
            place.delete(name)


def list_claims(place: ClaimPlace) -> list[Claim]:
    """The claims of all parts. Raises `PlaceError`."""
    found = [(name, place.read(name)) for name in place.names() if _PART.fullmatch(name)]
    return [_claim_of(name, data) for name, data in found if data is not None]


def owner_of(place: ClaimPlace, part: str) -> Owner | None:
    """Who writes a part now; None if nobody does, or the entry makes no sense. Raises `PlaceError`."""
    return _owner_of(place.read(part + OWNER))


def _owner_of(data: bytes | None) -> Owner | None:
    fields = _table(data)
    pid = fields.get("pid")
    host, boot, started, token = (str(fields.get(name)) for name in ("host", "boot", "started", "token"))
    return Owner(host, boot, pid, started, token) if isinstance(pid, int) else None


def _owner_bytes(owner: Owner) -> bytes:
    fields = {"host": owner.host, "boot": owner.boot, "pid": owner.pid, "started": owner.started, "token": owner.token}
    return json.dumps(fields).encode()


def _claim_bytes(claim: Claim) -> bytes:
    return json.dumps({"quota": claim.quota, "total": claim.total}).encode()


def _claim_of(part: str, data: bytes) -> Claim:
    """A claim whose entry makes no sense counts as one without limit: nothing else is safe."""
    fields = _table(data)
    return Claim(part, _bytes_in(fields, "quota"), _bytes_in(fields, "total"))


def _bytes_in(fields: dict[str, str | int | None], name: str) -> int | None:
    value = fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _table(data: bytes | None) -> dict[str, str | int | None]:
    try:
        table = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}
