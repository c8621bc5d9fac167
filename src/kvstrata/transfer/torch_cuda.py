"""CUDA by torch: streams, events, page-locked primary, and one launch for many copies."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstrata.transfer.device import PIN_BYTES
from kvstrata.types import I64

_log = logging.getLogger("vllm.kvstrata")

Launch = Callable[[Any, Any, Any], None]
"""Copies between lists of addresses (int64 tensors in host memory) on the current stream, as one operation."""


class CudaEvent:
    """A torch event."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def happened(self) -> bool:
        """Whether it has happened."""
        return bool(self.event.query())

    def synchronize(self) -> None:
        """Wait for it."""
        self.event.synchronize()


class CudaStream:
    """A torch stream."""

    def __init__(self, torch: Any, stream: Any) -> None:
        self._torch = torch
        self.stream = stream

    def record(self) -> CudaEvent:
        """A mark behind all that is queued."""
        event = self._torch.cuda.Event()
        event.record(self.stream)
        return CudaEvent(event)

    def wait(self, event: Any) -> None:
        """What is queued from now on comes after the event."""
        self.stream.wait_event(event.event)


class CudaDevice:
    """The current CUDA device; `launch` is the engine's operation for many copies."""

    def __init__(self, launch: Launch) -> None:
        self._torch = importlib.import_module("torch")
        self._launch = launch

    def engine_stream(self) -> CudaStream:
        """The stream that the engine computes on."""
        return CudaStream(self._torch, self._torch.cuda.current_stream())

    def side_stream(self) -> CudaStream:
        """A stream of our own."""
        return CudaStream(self._torch, self._torch.cuda.Stream())

    def launch(self, stream: Any, sources: I64, targets: I64, sizes: I64) -> None:
        """Queue copies between addresses."""
        with self._torch.cuda.stream(stream.stream):
            self._launch(*(self._torch.from_numpy(np.ascontiguousarray(a)) for a in (sources, targets, sizes)))


def pin(address: int, size: int) -> bool:
    """Page-lock memory, in pieces; False, with a warning, if the system refuses: copies are then pageable."""
    runtime = importlib.import_module("torch").cuda.cudart()
    for start in range(0, size, PIN_BYTES):
        error = runtime.cudaHostRegister(address + start, min(PIN_BYTES, size - start), 0)
        if int(error):
            _log.warning(
                "kvstrata: %d of %d bytes of primary could not be page-locked (error %d); copies will be slower",
                size - start,
                size,
                int(error),
            )
            return False
    return True
