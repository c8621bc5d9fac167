"""The loop that keeps calls at the disk: who goes first, how deep, and what becomes of calls that end badly."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from kvstrata.testing.clock import ManualClock
from kvstrata.testing.simfs import SimDisk, SimFiles
from kvstrata.tiers.disk.calls import Call
from kvstrata.tiers.disk.format import BatchKind, payload_digest
from kvstrata.tiers.disk.io import aligned_buffer
from kvstrata.tiers.disk.loop import IoLoop
from kvstrata.tiers.disk.store_room import DRAIN_S, LEAST_BYTES
from kvstrata.tiers.disk.tasks import Done, Prepare, ReadEven, ReadUnit, Sync, Task, WriteBatch
from kvstrata.tiers.disk.work import Workshop, segment_name
from kvstrata.types import FailCause

MIB = 1 << 20
SIZE = 8 * MIB


class ScriptedQueue:
    """Calls are carried out on a simulated file when the test says so, in the order that it says."""

    handle = -1

    def __init__(self, files: SimFiles) -> None:
        self.files = files
        self.pushed: list[tuple[int, Call, int, int]] = []
        self.at_disk: list[tuple[int, Call, int, int]] = []
        self.ended: list[tuple[int, int]] = []
        self.handed_over: list[int] = []
        """How many calls each submission had."""

    def push(self, tag: int, call: Call, begin: int, size: int) -> None:
        self.pushed.append((tag, call, begin, size))

    def submit(self) -> None:
        if self.pushed:
            self.handed_over.append(len(self.pushed))
        self.at_disk += self.pushed
        self.pushed.clear()

    def take(self) -> list[tuple[int, int]]:
        ended, self.ended = self.ended, []
        return ended

    def end(self, which: int = 0, *, result: int | None = None) -> None:
        """One call at the disk ends: as it should, or with `result` (which moves that many bytes)."""
        tag, call, begin, size = self.at_disk.pop(which)
        take = size if result is None else max(result, 0)
        if take:
            move = self.files.pwritev if call.write else self.files.preadv
            take = move(call.handle, call.buffers(begin, take), call.offset + begin)
        self.ended.append((tag, take if result is None or result >= 0 else result))


class Rig:
    def __init__(self, *, width: int = 8, write_depth: int = 4) -> None:
        self.files = SimFiles(SimDisk())
        directory = self.files.open_directory("/tier", create=True)
        handle = self.files.open(directory, segment_name(0), write=True, create=True)
        self.files.allocate(handle, 2 * SIZE)
        self.region = aligned_buffer(2 * SIZE)
        self.region[:SIZE] = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8).data
        self.queue = ScriptedQueue(self.files)
        self.answers: list[Done] = []
        self.aside: list[Task] = []
        self.clock = ManualClock()
        self.runs: list[Callable[[], Done]] = []
        workshop = Workshop(self.files, directory, self.region, direct=False, alone=True)
        self.loop = IoLoop(
            workshop, self.queue, lambda done, load: self.answers.append(done),
            self.put_aside,
            width=width, write_depth=write_depth, clock=self.clock,
        )  # fmt: skip

    def put_aside(self, task: Task, run: Callable[[], Done]) -> None:
        self.aside.append(task)
        self.runs.append(run)

    def turn(self) -> None:
        while self.loop.turn():
            pass

    def write(self, number: int, size: int = MIB - 4096) -> WriteBatch:
        start = 4096 + number * MIB
        return WriteBatch(
            number, 0, bytes(16), 1, start, size + 4096, int(BatchKind.RECORDS), bytes(16), 1, 0, bytes([number]) * 36,
            [start + 4096], [size], [number * MIB], b"", True,
        )  # fmt: skip

    def read(self, number: int, source: int = 0, size: int = MIB - 4096) -> ReadUnit:
        digest = payload_digest(self.region[source * MIB : source * MIB + size])
        return ReadUnit(number, 0, [8192 + source * MIB], [size], [SIZE + source * MIB], digest, True, True)

    def store(self, *numbers: int) -> None:
        for number in numbers:
            self.loop.push(self.write(number))
        self.finish()
        self.answers.clear()

    def finish(self) -> None:
        self.turn()
        while self.queue.at_disk:
            self.queue.end()
            self.turn()

    def kinds(self) -> list[bool]:
        return [call.write for _, call, _, _ in self.queue.at_disk]


def test_what_was_stored_comes_back_in_whatever_order_calls_end() -> None:
    rig = Rig()
    for number in range(4):
        rig.loop.push(rig.write(number))
    rig.turn()
    while rig.queue.at_disk:
        rig.queue.end(-1)
        rig.turn()
    assert sorted(done.task_id for done in rig.answers) == [0, 1, 2, 3]
    assert all(not done.cause and len(done.digests) == 16 for done in rig.answers)
    rig.answers.clear()
    for number in range(4):
        rig.loop.push(rig.read(10 + number, number))
    rig.finish()
    assert [(done.cause, done.failed) for done in rig.answers] == [("", [])] * 4
    for number in range(4):
        part = slice(number * MIB, (number + 1) * MIB - 4096)
        assert rig.region[SIZE:][part] == rig.region[:SIZE][part]
    assert not rig.loop.busy


def test_loads_go_first_and_one_small_store_call_beside_them() -> None:
    rig = Rig(width=2)
    rig.store(0)
    for number in range(1, 4):
        rig.loop.push(rig.write(number))
    for number in range(5):
        rig.loop.push(rig.read(10 + number))
    rig.turn()
    assert rig.kinds() == [False, False, True]
    assert rig.queue.at_disk[-1][3] <= MIB // 4
    while any(not write for write in rig.kinds()):
        assert sum(rig.kinds()) <= 1
        rig.queue.end()
        rig.turn()
    rig.finish()
    assert sorted(done.task_id for done in rig.answers) == [1, 2, 3, 10, 11, 12, 13, 14]
    assert not any(done.cause or done.failed for done in rig.answers)


def test_stores_find_back_to_their_depth_with_what_they_store_after_a_load() -> None:
    rig = Rig(write_depth=8)
    rig.store(0)
    rig.loop.push(rig.read(10))
    rig.finish()
    for again in range(72):
        rig.loop.push(msgspec.structs.replace(rig.write(again % 8), task_id=again))
    depths, sizes = [], []
    rig.turn()
    while rig.queue.at_disk:
        depths.append(len(rig.queue.at_disk))
        sizes.append(rig.queue.at_disk[0][3])
        rig.queue.end()
        rig.turn()
    # Quarters of a mebibyte: of every four mebibytes twice as many at once.
    assert [depths[at] for at in (0, 15, 16, 31, 32, 47, 48, 160)] == [1, 1, 2, 2, 4, 4, 8, 8]
    assert set(sizes[:192]) == {MIB // 4}
    assert set(sizes[200:]) == {MIB}


def test_calls_at_the_disk_and_stores_made_ready_are_bounded() -> None:
    rig = Rig(width=3, write_depth=2)
    for number in range(8):
        for again in range(5):
            rig.loop.push(msgspec.structs.replace(rig.write(number), task_id=number + 8 * again))
    rig.turn()
    assert len(rig.queue.at_disk) == 2
    assert rig.loop._writes.ready <= 17 * MIB
    rig.finish()
    assert len(rig.answers) == 40


def test_of_calls_that_end_all_at_once_the_first_is_followed_before_the_others_are_looked_at() -> None:
    rig = Rig(write_depth=2)
    for number in range(4):
        rig.loop.push(rig.write(number))
    rig.turn()
    rig.queue.handed_over.clear()
    rig.queue.end()
    rig.queue.end()
    rig.loop.turn()
    assert rig.queue.handed_over == [1, 1]


def test_without_loads_store_calls_are_long_and_beside_them_short() -> None:
    rig = Rig()
    rig.store(0)
    rig.loop.push(rig.write(1, 6 * MIB))
    rig.turn()
    assert [size for _, _, _, size in rig.queue.at_disk] == [MIB + 4096] * 4
    rig.loop.push(rig.read(9))
    rig.loop.push(rig.write(0, MIB))
    for _ in range(4):
        rig.queue.end()
    rig.turn()
    assert [(call.write, size) for _, call, _, size in rig.queue.at_disk] == [(False, MIB - 4096), (True, MIB // 4)]
    rig.finish()
    assert sorted(done.task_id for done in rig.answers) == [0, 1, 9]


def test_stores_at_the_disk_are_what_it_writes_in_a_short_time() -> None:
    rig = Rig(write_depth=32)
    depths = []
    for milliseconds in (1, 40):  # for each store of a mebibyte
        rig.answers.clear()
        for again in range(400):
            rig.loop.push(msgspec.structs.replace(rig.write(again % 8), task_id=again))
        rig.turn()
        while rig.queue.at_disk:
            rig.queue.end()
            rig.clock.advance(milliseconds / 1000)
            rig.turn()
            if len(rig.answers) == 200:
                depths.append(len(rig.queue.at_disk))
        assert len(rig.answers) == 400
    assert depths == [round(DRAIN_S / 0.001), LEAST_BYTES // MIB]


def test_of_many_calls_that_end_all_at_once_few_are_looked_at_between_two_that_are_handed_over() -> None:
    rig = Rig(width=16)
    rig.store(0)
    for number in range(96):
        rig.loop.push(rig.read(10 + number, size=32_768))
    rig.turn()
    assert len(rig.queue.at_disk) == 32
    rig.queue.handed_over.clear()
    for _ in range(32):
        rig.queue.end()
    rig.loop.turn()
    assert rig.queue.handed_over == [1, 2, 4, 8, 8, 8, 1]
    rig.finish()
    assert len(rig.answers) == 96


def test_the_first_call_for_an_idle_disk_goes_alone_and_others_together() -> None:
    rig = Rig(width=16)
    rig.store(0)
    rig.queue.handed_over.clear()
    for number in range(16):
        rig.loop.push(rig.read(10 + number, size=32_768))
    rig.loop.turn()
    assert rig.queue.handed_over == [1, 8, 7]
    for number in range(16, 20):
        rig.loop.push(rig.read(10 + number, size=32_768))
    rig.queue.handed_over.clear()
    rig.loop.turn()
    assert rig.queue.handed_over == [4]


def test_long_calls_go_by_ones_and_twos_so_that_the_kernel_does_not_join_them() -> None:
    rig = Rig()
    rig.store(0)
    rig.queue.handed_over.clear()
    for number in range(6):
        rig.loop.push(rig.read(10 + number))
    rig.loop.turn()
    assert rig.queue.handed_over == [1, 2, 2, 1]
    rig.finish()
    rig.queue.handed_over.clear()
    rig.loop.push(rig.write(0, 6 * MIB))
    rig.finish()
    assert set(rig.queue.handed_over) == {1}


def test_the_last_loads_are_not_all_at_the_disk_at_once() -> None:
    """A disk that reports all that it has at once: what is verified after the last call must be little."""
    rig = Rig(width=64)
    rig.store(0)
    for number in range(80):
        rig.loop.push(rig.read(10 + number))
    bursts = []
    rig.loop.turn()
    while rig.loop.busy:
        while rig.loop.turn():
            pass
        bursts.append(len(rig.queue.at_disk))
        assert bursts[-1] <= max(8, 80 - sum(bursts))
        for _ in range(bursts[-1]):
            rig.queue.end()
    assert len(rig.answers) == 80
    assert bursts[0] == 40
    assert bursts[-1] <= 8
    assert len(bursts) <= 6


@pytest.mark.parametrize("bad", ["digest", "short", "error"])
def test_a_load_that_is_not_as_it_should_be_says_why(bad: str) -> None:
    rig = Rig()
    rig.store(0)
    task = rig.read(10)
    if bad == "digest":
        task = msgspec.structs.replace(task, digests=bytes(16))
    rig.loop.push(task)
    rig.turn()
    rig.queue.end(result={"digest": None, "short": 1000, "error": -errno.EIO}[bad])
    rig.finish()
    (done,) = rig.answers
    cause = {"digest": FailCause.CORRUPT, "short": FailCause.WRONG_SIZE, "error": FailCause.IO_ERROR}[bad]
    assert done.failed == [(0, str(cause))]


def test_of_small_loads_twice_as_many_are_at_the_disk() -> None:
    rig = Rig(width=3)
    rig.store(0)
    for number in range(10):
        rig.loop.push(rig.read(number, size=32_768))
    rig.turn()
    assert len(rig.queue.at_disk) == 6
    rig.finish()
    assert {done.task_id for done in rig.answers} == set(range(10))


def test_a_call_that_comes_back_short_goes_on_where_it_ended() -> None:
    rig = Rig()
    rig.loop.push(rig.write(0))
    rig.turn()
    rig.queue.end(result=8192)
    rig.finish()
    rig.loop.push(rig.read(1))
    rig.turn()
    rig.queue.end(result=512)
    rig.finish()
    assert [(done.task_id, done.cause, done.failed) for done in rig.answers] == [(0, "", []), (1, "", [])]


@pytest.mark.parametrize(("result", "cause"), [(0, FailCause.NO_SPACE), (-errno.ENOSPC, FailCause.NO_SPACE),
                                               (-errno.EIO, FailCause.IO_ERROR)])  # fmt: skip
def test_a_store_call_that_fails_is_the_answer(result: int, cause: FailCause) -> None:
    rig = Rig()
    rig.loop.push(rig.write(0, 6 * MIB))
    rig.turn()
    rig.queue.end(1, result=result)
    rig.finish()
    assert [done.cause for done in rig.answers] == [cause]
    assert not rig.loop.busy


def test_one_bad_sector_fails_only_its_record() -> None:
    rig = Rig()
    rig.store(0, 1)
    good, bad = rig.read(0, 0), rig.read(0, 1)
    half = (MIB - 4096) // 2
    digests = b"".join(payload_digest(rig.region[at : at + half]) for at in (0, half))
    unit = ReadUnit(9, 0, [8192, 8192 + half], [half, half], [SIZE, SIZE + half], digests, True, True)
    assert good.lengths == bad.lengths
    rig.loop.push(unit)
    rig.turn()
    rig.queue.end(result=-errno.EIO)
    rig.turn()
    rig.queue.end(result=-errno.EIO)
    rig.finish()
    assert [(done.task_id, done.cause, done.failed) for done in rig.answers] == [(9, "", [(0, FailCause.IO_ERROR)])]


def even(rig: Rig, number: int, *batches: int) -> ReadEven:
    """A load of all four quarters of each of these batches."""
    size = MIB // 4 - 1024
    numbers = [(batch, quarter) for batch in batches for quarter in range(4)]
    sources = [batch * MIB + quarter * size for batch, quarter in numbers]
    digests = b"".join(payload_digest(rig.region[at : at + size]) for at in sources)
    return ReadEven(number, 0, size, [8192 + at for at in sources], [SIZE + at for at in sources], digests, True)


def test_a_load_of_many_is_read_in_units_and_answered_once() -> None:
    rig = Rig(width=2)
    rig.store(0, 1, 3)
    rig.loop.push(even(rig, 7, 0, 1, 3))
    rig.turn()
    assert rig.kinds() == [False, False]
    rig.finish()
    assert [(done.task_id, done.cause, done.failed) for done in rig.answers] == [(7, "", [])]
    for number in (0, 1, 3):
        part = slice(number * MIB, (number + 1) * MIB - 4096)
        assert rig.region[SIZE:][part] == rig.region[:SIZE][part]
    assert not rig.loop.busy
    assert not rig.loop._cuts


def test_what_fails_in_a_load_of_many_is_named_by_its_place_in_it() -> None:
    rig = Rig()
    rig.store(0, 1, 3)
    task = even(rig, 7, 0, 1, 3)
    digests = bytearray(task.digests)
    digests[16 * 6] ^= 1
    rig.loop.push(msgspec.structs.replace(task, digests=bytes(digests)))
    rig.turn()
    rig.queue.end(2, result=-errno.EIO)  # the last unit; then its records one by one
    rig.turn()
    rig.queue.end(2, result=-errno.EIO)
    rig.finish()
    (done,) = rig.answers
    assert sorted(done.failed) == [(6, FailCause.CORRUPT), (8, FailCause.IO_ERROR)]
    assert rig.loop._workshop.run(task) == Done(7)  # the same task, run as one


def test_what_has_not_begun_of_a_load_of_many_can_be_forgotten() -> None:
    rig = Rig(width=1)
    rig.store(0, 1, 2, 3)
    rig.loop.push(even(rig, 7, 0, 1, 2, 3))
    rig.loop.push(rig.read(8))
    rig.loop.turn()
    rig.loop.forget([7])
    assert not rig.answers  # a call still fills slots of it
    rig.finish()
    assert [(done.task_id, done.cause) for done in rig.answers] == [(7, FailCause.CANCELLED), (8, "")]
    assert not rig.loop.busy
    assert not rig.loop._cuts
    assert not rig.loop._forgotten


def test_a_file_that_ends_early_is_the_wrong_size_of_what_lies_behind() -> None:
    rig = Rig()
    rig.store(0)
    rig.loop.push(rig.read(1, 0, 2 * MIB))
    rig.turn()
    rig.queue.end(result=MIB // 2)
    rig.turn()
    while rig.queue.at_disk:
        rig.queue.end(result=0)
        rig.turn()
    assert [done.failed for done in rig.answers] == [[(0, FailCause.WRONG_SIZE)]]


def test_what_is_forgotten_is_answered_as_cancelled_and_what_waits_for_the_device_goes_aside() -> None:
    rig = Rig()
    rig.store(0)
    rig.loop.push(rig.read(1))
    rig.loop.push(rig.read(2))
    rig.loop.forget([2])
    rig.loop.push(Sync(3, []))
    rig.loop.push(Prepare(4, 0, 0, False, b"", [], 0))
    rig.finish()
    assert {done.task_id: done.cause for done in rig.answers} == {1: "", 2: FailCause.CANCELLED}
    assert [task.task_id for task in rig.aside] == [3, 4]


def test_batches_for_a_new_file_go_aside_and_count_for_the_depth() -> None:
    rig = Rig(write_depth=2)
    for number in range(4):
        rig.loop.push(msgspec.structs.replace(rig.write(number), fresh=True))
    rig.turn()
    assert [task.task_id for task in rig.aside] == [0, 1]
    rig.loop.push(rig.read(9))
    rig.loop.push(Sync(10, []))
    assert rig.loop.ended_aside(Done(0))
    rig.turn()
    assert [task.task_id for task in rig.aside] == [0, 1, 10]  # a load is about, and one store is still there
    assert not rig.loop.ended_aside(Done(10))
    assert rig.loop.ended_aside(Done(1))
    rig.turn()
    assert [task.task_id for task in rig.aside] == [0, 1, 10, 2]
    rig.queue.end()
    rig.turn()
    rig.loop.forget([3])
    assert rig.loop.ended_aside(Done(2))
    rig.turn()
    assert [(done.task_id, done.cause) for done in rig.answers][-1] == (3, FailCause.CANCELLED)
    assert {done.task_id for done in rig.answers} == {0, 1, 2, 3, 9, 10}
    assert not rig.loop.busy


def quarters(number: int, *, fresh: bool = False) -> WriteBatch:
    """A store of four chunks whose digests are made one after the other."""
    size = MIB // 4
    return WriteBatch(
        number, 0, bytes(16), 1, 4096, MIB + 4096, int(BatchKind.RECORDS), bytes(16), 1, 0, bytes(range(144)), [],
        [size], [at * size for at in range(4)], b"", True, fresh,
    )  # fmt: skip


def test_a_load_that_comes_while_digests_are_made_does_not_wait_for_all_of_them() -> None:
    rig = Rig()
    rig.store(0)
    rig.loop.push(rig.read(10))
    rig.finish()
    rig.loop.push(quarters(1))
    assert rig.loop.turn()
    rig.loop.push(rig.read(11))
    assert rig.loop.turn()
    assert rig.kinds() == [False]
    assert rig.loop.busy
    rig.finish()
    assert [done.task_id for done in rig.answers] == [10, 11, 1]
    assert rig.answers[-1].digests == b"".join(
        payload_digest(rig.region[at : at + MIB // 4]) for at in range(0, MIB, MIB // 4)
    )
    assert not rig.loop.busy


def test_without_loads_digests_are_made_in_one_go() -> None:
    rig = Rig()
    rig.loop.push(quarters(1))
    assert rig.loop.turn()
    rig.loop.turn()
    assert rig.kinds() == [True]


@pytest.mark.parametrize("load", [False, True])
def test_a_batch_for_a_new_file_has_its_digests_and_is_written_in_short_calls_while_loads_are_about(
    load: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()
    if load:
        rig.store(0)
        rig.loop.push(rig.read(10))
        rig.finish()
    rig.loop.push(quarters(1, fresh=True))
    rig.turn()
    sizes: list[int] = []
    write = rig.files.pwritev

    def noted(handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        sizes.append(sum(map(len, buffers)))
        return write(handle, buffers, offset)

    def hashed(*_: object) -> bytes:
        raise AssertionError("hashed beside the loop, which then waits for the interpreter")

    monkeypatch.setattr(rig.files, "pwritev", noted)
    monkeypatch.setattr(rig.loop._workshop, "_digest", hashed)
    (run,) = rig.runs
    done = run()
    assert (done.cause, len(done.digests)) == ("", 64)
    assert max(sizes) == (MIB // 2 if load else MIB + 4096)
    assert sum(sizes) == MIB + 4096


def test_a_batch_for_a_new_file_waits_for_its_turn_with_its_digests_made() -> None:
    rig = Rig(write_depth=2)
    rig.store(0)
    rig.loop.push(rig.read(10))
    rig.finish()
    rig.loop.push(quarters(1, fresh=True))
    rig.loop.turn()
    rig.loop._writes.out += 1  # the place that was free is taken meanwhile
    rig.turn()
    assert rig.aside == []
    assert rig.loop.busy
    rig.loop._writes.out -= 1
    rig.turn()
    assert [task.task_id for task in rig.aside] == [1]


def test_a_task_that_cannot_begin_is_answered() -> None:
    rig = Rig()
    rig.loop.push(ReadUnit(1, 77, [4096], [4096], [0], bytes(16), True, True))
    rig.loop.push(WriteBatch(2, 0, b"", 0, 0, 4096, 99, b"", 0, 0, b"x" * 36, [0], [0], [0], b"", True))
    rig.finish()
    answers = {done.task_id: done for done in rig.answers}
    assert answers[1].failed == [(0, FailCause.IO_ERROR)]
    assert answers[2].cause == FailCause.IO_ERROR
    assert not rig.loop.busy
