"""What ops of each kind need: starts of leases, the rows released since the last op, moves of rows that extend."""

from __future__ import annotations

import numpy as np

from scheduler_service.core.choice import Extend
from scheduler_service.core.ops import GREEDY, Cause, Int32Array, LeaseStart
from scheduler_service.core.placement import Placement
from scheduler_service.core.request import Request
from scheduler_service.core.row_table import Phase
from scheduler_service.core.states import Event, State

NO_TOKENS: Int32Array = np.empty(0, dtype=np.int32)

EVENT_OF_CAUSE = {
    Cause.FIRST_CHUNK: Event.SCHEDULE_PREFILL_FIRST_CHUNK,
    Cause.CONTINUATION: Event.SCHEDULE_PREFILL,
    Cause.RESUME: Event.SCHEDULE_DECODE_FROM_RETRACTED,
    Cause.PREFILL_DONE_TO_DECODE: Event.SCHEDULE_DECODE,
    Cause.DECODE: Event.SCHEDULE_DECODE,
}
_PHASE_OF_STATE = {
    State.PREFILLING: int(Phase.PREFILLING),
    State.PREFILL_DONE: int(Phase.PREFILL_DONE),
    State.DECODING: int(Phase.DECODING),
}
_INT32 = np.dtype(np.int32)
_RESUME = Cause.RESUME


def released_rows(placement: Placement) -> Int32Array:
    """Rows released since the last op, of which the next one tells."""
    if not placement.released_rows:
        return NO_TOKENS
    released = np.array(placement.released_rows, dtype=_INT32)
    placement.released_rows.clear()
    return released


def lease_start(request: Request, num_computed: int, vocab_size: int) -> LeaseStart:
    """What the runtime is told of a request at the start of a lease whose first op finds `num_computed` tokens computed."""
    sampling = request.sampling
    # The runtime's part in a trace is the step of the first token.
    traceparent = "" if request.num_output else request.traceparent
    if sampling is GREEDY:
        return LeaseStart(request.row, request.request_id, traceparent=traceparent)
    needs_stops = sampling.min_new_tokens > 0
    return LeaseStart(
        req_pool_index=request.row,
        request_id=request.request_id,
        sampling=sampling,
        # An id beyond the vocabulary is allowed, never sampled, and none of the runtime's business.
        stop_ids=tuple(token for token in request.stop_ids if token < vocab_size) if needs_stops else (),
        prompt_len=request.prompt_len if needs_stops or sampling.has_penalty else 0,
        traceparent=traceparent,
        history=request.token_slice(0, num_computed).astype("<i4", copy=False).tobytes() if sampling.has_penalty else b"",
    )


def input_ids(extend: Extend, request: Request, num_computed: int) -> Int32Array:
    """The tokens that the row computes."""
    stop = num_computed + extend.input_len
    known = extend.known
    return request.token_slice(num_computed, stop) if known is None else known[num_computed:stop]


def move_extend(placement: Placement, extend: Extend, request: Request, *, whole: bool) -> None:
    """The row's tokens are planned; `whole`: all that are known."""
    placement.keep(request)
    target = State.PREFILLING
    if whole:
        target = State.DECODING if extend.cause is _RESUME else State.PREFILL_DONE
    request.move(EVENT_OF_CAUSE[extend.cause], target)
    placement.rows.phase[extend.row] = _PHASE_OF_STATE[target]
