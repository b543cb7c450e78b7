"""Digest columns of an op: what of them is refused, and that nothing has changed then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runtime_service.ops import ForwardOp, RefusalCode

NewSession = Callable[..., Any]


def asking(op: ForwardOp, *, own: int | None = None, others: list[int] | None = None, digests: int | None = None) -> ForwardOp:
    """The op with `own` digests of its rows, the rows `others` to verify, and as many digests of those, or `digests`."""
    others = others or []
    return replace(
        op,
        row_digests=np.zeros(own or 0, dtype=np.uint64),
        verify_rows=np.array(others, dtype=np.int32),
        verify_digests=np.zeros(len(others) if digests is None else digests, dtype=np.uint64),
    )


@pytest.fixture
def session(ops: Any, new_session: NewSession) -> Any:
    """Rows 1, 2 and 3 have a lease."""
    session = new_session()
    session.take(ops.make(1, ops.first_chunk(1, (1, 2)), ops.first_chunk(2, (3, 4)), ops.first_chunk(3, (5, 6))))
    return session


@pytest.mark.parametrize(
    ("columns", "code", "row", "words"),
    [
        ({"own": 2}, RefusalCode.MALFORMED, 0, "row_digests has 2 entries, the op 1 rows"),
        ({"others": [2, 3], "digests": 1}, RefusalCode.MALFORMED, 0, "verify_rows has 2 entries, verify_digests 1"),
        ({"digests": 1}, RefusalCode.MALFORMED, 0, "verify_rows has 0 entries, verify_digests 1"),
        ({"others": [2, 0]}, RefusalCode.ROW_OUT_OF_RANGE, 0, "verify_rows holds 0, row numbers are in [1, 4]"),
        ({"others": [5]}, RefusalCode.ROW_OUT_OF_RANGE, 5, "verify_rows holds 5"),
        ({"others": [-(1 << 31)]}, RefusalCode.ROW_OUT_OF_RANGE, 0, "verify_rows holds -2147483648"),
        ({"others": [2, 3, 2]}, RefusalCode.ROW_REPEATED, 2, "row 2 of request 'request-2': verify_rows holds it"),
        ({"others": [2, 1]}, RefusalCode.ROW_REPEATED, 1, "the op names it once more"),
        ({"others": [2, 4]}, RefusalCode.LEASE_NOT_STARTED, 4, "row 4: verify_rows holds it, but it has no lease"),
    ],
)
def test_columns_that_do_not_fit(
    columns: dict[str, Any], code: RefusalCode, row: int, words: str, session: Any, ops: Any
) -> None:
    """Unequal lengths, and rows that are out of range, named twice or in nobody's use, each with code, row and words."""
    refusal = session.refused(asking(ops.make(2, ops.decode(1)), **columns))
    assert (refusal.code, refusal.row, refusal.step) == (code, row, 2)
    assert words in refusal.detail


def test_a_row_that_the_op_releases_has_no_lease_any_more(session: Any, ops: Any) -> None:
    """Released rows are empty when the digests are computed."""
    refusal = session.refused(asking(ops.make(2, ops.decode(1), released=(3,)), others=[2, 3]))
    assert (refusal.code, refusal.row) == (RefusalCode.LEASE_NOT_STARTED, 3)


@pytest.mark.parametrize("columns", [{}, {"own": 1}, {"others": [3, 2]}, {"own": 1, "others": [2, 3]}])
def test_columns_that_fit(columns: dict[str, Any], session: Any, ops: Any) -> None:
    """Own digests or none, and other rows in any order or none, are taken."""
    session.take(asking(ops.make(2, ops.decode(1)), **columns))
    assert session.last_step == 2


def test_an_op_without_rows_may_ask(session: Any, ops: Any) -> None:
    """An op that only releases may have other rows compared."""
    session.take(asking(ops.make(2, released=(3,)), others=[1, 2]))
