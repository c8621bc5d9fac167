"""Answers of a server read from its socket, so that a payload arrives where it belongs.

The library's reader would copy each value twice: into its buffer, and into a text of its own. Here only the line before
a value, its header and what came with them pass through a small buffer; the rest goes from the socket into primary,
and is checked there while the processor still has it in its cache.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import redis.exceptions as errors

from kvstrata.tiers.common.record import HEADER_BYTES, Identity, check_header, check_payload
from kvstrata.tiers.server.client import ReadItem
from kvstrata.types import FailCause

BUFFER_BYTES = 4096
"""Most bytes that are copied once more than needed; a line is shorter."""
GROUPS = 2
"""So many groups of records are asked for at once: while one arrives the server makes the next."""
END = b"\r\n"

Command: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Terms:
    """What is accepted, and for how long it is waited for."""

    identity: Identity
    verify: bool
    seconds: float
    """Longest time for one record to arrive."""
    now: Callable[[], float]
    cause: Callable[[BaseException], FailCause]
    """What an error in the place of a value means."""


class Replies:
    """What a server answers on one connection, in order. Raises `OSError` or an error of the library.

    `late` tells whether reading has taken too long; it is asked whenever a piece has come.
    """

    def __init__(self, socket: Any, late: Callable[[], bool]) -> None:
        self._socket = socket
        self._late = late
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._begin = self._end = 0

    def _receive(self, place: memoryview) -> int:
        count = int(self._socket.recv_into(place))
        if count == 0:
            raise errors.ConnectionError("the server has closed the connection")
        if self._late():
            raise errors.TimeoutError("an answer takes too long")
        return count

    def _fill(self) -> None:
        """Have more in the buffer."""
        left = self._end - self._begin
        self._buffer[:left] = self._buffer[self._begin : self._end]
        self._begin, self._end = 0, left
        if left == BUFFER_BYTES:
            raise errors.InvalidResponse("a line without an end")
        self._end += self._receive(self._buffer[left:])

    def line(self) -> bytes:
        """The next line: the kind of an answer and what is said of it."""
        while True:
            found = bytes(self._buffer[self._begin : self._end])
            at = found.find(END)
            if at >= 0:
                self._begin += at + len(END)
                return found[:at]
            self._fill()

    def take(self, place: memoryview) -> None:
        """The next bytes, as many as `place` has."""
        done = min(self._end - self._begin, len(place))
        place[:done] = self._buffer[self._begin : self._begin + done]
        self._begin += done
        while done < len(place):
            done += self._receive(place[done:])

    def skip(self, count: int) -> None:
        """Read `count` bytes and forget them."""
        while count:
            if self._begin == self._end:
                self._fill()
            step = min(self._end - self._begin, count)
            self._begin += step
            count -= step

    def finish_value(self) -> None:
        """What stands behind every value."""
        end = memoryview(bytearray(len(END)))
        self.take(end)
        if end != END:
            raise errors.InvalidResponse("a value of another length than was said")

    def value_size(self) -> int | errors.ResponseError:
        """The length of the value that follows, 0 if there is none, or what the server says instead."""
        line = self.line()
        kind, said = line[:1], line[1:]
        if kind == b"-":
            return errors.ResponseError(said.decode("utf-8", "replace"))
        if kind == b"_":
            return 0
        if kind != b"$" or not said.removeprefix(b"-").isdigit():
            raise errors.InvalidResponse("no value")
        size = int(said)
        if size == 0:
            self.finish_value()
        return max(size, 0)


def read_straight(
    pool: Any, groups: Sequence[Sequence[ReadItem]], ask: Callable[[Sequence[ReadItem]], list[Command]], terms: Terms
) -> list[ReadItem]:
    """Read groups of records over one connection of redis-py's `pool`, the next being asked for while one arrives.

    `ask` gives the commands for a group, those whose answers are values first. Returns what was left, without an
    outcome, when the connection broke, or could not be had: the library may make a new one.
    """
    left = deque(item for group in groups for item in group)
    link = None
    try:
        link = pool.get_connection()
        _read_groups(link, groups, ask, terms, left)
    except Exception as error:
        if link is not None:
            link.disconnect()
        late = isinstance(error, errors.TimeoutError | TimeoutError)
        for item in left:
            item.failed = FailCause.TIMEOUT if late else FailCause.IO_ERROR
        if late:
            left.clear()
    finally:
        if link is not None:
            pool.release(link)
    return [item for item in left if item.permit]


def _read_groups(
    link: Any,
    groups: Sequence[Sequence[ReadItem]],
    ask: Callable[[Sequence[ReadItem]], list[Command]],
    terms: Terms,
    left: deque[ReadItem],
) -> None:
    """Take items from `left` as they are done."""
    socket = getattr(link, "_sock", None)
    if socket is None:  # the library is not as it was: all is left to it
        return
    until = 0.0
    replies = Replies(socket, lambda: terms.now() > until)
    asked: deque[int] = deque()
    for number, group in enumerate(groups):
        for later in groups[number + len(asked) : number + GROUPS]:
            commands = ask(later)
            link.send_packed_command(link.pack_commands(commands))
            asked.append(len(commands))
        for item in group:
            until = terms.now() + terms.seconds
            _read_one(replies, item, terms)
            left.popleft()
        for _ in range(asked.popleft() - len(group)):
            replies.line()


def _read_one(replies: Replies, item: ReadItem, terms: Terms) -> None:
    size = replies.value_size()
    if isinstance(size, errors.ResponseError):
        item.failed = terms.cause(size)
    elif size == 0:
        item.failed = FailCause.GONE
    else:
        read_record(replies, item, size, terms.identity, verify=terms.verify)


def read_record(replies: Replies, item: ReadItem, size: int, identity: Identity, *, verify: bool) -> None:
    """Read a value of `size` bytes, above 0, that should be the record of `item`, and judge it.

    Only a payload whose header belongs to the key is written to the target. A record that is none leaves its mark in
    `version`.
    """
    head = bytearray(min(size, HEADER_BYTES))
    replies.take(memoryview(head))
    rest = size - len(head)
    header = check_header(head, identity, item.key)
    if isinstance(header, FailCause) or not rest == header.payload_bytes == len(item.target):
        record = memoryview(bytearray(size))
        record[: len(head)] = head
        replies.take(record[len(head) :])
        if not item.accept(record, identity, verify=verify):
            item.version = version_of(record)
    elif not item.take_permit():
        item.failed = FailCause.TIMEOUT
        replies.skip(rest)
    else:
        replies.take(item.target)
        item.failed = check_payload(header, identity, item.target, verify=verify)
        if item.failed is not None:
            item.version = version_of(head, item.target)
    replies.finish_value()


def version_of(*pieces: bytes | bytearray | memoryview) -> str:
    """What tells a value from a later one under its name."""
    mark = hashlib.sha1(usedforsecurity=False)
    for piece in pieces:
        mark.update(piece)
    return mark.hexdigest()
