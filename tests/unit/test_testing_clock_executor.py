"""The manual clock and the executors without threads."""

from __future__ import annotations

import pytest

from kvstrata.testing import InlineExecutor, ManualClock, ManualExecutor
from kvstrata.tiers.base import Clock, Executor


def test_both_clocks_move_together_and_never_back() -> None:
    clock: Clock = (manual := ManualClock(5.0, 100.0))
    assert manual.advance(2.5) == 7.5
    assert (clock.monotonic(), clock.wall()) == (7.5, 102.5)
    manual.set_wall(1.0)
    assert (clock.monotonic(), clock.wall()) == (7.5, 1.0)
    with pytest.raises(ValueError, match="cannot go back"):
        manual.advance(-1.0)


def fail() -> None:
    raise RuntimeError("task failed")


def test_inline_runs_at_once_and_keeps_what_is_raised() -> None:
    executor = InlineExecutor()
    plain: Executor = executor
    ran: list[int] = []
    plain.submit(lambda: ran.append(1))
    plain.submit(fail)
    assert ran == [1]
    assert [str(error) for error in executor.raised] == ["task failed"]
    assert plain.wait_idle(0.0)
    assert plain.close(0.0)
    plain.submit(lambda: ran.append(2))
    assert ran == [1]


def queue(executor: ManualExecutor, count: int) -> list[int]:
    order: list[int] = []
    for number in range(count):
        executor.submit(lambda number=number: order.append(number))
    return order


def test_manual_runs_in_order_when_told() -> None:
    executor = ManualExecutor()
    order = queue(executor, 4)
    assert order == []
    assert executor.run_next()
    executor.run_at(2)
    assert order == [0, 3]
    assert executor.drop_next()
    assert executor.run_all() == 1
    assert order == [0, 3, 2]
    assert not executor.run_next()
    assert not executor.drop_next()


def test_a_seed_gives_one_other_order_each_time() -> None:
    orders = []
    for seed in (1, 1, 2):
        executor = ManualExecutor(seed)
        order = queue(executor, 12)
        executor.run_all()
        orders.append(order)
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert sorted(orders[2]) == list(range(12))


def test_run_all_runs_tasks_of_tasks_and_survives_what_they_raise() -> None:
    executor = ManualExecutor()
    order: list[str] = []
    executor.submit(fail)
    executor.submit(lambda: executor.submit(lambda: order.append("inner")))
    assert executor.wait_idle(1.0)
    assert order == ["inner"]
    assert len(executor.raised) == 1
    assert executor.ran == 3


def test_a_hanging_device_runs_nothing_until_it_comes_back() -> None:
    executor = ManualExecutor()
    executor.hang = True
    order = queue(executor, 2)
    assert not executor.wait_idle(9.0)
    assert not executor.close(9.0)
    executor.submit(lambda: order.append(9))
    assert executor.pending == 2
    executor.run_all()
    assert order == [0, 1]
