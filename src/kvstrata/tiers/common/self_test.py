"""The self-test of tiers that can run a job of one key on a buffer outside primary."""

from __future__ import annotations

from typing import Protocol

from kvstrata.types import BLOCK_HASH_BYTES, FailCause, OffloadKey, make_key

SELF_TEST_KEY = make_key(b"kvstrata self-test".ljust(BLOCK_HASH_BYTES, b"\0"), 0xFFFFFFFF)
SELF_TEST_BYTES = 256


class _Testable(Protocol):
    name: str

    def run_quietly(self, key: OffloadKey, buffer: memoryview, *, load: bool) -> list[FailCause | None] | None:
        """Run a job of one key that nobody else hears of; None if it does not end in time."""
        ...

    def remove_quietly(self, key: OffloadKey) -> None:
        """Remove a key without telling anybody."""
        ...


def run_self_test(tier: _Testable) -> str | None:
    """Write, read back, compare, remove. None if all is well, else one line."""
    tier.remove_quietly(SELF_TEST_KEY)
    written = bytes(range(SELF_TEST_BYTES))
    buffer = bytearray(written)
    said = _run(tier, "write", buffer, load=False)
    if said is None:
        buffer[:] = bytes(SELF_TEST_BYTES)
        said = _run(tier, "read", buffer, load=True)
    if said is None and buffer != written:
        said = f"{tier.name} failed its self-test: other bytes came back than were written"
    tier.remove_quietly(SELF_TEST_KEY)
    return said


def _run(tier: _Testable, what: str, buffer: bytearray, *, load: bool) -> str | None:
    result = tier.run_quietly(SELF_TEST_KEY, memoryview(buffer), load=load)
    if result is None:
        return f"{tier.name} failed its self-test: the {what} did not end"
    if result != [None]:
        causes = ", ".join(str(cause) for cause in result) or "refused"
        return f"{tier.name} failed its self-test: {what}: {causes}"
    return None
