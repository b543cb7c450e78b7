"""SteadyRows: a scheduler that keeps columns from step to step plans what one plans that looks everything up."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from scheduler_driver import DEFAULTS, Driver
from scheduler_service.core.config import RefreshPolicy, SchedulerConfig, Verify
from scheduler_service.core.states import State
from scheduler_service.wire import op_to_proto


def _config(**options: Any) -> SchedulerConfig:
    return SchedulerConfig(**DEFAULTS | {"num_pages": 200, "max_rows": 8, "max_pages_per_row": 20, "page_size": 2} | options)


def _decoding(config: SchedulerConfig, count: int = 3, max_tokens: int = 20, **options: Any) -> Driver:
    """`count` requests with prompts of different lengths, all of which have decoded a few steps."""
    driver = Driver(config)
    for i in range(count):
        driver.submit(f"r{i}", [1] * (i + 1), max_tokens, **options)
    for _ in range(4):
        driver.step()
    assert {request.state for request in driver.requests.values()} == {State.DECODING}
    return driver


def _is_steady(driver: Driver) -> bool:
    driver.step()
    assert driver.op is not None
    return driver.op.steady is not None


def test_rows_are_steady_from_the_second_step_alike() -> None:
    """The rows of a prefill and of the first decode are looked up, those of the steps after it not, until all end at once."""
    driver = Driver(_config(overlap_depth=0))
    for i in range(3):
        driver.submit(f"r{i}", [1] * (i + 1), 12)
    found = []
    while driver.scheduler.has_work:
        steady = _is_steady(driver)
        assert driver.op is not None
        found.append((steady, driver.op.num_rows, driver.op.may_end))
    assert found == [(False, 3, True)] * 2 + [(True, 3, False)] * 9 + [(True, 3, True)]


@pytest.mark.parametrize("event", ["submit", "abort", "retract", "budget"])
def test_what_changes_the_rows_ends_it(event: str) -> None:
    """The next op has the rows that it should have, and after that the rows are steady again."""
    driver = _decoding(_config(overlap_depth=0))
    assert _is_steady(driver)
    scheduler = driver.scheduler
    if event == "submit":
        driver.submit("new", [1, 2], 20)
    elif event == "abort":
        scheduler.abort("r1")
        driver.collect()
    elif event == "retract":
        scheduler.retract("r1")
    else:
        scheduler.set_token_budget(2)
    assert not _is_steady(driver)
    names = [request.request_id for request in driver.op.requests] if driver.op else []
    expected = {"submit": {"new", "r0", "r1", "r2"}, "abort": {"r0", "r2"}, "retract": {"r0", "r2"}, "budget": {"r0", "r1"}}
    assert set(names) == expected[event]
    assert any(_is_steady(driver) for _ in range(4))


def test_stop_tokens_end_steady_rows() -> None:
    """A row whose token is one of its stop ids ends with it, one whose list lacks it does not."""
    driver = _decoding(_config(overlap_depth=0))
    assert _is_steady(driver)
    next_token = driver.requests["r1"].output
    other = Driver(_config(overlap_depth=0))
    other.submit("r1", [1, 1], 20, stop_ids=[500, next_token[4]])
    other.submit("r2", [1, 1, 1], 20, stop_ids=[501])
    other.run()
    assert (other.finish["r1"], other.finish["r2"]) == ("stop", "length")
    assert other.outputs["r1"] == next_token[:5]


def test_a_plan_that_fails_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error after the rows have grown leaves pages, rows and the next op as if there had been none."""
    driver, calm = (_decoding(_config(overlap_depth=0)) for _ in range(2))
    for _ in range(6):
        before = driver.state()
        with monkeypatch.context() as patch:
            patch.setattr("scheduler_service.core.steady.SteadyRows.advance", lambda _: 1 // 0)
            patch.setattr("scheduler_service.core.row_table.RowTable.advance", lambda *_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                driver.scheduler.plan()
        assert driver.state() == before
        for one in (driver, calm):
            one.step()
        assert driver.op is not None
        assert calm.op is not None
        assert op_to_proto(driver.op) == op_to_proto(calm.op)


@pytest.mark.parametrize("seed", range(20))
def test_ops_are_those_of_a_scheduler_that_keeps_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random requests, aborts and retractions in small and large pools, under every policy: byte for byte the same."""
    choose = random.Random(seed)
    config = _config(
        num_pages=choose.choice([20, 30, 200]),
        overlap_depth=choose.choice([0, 1, 2]),
        mixed=choose.random() < 0.7,
        verify=choose.choice(list(Verify)),
        verify_interval=3,
        refresh_policy=choose.choice([RefreshPolicy.TRANSITION, RefreshPolicy.DIFF, RefreshPolicy.ALWAYS]),
    )
    drivers = [Driver(config), Driver(config)]
    plain = drivers[1].scheduler
    monkeypatch.setattr(plain._planner._steady, "begin", lambda *_: None)
    num_steady = 0
    for step in range(120):
        if choose.random() < 0.15:
            prompt, limit = [choose.randrange(3) for _ in range(choose.randint(1, 12))], choose.randint(1, 25)
            stop_ids = [choose.randrange(3)] if step % 3 else []
            for driver in drivers:
                driver.submit(f"r{step}", prompt, limit, stop_ids=stop_ids)
        live = [request.request_id for request in plain.requests.values() if request.state is State.DECODING]
        if live and choose.random() < 0.05:
            name, act = choose.choice(live), choose.choice(["abort", "retract"])
            for driver in drivers:
                getattr(driver.scheduler, act)(name)
                driver.collect()
        for driver in drivers:
            driver.step()
        first, second = (driver.op for driver in drivers)
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            assert op_to_proto(first) == op_to_proto(second)
            num_steady += first.steady is not None
            assert second.steady is None
        assert drivers[0].outputs == drivers[1].outputs
    assert num_steady or config.refresh_policy is RefreshPolicy.ALWAYS
    assert np.array_equal(drivers[0].scheduler.placement.rows.pages, plain.placement.rows.pages)
