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
       104    16  keyed BLAKE3 of bytes 0 to 103 and the payload, where the writer has a secret; else zero
       120     8  xxh3-64 of bytes 0 to 119
"""

from __future__ import annotations

import hmac
import importlib
import struct
from dataclasses import dataclass, field
from typing import Any

import xxhash

from kvstrata.errors import ConfigError
from kvstrata.types import FailCause, OffloadKey

MAGIC = b"KVSTRATA"
VERSION = 1
HEADER_BYTES = 128
KIND_CHUNK = 1

_BODY = struct.Struct("<8sHHI16sQ36sIQ16s16s")
_CHECK = struct.Struct("<Q")
_VERSION_AT = slice(8, 10)
_TAGGED = 104
"""So many bytes of a header go into the tag."""
TAG_BYTES = 16
NO_TAG = bytes(TAG_BYTES)
_TAG_CONTEXT = "kvstrata 2026-11 tag of a record"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a tier accepts: records of this namespace and layout, nothing else; with a secret, only its own tags."""

    namespace: bytes
    layout_tag: int
    tag_key: bytes | None = field(default=None, repr=False)
    """Made by `tag_key_of`; None: records are neither tagged nor refused for having no tag."""


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a header that is intact and belongs to the key that was asked for."""

    payload_bytes: int
    digest: bytes
    tag: bytes = NO_TAG
    tagged: bytes = field(default=b"", compare=False)
    """The part of the header that the tag covers."""


def tag_key_of(secret: str) -> bytes:
    """The key that tags are made with. Raises `ConfigError` if the package that makes them is missing."""
    made: bytes = _blake3()(secret.encode(), derive_key_context=_TAG_CONTEXT).digest()
    return made


def _blake3() -> Any:
    try:
        return importlib.import_module("blake3").blake3
    except ImportError as error:
        raise ConfigError(f"secret: needs blake3: pip install 'kvstrata[secret]': {error}") from error


def _tag(key: bytes, head: bytes, payload: bytes | memoryview) -> bytes:
    made: bytes = _blake3()(head, key=key).update(payload).digest(TAG_BYTES)
    return made


def make_header(
    identity: Identity, key: OffloadKey, payload_bytes: int, digest: bytes, payload: bytes | memoryview = b""
) -> bytes:
    """The header of a payload. The payload itself is needed where records are tagged."""
    fields = (MAGIC, VERSION, HEADER_BYTES, KIND_CHUNK, identity.namespace, identity.layout_tag, key, 0, payload_bytes)
    body = _BODY.pack(*fields, digest, NO_TAG)
    if identity.tag_key is not None:
        body = body[:_TAGGED] + _tag(identity.tag_key, body[:_TAGGED], payload)
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
    magic, version, _, kind, namespace, layout_tag, found, _, payload_bytes, digest, tag = _BODY.unpack(body)
    asked = (MAGIC, VERSION, KIND_CHUNK, identity.namespace, identity.layout_tag, key)
    if (magic, version, kind, namespace, layout_tag, found) != asked:
        return FailCause.FOREIGN
    if identity.tag_key is not None and tag == NO_TAG:
        return FailCause.FOREIGN
    return Header(payload_bytes, digest, tag, body[:_TAGGED])


def check_payload(
    header: Header, identity: Identity, payload: bytes | memoryview, *, verify: bool = True
) -> FailCause | None:
    """Whether a payload is the one that its header speaks of, and, with a secret, was written by one who has it."""
    if verify and xxhash.xxh3_128_digest(payload) != header.digest:
        return FailCause.CORRUPT
    if identity.tag_key is not None:
        wanted = _tag(identity.tag_key, header.tagged, payload)
        if not hmac.compare_digest(wanted, header.tag):
            return FailCause.FOREIGN
    return None
