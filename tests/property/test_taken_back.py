"""A scheduler in which things go wrong, beside one in which nothing does: after each call the two are equal.

Each call is first made to raise at some line of the core, again and again at another, and then made undisturbed. What is not
part of `Driver.state` (ages of cached pages, the heap they are evicted from) shows in later plans, which are compared as well.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from faults import Fault, fault_at_line
from scheduler_driver import DEFAULTS, Driver
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import RequestError

CONFIGS = st.fixed_dictionaries(
    {
        "page_size": st.integers(1, 3),
        "num_pages": st.integers(3, 9),
        "max_rows": st.integers(1, 4),
        "chunk_size": st.integers(1, 6),
        "overlap_depth": st.integers(0, 2),
        "mixed": st.booleans(),
        "prefix_cache": st.sampled_from([True, True, False]),
    }
)
NAMES = st.sampled_from("abcd")
CALLS = st.one_of(
    st.tuples(st.just("submit"), NAMES, st.lists(st.integers(0, 1), min_size=1, max_size=7), st.integers(1, 6)),
    st.tuples(st.just("plan")),
    st.tuples(st.just("plan")),
    st.tuples(st.just("plan")),
    st.tuples(st.just("retract"), NAMES),
    st.tuples(st.just("abort"), NAMES),
    st.tuples(st.just("reset_prefix_cache"), st.booleans()),
)


def _call(driver: Driver, call: tuple[Any, ...], lines: list[int]) -> Any:
    """What the call comes to; before that it is disturbed at each of `lines`."""
    scheduler = driver.scheduler
    if call[0] == "submit":
        act = lambda: driver.submit(call[1], call[2], call[3], stop_ids=[996, call[3]])  # noqa: E731
    elif call[0] == "plan":
        act = scheduler.plan
    elif call[0] == "reset_prefix_cache":
        act = lambda: scheduler.reset_prefix_cache(force=call[1])  # noqa: E731
    else:
        act = lambda: getattr(scheduler, call[0])(call[1])  # noqa: E731
    for line in lines:
        before = driver.state()
        try:
            with fault_at_line(line):
                result = act()
        except Fault:
            assert driver.state() == before
        except RequestError as error:
            return error.code
        else:
            return result
    try:
        return act()
    except RequestError as error:
        return error.code


def _answer(driver: Driver, op: Any) -> Any:
    """Run the op that was planned, if one was, and hand back the oldest result when it is due."""
    planned = None
    if op is not None:
        driver.results.append(driver.runtime.run(op))
        planned = driver.planned(op)
    if driver.results and (len(driver.results) > driver.config.overlap_depth or op is None):
        driver.complete()
    driver.collect()
    driver.audit()
    return planned


@given(options=CONFIGS, calls=st.lists(st.tuples(CALLS, st.lists(st.integers(1, 300), max_size=3)), max_size=40))
@settings(max_examples=150)
def test_calls_that_raised_have_left_nothing(options: dict[str, Any], calls: list[tuple[tuple[Any, ...], list[int]]]) -> None:
    """A scheduler whose calls raised at up to three lines each goes on exactly like one whose calls did not."""
    config = SchedulerConfig(**DEFAULTS | options)
    disturbed, calm = Driver(config), Driver(config)
    for driver in (disturbed, calm):
        driver.scheduler.placement.cache.records = []
    for call, lines in calls:
        results = [_call(disturbed, call, lines), _call(calm, call, [])]
        if call[0] == "plan":
            results = [_answer(disturbed, results[0]), _answer(calm, results[1])]
        if call[0] != "submit":
            assert results[0] == results[1]
        for driver in (disturbed, calm):
            driver.collect()
        assert disturbed.state() == calm.state()
    for driver in (disturbed, calm):
        driver.run()
    assert (disturbed.outputs, disturbed.finish, disturbed.num_ops) == (calm.outputs, calm.finish, calm.num_ops)
