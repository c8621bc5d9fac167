"""Byte views of an engine's KV tensors, grouped so that few copies move many layers.

A *sheet* is a number of layers with pages of one size at constant distances in one storage: (layers, blocks, page).
One strided copy moves a run of blocks of all layers of a sheet.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstrata.errors import ConfigError
from kvstrata.transfer.pieces import Run, unit


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """One layer's blocks as bytes: `tensor` is uint8 (blocks, page) with one byte per element in the page."""

    name: str
    tensor: Any


@dataclass(frozen=True, slots=True)
class Sheet:
    """Layers at constant distances. `at` is where the first one's page lies in the bytes of a block, `page` its size.

    `width` bytes make one element of `view`, which is (layers, blocks, page // width).
    """

    view: Any
    at: int
    page: int
    width: int

    @property
    def layers(self) -> int:
        """How many layers it has."""
        return int(self.view.shape[0])

    def blocks(self, run: Run) -> Any:
        """The run's blocks: (layers, count, page // width)."""
        return self.view[:, run.block : run.block + run.count * run.block_step : run.block_step]

    def places(self, primary: Any, run: Run) -> Any:
        """The run's bytes in primary (a uint8 tensor), in the same shape."""
        torch = importlib.import_module("torch")
        first = run.place + self.at
        last = first + (run.count - 1) * run.place_step + self.layers * self.page
        if first < 0 or last > primary.shape[0]:
            raise IndexError(f"bytes {first} to {last} are not in primary")
        wide = primary.view(element_type(torch, self.width))
        return wide.as_strided(
            (self.layers, run.count, self.page // self.width),
            (self.page // self.width, max(run.place_step // self.width, 1), 1),
            wide.storage_offset() + first // self.width,
        )


def element_type(torch: Any, width: int) -> Any:
    """The torch type of that many bytes; copies do not look at the values."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]


def layer_bytes(name: str, cache: Any, blocks: int, page: int) -> LayerBytes:
    """The bytes of a layer whose first dimension counts blocks; `page` bytes of each are its own.

    Raises `ConfigError` for a tensor whose blocks are not each one piece of memory.
    """
    torch = importlib.import_module("torch")
    size = cache.element_size()
    inner = cache[0]
    if cache.shape[0] != blocks:
        raise ConfigError(f"layer {name}: {cache.shape[0]} blocks, expected {blocks}")
    if not _dense(inner) or inner.numel() * size < page:
        raise ConfigError(f"layer {name}: a block is not one piece of {page} bytes: {tuple(inner.shape)}")
    raw = torch.empty(0, dtype=torch.uint8, device=cache.device)
    raw.set_(cache.untyped_storage(), cache.storage_offset() * size, (blocks, page), (cache.stride(0) * size, 1))
    return LayerBytes(name, raw)


def _dense(block: Any) -> bool:
    """Whether the elements of a block fill one piece of memory, in whatever order of dimensions."""
    expected = 1
    for stride, extent in sorted(zip(block.stride(), block.shape, strict=True)):
        if extent == 1:
            continue
        if stride != expected:
            return False
        expected *= extent
    return True


def sheets(layers: Sequence[LayerBytes], place_unit: int) -> tuple[Sheet, ...]:
    """The layers of a group, in order, as few sheets. `place_unit`: all places are whole multiples of it."""
    made, begin, at = [], 0, 0
    while begin < len(layers):
        end = begin + 1
        while end < len(layers) and _continues(layers[begin : end + 1]):
            end += 1
        made.append(_sheet(layers[begin:end], at, place_unit))
        at += made[-1].page * made[-1].layers
        begin = end
    # An element must divide every page, or places behind an odd one would not be whole elements.
    width = unit([place_unit, at, *(sheet.width for sheet in made), *(sheet.at for sheet in made)])
    return tuple(_narrow(sheet, width) for sheet in made)


def _continues(layers: Sequence[LayerBytes]) -> bool:
    """Whether the last layer lies at the same distance from its forerunner as all the others."""
    first, last, before = layers[0].tensor, layers[-1].tensor, layers[-2].tensor
    if (
        last.shape != first.shape
        or last.stride() != first.stride()
        or last.device != first.device
        or last.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    ):
        return False
    step = last.storage_offset() - before.storage_offset()
    return bool(step > 0 and step == layers[1].tensor.storage_offset() - first.storage_offset())


def _sheet(layers: Sequence[LayerBytes], at: int, place_unit: int) -> Sheet:
    first = layers[0].tensor
    blocks, page = first.shape
    step = layers[1].tensor.storage_offset() - first.storage_offset() if len(layers) > 1 else page
    view = first.as_strided((len(layers), blocks, page), (step, first.stride(0), 1), first.storage_offset())
    numbers = (page, step, first.stride(0), first.storage_offset(), first.data_ptr(), at, place_unit)
    return Sheet(view, at, page, unit(numbers))


def _narrow(sheet: Sheet, width: int) -> Sheet:
    torch = importlib.import_module("torch")
    raw, base = sheet.view, sheet.view
    wide = torch.empty(0, dtype=element_type(torch, width), device=raw.device)
    wide.set_(
        base.untyped_storage(),
        base.storage_offset() // width,
        (raw.shape[0], raw.shape[1], sheet.page // width),
        (raw.stride(0) // width, raw.stride(1) // width, 1),
    )
    return Sheet(wide, sheet.at, sheet.page, width)
