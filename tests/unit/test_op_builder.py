"""build_op: the columns of a ForwardOp, by hand for small states and by rule for long runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from scheduler_service.core.ops import GREEDY, Cause, ForwardOp, SamplingParams, StepResult
from scheduler_service.core.states import State

Drive = Callable[..., Any]


def _columns(op: ForwardOp) -> dict[str, Any]:
    names = (
        "req_pool_indices",
        "row_generations",
        "row_lens",
        "begins",
        "sizes",
        "full_refresh",
        "occupied_pages",
        "num_computed",
        "input_lens",
        "input_ids",
        "sample",
        "released_rows",
    )
    return {name: getattr(op, name).tolist() for name in names}


# Columns, by hand


def test_first_chunks(drive: Drive) -> None:
    """Two cold prompts in one step: whole rows from logical page 0, all ids, one token wanted of each."""
    driver = drive()
    driver.submit("A", [1, 2, 3, 4, 5, 6, 7], 3)
    driver.submit("B", [1, 2, 3, 4, 9])
    driver.plan()
    op = driver.op
    assert (op.session_no, op.step, op.num_rows, op.num_extend_rows) == (1, 1, 2, 2)
    assert _columns(op) == {
        "req_pool_indices": [1, 2],
        "row_generations": [1, 1],
        "row_lens": [2, 2],
        "begins": [0, 0],
        "sizes": [2, 2],
        "full_refresh": [True, True],
        "occupied_pages": [1, 2, 3, 4],
        "num_computed": [0, 0],
        "input_lens": [7, 5],
        "input_ids": [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 9],
        "sample": [True, True],
        "released_rows": [],
    }
    assert op.causes == [Cause.FIRST_CHUNK, Cause.FIRST_CHUNK]
    assert [request.request_id for request in op.requests] == ["A", "B"]


def test_first_decode_that_adopts(drive: Drive) -> None:
    """B has ended and published page 3; A's first decode appends nothing, repoints page 1 to 3 and is refreshed."""
    driver = drive()
    driver.submit("A", [1, 2, 3, 4, 5, 6, 7], 3)
    driver.submit("B", [1, 2, 3, 4, 9])
    driver.step()
    driver.plan()
    assert driver.op.causes == [Cause.PREFILL_DONE_TO_DECODE]
    assert driver.op.num_extend_rows == 0
    assert _columns(driver.op) == {
        "req_pool_indices": [1],
        "row_generations": [1],
        "row_lens": [2],
        "begins": [2],
        "sizes": [0],
        "full_refresh": [True],
        "occupied_pages": [3, 2],
        "num_computed": [7],
        "input_lens": [1],
        "input_ids": [],
        "sample": [True],
        "released_rows": [2],
    }


def test_plain_decode_sends_the_tail(drive: Drive) -> None:
    """A decode that opens a page sends that page alone; one that does not sends none."""
    driver = drive(page_size=2)
    driver.submit("A", [1, 2, 3], 4)
    driver.step()
    driver.step()
    driver.step()
    assert _columns(driver.op) == {
        "req_pool_indices": [1],
        "row_generations": [1],
        "row_lens": [3],
        "begins": [2],
        "sizes": [1],
        "full_refresh": [False],
        "occupied_pages": [3],
        "num_computed": [4],
        "input_lens": [1],
        "input_ids": [],
        "sample": [True],
        "released_rows": [],
    }


def test_chunks_want_no_token_until_the_last(drive: Drive) -> None:
    """A prompt of ten in chunks of four: 4, 4 and 2 tokens, one page more each time, a token wanted of the last."""
    driver = drive(chunk_size=4)
    driver.submit("A", range(1, 11), 2)
    seen = []
    for _ in range(3):
        driver.step()
        columns = _columns(driver.op)
        seen.append((columns["num_computed"], columns["input_ids"], columns["begins"], columns["sizes"], columns["sample"]))
    assert seen == [
        ([0], [1, 2, 3, 4], [0], [1], [False]),
        ([4], [5, 6, 7, 8], [1], [1], [False]),
        ([8], [9, 10], [2], [1], [True]),
    ]
    assert driver.requests["A"].state is State.PREFILL_DONE


def test_resume_is_a_new_lease(drive: Drive) -> None:
    """A resume matches what was published, recomputes the rest, and has a generation of its own, in the same row."""
    driver = drive()
    driver.submit("A", [1, 2, 3, 4, 5, 6, 7], 3)
    driver.step()
    driver.retract("A")
    assert driver.step() == {}
    driver.step()
    assert driver.op.causes == [Cause.RESUME]
    assert _columns(driver.op) == {
        "req_pool_indices": [1],
        "row_generations": [2],
        "row_lens": [2],
        "begins": [0],
        "sizes": [2],
        "full_refresh": [True],
        "occupied_pages": [1, 2],
        "num_computed": [4],
        "input_lens": [4],
        "input_ids": [5, 6, 7, 168],
        "sample": [True],
        "released_rows": [1],
    }


def test_columns_have_the_types_of_the_wire(drive: Drive) -> None:
    """Counts and ids are int32, flags are bool, in an op with every kind of row and in one without rows."""
    driver = drive(chunk_size=4)
    driver.submit("A", [1, 2, 3], 5)
    driver.step()
    driver.submit("B", range(1, 11), 2)
    driver.plan()
    ops = [driver.op]
    driver.complete()
    driver.abort("A")
    ops.append(driver.scheduler.flush_releases())
    for op in ops:
        for name in _columns(op):
            expected = np.bool_ if name in {"full_refresh", "sample"} else np.int32
            assert getattr(op, name).dtype == expected, name


def test_op_is_a_snapshot(drive: Drive) -> None:
    """What the scheduler does later does not reach into an op that was handed out."""
    driver = drive(page_size=2, overlap_depth=2)
    driver.submit("A", [1, 2, 3], 9)
    driver.plan()
    op = driver.op
    before = _columns(op)
    driver.plan()
    driver.complete()
    driver.retract("A")
    driver.plan()
    assert _columns(op) == before


# Order


def test_extend_rows_come_first_in_the_order_of_the_classes(drive: Drive) -> None:
    """Continuations, resumes, first chunks, then decode rows; by (priority, arrival) within a class."""
    driver = drive(num_pages=40, max_pages_per_row=20, chunk_size=4, max_rows=8)
    driver.submit("decode2", [1, 2], 9, priority=5)
    driver.submit("decode1", [3, 4], 9, priority=2)
    driver.submit("resume", [5, 6], 9)
    driver.step()
    driver.retract("resume")
    driver.submit("chunk", range(10, 30), 9, priority=7)
    driver.step()  # the resume holds back the queue in this step
    assert list(driver.planned(driver.op)) == ["decode1", "decode2"]
    driver.submit("first", [8, 9], 9, priority=-1)
    assert list(driver.step()) == ["resume", "first", "chunk", "decode1", "decode2"]
    driver.submit("late", [8, 9], 9)
    driver.retract("resume")
    assert list(driver.step()) == ["chunk", "first", "decode1", "decode2"]
    planned = driver.step()
    assert {name: row.cause for name, row in planned.items()} == {
        "chunk": "continuation",
        "resume": "resume",
        "late": "first_chunk",
        "first": "decode",
        "decode1": "decode",
        "decode2": "decode",
    }
    assert list(planned) == ["chunk", "resume", "late", "first", "decode1", "decode2"]
    assert driver.op.num_extend_rows == 3


# What a lease begins with, and what is released


def test_lease_starts_of_first_chunk_and_resume_only(drive: Drive) -> None:
    """A lease is announced in its first op; continuations and decodes announce nothing."""
    driver = drive(chunk_size=4)
    driver.submit("A", range(1, 7), 4)
    announced = []
    for step in range(5):
        if step == 3:
            driver.retract("A")
        driver.step()
        announced.append([start.request_id for start in driver.op.lease_starts] if driver.op else None)
    assert announced == [["A"], [], [], None, ["A"]]


def test_lease_start_carries_what_the_sampler_needs(drive: Drive) -> None:
    """Sampling parameters and trace context always; stop ids and prompt length only when a minimum length needs them."""
    driver = drive()
    minimum = SamplingParams(temperature=0.5, seed=2**63, min_new_tokens=2)
    plain = SamplingParams(temperature=0.5, top_k=3, seed=7)
    driver.submit("A", [1, 2, 3], 4, sampling=minimum, stop_ids=[5, 6], traceparent="00-ab-cd-01")
    driver.submit("B", [1, 2], 4, sampling=plain, stop_ids=[5, 6])
    driver.submit("C", [1], 4)
    driver.plan()
    first, second, third = driver.op.lease_starts
    assert (first.req_pool_index, first.request_id, first.sampling) == (1, "A", minimum)
    assert (first.stop_ids, first.prompt_len, first.traceparent) == ((5, 6), 3, "00-ab-cd-01")
    assert (second.req_pool_index, second.request_id, second.sampling) == (2, "B", plain)
    assert (second.stop_ids, second.prompt_len, second.traceparent) == ((), 0, "")
    assert (third.req_pool_index, third.sampling) == (3, GREEDY)


def test_trace_context_goes_with_leases_before_the_first_token(drive: Drive) -> None:
    """A request that loses its row in the middle of its prompt takes its context along; one that has a token does not."""
    driver = drive(chunk_size=2)
    driver.submit("A", [1, 2, 3, 4, 5], 9, traceparent="00-ab-cd-01")
    found = []
    for num_steps in (1, 6, 3):
        for _ in range(num_steps):
            driver.step()
            found += [start.traceparent for start in driver.op.lease_starts] if driver.op else []
        driver.retract("A")
    assert found == ["00-ab-cd-01", "00-ab-cd-01", ""]


def test_released_rows_are_named_once_in_the_order_of_release(drive: Drive) -> None:
    """The next op names every row given back since the last one, and no later op names it again."""
    driver = drive()
    for index, name in enumerate("ABCD"):
        driver.submit(name, [index + 1] * 3, 9)
    driver.step()
    driver.abort("C")
    driver.abort("A")
    driver.plan()
    assert _columns(driver.op)["released_rows"] == [3, 1]
    driver.complete()
    driver.plan()
    assert _columns(driver.op)["released_rows"] == []


def test_row_released_and_leased_again_in_one_step(drive: Drive) -> None:
    """A row number is in both lists when it changes hands between two ops: it is released before it is begun."""
    driver = drive(max_rows=1)
    driver.submit("A", [1, 2, 3])
    driver.submit("B", [4, 5, 6])
    driver.step()
    driver.plan()
    columns = _columns(driver.op)
    assert (columns["released_rows"], columns["req_pool_indices"], columns["row_generations"]) == ([1], [1], [2])


def test_zero_row_op_releases_rows(drive: Drive) -> None:
    """When nothing is planned an op without rows names the released rows, counts as a step, and is answered."""
    driver = drive()
    driver.submit("A", [1, 2, 3])
    driver.step()
    op = driver.scheduler.flush_releases()
    columns = _columns(op)
    assert columns.pop("released_rows") == [1]
    assert all(column == [] for column in columns.values())
    assert (op.step, op.num_rows, op.num_extend_rows, op.causes, op.lease_starts) == (2, 0, 0, [], [])
    assert driver.scheduler.num_in_flight == 1
    driver.scheduler.complete(StepResult(1, 2, np.empty(0, dtype=np.int32)))
    assert driver.scheduler.num_in_flight == 0
    assert driver.scheduler.flush_releases() is None
