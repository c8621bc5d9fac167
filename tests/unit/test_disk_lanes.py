"""Who may use the disk when: loads before stores, and one store at a time while a load waits."""

from __future__ import annotations

from kvstrata.testing.executor import ManualExecutor
from kvstrata.tiers.disk.lanes import Lanes
from kvstrata.tiers.disk.tasks import Done, Prepare, ReadUnit, Sync, Task, WriteBatch
from kvstrata.types import FailCause


def write(number: int) -> WriteBatch:
    return WriteBatch(number, 0, b"", 0, 0, 4096, 1, b"", 0, 0, b"", [], [], [], b"", True)


def read(number: int) -> ReadUnit:
    return ReadUnit(number, 0, [], [], [], b"", True, True)


class Nested:
    """Runs lanes so that tasks overlap: while one runs, the executor's other tasks run inside it."""

    def __init__(self, width: int, write_depth: int) -> None:
        self.executor = ManualExecutor()
        self.order: list[int] = []
        self.active: list[Task] = []
        self.most_writes: list[int] = []
        self.during = None
        self.answers: list[Done] = []
        self.lanes = Lanes(self.run, self.executor, self.answers.append, width=width, write_depth=write_depth)

    def run(self, task: Task) -> Done:
        self.active.append(task)
        self.order.append(task.task_id)
        self.most_writes.append(sum(isinstance(each, WriteBatch) for each in self.active))
        self.executor.run_next()  # somebody else's turn, while this one is at the disk
        self.active.remove(task)
        return Done(task.task_id)


def test_loads_go_first() -> None:
    rig = Nested(width=1, write_depth=1)
    for task in (write(1), write(2), read(3), read(4)):
        rig.lanes.push(task)
    rig.lanes.start()
    rig.executor.run_all()
    assert rig.order == [3, 4, 1, 2]


def test_what_others_wait_for_goes_before_everything() -> None:
    rig = Nested(width=1, write_depth=1)
    for task in (write(1), read(2), Sync(3, []), Prepare(4, 0, 0, False, b"", [], 0)):
        rig.lanes.push(task)
    rig.lanes.start()
    rig.executor.run_all()
    assert rig.order == [3, 4, 2, 1]


def test_stores_alone_use_their_depth_and_no_more() -> None:
    rig = Nested(width=8, write_depth=4)
    for number in range(20):
        rig.lanes.push(write(number))
    rig.lanes.start()
    rig.executor.run_all()
    assert sorted(rig.order) == list(range(20))
    assert max(rig.most_writes) == 4


def test_one_store_at_a_time_while_a_load_waits_or_runs() -> None:
    rig = Nested(width=6, write_depth=5)
    for number in range(12):
        rig.lanes.push(read(100 + number))
    for number in range(12):
        rig.lanes.push(write(number))
    rig.lanes.start()
    rig.executor.run_all()
    assert len(rig.order) == 24
    last_read = max(place for place, task_id in enumerate(rig.order) if task_id >= 100)
    assert max(rig.most_writes[: last_read + 1]) <= 1
    assert not rig.lanes.busy


def test_what_is_forgotten_is_answered_as_cancelled() -> None:
    rig = Nested(width=2, write_depth=2)
    for number in range(4):
        rig.lanes.push(read(number))
    rig.lanes.forget([1, 2])
    rig.lanes.start()
    rig.executor.run_all()
    assert {done.task_id: done.cause for done in rig.answers} == {
        0: "", 1: FailCause.CANCELLED, 2: FailCause.CANCELLED, 3: "",
    }  # fmt: skip
    assert sorted(rig.order) == [0, 3]


def test_abandoned_tasks_are_given_back() -> None:
    rig = Nested(width=2, write_depth=2)
    rig.lanes.push(read(1))
    rig.lanes.push(write(2))
    assert sorted(task.task_id for task in rig.lanes.abandon()) == [1, 2]
    rig.executor.run_all()
    assert rig.order == []


def test_stores_find_back_to_their_depth_one_by_one_after_a_load() -> None:
    rig = Nested(width=6, write_depth=4)
    rig.lanes.push(read(100))
    for number in range(30):
        rig.lanes.push(write(number))
    rig.lanes.start()
    rig.executor.run_all()
    assert rig.order[0] == 100
    depths = rig.most_writes
    assert max(depths) == 4
    # Each one more was earned by a store that ended before.
    first_at = [depths.index(depth) for depth in (1, 2, 3, 4)]
    assert first_at == sorted(first_at)
    assert first_at[1] >= 2


def test_a_runner_with_a_burst_goes_on_without_a_hand_over() -> None:
    executor, ran = ManualExecutor(), []
    lanes = Lanes(
        lambda task: Done(task.task_id),
        executor,
        lambda done: ran.append(done.task_id),
        width=1,
        write_depth=1,
        burst=3,
    )
    for number in range(5):
        lanes.push(read(number))
    lanes.start()
    assert executor.run_next()
    assert ran == [0, 1, 2]
    executor.run_all()
    assert ran == [0, 1, 2, 3, 4]
    assert not executor.pending
