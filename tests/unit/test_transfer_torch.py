"""The torch copier on host memory gives what the NumPy twin gives, for one storage and for many."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from kvstrata.errors import ConfigError
from kvstrata.transfer.numpy_copy import NumpyCopier
from kvstrata.transfer.pieces import Piece
from kvstrata.transfer.torch_copier import make_copier
from kvstrata.transfer.torch_views import LayerBytes, layer_bytes, sheets

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

BLOCKS = 9


def caches(kind: str) -> list[object]:
    """Layers of one group: in one storage one after the other, interleaved by block, or each by itself."""
    import torch

    generator = torch.Generator().manual_seed(1)
    if kind == "layers":
        whole = torch.randn((4, BLOCKS, 2, 8, 6), generator=generator)
        return [whole[i] for i in range(4)]
    if kind == "blocks":
        whole = torch.randn((BLOCKS, 4, 2, 8, 6), generator=generator)
        return [whole[:, i] for i in range(4)]
    return [torch.randn((BLOCKS, 2, 8, 6 + i), generator=generator) for i in range(3)]


@needs_torch
@pytest.mark.parametrize("kind", ["layers", "blocks", "single"])
@pytest.mark.parametrize("place_unit", [4, 8, 512])
def test_the_same_bytes_as_the_twin(kind: str, place_unit: int) -> None:
    tensors = caches(kind)
    pages = [tensor[0].numel() * 4 for tensor in tensors]
    layers = [layer_bytes(f"l{i}", tensor, BLOCKS, pages[i]) for i, tensor in enumerate(tensors)]
    twin_arrays = [layer.tensor.numpy().copy() for layer in layers]
    primary, twin_primary = bytearray(65536), np.zeros(65536, np.uint8)
    size = sum(pages)
    step = -(-size // max(place_unit, 8)) * max(place_unit, 8)
    copier = make_copier([layers], memoryview(primary), place_unit, lambda: 0.0)
    twin = NumpyCopier([twin_arrays], twin_primary)
    store = Piece(0, np.array([1, 2, 3, 8], np.int64), np.array([0, step, 2 * step, 6 * step], np.int64))
    load = Piece(0, np.array([5, 4], np.int64), np.array([2 * step, 6 * step], np.int64))
    for other in (copier, twin):
        other.store(1, [store])
        other.load(2, [load])
    assert bytes(primary) == twin_primary.tobytes()
    for layer, array in zip(layers, twin_arrays, strict=True):
        assert (layer.tensor.numpy() == array).all()
    assert [done.ok for done in copier.finished()] == [True, True]


@needs_torch
def test_layers_of_one_storage_are_one_sheet() -> None:
    for kind in ("layers", "blocks"):
        layers = [layer_bytes("l", tensor, BLOCKS, tensor[0].numel() * 4) for tensor in caches(kind)]
        assert [sheet.layers for sheet in sheets(layers, 512)] == [4]
        assert sheets(layers, 512)[0].width == 8


@needs_torch
def test_a_block_outside_fails_and_touches_nothing() -> None:
    (tensor, *_) = caches("single")
    layers = [layer_bytes("l", tensor, BLOCKS, tensor[0].numel() * 4)]
    before = tensor.clone()
    copier = make_copier([layers], memoryview(bytearray(4096)), 8, lambda: 0.0)
    copier.load(1, [Piece(0, np.array([BLOCKS], np.int64), np.array([0], np.int64))])
    copier.load(2, [Piece(0, np.array([0], np.int64), np.array([4096], np.int64))])
    assert [done.ok for done in copier.finished()] == [False, False]
    assert bool((tensor == before).all())


@needs_torch
def test_a_layer_whose_block_is_in_pieces_is_refused() -> None:
    import torch

    cache = torch.zeros((2, BLOCKS, 4, 4)).transpose(0, 1)
    with pytest.raises(ConfigError, match="not one piece"):
        layer_bytes("l", cache, BLOCKS, 128)
    with pytest.raises(ConfigError, match="9 blocks, expected 8"):
        layer_bytes("l", torch.zeros((BLOCKS, 4)), 8, 16)


@needs_torch
def test_an_unknown_device_is_refused() -> None:
    import torch

    with pytest.raises(ConfigError, match="meta"):
        make_copier([[LayerBytes("l", torch.zeros((2, 4), device="meta"))]], memoryview(bytearray(64)), 8, lambda: 0.0)
