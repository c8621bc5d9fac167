"""The bytes of one chunk, kept alone: a header of 128 bytes, then the payload (docs/format.md, "record of one chunk").

The value of a file (fs), an object (object) or a key (redis). All numbers are little endian.

    offset  size  field
         0     8  magic "KVSTRATA"
         8     2  format version (1)
        10     2  header length (128)
        12     4  kind of record (1: one chunk)
        16    16  namespace digest
        32     8  layout tag
        40    36  key
        76     4  zero
        80     8  payload length
        88    16  xxh3-128 of the payload, big endian as the digest functions give it
       104    16  zero; the place of a keyed tag, once there is one
       120     8  xxh3-64 of bytes 0 to 119
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvstrata.types import FailCause, OffloadKey

MAGIC = b"KVSTRATA"
VERSION = 1
HEADER_BYTES = 128
KIND_CHUNK = 1

_BODY = struct.Struct("<8sHHI16sQ36sIQ16s16s")
_CHECK = struct.Struct("<Q")
_VERSION_AT = slice(8, 10)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a tier accepts: records of this namespace and layout, nothing else."""

    namespace: bytes
    layout_tag: int


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a header that is intact and belongs to the key that was asked for."""

    payload_bytes: int
    digest: bytes


def make_header(identity: Identity, key: OffloadKey, payload_bytes: int, digest: bytes) -> bytes:
    """The header of a payload."""
    body = _BODY.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES,
        KIND_CHUNK,
        identity.namespace,
        identity.layout_tag,
        key,
        0,
        payload_bytes,
        digest,
        bytes(16),
    )
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def check_header(data: bytes | bytearray, identity: Identity, key: OffloadKey) -> Header | FailCause:
    """The header in `data`, or why it is not the one that was asked for.

    A header of another version cannot be checked; it is foreign, not corrupt. So is an intact header that another
    namespace, layout or key has.
    """
    if len(data) < HEADER_BYTES:
        return FailCause.WRONG_SIZE
    body = bytes(data[: _BODY.size])
    if _CHECK.unpack_from(data, _BODY.size)[0] != xxhash.xxh3_64_intdigest(body):
        other_version = body.startswith(MAGIC) and body[_VERSION_AT] != VERSION.to_bytes(2, "little")
        return FailCause.FOREIGN if other_version else FailCause.CORRUPT
    magic, version, _, kind, namespace, layout_tag, found, _, payload_bytes, digest, _ = _BODY.unpack(body)
    asked = (MAGIC, VERSION, KIND_CHUNK, identity.namespace, identity.layout_tag, key)
    if (magic, version, kind, namespace, layout_tag, found) != asked:
        return FailCause.FOREIGN
    return Header(payload_bytes, digest)
