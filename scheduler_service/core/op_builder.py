"""From the rows that were chosen to the columns of a ForwardOp; the rows advance here."""

from __future__ import annotations

import numpy as np

from scheduler_service.core.config import RefreshPolicy, Verify
from scheduler_service.core.digests import row_digests
from scheduler_service.core.ops import BoolArray, Cause, ForwardOp, Int32Array, LeaseStart, UInt64Array
from scheduler_service.core.placement import Placement
from scheduler_service.core.policy import Choice
from scheduler_service.core.request import Request
from scheduler_service.core.row_table import Phase, RowTable
from scheduler_service.core.states import Event, State, transition_of

_NO_TOKENS: Int32Array = np.empty(0, dtype=np.int32)

EVENT_OF_CAUSE = {
    Cause.FIRST_CHUNK: Event.SCHEDULE_PREFILL_FIRST_CHUNK,
    Cause.CONTINUATION: Event.SCHEDULE_PREFILL,
    Cause.RESUME: Event.SCHEDULE_DECODE_FROM_RETRACTED,
    Cause.PREFILL_DONE_TO_DECODE: Event.SCHEDULE_DECODE,
    Cause.DECODE: Event.SCHEDULE_DECODE,
}

_PHASE_OF_STATE = {
    State.PREFILLING: Phase.PREFILLING,
    State.PREFILL_DONE: Phase.PREFILL_DONE,
    State.DECODING: Phase.DECODING,
}


def build_op(placement: Placement, choice: Choice, session_no: int, step: int) -> ForwardOp:
    """Advance the chosen rows by their transitions and write them down as an op.

    Decode rows that change neither state nor earlier pages cost a fixed number of numpy calls, however many there are.
    """
    rows = placement.rows
    num_extend = len(choice.extends)
    decodes = choice.decodes
    first_decodes = rows.phase[decodes] == Phase.PREFILL_DONE
    indices = np.concatenate((np.array([extend.row for extend in choice.extends], dtype=np.int32), decodes))
    requests: list[Request] = placement.request_of_row[indices].tolist()
    input_lens = np.ones(len(indices), dtype=np.int32)
    input_lens[:num_extend] = [extend.input_len for extend in choice.extends]
    num_computed = rows.num_computed[indices]
    computed_after = num_computed + input_lens
    sample = np.ones(len(indices), dtype=np.bool_)
    sample[:num_extend] = computed_after[:num_extend] == rows.num_known[indices[:num_extend]]
    row_lens = rows.num_pages[indices]
    begins = np.minimum(rows.sent_len[indices], row_lens)
    by_table = np.zeros(len(indices), dtype=np.bool_)
    by_table[num_extend:] = first_decodes
    by_table[:num_extend] = [
        transition_of(request.request_id, request.state, EVENT_OF_CAUSE[extend.cause]).full_refresh
        for request, extend in zip(requests, choice.extends, strict=False)
    ]
    full_refresh = _refresh_bits(placement, indices, by_table)
    starts = np.where(full_refresh, np.int32(0), begins)
    op = ForwardOp(
        session_no=session_no,
        step=step,
        req_pool_indices=indices,
        row_generations=rows.generation[indices],
        row_lens=row_lens,
        begins=begins,
        sizes=row_lens - begins,
        full_refresh=full_refresh,
        occupied_pages=rows.gather(indices, starts),
        num_computed=num_computed,
        num_extend_rows=num_extend,
        input_lens=input_lens,
        input_ids=_input_ids(choice, requests, num_computed),
        sample=sample,
        released_rows=np.array(placement.released_rows, dtype=np.int32),
        lease_starts=[
            lease_start(requests[index], int(num_computed[index]), placement.config.vocab_size)
            for index, extend in enumerate(choice.extends)
            if extend.cause is not Cause.CONTINUATION
        ],
        requests=requests,
        extend_causes=[extend.cause for extend in choice.extends],
        first_decodes=first_decodes if first_decodes.any() else None,
        num_logprobs=rows.num_logprobs[indices] if rows.num_asking else None,
    )
    placement.released_rows.clear()
    rows.mark_sent(indices, starts)
    verify = placement.config.verify
    if verify is not Verify.OFF:
        sampled = verify is Verify.SAMPLE
        if not sampled or step % placement.config.verify_interval == 0:
            _ask_digests(op, rows, others=sampled)
    rows.num_computed[indices] = computed_after
    rows.num_outstanding[indices] += 1
    _move_requests(placement, choice, requests, sample, first_decodes)
    return op


def lease_start(request: Request, num_computed: int, vocab_size: int) -> LeaseStart:
    """What the runtime is told of a request at the start of a lease whose first op finds `num_computed` tokens computed."""
    sampling = request.sampling
    needs_stops = sampling.min_new_tokens > 0
    return LeaseStart(
        req_pool_index=request.row,
        request_id=request.request_id,
        sampling=sampling,
        # An id beyond the vocabulary is allowed, never sampled, and none of the runtime's business.
        stop_ids=tuple(token for token in request.stop_ids if token < vocab_size) if needs_stops else (),
        prompt_len=request.prompt_len if needs_stops or sampling.has_penalty else 0,
        traceparent=request.traceparent,
        history=request.token_slice(0, num_computed).astype("<i4", copy=False).tobytes() if sampling.has_penalty else b"",
    )


def _ask_digests(op: ForwardOp, rows: RowTable, *, others: bool) -> None:
    """Note what the mirror must hold once the op is applied, of the op's rows and, if asked, of the `others` in use."""
    op.row_digests = _expected(rows, op.req_pool_indices)
    if others:
        # A row that was repointed since it was last sent differs from its mirror until its next op, which sends it whole.
        wanted = (rows.sent_len > 0) & ~rows.dirty
        wanted[op.req_pool_indices] = False
        op.verify_rows = np.flatnonzero(wanted).astype(np.int32)
        op.verify_digests = _expected(rows, op.verify_rows)


def _expected(rows: RowTable, indices: Int32Array) -> UInt64Array:
    lens = rows.sent_len[indices]  # all sent rows fit into the mirror: the runtime's width is also the table's
    return row_digests(rows.pages, indices, lens, lens)


def _refresh_bits(placement: Placement, indices: Int32Array, by_table: BoolArray) -> BoolArray:
    rows = placement.rows
    policy = placement.config.refresh_policy
    if policy is RefreshPolicy.TAIL_ONLY:
        return np.zeros(len(indices), dtype=np.bool_)
    if policy is RefreshPolicy.ALWAYS:
        return np.ones(len(indices), dtype=np.bool_)
    bits: BoolArray = rows.unsent[indices] | rows.dirty[indices]
    if policy is RefreshPolicy.TRANSITION:
        return bits | by_table
    for index in np.flatnonzero(rows.dirty[indices] & ~rows.unsent[indices]).tolist():
        bits[index] = rows.changed_since_sent(int(indices[index]))
    return bits


def _input_ids(choice: Choice, requests: list[Request], num_computed: Int32Array) -> Int32Array:
    parts = [
        request.token_slice(int(start), int(start) + extend.input_len)
        for extend, request, start in zip(choice.extends, requests, num_computed, strict=False)
    ]
    return np.concatenate(parts) if parts else _NO_TOKENS


def _move_requests(
    placement: Placement, choice: Choice, requests: list[Request], sample: BoolArray, first_decodes: BoolArray
) -> None:
    phase = placement.rows.phase
    for index, extend in enumerate(choice.extends):
        request = requests[index]
        placement.keep(request)
        whole = State.DECODING if extend.cause is Cause.RESUME else State.PREFILL_DONE
        request.move(EVENT_OF_CAUSE[extend.cause], whole if sample[index] else State.PREFILLING)
        phase[extend.row] = _PHASE_OF_STATE[request.state]
    num_extend = len(choice.extends)
    for index in np.flatnonzero(first_decodes).tolist():
        placement.keep(requests[num_extend + index])
        requests[num_extend + index].move(Event.SCHEDULE_DECODE, State.DECODING)
        phase[choice.decodes[index]] = Phase.DECODING
