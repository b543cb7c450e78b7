"""The op of one row that extends, with nothing beside it: what a prompt gets that comes to an idle scheduler.

It says what `op_builder` would say of that row. There each column costs a few numpy calls whatever its length, and for one row
plain numbers are several times quicker.
"""

from __future__ import annotations

import numpy as np

from scheduler_service.core.choice import Extend
from scheduler_service.core.config import RefreshPolicy
from scheduler_service.core.op_parts import EVENT_OF_CAUSE, input_ids, lease_start, move_extend, released_rows
from scheduler_service.core.ops import BoolArray, Cause, ForwardOp
from scheduler_service.core.placement import Placement
from scheduler_service.core.request import Request
from scheduler_service.core.states import transition_of

_INT32 = np.dtype(np.int32)
_YES: BoolArray = np.ones(1, dtype=np.bool_)
_NO: BoolArray = np.zeros(1, dtype=np.bool_)
_YES.flags.writeable = _NO.flags.writeable = False
_CONTINUATION = Cause.CONTINUATION
_TRANSITION, _DIFF = RefreshPolicy.TRANSITION, RefreshPolicy.DIFF


def lone_op(placement: Placement, extend: Extend, session_no: int, step: int) -> ForwardOp:
    """Advance the row and write it down as an op, whose fields are given in their order: names would take another µs."""
    rows, row, cause, input_len = placement.rows, extend.row, extend.cause, extend.input_len
    request: Request = placement.request_of_row[row]
    num_pages, _, sent_len, generation, _, _, num_computed, num_outstanding, num_known, num_logprobs = rows.numbers_of(row)
    full_refresh = _full_refresh(placement, extend, request)
    begin = min(sent_len, num_pages)
    start = 0 if full_refresh else begin
    whole = num_computed + input_len == num_known
    numbers = (row, generation, num_pages, begin, num_pages - begin, num_computed, input_len, num_logprobs)
    columns = np.array(numbers, dtype=_INT32)
    op = ForwardOp(
        session_no,
        step,
        columns[0:1],
        columns[1:2],
        columns[2:3],
        columns[3:4],
        columns[4:5],
        _YES if full_refresh else _NO,
        rows.pages[row, start:num_pages].copy(),
        columns[5:6],
        1,
        columns[6:7],
        input_ids(extend, request, num_computed),
        _YES if whole else _NO,
        released_rows(placement),
        [] if cause is _CONTINUATION else [lease_start(request, num_computed, placement.config.vocab_size)],
        [request],
        [cause],
        num_logprobs=columns[7:8] if rows.num_asking else None,
        num_ended=rows.num_ended,
    )
    rows.advance_one(row, start, num_computed + input_len, num_outstanding + 1)
    move_extend(placement, extend, request, whole=whole)
    return op


def _full_refresh(placement: Placement, extend: Extend, request: Request) -> bool:
    policy, rows, row = placement.config.refresh_policy, placement.rows, extend.row
    by_table = transition_of(request.request_id, request.state, EVENT_OF_CAUSE[extend.cause]).full_refresh
    if policy is _TRANSITION:
        return by_table or bool(rows.unsent[row] or rows.dirty[row])
    if policy is _DIFF:
        return bool(rows.unsent[row] or (rows.dirty[row] and rows.changed_since_sent(row)))
    return policy is RefreshPolicy.ALWAYS
