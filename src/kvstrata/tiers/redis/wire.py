"""How commands go on the wire: large values are sent from where they lie, without being copied together.

A record is a header and a payload that is still in primary. The library's own packer would copy both into one text,
and that into the request; this one hands the pieces to the socket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hiredis


@dataclass(frozen=True, slots=True)
class Pieces:
    """One argument of a command, as bytes that follow each other."""

    head: bytes
    body: memoryview

    def __len__(self) -> int:
        return len(self.head) + len(self.body)

    def join(self) -> bytes:
        """All of it in one copy."""
        return b"".join((self.head, self.body))


class Packer:
    """What redis-py calls a command packer."""

    def pack(self, *args: Any) -> list[bytes | memoryview]:
        """The request as pieces, in order."""
        name = args[0].encode() if isinstance(args[0], str) else args[0]
        words = (*name.split(), *args[1:])
        if not any(isinstance(word, Pieces) for word in words):
            return [hiredis.pack_command(words)]
        output: list[bytes | memoryview] = []
        text = bytearray(b"*%d\r\n" % len(words))
        for word in words:
            if isinstance(word, Pieces):
                text += b"$%d\r\n" % len(word)
                text += word.head
                output += (bytes(text), word.body)
                text = bytearray()
            else:
                data = word if isinstance(word, bytes) else str(word).encode()
                text += b"$%d\r\n%b" % (len(data), data)
            text += b"\r\n"
        output.append(bytes(text))
        return output
