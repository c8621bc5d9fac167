"""The device copier against doubles of stream and event that record the order of everything."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from kvstrata.transfer import torch_cuda
from kvstrata.transfer.device import DeviceCopier, DeviceLayer, merge
from kvstrata.transfer.numpy_copy import NumpyCopier
from kvstrata.transfer.pieces import Piece
from kvstrata.types import I64


@dataclass
class FakeEvent:
    stream: str
    at: int
    gpu: FakeGpu

    def happened(self) -> bool:
        return self.gpu.done_through >= self.at

    def synchronize(self) -> None:
        self.gpu.run(self.at)


@dataclass
class FakeStream:
    name: str
    gpu: FakeGpu

    def record(self) -> FakeEvent:
        self.gpu.log.append((self.name, "record", ""))
        return FakeEvent(self.name, len(self.gpu.log) - 1, self.gpu)

    def wait(self, event: FakeEvent) -> None:
        self.gpu.log.append((self.name, "wait", f"{event.stream}@{event.at}"))


@dataclass
class FakeGpu:
    """Does queued copies only when told to, in the order in which they were queued."""

    log: list[tuple[str, str, str]] = field(default_factory=list)
    copies: list[tuple[int, I64, I64, I64]] = field(default_factory=list)
    done_through: int = -1
    streams: int = 0
    refused: int = -1
    """The launch, counted from 0, that raises."""

    def engine_stream(self) -> FakeStream:
        return FakeStream("engine", self)

    def side_stream(self) -> FakeStream:
        self.streams += 1
        return FakeStream(f"side{self.streams}", self)

    def launch(self, stream: FakeStream, sources: I64, targets: I64, sizes: I64) -> None:
        if len(self.copies) == self.refused:
            raise RuntimeError("out of resources")
        self.log.append((stream.name, "copy", str(len(sizes))))
        self.copies.append((len(self.log) - 1, sources, targets, sizes))

    def run(self, through: int) -> None:
        for at, sources, targets, sizes in self.copies:
            if self.done_through < at <= through:
                for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
                    ctypes.memmove(target, source, size)
        self.done_through = max(self.done_through, through)

    def run_all(self) -> None:
        self.run(len(self.log) - 1)


class Bench:
    """Two groups: one of two layers whose blocks lie apart, one of a single layer."""

    def __init__(self, border: int = 1 << 30) -> None:
        dice = np.random.default_rng(1)
        self.arrays = [
            [dice.integers(0, 256, (12, 32), dtype=np.uint8), dice.integers(0, 256, (12, 48), dtype=np.uint8)],
            [dice.integers(0, 256, (12, 16), dtype=np.uint8)],
        ]
        self.primary = np.zeros(8192, np.uint8)
        self.gpu = FakeGpu()
        layers = [
            [DeviceLayer(a.ctypes.data, a.strides[0], a.shape[1], a.shape[0]) for a in group] for group in self.arrays
        ]
        self.copier = DeviceCopier(layers, self.primary.ctypes.data, len(self.primary), self.gpu, lambda: 0.0, border)


def piece(group: int, blocks: list[int], places: list[int]) -> Piece:
    return Piece(group, np.array(blocks, np.int64), np.array(places, np.int64))


@pytest.mark.scenario_30
def test_no_read_of_a_block_before_what_the_engine_queued() -> None:
    bench = Bench()
    bench.copier.store(1, [piece(0, [3, 4], [0, 80]), piece(1, [5], [512])])
    stream = bench.gpu.log[-1][0]
    mine = [(what, detail) for name, what, detail in bench.gpu.log if name == stream]
    assert bench.gpu.log[0] == ("engine", "record", "")
    assert mine[0] == ("wait", "engine@0")
    assert [what for what, _ in mine[1:]] == ["copy", "copy", "record"]


def test_one_launch_for_each_group_of_a_job() -> None:
    bench = Bench()
    bench.copier.load(1, [piece(0, [1, 2, 3, 9], [0, 80, 160, 800]), piece(1, [5, 7], [512, 1024])])
    assert sum(what == "copy" for _, what, _ in bench.gpu.log) == 2


@pytest.mark.scenario_30
def test_the_engine_goes_on_only_behind_the_copies_that_it_waits_for() -> None:
    bench = Bench()
    bench.copier.store(1, [piece(1, [5], [0])])
    end = len(bench.gpu.log) - 1
    bench.copier.store(2, [piece(1, [6], [64])])
    bench.copier.wait([1, 77])
    assert [entry for entry in bench.gpu.log if entry[:2] == ("engine", "wait")] == [
        ("engine", "wait", f"{bench.gpu.log[end][0]}@{end}")
    ]


def test_a_job_is_reported_when_its_copies_are_done_and_once() -> None:
    bench = Bench()
    bench.copier.load(1, [piece(0, [1], [0])])
    assert bench.copier.finished() == []
    bench.gpu.run_all()
    assert [(done.job_id, done.ok, done.size) for done in bench.copier.finished()] == [(1, True, 80)]
    assert bench.copier.finished() == []


def test_loads_and_stores_do_not_wait_for_each_other() -> None:
    bench = Bench()
    bench.copier.store(1, [piece(1, [5], [0])])
    bench.copier.load(2, [piece(1, [6], [64])])
    streams = {name for name, what, _ in bench.gpu.log if what == "copy"}
    assert len(streams) == 2
    waits = [detail for name, what, detail in bench.gpu.log if what == "wait" and name in streams]
    assert all(detail.startswith("engine@") for detail in waits)


def test_the_same_bytes_as_the_twin() -> None:
    bench = Bench()
    twin_arrays = [[a.copy() for a in group] for group in bench.arrays]
    twin_primary = np.zeros_like(bench.primary)
    twin = NumpyCopier(twin_arrays, twin_primary)
    jobs = [
        (True, [piece(0, [3, 4, 7], [0, 80, 400]), piece(1, [5, 6], [512, 528])]),
        (False, [piece(0, [1, 2], [0, 400]), piece(1, [11], [512])]),
        (True, [piece(0, [2], [1024])]),
    ]
    for number, (store, pieces) in enumerate(jobs):
        for copier in (bench.copier, twin):
            (copier.store if store else copier.load)(number, pieces)
        bench.gpu.run_all()
    assert (bench.primary == twin_primary).all()
    for mine, other in zip(bench.arrays, twin_arrays, strict=True):
        assert all((a == b).all() for a, b in zip(mine, other, strict=True))
    assert [done.ok for done in bench.copier.finished()] == [True] * 3


def test_a_block_or_place_outside_fails_before_anything_is_queued() -> None:
    bench = Bench()
    bench.copier.load(1, [piece(0, [12], [0])])
    bench.copier.store(2, [piece(1, [1], [8190])])
    assert [(done.job_id, done.ok) for done in bench.copier.finished()] == [(1, False), (2, False)]
    assert bench.gpu.log == []


@pytest.mark.parametrize("load", [True, False])
def test_a_launch_that_fails_is_reported_behind_what_was_queued_before_it(load: bool) -> None:
    bench = Bench()
    bench.gpu.refused = 1
    pieces = [piece(0, [3], [0]), piece(1, [5], [512])]
    (bench.copier.load if load else bench.copier.store)(1, pieces)
    assert bench.copier.finished() == []  # the first group's copy may still write
    bench.copier.wait([1])
    assert bench.gpu.log[-1][:2] == ("engine", "wait")
    bench.gpu.run_all()
    assert [(done.job_id, done.ok) for done in bench.copier.finished()] == [(1, False)]
    assert str(bench.copier.last_error) == "out of resources"


def test_a_load_into_blocks_that_are_still_read_comes_behind_the_copy() -> None:
    """The engine's stream waits for the store; the load waits for the engine's stream as it is then."""
    bench = Bench()
    bench.copier.store(1, [piece(1, [5], [0])])
    end = len(bench.gpu.log) - 1
    bench.copier.wait([1])
    bench.copier.load(2, [piece(1, [5], [64])])
    rest = bench.gpu.log[end + 1 :]
    side = rest[-1][0]
    assert [(name, what) for name, what, _ in rest] == [
        ("engine", "wait"),
        ("engine", "record"),
        (side, "wait"),
        (side, "copy"),
        (side, "record"),
    ]
    assert rest[2][2] == f"engine@{end + 2}"


def test_no_copy_crosses_a_border_of_what_was_page_locked() -> None:
    bench = Bench(border=100)
    before = [a.copy() for a in bench.arrays[0]]
    bench.copier.store(1, [piece(0, [3, 4, 5], [0, 80, 960])])
    assert sum(what == "copy" for _, what, _ in bench.gpu.log) == 1
    _, _, targets, sizes = bench.gpu.copies[0]
    at = targets - bench.primary.ctypes.data
    assert (at // 100 == (at + sizes - 1) // 100).all()
    bench.gpu.run_all()
    for block, place in ((3, 0), (4, 80), (5, 960)):
        assert bench.primary[place : place + 32].tolist() == before[0][block].tolist()
        assert bench.primary[place + 32 : place + 80].tolist() == before[1][block].tolist()


def test_close_waits_for_what_is_under_way() -> None:
    bench = Bench()
    bench.copier.store(1, [piece(1, [5], [0])])
    bench.copier.close()
    assert bench.primary[:16].tolist() == bench.arrays[1][0][5].tolist()


def test_merge_joins_only_what_goes_on_on_both_sides() -> None:
    blocks, places, sizes = merge(
        np.array([100, 0, 116, 200], np.int64), np.array([16, 0, 32, 48], np.int64), np.full(4, 16, np.int64)
    )
    assert list(zip(blocks.tolist(), places.tolist(), sizes.tolist(), strict=True)) == [
        (0, 0, 16),
        (100, 16, 32),
        (200, 48, 16),
    ]


class FakeTorch:
    """The part of torch's CUDA that is used; records every call in order."""

    def __init__(self, refuse_at: int = -1) -> None:
        self.log: list[tuple[object, ...]] = []
        self.refuse_at = refuse_at
        torch = self

        class Event:
            def record(self, stream: object) -> None:
                torch.log.append(("record", stream))

            def query(self) -> bool:
                return False

        class Runtime:
            def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - the name there
                torch.log.append(("pin", address, size, flags))
                return 2 if len(torch.log) - 1 == torch.refuse_at else 0

        self.cuda = SimpleNamespace(Event=Event, cudart=Runtime)


def test_primary_is_page_locked_in_pieces_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert torch_cuda.pin(4096, (2 << 30) + 512)
    gib = 1 << 30
    assert torch.log == [("pin", 4096, gib, 0), ("pin", 4096 + gib, gib, 0), ("pin", 4096 + 2 * gib, 512, 0)]
    refusing = FakeTorch(refuse_at=1)
    monkeypatch.setitem(sys.modules, "torch", refusing)
    assert not torch_cuda.pin(4096, 4 << 30)
    assert len(refusing.log) == 2  # no further piece is tried: the rest is pageable
    assert "could not be page-locked" in caplog.text


def test_streams_and_events_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch()
    waited: list[object] = []
    stream = SimpleNamespace(wait_event=waited.append)
    mark = torch_cuda.CudaStream(torch, stream).record()
    assert torch.log == [("record", stream)]
    assert not mark.happened()
    torch_cuda.CudaStream(torch, stream).wait(mark)
    assert waited == [mark.event]
