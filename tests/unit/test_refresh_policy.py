"""refresh_policy: when a row is sent in full, under each policy, and that nothing else depends on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler_service.core.config import RefreshPolicy, SchedulerConfig
from scheduler_service.core.ops import Cause, ForwardOp, StepResult
from scheduler_service.core.scheduler import Scheduler

Drive = Callable[..., Any]
MakeConfig = Callable[..., SchedulerConfig]

_RIGHT_POLICIES = [RefreshPolicy.TRANSITION, RefreshPolicy.DIFF, RefreshPolicy.ALWAYS]


def _columns(op: ForwardOp) -> dict[str, list[Any]]:
    names = ("req_pool_indices", "row_lens", "begins", "sizes", "full_refresh", "occupied_pages")
    return {name: getattr(op, name).tolist() for name in names}


def _run_plain(scheduler: Scheduler) -> ForwardOp:
    """Plan one op and answer token 7 wherever one is wanted."""
    op = scheduler.plan()
    assert op is not None
    scheduler.complete(StepResult(op.session_no, op.step, np.where(op.sample, 7, -1).astype(np.int32)))
    return op


def _long_run(drive: Drive, policy: RefreshPolicy, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    """A run with duplicates, chunks, retraction and resume; returns the driver and every step's planned rows."""
    driver = drive(page_size=2, num_pages=20, chunk_size=4, token_budget=12, refresh_policy=policy, **options)
    steps = []
    driver.submit("A", [1, 2, 3, 4, 5, 6, 7], 6)
    driver.submit("B", [1, 2, 3, 4, 5, 6, 7], 6)
    driver.submit("C", [1, 2, 3, 9, 9], 8)
    for step in range(40):
        if step in {3, 7}:
            driver.retract("B")
        if step == 4:
            driver.submit("D", [1, 2, 3, 4, 5, 6, 7, 8, 9], 3)
        if not driver.scheduler.has_work:
            break
        steps.append(driver.step())
    driver.run()
    return driver, steps


def test_policies_differ_in_bits_alone(drive: Drive) -> None:
    """Rows, begins, sizes, tokens and causes of every step are the same under the three right policies."""
    runs = {policy: _long_run(drive, policy) for policy in _RIGHT_POLICIES}
    shown = {
        policy: [
            {name: (row.cause, row.row, row.begin, row.size, row.pages, row.num_computed) for name, row in planned.items()}
            for planned in steps
        ]
        for policy, (_, steps) in runs.items()
    }
    assert shown[RefreshPolicy.DIFF] == shown[RefreshPolicy.ALWAYS] == shown[RefreshPolicy.TRANSITION]
    assert runs[RefreshPolicy.DIFF][0].outputs == runs[RefreshPolicy.ALWAYS][0].outputs
    causes = {row.cause for planned in runs[RefreshPolicy.DIFF][1] for row in planned.values()}
    assert causes == set(Cause), "the run has every transition"


def test_transition_policy_is_exactly_the_table(drive: Drive) -> None:
    """Over a long run the bit is set on every row but those that go from a decode to a decode."""
    _, steps = _long_run(drive, RefreshPolicy.TRANSITION)
    for planned in steps:
        for row in planned.values():
            assert row.full == (row.cause != "decode")


def test_always_policy_sets_every_bit(drive: Drive) -> None:
    """Every row of every op."""
    _, steps = _long_run(drive, RefreshPolicy.ALWAYS)
    assert all(row.full for planned in steps for row in planned.values())


def test_diff_policy_sets_the_bit_only_where_a_sent_entry_changed(drive: Drive) -> None:
    """The bit of a row that was sent before in its lease says that an entry below `begin` differs from then."""
    _, steps = _long_run(drive, RefreshPolicy.DIFF)
    sent: dict[str, list[int]] = {}
    flips = 0
    for planned in steps:
        for name, row in planned.items():
            if row.cause in {"first_chunk", "resume"}:
                assert row.full
                assert row.begin == 0
            else:
                changed = row.pages[: row.begin] != sent[name][: row.begin]
                assert row.full == changed, (name, row)
                flips += changed
            sent[name] = row.pages
    assert flips > 0


@pytest.mark.parametrize("policy", _RIGHT_POLICIES)
def test_begin_and_size_do_not_depend_on_the_bit(drive: Drive, policy: RefreshPolicy) -> None:
    """`begin` is what was sent in this lease (0 in its first op), and begin + size is the row's length."""
    _, steps = _long_run(drive, policy)
    sent: dict[str, int] = {}
    for planned in steps:
        for name, row in planned.items():
            lease_begins = row.cause in {"first_chunk", "resume"}
            assert row.begin == (0 if lease_begins else sent[name])
            assert row.begin + row.size == len(row.pages)
            sent[name] = len(row.pages)


def test_twins_under_each_policy(drive: Drive) -> None:
    """At the first decode A keeps its row and B adopts A's pages, both with size 0: the policies differ in A's bit."""
    expected = {
        RefreshPolicy.TRANSITION: ([True, True], [1, 2, 3, 1, 2, 6]),
        RefreshPolicy.DIFF: ([False, True], [1, 2, 6]),
        RefreshPolicy.ALWAYS: ([True, True], [1, 2, 3, 1, 2, 6]),
    }
    for policy, (bits, pages) in expected.items():
        driver = drive(refresh_policy=policy)
        for name in "AB":
            driver.submit(name, range(1, 11), 4)
        driver.step()
        driver.plan()
        columns = _columns(driver.op)
        assert (columns["begins"], columns["sizes"]) == ([3, 3], [0, 0])
        assert (columns["full_refresh"], columns["occupied_pages"]) == (bits, pages)


@pytest.mark.parametrize("policy", _RIGHT_POLICIES)
def test_guard_refreshes_a_row_that_changed_without_a_transition(make_config: MakeConfig, policy: RefreshPolicy) -> None:
    """A decoding row whose sent entry is repointed behind the table's back gets the bit under every policy, once."""
    scheduler = Scheduler(make_config(refresh_policy=policy))
    scheduler.submit("A", [1, 2, 3, 4, 5], max_tokens=9, prefix_cache=False)
    for _ in range(3):
        _run_plain(scheduler)
    placement = scheduler.placement
    old, new = placement.rows.row_pages(1)[:1].copy(), placement.pool.take(1)
    placement.rows.repoint(1, 0, new)
    placement.pool.give(old)
    assert _columns(_run_plain(scheduler)) == {
        "req_pool_indices": [1],
        "row_lens": [2],
        "begins": [2],
        "sizes": [0],
        "full_refresh": [True],
        "occupied_pages": [3, 2],
    }
    assert _run_plain(scheduler).full_refresh.tolist() == [policy is RefreshPolicy.ALWAYS]


@pytest.mark.parametrize("policy", _RIGHT_POLICIES)
def test_entry_that_changed_and_changed_back(make_config: MakeConfig, policy: RefreshPolicy) -> None:
    """A row that was repointed away and back again is as it was sent: `diff` sees that, the others send it in full."""
    scheduler = Scheduler(make_config(refresh_policy=policy))
    scheduler.submit("A", [1, 2, 3, 4, 5], max_tokens=9, prefix_cache=False)
    for _ in range(3):
        _run_plain(scheduler)
    rows = scheduler.placement.rows
    rows.repoint(1, 0, np.array([9], dtype=np.int32))
    rows.repoint(1, 0, np.array([1], dtype=np.int32))
    assert _run_plain(scheduler).full_refresh.tolist() == [policy is not RefreshPolicy.DIFF]


def test_tail_only_never_sets_the_bit_and_counts_across_leases(make_config: MakeConfig) -> None:
    """The broken policy: begin is what was last sent for the request in any lease, so the worked example's flip is not sent."""
    scheduler = Scheduler(make_config(refresh_policy=RefreshPolicy.TAIL_ONLY))
    scheduler.submit("A", [1, 2, 3, 4, 5, 6, 7], max_tokens=3)
    scheduler.submit("B", [1, 2, 3, 4, 9], max_tokens=1)
    first = _columns(_run_plain(scheduler))
    assert (first["begins"], first["sizes"], first["full_refresh"]) == ([0, 0], [2, 2], [False, False])
    scheduler.retract("A")
    assert scheduler.plan() is None
    resume = _columns(_run_plain(scheduler))
    assert (resume["req_pool_indices"], resume["row_lens"]) == ([1], [2])
    assert (resume["begins"], resume["sizes"], resume["occupied_pages"]) == ([2], [0], [])
    tail = _columns(_run_plain(scheduler))
    assert (tail["begins"], tail["sizes"], tail["full_refresh"], tail["occupied_pages"]) == ([2], [1], [False], [1])


def test_tail_only_begin_is_cut_to_the_row(make_config: MakeConfig) -> None:
    """A resume onto a shorter row than was sent before begins at its end, never beyond."""
    scheduler = Scheduler(make_config(refresh_policy=RefreshPolicy.TAIL_ONLY, chunk_size=4, prefix_cache=False))
    scheduler.submit("A", list(range(1, 11)), max_tokens=3)
    for _ in range(3):
        _run_plain(scheduler)
    scheduler.retract("A")
    scheduler.plan()
    resume = _columns(_run_plain(scheduler))
    assert (resume["row_lens"], resume["begins"], resume["sizes"]) == ([1], [1], [0])
