"""A store client whose requests fail on command, around any other: faults of a server without a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstrata.tiers.common.claims import ClaimPlace, PlaceError
from kvstrata.tiers.common.index import Name
from kvstrata.tiers.server.client import ClientSetup, FoundRecord, ReadItem, StoreClient, WriteItem
from kvstrata.types import FailCause, OffloadKey


class FaultyClient:
    """`inner`, but `failing_reads` and `failing_writes` name what every request ends with while they are set.

    `lands`: a write that fails reaches the store all the same. `failing_scans`: scans fail, reads do not.
    `calls` counts batches by method, `keys` their keys.
    """

    def __init__(self, inner: StoreClient) -> None:
        self.inner = inner
        self.overhead = inner.overhead
        self.trusts_index = inner.trusts_index
        self.failing_reads: FailCause | None = None
        self.failing_writes: FailCause | None = None
        self.lands = False
        self.failing_scans = False
        self.calls: dict[str, int] = {}
        self.keys: dict[str, int] = {}

    def _count(self, method: str, keys: int) -> None:
        self.calls[method] = self.calls.get(method, 0) + 1
        self.keys[method] = self.keys.get(method, 0) + keys

    @property
    def unit(self) -> int:
        """The inner one's, which it may learn when it is opened."""
        return self.inner.unit

    @property
    def claims(self) -> ClaimPlace:
        """The inner one's."""
        return self.inner.claims

    def open(self, setup: ClientSetup) -> None:
        """Fails as reads do."""
        if self.failing_reads is not None:
            raise PlaceError("the store does not answer (injected)")
        self.inner.open(setup)

    def close(self) -> None:
        """Never fails."""
        self.inner.close()

    def exists(self, keys: Sequence[OffloadKey], *, own: bool) -> list[bool | FailCause]:
        """Fails as reads do."""
        self._count("exists", len(keys))
        if self.failing_reads is not None:
            return [self.failing_reads] * len(keys)
        return self.inner.exists(keys, own=own)

    def read(self, items: Sequence[ReadItem]) -> None:
        """Fails as reads do."""
        self._count("read", len(items))
        if self.failing_reads is None:
            self.inner.read(items)
            return
        for item in items:
            item.failed = self.failing_reads

    def write(self, items: Sequence[WriteItem]) -> None:
        """Fails as writes do, and lands if it is told to."""
        self._count("write", len(items))
        if self.failing_writes is None or self.lands:
            self.inner.write(items)
        if self.failing_writes is not None:
            for item in items:
                item.fail(self.failing_writes, uncertain=self.failing_writes.is_passing)

    def remove(self, names: Sequence[Name]) -> list[bool]:
        """Fails as writes do."""
        self._count("remove", len(names))
        return [False] * len(names) if self.failing_writes is not None else self.inner.remove(names)

    def discard(self, items: Sequence[ReadItem]) -> list[bool]:
        """Fails as writes do."""
        self._count("discard", len(items))
        return [False] * len(items) if self.failing_writes is not None else self.inner.discard(items)

    def touch(self, stamps: Sequence[tuple[OffloadKey, int]]) -> None:
        """Never fails."""
        self.inner.touch(stamps)

    def scan(self) -> Iterator[list[FoundRecord]]:
        """Fails as reads do, or alone."""
        if self.failing_reads is not None or self.failing_scans:
            raise PlaceError("the store does not answer (injected)")
        yield from self.inner.scan()
