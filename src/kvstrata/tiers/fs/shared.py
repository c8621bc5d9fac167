"""The fs tier in a directory that several engines share: a part for each, no lock, no server."""

from __future__ import annotations

import grp
from typing import Unpack

from kvstrata.errors import ConfigError
from kvstrata.tiers.common.tasks import Ticket
from kvstrata.tiers.fs.files import Access, FileSystem, RealFileSystem
from kvstrata.tiers.fs.shared_client import SharedClient
from kvstrata.tiers.server.client import StoreClient
from kvstrata.tiers.server.core import State
from kvstrata.tiers.server.tasks import Task
from kvstrata.tiers.server.tier import CommonOptions, ServerTier
from kvstrata.types import Capabilities, Locality, Medium

CLAIM_BYTES = 16 << 10
"""Of the limit, what the claim of a part may take: its entries, and their temporary files."""


class SyncTask(Task):
    """Makes what was written durable."""

    def __init__(self, client: StoreClient, shared: SharedClient, ticket: Ticket) -> None:
        super().__init__(client)
        self.shared = shared
        self.ticket = ticket
        self.ok = False

    def run(self) -> None:
        self.ok = self.shared.sync()


class SharedFsTier(ServerTier):
    """Chunks in the directory `path`, each engine writing its own `part` and reading all.

    `limit`: bytes of this part, all its files counted as allocated; `shared_limit`: what all parts may claim together.
    `min_free`: bytes of the device that are left free. `mode`: permission bits of files, "0600" unless the engines run
    as different users ("0660"); never the world's. `group`: name or number of the files' group. `files` replaces the
    operating system in tests.
    """

    medium = Medium.SHARED_FS
    locality = Locality.SHARED

    def __init__(
        self,
        path: str,
        *,
        part: str,
        name: str = "fs",
        limit: int | None = None,
        min_free: int = 0,
        mode: str | int = 0o600,
        group: str | int | None = None,
        probe_cost_s: float = 0.0005,
        files: FileSystem | None = None,
        **common: Unpack[CommonOptions],
    ) -> None:
        at = f"tier {name}"
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit <= CLAIM_BYTES):
            raise ConfigError(f"{at}: limit: {limit!r} must be a number of bytes, above {CLAIM_BYTES}")
        if not isinstance(min_free, int) or isinstance(min_free, bool) or min_free < 0:
            raise ConfigError(f"{at}: min_free: {min_free!r} must be a number of bytes, at least 0")
        self.capabilities = Capabilities(sync_probe=False, probe_cost_s=probe_cost_s, shared=True)
        access = Access(mode_of(mode, at), group_of(group, at))
        self._shared = SharedClient(str(path), files or RealFileSystem(), access, min_free)
        settings = self._settings_from(name, common, limit=limit, part=part)
        super().__init__(self._shared, settings)

    def _forget_part(self) -> None:
        super()._forget_part()
        if self._settings.limit is not None:
            self._index.limit = self._settings.limit - CLAIM_BYTES

    def flush(self) -> int:
        """Answered when every file that was written is durable, and its name."""
        if self._state not in (State.SCANNING, State.READY):
            return super().flush()
        ticket = self._ticket()
        self._submit(SyncTask(self._client, self._shared, ticket))
        self._feed()
        return ticket.number

    def _apply(self, task: Task) -> None:
        if isinstance(task, SyncTask):
            self._part_done(task.ticket, ok=task.ok and task.crash is None and not task.abandoned)
        else:
            super()._apply(task)


def mode_of(value: str | int, at: str) -> int:
    """Permission bits of files: the owner may read and write, the group may be let in, the world never."""
    try:
        mode = int(value, 8) if isinstance(value, str) else value
    except ValueError:
        mode = -1
    if isinstance(mode, bool) or not isinstance(mode, int) or mode not in (0o600, 0o640, 0o660):
        shown = oct(value) if isinstance(value, int) else repr(value)
        raise ConfigError(f'{at}: mode: {shown} must be "0600", "0640" or "0660"')
    return mode


def group_of(value: str | int | None, at: str) -> int | None:
    """The number of a group."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    try:
        return grp.getgrnam(str(value)).gr_gid
    except KeyError:
        raise ConfigError(f"{at}: group: there is no group {value!r} on this machine") from None
