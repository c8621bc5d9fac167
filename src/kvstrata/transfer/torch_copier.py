"""Chooses the copier for the device that KV tensors lie on."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvstrata.errors import ConfigError
from kvstrata.transfer.base import Copier
from kvstrata.transfer.device import DeviceCopier, DeviceLayer
from kvstrata.transfer.torch_cpu import CpuCopier
from kvstrata.transfer.torch_cuda import CudaDevice, Launch, pin
from kvstrata.transfer.torch_views import LayerBytes, sheets


def make_copier(
    groups: Sequence[Sequence[LayerBytes]],
    primary: memoryview,
    place_unit: int,
    clock: Callable[[], float],
    launch: Launch | None = None,
) -> Copier:
    """The copier for these layers, per group, and primary. Raises `ConfigError` for a device without one.

    `launch` is the engine's operation for many copies at once, needed on an accelerator.
    """
    torch = importlib.import_module("torch")
    devices = {layer.tensor.device.type for group in groups for layer in group}
    if devices == {"cpu"}:
        whole = torch.frombuffer(primary, dtype=torch.uint8)
        return CpuCopier([sheets(group, place_unit) for group in groups], whole, clock)
    if devices == {"cuda"} and launch is not None:
        address = np.frombuffer(primary, dtype=np.uint8).ctypes.data
        pin(address, len(primary))
        layers = [[_device_layer(layer.tensor) for layer in group] for group in groups]
        return DeviceCopier(layers, address, len(primary), CudaDevice(launch), clock)
    raise ConfigError(f"no copier for KV tensors on {', '.join(sorted(devices))}")


def _device_layer(tensor: Any) -> DeviceLayer:
    return DeviceLayer(tensor.data_ptr(), tensor.stride(0), tensor.shape[1], tensor.shape[0])
