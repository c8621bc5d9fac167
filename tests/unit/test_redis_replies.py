"""Values read from the socket of a Redis connection straight into primary, however the bytes come in pieces."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest
import redis
import redis.exceptions as errors
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.testing.tier_harness import chunk_keys
from kvstrata.tiers.common.record import HEADER_BYTES, Identity, make_header
from kvstrata.tiers.redis.client import cause_of_value
from kvstrata.tiers.redis.replies import BUFFER_BYTES, GROUPS, Terms, read_straight
from kvstrata.tiers.server.client import ReadItem
from kvstrata.types import FailCause, OffloadKey

IDENTITY = Identity(b"namespace-16-byt", 1)
OTHER = Identity(b"namespace-of-oth", 1)
KEYS = chunk_keys(12)
HANGS = object()
"""In the place of a piece: nothing comes in time."""


class Link:
    """A connection, its server and its pool in one: answers come in the pieces that the test says."""

    def __init__(self, answers: bytes, pieces: Sequence[int] = (), *, end: object = None, step_s: float = 0.0) -> None:
        self._sock = self
        self.sent: list[list[Any]] = []
        self.taken = self.disconnects = self.released = 0
        self.time = 0.0
        self._answers, self._pieces, self._end, self._step_s = answers, list(pieces), end, step_s

    def get_connection(self) -> Link:
        return self

    def release(self, link: Link) -> None:
        assert link is self
        self.released += 1

    def disconnect(self) -> None:
        self.disconnects += 1

    def pack_commands(self, commands: list[Any]) -> list[Any]:
        return commands

    def send_packed_command(self, commands: list[Any]) -> None:
        self.sent.append(commands)

    def recv_into(self, place: memoryview) -> int:
        self.time += self._step_s
        left = len(self._answers) - self.taken
        if not left and self._end is HANGS:
            raise TimeoutError
        count = min(len(place), left, self._pieces.pop(0) if self._pieces else left)
        place[:count] = self._answers[self.taken : self.taken + count]
        self.taken += count
        return count


def payload_of(index: int, size: int) -> bytes:
    return bytes((index * 7 + at) % 251 for at in range(size))


def record(index: int, size: int, identity: Identity = IDENTITY) -> bytes:
    payload = payload_of(index, size)
    return make_header(identity, KEYS[index], size, xxhash.xxh3_128_digest(payload), payload) + payload


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def item_of(key: OffloadKey, size: int) -> ReadItem:
    return ReadItem(key, memoryview(bytearray(size)), None)


def read(link: Link, items: list[ReadItem], *, group: int = 3, extra: int = 0) -> list[ReadItem]:
    """Read by groups; `extra`: commands per group whose answers are no values."""
    groups = [items[at : at + group] for at in range(0, len(items), group)]

    def ask(part: Sequence[ReadItem]) -> list[tuple[Any, ...]]:
        return [("GETRANGE", item.key) for item in part] + [("PEXPIRE",)] * extra

    return read_straight(link, groups, ask, Terms(IDENTITY, True, 4.0, lambda: link.time, cause_of_value))


CASES = {
    "good": (lambda index, size: bulk(record(index, size)), None),
    "nothing": (lambda index, size: b"$0\r\n\r\n", FailCause.GONE),
    "nil": (lambda index, size: b"$-1\r\n", FailCause.GONE),
    "null of RESP3": (lambda index, size: b"_\r\n", FailCause.GONE),
    "refused": (lambda index, size: b"-NOPERM no\r\n", FailCause.REFUSED),
    "another type": (lambda index, size: b"-WRONGTYPE Operation\r\n", FailCause.FOREIGN),
    "busy": (lambda index, size: b"-LOADING\r\n", FailCause.IO_ERROR),
    "shorter than a header": (lambda index, size: bulk(record(index, size)[:50]), FailCause.WRONG_SIZE),
    "short": (lambda index, size: bulk(record(index, size)[:-1]), FailCause.WRONG_SIZE),
    "long": (lambda index, size: bulk(record(index, size) + b"x"), FailCause.WRONG_SIZE),
    "of another namespace": (lambda index, size: bulk(record(index, size, OTHER)), FailCause.FOREIGN),
    "altered": (lambda index, size: bulk(record(index, size)[:-1] + b"\xff"), FailCause.CORRUPT),
}


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    kinds=st.lists(st.sampled_from(sorted(CASES)), min_size=1, max_size=12),
    sizes=st.lists(st.sampled_from([1, 100, BUFFER_BYTES - HEADER_BYTES, 10_000]), min_size=12, max_size=12),
    pieces=st.lists(st.integers(1, 300), max_size=400),
    group=st.integers(1, 5),
    extra=st.integers(0, 2),
)
def test_each_item_has_its_own_outcome_whatever_came_before_and_in_which_pieces(
    kinds: list[str], sizes: list[int], pieces: list[int], group: int, extra: int
) -> None:
    items = [item_of(KEYS[index], sizes[index]) for index in range(len(kinds))]
    answers = b""
    for at in range(0, len(kinds), group):
        part = range(at, min(at + group, len(kinds)))
        answers += b"".join(CASES[kinds[index]][0](index, sizes[index]) for index in part) + b":1\r\n" * extra
    link = Link(answers, pieces)
    assert read(link, items, group=group, extra=extra) == []
    assert (link.taken, link.disconnects, link.released) == (len(answers), 0, 1)
    for index, (kind, size, item) in enumerate(zip(kinds, sizes, items, strict=False)):
        assert item.failed == CASES[kind][1], kind
        if kind == "good":
            assert bytes(item.target) == payload_of(index, size)
        elif kind != "altered":  # nothing is written to primary before the header was found to be right
            assert bytes(item.target) == bytes(size)
        if item.failed in (FailCause.WRONG_SIZE, FailCause.CORRUPT) or kind == "of another namespace":
            value = CASES[kind][0](index, size).partition(b"\r\n")[2][:-2]
            assert item.version == hashlib.sha1(value, usedforsecurity=False).hexdigest()


def test_only_so_many_groups_are_asked_for_before_they_have_come() -> None:
    items = [item_of(KEYS[index], 100) for index in range(12)]
    link = Link(b"")
    assert len(read(link, items)) == 12  # the server closes at once
    assert [len(commands) for commands in link.sent] == [3] * GROUPS
    assert link.disconnects == 1


def test_what_was_not_begun_when_the_connection_broke_is_given_back_and_what_was_is_not() -> None:
    items = [item_of(KEYS[index], 1000) for index in range(6)]
    answers = b"".join(bulk(record(index, 1000)) for index in range(3))
    left = read(Link(answers[:-500]), items)
    assert [item.failed for item in items[:2]] == [None, None]
    assert items[2].failed is FailCause.IO_ERROR
    assert left == items[3:]


@pytest.mark.parametrize("cut", [0, 3, 500, 1500])
def test_a_server_that_hangs_fails_all_that_has_not_come_and_the_connection_is_not_used_again(cut: int) -> None:
    items = [item_of(KEYS[index], 1000) for index in range(6)]
    link = Link(bulk(record(0, 1000))[:cut] if cut < 1000 else bulk(record(0, 1000)), end=HANGS)
    assert read(link, items) == []
    assert items[0].failed is (None if cut >= 1000 else FailCause.TIMEOUT)
    assert {item.failed for item in items[1:]} == {FailCause.TIMEOUT}
    assert (link.disconnects, link.released) == (1, 1)


def test_a_record_that_comes_byte_by_byte_is_given_up_in_time() -> None:
    items = [item_of(KEYS[0], 1000)]
    link = Link(bulk(record(0, 1000)), [1] * 2000, step_s=0.1)
    assert read(link, items) == []
    assert items[0].failed is FailCause.TIMEOUT
    assert 4.0 < link.time < 4.2
    patient = Link(b"".join(bulk(record(index, 1000)) for index in range(12)), [100] * 200, step_s=0.1)
    many = [item_of(KEYS[index], 1000) for index in range(12)]
    assert read(patient, many) == []
    assert patient.time > 8.0  # the bound is one record's
    assert {item.failed for item in many} == {None}


def test_an_item_that_was_given_up_is_not_written_and_the_next_one_comes_all_the_same() -> None:
    items = [item_of(KEYS[index], 9000) for index in range(2)]
    assert items[0].take_permit()
    assert read(Link(b"".join(bulk(record(index, 9000)) for index in range(2)), [700] * 99), items) == []
    assert [item.failed for item in items] == [FailCause.TIMEOUT, None]
    assert bytes(items[0].target) == bytes(9000)
    assert not items[1].take_permit()


@pytest.mark.parametrize("said", [b">2\r\n+moved\r\n", b"*1\r\n", b"$x\r\n", b"+OK\r\n", b"x" * (BUFFER_BYTES + 1)])
def test_an_answer_that_is_no_value_ends_the_connection_not_the_items(said: bytes) -> None:
    items = [item_of(KEYS[index], 100) for index in range(3)]
    link = Link(bulk(record(0, 100)) + said + bulk(record(1, 100)))
    assert read(link, items) == items[1:]
    assert link.disconnects == 1


def test_a_value_that_is_longer_than_was_said_ends_the_connection() -> None:
    items = [item_of(KEYS[index], 100) for index in range(2)]
    assert read(Link(bulk(record(0, 100))[:-2] + b"xx" + bulk(record(1, 100))), items) == items[1:]


def test_a_server_that_cannot_be_reached_leaves_everything_to_the_caller() -> None:
    class Away:
        def get_connection(self) -> Link:
            raise errors.ConnectionError("refused")

    items = [item_of(KEYS[0], 100)]
    terms = Terms(IDENTITY, True, 4.0, lambda: 0.0, cause_of_value)
    assert read_straight(Away(), [items], lambda part: [], terms) == items


def test_the_library_has_its_socket_where_it_is_looked_for() -> None:
    connection = redis.Connection()
    assert hasattr(connection, "_sock")  # else each read goes the long way, and nobody would notice
