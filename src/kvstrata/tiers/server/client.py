"""What a store behind a server must offer to become a tier: eleven blocking methods and three facts.

`ServerTier` does the rest: jobs, time-outs, the limit, eviction, recovery, the self-test. A client knows where things
lie in its store, how a batch goes there and back, and what an error means. It is used by several workers at once; no
method raises anything but `PlaceError`, and only where that is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import xxhash

from kvstrata.tiers.common.claims import ClaimPlace
from kvstrata.tiers.common.index import Name, is_served
from kvstrata.tiers.common.record import HEADER_BYTES, Identity, check_header, check_payload, make_header
from kvstrata.types import FailCause, OffloadKey


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """One record that a scan of the own part found: its name, what it takes, when it was last used (any unit)."""

    name: Name
    allocated: int
    stamp: int


@dataclass(slots=True, eq=False)
class WriteItem:
    """One record to be written. `payload` may be read until the write has returned, and not after."""

    key: OffloadKey
    payload: memoryview
    digest: bytes | None
    """The payload's xxh3-128, if it was made already."""
    stamp: int
    """Time of last use, ns; later ones are warmer."""
    failed: FailCause | None = FailCause.CANCELLED
    """Set by the client: why it was not written; None if it is there."""
    uncertain: bool = False
    """Set by the client with `failed`: it may have been written all the same."""
    foreign: bool = False
    """Set by the client without `failed`: the record was there already, and belongs to another writer's part."""

    def header(self, identity: Identity) -> bytes:
        """The header of the record."""
        digest = self.digest or xxhash.xxh3_128_digest(self.payload)
        return make_header(identity, self.key, len(self.payload), digest, self.payload)

    def fail(self, cause: FailCause, *, uncertain: bool = False) -> None:
        """It was not written, or nobody knows."""
        self.failed, self.uncertain = cause, uncertain


@dataclass(slots=True, eq=False)
class ReadItem:
    """One record to be read into `target`, which is written at most once, by `accept`."""

    key: OffloadKey
    target: memoryview
    own: bool | None
    """Whether the own part has it; None if that is not known."""
    failed: FailCause | None = FailCause.CANCELLED
    """Set by the client, or by `accept`: why it was not read; None if it was."""
    version: object = None
    """Set by the client with a bad content: what `discard` needs to find this very version, and no other."""
    permit: list[None] = field(default_factory=lambda: [None])

    def take_permit(self) -> bool:
        """Whether the caller may be the one that settles this item: true once, for a worker or for a time-out."""
        try:
            self.permit.pop()
        except IndexError:
            return False
        return True

    def accept(self, record: memoryview, identity: Identity, *, verify: bool = True) -> bool:
        """Check a whole record and copy its payload to `target`; False, with `failed` set, if it is not acceptable.

        The bytes are verified where they arrived: primary never sees those of another chunk.
        """
        self.failed = self._check(record, identity, verify=verify)
        if self.failed is None:
            if self.take_permit():
                self.target[:] = record[HEADER_BYTES:]
            else:
                self.failed = FailCause.TIMEOUT
        return self.failed is None

    def _check(self, record: memoryview, identity: Identity, *, verify: bool) -> FailCause | None:
        if len(record) < HEADER_BYTES:
            return FailCause.WRONG_SIZE
        header = check_header(bytes(record[:HEADER_BYTES]), identity, self.key)
        if isinstance(header, FailCause):
            return header
        if not len(record) - HEADER_BYTES == header.payload_bytes == len(self.target):
            return FailCause.WRONG_SIZE
        return check_payload(header, identity, record[HEADER_BYTES:], verify=verify)


@dataclass(frozen=True, slots=True)
class ClientSetup:
    """What a client learns when it is opened."""

    identity: Identity
    part: str
    """The part that this writer writes in."""
    verify: bool
    timeout_s: float
    """Longest time of one request; the client must see to it that none takes (much) longer."""


class StoreClient(Protocol):
    """One store. Reads see every part, writes go to the own one."""

    overhead: int
    """Bytes that a record takes besides its header and payload."""
    unit: int
    """A record takes whole multiples of so many bytes; known once the client is open."""
    trusts_index: bool
    """Nothing leaves the own part but by this tier (or rarely): keys in its index are not asked for."""

    @property
    def claims(self) -> ClaimPlace:
        """Where the claims of parts lie. Usable between `open` and `close`."""
        ...

    def open(self, setup: ClientSetup) -> None:
        """Connect and check that the store can be used. Raises `PlaceError` that names the setting to look at."""
        ...

    def close(self) -> None:
        """Let go of connections; idempotent."""
        ...

    def exists(self, keys: Sequence[OffloadKey], *, own: bool) -> list[bool | FailCause]:
        """Per key, whether a part has a record that a load would (as far as can be told) accept.

        `own`: False if it is known that the own part has none of them.
        """
        ...

    def read(self, items: Sequence[ReadItem]) -> None:
        """Read all items at once; each gets its own outcome."""
        ...

    def write(self, items: Sequence[WriteItem]) -> None:
        """Write all items at once, each as a whole or not at all; each gets its own outcome."""
        ...

    def remove(self, names: Sequence[Name]) -> list[bool]:
        """Delete records of the own part; per name, whether it is gone now. What was not there is gone."""
        ...

    def discard(self, items: Sequence[ReadItem]) -> list[bool]:
        """See to it that the bad version that each item read is not served again; per item, whether it is gone."""
        ...

    def touch(self, stamps: Sequence[tuple[OffloadKey, int]]) -> None:
        """Note when own records were last used, if the store can keep that; best effort."""
        ...

    def scan(self) -> Iterator[list[FoundRecord]]:
        """All records of the own part, also of other namespaces, by pages. Raises `PlaceError`."""
        ...


def footprint(client: StoreClient, payload_bytes: int) -> int:
    """Bytes that the record of a payload takes in a store."""
    return -(-(HEADER_BYTES + payload_bytes + client.overhead) // client.unit) * client.unit


SCOPE_BYTES = 24


def scope_of(identity: Identity) -> bytes:
    """What stands before a key in a store, so that no other namespace or layout ever finds it: 16 + 8 bytes."""
    return identity.namespace + identity.layout_tag.to_bytes(8, "big")


def full_name(identity: Identity, name: Name) -> bytes:
    """Scope and key of a name: a bare key is of the own scope, a longer name has its scope before it."""
    return scope_of(identity) + name if is_served(name) else name


def short_name(identity: Identity, full: bytes) -> Name:
    """The name of a record by scope and key: the key alone if it is of the own scope."""
    return full[SCOPE_BYTES:] if full.startswith(scope_of(identity)) else full
