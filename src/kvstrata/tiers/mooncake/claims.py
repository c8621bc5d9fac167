"""Claims of parts as small, pinned objects of a Mooncake Store.

    PREFIX/claim/NAME    one entry of `common.claims`
    PREFIX/part/N        the name of a part, N from 0 on: the store cannot list, so parts stand in numbered places

A put of an object that is there is answered as a success and changes nothing. So a create puts and reads back: whose
bytes are there has made it. That is atomic because the store accepts one put of a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvstrata.tiers.common.claims import AFTER, OWNER, PlaceError

MAX_PARTS = 64
"""Most parts that one prefix can have."""
NOT_FOUND = -704
ALREADY_THERE = -705


class StoreHolder(Protocol):
    """Who has the connection."""

    @property
    def store(self) -> Any:
        """The connected store, or None."""
        ...


class MooncakeClaims:
    """A `ClaimPlace` (common/claims.py)."""

    def __init__(self, holder: StoreHolder, prefix: str, pinned: Any) -> None:
        self._holder = holder
        self._prefix = prefix
        self._pinned = pinned
        self._followers: set[str] = set()
        self._parts: dict[int, str] = {}

    @property
    def _store(self) -> Any:
        store = self._holder.store
        if store is None:
            raise PlaceError("is not connected")
        return store

    def _name(self, name: str) -> str:
        return f"{self._prefix}/claim/{name}"

    def _place(self, number: int) -> str:
        return f"{self._prefix}/part/{number}"

    def create(self, name: str, data: bytes) -> bool:
        """Put, and look whose bytes are there."""
        self._enlist(name)
        return self._put_new(self._name(name), data)

    def _put_new(self, name: str, data: bytes) -> bool:
        code = self._store.put(name, data, self._pinned())
        if code not in (0, ALREADY_THERE):
            raise PlaceError(f"did not take an entry (code {code})")
        return self._get(name) == data

    def _get(self, name: str) -> bytes | None:
        data = bytes(self._store.get(name))
        if data:
            return data
        there = self._store.is_exist(name)
        if there == 0:
            return None
        raise PlaceError(f"did not give an entry (code {there})")

    def replace(self, name: str, data: bytes) -> None:
        """Upsert."""
        self._enlist(name)
        code = self._store.upsert(self._name(name), data, self._pinned())
        if code != 0:
            raise PlaceError(f"did not take an entry (code {code})")

    def read(self, name: str) -> bytes | None:
        """Get."""
        return self._get(self._name(name))

    def delete(self, name: str) -> None:
        """Remove, whoever reads it."""
        code = self._store.remove(self._name(name), True)
        if code not in (0, NOT_FOUND):
            raise PlaceError(f"did not remove an entry (code {code})")
        self._followers.discard(name)
        if "." not in name:
            for number, part in list(self._parts.items()):
                if part == name:
                    self._store.remove(self._place(number), True)
                    del self._parts[number]

    def names(self) -> list[str]:
        """The entries of all parts that there are, and those of followers that this process has met."""
        candidates = [name for part in self.parts() for name in (part, part + OWNER)] + sorted(self._followers)
        return [name for name, there in zip(candidates, self._exist(candidates), strict=True) if there]

    def parts(self) -> list[str]:
        """The names in the numbered places."""
        self.note_places([int(there) for there in self._exist(self.places)])
        return list(dict.fromkeys(self._parts.values()))

    @property
    def places(self) -> list[str]:
        """The objects whose existence tells which parts there are; whoever asks for them calls `note_places`."""
        return [self._place(number) for number in range(MAX_PARTS)]

    def note_places(self, codes: Sequence[int]) -> list[str]:
        """Take note of which of `places` are there (1) or not (0); returns the parts that are new."""
        new = []
        for number, code in enumerate(codes):
            if code == 0:
                self._parts.pop(number, None)
            elif code == 1 and number not in self._parts:
                data = self._get(self._place(number))
                if data is not None:
                    self._parts[number] = data.decode("ascii", "replace")
                    new.append(self._parts[number])
        return new

    def _exist(self, paths: Sequence[str]) -> list[bool]:
        """Whether entries, by the name of the claim or of the object, are there."""
        if not paths:
            return []
        names = [path if path.startswith(f"{self._prefix}/") else self._name(path) for path in paths]
        codes = self._store.batch_is_exist(names)
        if len(codes) != len(names) or min(codes) < 0:
            raise PlaceError(f"does not answer (code {min(codes, default=0)})")
        return [code == 1 for code in codes]

    def _enlist(self, name: str) -> None:
        """Give a part its numbered place, if it has none."""
        part = name.partition(".")[0]
        if AFTER in name:
            self._followers.add(name)
        if part in self.parts():
            return
        for number in range(MAX_PARTS):
            if number not in self._parts and self._put_new(self._place(number), part.encode()):
                self._parts[number] = part
                return
        raise PlaceError(f"there are {MAX_PARTS} parts already", permanent=True)
