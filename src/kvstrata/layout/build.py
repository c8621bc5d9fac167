"""The builder: makes kinds and layouts from names and JSON. The only module that decides which class a kind is."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvstrata.errors import ConfigError
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds import ChunkedLocal, FullAttention, Kind, RecurrentState, SlidingWindow
from kvstrata.layout.kinds.base import require_count

KIND_NAMES = (FullAttention.name, SlidingWindow.name, ChunkedLocal.name, RecurrentState.name)


class GroupSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One group in JSON. `window` counts for sliding_window only, `chunk_tokens` for chunked_local only."""

    kind: str
    tokens_per_block: int
    window: int = 0
    retained_extra_tokens: int = 0
    chunk_tokens: int = 0
    drafter: bool = False


class LayoutSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layout in JSON, as `kvstrata resolve` reads it."""

    groups: list[GroupSpec]
    blocks_per_chunk: int = 1
    alignment_tokens: int = 1


def kind_from_name(name: str, *, window: int = 0, retained_extra: int = 0, chunk_tokens: int = 0) -> Kind:
    """The kind called `name`; errors name the field, as `window: must be at least 1, got 0`."""
    for field, value in (("window", window), ("retained_extra_tokens", retained_extra), ("chunk_tokens", chunk_tokens)):
        require_count(field, value, 0, 1 << 40)
    match name:
        case FullAttention.name:
            return FullAttention()
        case SlidingWindow.name:
            return SlidingWindow(window, retained_extra)
        case ChunkedLocal.name:
            return ChunkedLocal(chunk_tokens)
        case RecurrentState.name:
            return RecurrentState()
    raise ConfigError(f"kind: must be one of {', '.join(KIND_NAMES)}, got {name!r}")


def layout_from_spec(spec: LayoutSpec) -> Layout:
    """The layout of a decoded spec; errors name the field, as `groups[1].window: must be at least 1, got 0`."""
    groups = []
    for index, group in enumerate(spec.groups):
        try:
            kind = kind_from_name(
                group.kind,
                window=group.window,
                retained_extra=group.retained_extra_tokens,
                chunk_tokens=group.chunk_tokens,
            )
        except ConfigError as error:
            raise ConfigError(f"groups[{index}].{error}") from None
        groups.append(Group(kind, group.tokens_per_block, drafter=group.drafter))
    return Layout(tuple(groups), spec.blocks_per_chunk, spec.alignment_tokens)


def layout_from_dict(fields: Mapping[str, object]) -> Layout:
    """The layout of a plain dictionary with the fields of `LayoutSpec`; unknown fields are errors."""
    try:
        spec = msgspec.convert(dict(fields), LayoutSpec, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(field_error(str(error))) from None
    return layout_from_spec(spec)


def field_error(message: str, prefix: str = "") -> str:
    """A decoder's message turned round, so that it begins with the field: `groups[1].window: Expected ...`."""
    text, _, path = message.partition(" - at `$")
    path = prefix + path.rstrip("`")
    for words in ("Object missing required field `", "Object contains unknown field `"):
        if text.startswith(words):
            path, text = (
                f"{path}.{text.removeprefix(words).rstrip('`')}",
                words.removeprefix("Object ").split(" field")[0],
            )
            text = "is missing" if text.startswith("missing") else "is not a known field"
    path = path.lstrip(".")
    return f"{path}: {text}" if path else text
