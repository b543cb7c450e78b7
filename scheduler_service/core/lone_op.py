"""The op of one row that extends, with nothing beside it: what a prompt gets that comes to an idle scheduler.

It says what `op_builder` would say of that row. There each column costs a few numpy calls whatever its length, and for one row
plain numbers are several times quicker.
"""

from __future__ import annotations

import numpy as np

from scheduler_service.core.config import RefreshPolicy
from scheduler_service.core.op_parts import EVENT_OF_CAUSE, lease_start, move_extend, released_rows
from scheduler_service.core.ops import BoolArray, Cause, ForwardOp
from scheduler_service.core.placement import Placement
from scheduler_service.core.policy import Extend
from scheduler_service.core.request import Request
from scheduler_service.core.states import transition_of

_INT32 = np.dtype(np.int32)
_CONTINUATION = Cause.CONTINUATION
_TRANSITION, _DIFF = RefreshPolicy.TRANSITION, RefreshPolicy.DIFF


def lone_op(placement: Placement, extend: Extend, session_no: int, step: int) -> ForwardOp:
    """Advance the row and write it down as an op."""
    rows, row, cause, input_len = placement.rows, extend.row, extend.cause, extend.input_len
    request: Request = placement.request_of_row[row]
    num_pages, _, sent_len, generation, _, _, num_computed, num_outstanding, num_known, num_logprobs = rows.numbers_of(row)
    full_refresh = _full_refresh(placement, extend, request)
    begin = min(sent_len, num_pages)
    start = 0 if full_refresh else begin
    whole = num_computed + input_len == num_known
    numbers = (row, generation, num_pages, begin, num_pages - begin, num_computed, input_len, num_logprobs)
    columns = np.array(numbers, dtype=_INT32)
    flags: BoolArray = np.array((full_refresh, whole))
    op = ForwardOp(
        session_no=session_no,
        step=step,
        req_pool_indices=columns[0:1],
        row_generations=columns[1:2],
        row_lens=columns[2:3],
        begins=columns[3:4],
        sizes=columns[4:5],
        full_refresh=flags[0:1],
        occupied_pages=rows.pages[row, start:num_pages].copy(),
        num_computed=columns[5:6],
        num_extend_rows=1,
        input_lens=columns[6:7],
        input_ids=request.token_slice(num_computed, num_computed + input_len),
        sample=flags[1:2],
        released_rows=released_rows(placement),
        lease_starts=[] if cause is _CONTINUATION else [lease_start(request, num_computed, placement.config.vocab_size)],
        requests=[request],
        extend_causes=[cause],
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
