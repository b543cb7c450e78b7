"""The audit of requests, of what was sent and of ops: each test damages one thing and expects the findings that name it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scheduler_service.core.invariants import audit_op, audit_writes
from scheduler_service.core.ops import ForwardOp
from scheduler_service.core.row_table import Phase
from scheduler_service.core.states import State

Subject = Any


# Requests


def test_finished_request_still_live(subject: Subject) -> None:
    """What is over is not in the table of the live."""
    subject.driver.requests["D"].state = State.FINISHED
    subject.finds(
        "request 'D' is over, but live",
        "the queue of submitted requests holds [] and counts 1, live are []",
    )


def test_row_and_request_disagree_about_the_state(subject: Subject) -> None:
    """The row's copy of a request's state is exact."""
    subject.placement.rows.phase[subject.row["B"]] = Phase.PREFILLING
    subject.finds("request 'B': row 2 knows 5 tokens, the request 5 and is decoding")


def test_row_and_request_disagree_about_the_length(subject: Subject) -> None:
    """The row's copy of a request's length is exact."""
    subject.placement.rows.num_known[subject.row["B"]] += 1
    subject.finds("request 'B': row 2 knows 6 tokens, the request 5 and is decoding")


@pytest.mark.parametrize("column", ["limit_len", "stop_ids"])
def test_row_and_request_disagree_about_the_end(subject: Subject, column: str) -> None:
    """A row that ends elsewhere than its request would run on, or end too early."""
    getattr(subject.placement.rows, column)[subject.row["B"]] = 9
    subject.finds("request 'B': row 2 ends at")


def test_outstanding_steps_miscounted(subject: Subject) -> None:
    """A request that believes in a step too many would never resume."""
    subject.placement.rows.num_outstanding[subject.row["B"]] += 1
    subject.finds("request 'B' counts 2 ops in flight, there are 1")


def test_outstanding_steps_of_a_retracted_request_miscounted(subject: Subject) -> None:
    """The same for one that holds no row."""
    subject.driver.requests["C"].num_outstanding = 1
    subject.finds("request 'C' counts 1 ops in flight, there are 0")


def test_request_that_should_have_ended(subject: Subject) -> None:
    """A request with all its tokens does not stay."""
    request = subject.driver.requests["A"]
    request.limit_len = len(request.tokens)
    subject.finds(
        "request 'A': row 1 ends at 14 tokens or [], the request does not",
        "request 'A' has all its 7 tokens, but is decoding",
    )


@pytest.mark.parametrize("name", ["C", "D"])
def test_queue_lost_a_request(subject: Subject, name: str) -> None:
    """A request that waits must be in the queue for its state."""
    if name == "C":
        subject.scheduler._retracted.remove(subject.driver.requests["C"])
    else:
        subject.scheduler._waiting.pop()
    state = "retracted" if name == "C" else "submitted"
    subject.finds(f"the queue of {state} requests holds [] and counts 0, live are ['{name}']")


# What was sent


def test_change_below_the_sent_length_unmarked(subject: Subject) -> None:
    """A write past `repoint` is found by comparing with what was sent."""
    pages, row = subject.placement.rows.pages, subject.row["A"]
    pages[row, [2, 3]] = pages[row, [3, 2]]
    subject.finds(f"row {row} changed below its sent length and is not marked dirty")


def test_more_sent_than_there_is(subject: Subject) -> None:
    """What was sent is a part of the row."""
    subject.placement.rows.sent_len[subject.row["B"]] = 4
    subject.finds("row 2 counts 4 entries as sent, it has 3")


def test_sent_before_the_first_op(subject: Subject) -> None:
    """A lease begins with nothing sent."""
    subject.placement.rows.unsent[subject.row["B"]] = True
    subject.finds("row 2 was not sent in its lease, but counts 3 entries as sent")


# Ops


@pytest.fixture
def op(subject: Subject) -> ForwardOp:
    """The op in flight, and sound."""
    made: ForwardOp = subject.driver.op
    assert audit_op(made) == audit_writes(subject.scheduler, made) == []
    return made


def test_op_names_a_row_twice(op: ForwardOp) -> None:
    """Two entries of one row would race."""
    op.req_pool_indices[1] = op.req_pool_indices[0]
    assert audit_op(op) == [f"step {op.step}: a row number is named twice: [1, 1]"]


def test_op_whose_lengths_do_not_add_up(op: ForwardOp) -> None:
    """Begin and size make the row's length."""
    op.sizes[0] += 1
    assert audit_op(op) == [f"step {op.step}: begin + size is not row_len: {op.begins.tolist()}, {op.sizes.tolist()}"]


def test_op_with_too_many_input_ids(op: ForwardOp) -> None:
    """The ids are those of the extend rows."""
    op.input_ids = np.append(op.input_ids, np.int32(1))
    assert audit_op(op) == [f"step {op.step}: 1 input ids for lengths [1, 1]"]


def test_op_with_a_row_that_computes_nothing(op: ForwardOp) -> None:
    """A row without an input has no place in an op."""
    op.input_lens[-1] = 0
    assert audit_op(op) == [f"step {op.step}: a row computes nothing: {op.input_lens.tolist()}"]


def test_op_that_writes_a_page_of_the_tree(subject: Subject, op: ForwardOp) -> None:
    """Shared pages are never written."""
    index = op.req_pool_indices.tolist().index(subject.row["A"])
    op.num_computed[index] = 3
    assert audit_writes(subject.scheduler, op) == [
        f"step {op.step}: row {subject.row['A']} writes logical page 1, but its first 2 pages are the tree's"
    ]


def test_op_without_a_page_for_its_last_token(subject: Subject, op: ForwardOp) -> None:
    """Every token an op computes has a page in the row it carries."""
    op.input_lens[0] += 20
    row = int(op.req_pool_indices[0])
    assert audit_writes(subject.scheduler, op) == [f"step {op.step}: row {row} has no page for its last token"]


@pytest.mark.parametrize("column", ["occupied_pages", "row_lens"])
def test_op_that_does_not_say_what_the_rows_are(subject: Subject, op: ForwardOp, column: str) -> None:
    """What is sent is what is here."""
    getattr(op, column)[0] += 1
    findings = audit_writes(subject.scheduler, op)
    assert len(findings) == 1
    assert findings[0].startswith(f"step {op.step}: the op says lengths [")
