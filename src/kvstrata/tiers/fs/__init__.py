"""The fs tier: one verified file per chunk in a directory, for one engine alone or shared by parts."""

from kvstrata.tiers.base import Tier
from kvstrata.tiers.fs.shared import SharedFsTier
from kvstrata.tiers.fs.tier import FsTier

__all__ = ["FsTier", "SharedFsTier", "make"]


def make(path: str, *, part: str = "", **settings: object) -> Tier:
    """The tier over a directory: with a `part` one of several engines that share it, else its only one."""
    if part:
        return SharedFsTier(path, part=part, **settings)  # type: ignore[arg-type]  # checked by the tier
    return FsTier(path, **settings)  # type: ignore[arg-type]
