"""What lease starts carry: history where a penalty is on, and never more in one op than its message has room for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler_service.core.ops import SamplingParams
from scheduler_service.wire_facts import MAX_LEASE_BYTES, MAX_MESSAGE_BYTES, RuntimeFacts, max_lease_bytes

Drive = Callable[..., Any]
PENALTY = SamplingParams(frequency_penalty=0.5)


def history(driver: Any, index: int = 0) -> list[int]:
    """The tokens in one lease start of the op that was planned last."""
    return np.frombuffer(driver.op.lease_starts[index].history, "<i4").tolist()


def test_history_is_what_no_op_of_the_lease_computes(drive: Drive) -> None:
    """Empty on a cold start, the cached prefix on a hit, the prompt and the output so far on a resume."""
    driver = drive(chunk_size=4)
    driver.submit("A", [1, 2, 3, 4, 5], 6, sampling=PENALTY)
    driver.step()
    assert (history(driver), driver.op.lease_starts[0].prompt_len) == ([], 5)
    driver.step()
    assert driver.op.lease_starts == []
    for _ in range(4):
        driver.step()
    driver.submit("B", [1, 2, 3, 4, 9], 1, sampling=PENALTY)
    driver.step()
    assert history(driver) == [1, 2, 3, 4]
    driver.run()
    driver.submit("C", [1, 2, 3, 4, 5], 8, sampling=PENALTY)
    for _ in range(5):
        driver.step()
    driver.retract("C")
    driver.step()
    driver.step()
    assert driver.op.lease_starts[0].request_id == "C"
    known = [1, 2, 3, 4, 5, *driver.outputs["C"]]
    computed = int(driver.op.num_computed[0])
    assert computed >= 8
    assert history(driver) == known[:computed]
    driver.run()


def test_no_history_without_a_penalty(drive: Drive) -> None:
    """A request without penalties carries neither history nor prompt_len, also on a cache hit."""
    driver = drive()
    driver.submit("A", [1, 2, 3, 4, 5], 2)
    driver.run()
    driver.submit("B", [1, 2, 3, 4, 5], 2)
    driver.step()
    assert driver.op.num_computed.tolist() == [4]
    assert (driver.op.lease_starts[0].history, driver.op.lease_starts[0].prompt_len) == (b"", 0)


def test_stop_ids_beyond_the_vocabulary_stay_here(drive: Drive) -> None:
    """With min_new_tokens the runtime is told the stop ids, which it refuses when they are no tokens: such ids stay behind."""
    driver = drive()
    driver.submit("A", [1], 2, stop_ids=(5, 996, 997, 2**31 - 1), sampling=SamplingParams(min_new_tokens=1))
    driver.plan()
    assert driver.op.lease_starts[0].stop_ids == (5, 996)


@pytest.mark.parametrize(("limit", "expected"), [(0, [1, 1, 1]), (50, [2, 1]), (10**6, [3])])
def test_leases_over_the_limit_wait_for_the_next_step(drive: Drive, limit: int, expected: list[int]) -> None:
    """One lease start always fits; more only within the limit, in order, and the others come one step later."""
    driver = drive(max_lease_bytes=limit)
    driver.submit("warm", [1, 2, 3, 4, 5], 1)
    driver.run()
    for name in ("A", "B", "C"):
        driver.submit(name, [1, 2, 3, 4, ord(name)], 4, sampling=PENALTY)  # 4 tokens of history each, and a name of 1 character
    started = []
    while driver.scheduler.num_waiting:
        driver.step()
        started.append([lease.request_id for lease in driver.op.lease_starts])
    assert [len(names) for names in started] == expected
    assert sum(started, []) == ["A", "B", "C"]
    driver.run()


def facts(max_rows: int, max_pages_per_row: int) -> RuntimeFacts:
    """A runtime of this shape."""
    return RuntimeFacts(1, 7, 16, 99, max_rows, max_pages_per_row, 997, 0, (), "m", "a", "", 0, 1, "cpu", "float32", 1.0)


def test_limit_leaves_room_for_the_columns() -> None:
    """32 MiB, or what the largest columns leave of a message."""
    assert max_lease_bytes(facts(256, 1024), 2048) == MAX_LEASE_BYTES
    rows = 65_535
    columns = rows * (4 * 200 + 64) + 4 * 2048
    assert max_lease_bytes(facts(rows, 200), 2048) == MAX_MESSAGE_BYTES - columns
