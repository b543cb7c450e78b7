"""What the runtime refuses: each wrong op with its code, row and words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runtime_service.errors import MAX_DETAIL_BYTES
from runtime_service.ops import ForwardOp, LeaseStart, RefusalCode, SamplingParams
from runtime_service.sampling_checks import sampling_error

NewSession = Callable[..., Any]


def i32(values: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Values as an int32 column."""
    return np.array(values, dtype=np.int32)


def changed(op: ForwardOp, **columns: Any) -> ForwardOp:
    """The op with other columns."""
    return replace(op, **{name: i32(value) if isinstance(value, list) else value for name, value in columns.items()})


def with_column(name: str, index: int, value: int) -> Callable[[ForwardOp], ForwardOp]:
    """An edit that sets one entry of a column."""

    def edit(op: ForwardOp) -> ForwardOp:
        column = getattr(op, name).copy()
        column[index] = value
        return replace(op, **{name: column})

    return edit


def with_sampling(**parameters: Any) -> Callable[[ForwardOp], ForwardOp]:
    """An edit that sets the first lease start's sampling parameters."""

    def edit(op: ForwardOp) -> ForwardOp:
        return replace(op, lease_starts=[replace(op.lease_starts[0], sampling=SamplingParams(**parameters))])

    return edit


def all_decode(op: ForwardOp) -> ForwardOp:
    """The op with its first row made a decode row."""
    return changed(op, num_extend_rows=0, input_lens=[1, 1], input_ids=[])


REFUSED_OPS: list[tuple[str, Callable[[ForwardOp], ForwardOp], RefusalCode, int, str]] = [
    ("short column", lambda op: changed(op, sizes=[3]), RefusalCode.MALFORMED, 0, "req_pool_indices 2, sizes 1 entries"),
    ("long column", lambda op: changed(op, sample=np.ones(3, np.bool_)), RefusalCode.MALFORMED, 0, "sample 3"),
    ("num_extend_rows", lambda op: replace(op, num_extend_rows=3), RefusalCode.MALFORMED, 0, "num_extend_rows is 3"),
    ("row 0", with_column("req_pool_indices", 1, 0), RefusalCode.ROW_OUT_OF_RANGE, 0, "row numbers are in [1, 4]"),
    ("row too high", with_column("req_pool_indices", 1, 5), RefusalCode.ROW_OUT_OF_RANGE, 5, "holds 5"),
    ("negative row", with_column("req_pool_indices", 1, -7), RefusalCode.ROW_OUT_OF_RANGE, 0, "holds -7"),
    ("released row", lambda op: changed(op, released_rows=[9]), RefusalCode.ROW_OUT_OF_RANGE, 9, "released_rows holds 9"),
    ("row twice", with_column("req_pool_indices", 1, 2), RefusalCode.ROW_REPEATED, 2, "twice"),
    ("negative length", with_column("num_computed", 1, -1), RefusalCode.MALFORMED, 1, "num_computed -1"),
    ("negative begin", with_column("begins", 0, -1), RefusalCode.MALFORMED, 2, "begin -1"),
    ("no tokens", with_column("input_lens", 0, 0), RefusalCode.MALFORMED, 2, "input_len 0 of an extend row"),
    ("two decode tokens", with_column("input_lens", 1, 2), RefusalCode.MALFORMED, 1, "input_len 2 of a decode row"),
    ("sum", with_column("sizes", 0, 2), RefusalCode.LENGTH_MISMATCH, 2, "begin 0 + size 2 is not row_len 3"),
    ("generation 0", with_column("row_generations", 0, 0), RefusalCode.STALE_GENERATION, 2, "generation 0 is lower than 1"),
    ("stale generation", with_column("row_generations", 1, 0), RefusalCode.STALE_GENERATION, 1, "lower than 1"),
    (
        "tail of a new lease",
        with_column("row_generations", 1, 2),
        RefusalCode.LEASE_NOT_STARTED,
        1,
        "generation 2, whose lease was never refreshed",
    ),
    (
        "no lease start",
        lambda op: replace(op, lease_starts=[]),
        RefusalCode.LEASE_NOT_STARTED,
        2,
        "without its lease start",
    ),
    (
        "lost update",
        lambda op: changed(op, row_lens=[3, 3], begins=[0, 3], sizes=[3, 0]),
        RefusalCode.GAP,
        1,
        "begin 3 is not the row_len 2 last applied",
    ),
    ("lost step", with_column("num_computed", 1, 6), RefusalCode.NOT_CONTIGUOUS, 1, "num_computed 6 is not 5"),
    (
        "no page for a token",
        with_column("num_computed", 0, 4),
        RefusalCode.ROW_TOO_SHORT,
        2,
        "num_computed 4 + input_len 9 = 13 tokens, its 3 pages hold 12",
    ),
    ("never sampled", all_decode, RefusalCode.NEVER_SAMPLED, 2, "never asked for a token"),
    ("page 0", with_column("occupied_pages", 1, 0), RefusalCode.PAGE_OUT_OF_RANGE, 2, "page 0 is outside [1, 64]"),
    ("page too high", with_column("occupied_pages", 2, 65), RefusalCode.PAGE_OUT_OF_RANGE, 2, "page 65 is outside"),
    ("page twice", with_column("occupied_pages", 2, 3), RefusalCode.PAGE_REPEATED, 2, "page 3 is sent twice"),
    ("missing pages", lambda op: changed(op, occupied_pages=[3, 4]), RefusalCode.MALFORMED, 0, "has 2 entries"),
    ("surplus pages", lambda op: changed(op, occupied_pages=[3, 4, 5, 6]), RefusalCode.MALFORMED, 0, "ask for 3"),
    ("token", with_column("input_ids", 8, 100), RefusalCode.TOKEN_OUT_OF_RANGE, 2, "token 100 is outside [0, 100)"),
    ("negative token", with_column("input_ids", 0, -1), RefusalCode.TOKEN_OUT_OF_RANGE, 2, "token -1"),
    ("missing tokens", lambda op: changed(op, input_ids=[1, 2]), RefusalCode.MALFORMED, 0, "input_ids has 2 entries"),
    (
        "start of no row",
        lambda op: replace(op, lease_starts=[*op.lease_starts, LeaseStart(4, "x")]),
        RefusalCode.MALFORMED,
        4,
        "the op does not name",
    ),
    ("start twice", lambda op: replace(op, lease_starts=op.lease_starts * 2), RefusalCode.MALFORMED, 2, "two lease starts"),
    (
        "start of a lease that goes on",
        lambda op: replace(op, lease_starts=[*op.lease_starts, LeaseStart(1, "request-1")]),
        RefusalCode.MALFORMED,
        1,
        "whose lease goes on",
    ),
    (
        "stop id",
        lambda op: replace(op, lease_starts=[LeaseStart(2, "request-2", stop_ids=(100,))]),
        RefusalCode.TOKEN_OUT_OF_RANGE,
        2,
        "stop id 100",
    ),
    ("temperature", with_sampling(temperature=100.5), RefusalCode.BAD_SAMPLING, 2, "temperature 100.5 is outside [0, 100]"),
]


@pytest.fixture
def a_valid_op(ops: Any) -> ForwardOp:
    """A second step of two rows, row 2 beginning a lease and row 1 going on; the first step was `first_chunk()`."""
    return ops.make(2, ops.first_chunk(2, pages=(3, 4, 5), ids=(1, 2, 3, 4, 5, 6, 7, 8, 9)), ops.decode())


def test_valid_op_is_accepted(begun_session: NewSession, a_valid_op: ForwardOp) -> None:
    """The op that all refused ones are made from is itself accepted."""
    begun_session().take(a_valid_op)


@pytest.mark.parametrize(("edit", "code", "row", "detail"), [case[1:] for case in REFUSED_OPS], ids=[c[0] for c in REFUSED_OPS])
def test_refused_ops(
    begun_session: NewSession,
    a_valid_op: ForwardOp,
    edit: Callable[[ForwardOp], ForwardOp],
    code: RefusalCode,
    row: int,
    detail: str,
) -> None:
    """Each wrong op is refused with its code, the row, the request and the value, and no row has changed."""
    session = begun_session()
    op = edit(a_valid_op)
    refusal = session.refused(op)
    assert (refusal.code, refusal.row, refusal.session_no, refusal.step) == (code, row, 1, 2)
    assert detail in refusal.detail
    if row == 1 or (row == 2 and op.lease_starts):
        assert refusal.request_id == f"request-{row}"
        assert refusal.detail.startswith(f"row {row} of request 'request-{row}': ")


@pytest.mark.parametrize(
    ("parameters", "prompt_len", "message"),
    [
        ({"temperature": -0.1}, 0, "temperature -0.1"),
        ({"temperature": float("nan")}, 0, "temperature nan"),
        ({"top_k": 0}, 0, "top_k 0 is below 1"),
        ({"top_p": 0.0}, 0, "top_p 0.0 is outside (0, 1]"),
        ({"top_p": 1.01}, 0, "top_p 1.01"),
        ({"min_p": -0.5}, 0, "min_p -0.5"),
        ({"min_p": 1.5}, 0, "min_p 1.5 is outside [0, 1]"),
        ({"seed": -1}, 0, "seed -1"),
        ({"seed": 2**64}, 0, "seed 18446744073709551616"),
        ({"min_new_tokens": -1}, 0, "min_new_tokens -1"),
        ({"min_new_tokens": 3}, 0, "needs prompt_len"),
        ({"min_new_tokens": 3}, 5, ""),
        ({"temperature": 100.0, "top_k": 1, "top_p": 1.0, "min_p": 1.0, "seed": 2**64 - 1}, 0, ""),
    ],
)
def test_sampling_ranges(parameters: dict[str, Any], prompt_len: int, message: str) -> None:
    """Each sampling parameter has its range, ends included as the protocol says."""
    found = sampling_error(SamplingParams(**parameters), prompt_len, 100)
    assert message in found
    assert bool(found) == bool(message)


def test_sums_of_hostile_lengths_do_not_wrap(new_session: NewSession, ops: Any) -> None:
    """Lengths whose 32-bit sums would wrap into agreement are refused."""
    top = 2**31 - 1
    session = new_session(overlap_depth=0)
    op = changed(ops.make(1, ops.first_chunk()), num_computed=[top])
    assert session.refused(op).code is RefusalCode.ROW_TOO_SHORT
    session.reset(2)
    op = changed(ops.make(1, ops.first_chunk(), session_no=2), begins=[top], sizes=[top])
    assert session.refused(op).code is RefusalCode.LENGTH_MISMATCH
    session.reset(3)
    op = changed(ops.make(1, ops.first_chunk(), session_no=3), row_lens=[top], sizes=[top])
    assert session.refused(op).code is RefusalCode.MALFORMED


def test_more_rows_than_row_numbers_is_a_repeat(new_session: NewSession, ops: Any) -> None:
    """Five rows on four row numbers: one comes twice."""
    session = new_session()
    refusal = session.refused(ops.make(1, *(ops.first_chunk(row, pages=(row,), ids=(1,)) for row in (1, 2, 3, 4, 3))))
    assert (refusal.code, refusal.row) == (RefusalCode.ROW_REPEATED, 3)


def test_detail_is_bounded(new_session: NewSession, ops: Any) -> None:
    """A refusal about a request with an endless id still fits the limit."""
    session = new_session()
    op = ops.make(1, replace(ops.first_chunk(), start="x" * 5000))
    refusal = session.refused(with_column("occupied_pages", 0, 0)(op))
    assert len(refusal.detail.encode()) == MAX_DETAIL_BYTES
    assert str(refusal).startswith("PAGE_OUT_OF_RANGE: row 1 of request 'xxx")
