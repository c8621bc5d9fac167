"""Frees a part of a store whose engine does not come back: `kvstrata fsck TIER --config FILE --release PART`."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.errors import ConfigError
from kvstrata.tiers.common.claims import PlaceError, check_gone, check_part, drop_claim, list_claims
from kvstrata.tiers.common.record import Identity
from kvstrata.tiers.server.client import ClientSetup, StoreClient

REMOVES = 256


@dataclass(frozen=True, slots=True)
class ReleasedPart:
    """What was freed; `kept` records would not go, and with them the claim stays."""

    part: str
    records: int
    bytes: int
    kept: int


def release_part(client: StoreClient, part: str, *, timeout_s: float, this_host_only: bool = True) -> ReleasedPart:
    """Delete a part's records, then its claim. Raises `ConfigError` if there is no such part or it may be in use.

    An owner on this host that still runs is never overridden; one on another host only if `this_host_only` is False,
    because nothing can be known of it from here.
    """
    check_part(part, "--release")
    try:
        client.open(ClientSetup(Identity(bytes(16), 0), part, False, timeout_s))
        if part not in {claim.part for claim in list_claims(client.claims)}:
            raise ConfigError(f"there is no part {part}")
        check_gone(client.claims, part, this_host_only=this_host_only)
        records = size = kept = 0
        for page in list(client.scan()):
            for start in range(0, len(page), REMOVES):
                batch = page[start : start + REMOVES]
                for found, gone in zip(batch, client.remove([found.name for found in batch]), strict=True):
                    records, size, kept = records + gone, size + gone * found.allocated, kept + (not gone)
        if not kept:
            drop_claim(client.claims, part)
    except PlaceError as error:
        raise ConfigError(str(error)) from error
    finally:
        client.close()
    return ReleasedPart(part, records, size, kept)
