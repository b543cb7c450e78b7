"""From the rows that were chosen to the columns of a ForwardOp; the rows advance here."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler_service.core.choice import Choice
from scheduler_service.core.config import RefreshPolicy, Verify
from scheduler_service.core.digests import row_digests
from scheduler_service.core.lone_op import lone_op
from scheduler_service.core.op_parts import EVENT_OF_CAUSE, NO_TOKENS, input_ids, lease_start, move_extend, released_rows
from scheduler_service.core.ops import BoolArray, Cause, ForwardOp, Int32Array, UInt64Array
from scheduler_service.core.placement import Placement
from scheduler_service.core.request import Request
from scheduler_service.core.row_table import (
    DIRTY,
    GENERATION,
    NUM_COMPUTED,
    NUM_KNOWN,
    NUM_LOGPROBS,
    NUM_OUTSTANDING,
    NUM_PAGES,
    PHASE,
    SENT_LEN,
    UNSENT,
    Phase,
    RowTable,
)
from scheduler_service.core.states import Event, State, transition_of
from scheduler_service.core.steady import SteadyRows

_NO_PLACES: npt.NDArray[np.intp] = np.empty(0, dtype=np.intp)

_CONTINUATION = Cause.CONTINUATION
_PREFILL_DONE = np.uint8(Phase.PREFILL_DONE)


def build_op(placement: Placement, choice: Choice, session_no: int, step: int) -> ForwardOp:
    """Advance the chosen rows by their transitions and write them down as an op.

    Decode rows that change neither state nor earlier pages cost a fixed number of numpy calls, however many there are.
    """
    steady = choice.steady
    if steady is not None and steady.version == placement.rows.version:
        op = _steady_op(placement, steady, session_no, step)
    elif len(choice.extends) == 1 and not len(choice.decodes):
        op = lone_op(placement, choice.extends[0], session_no, step)
    else:
        op = _new_op(placement, choice, session_no, step)
    verify = placement.config.verify
    if verify is not Verify.OFF:
        sampled = verify is Verify.SAMPLE
        if not sampled or step % placement.config.verify_interval == 0:
            _ask_digests(op, placement.rows, others=sampled)
    return op


def _steady_op(placement: Placement, steady: SteadyRows, session_no: int, step: int) -> ForwardOp:
    """The rows of the step before, each one token further."""
    op = ForwardOp(  # fields in their order: names would take another µs
        session_no,
        step,
        steady.indices,
        steady.generations,
        steady.row_lens,
        steady.begins,
        steady.sizes,
        steady.no_flags,
        steady.pages,
        steady.num_computed,
        0,
        steady.ones,
        NO_TOKENS,
        steady.all_flags,
        released_rows(placement),
        [],
        steady.requests,
        [],
        num_logprobs=steady.num_logprobs,
        steady=steady,
        num_ended=placement.rows.num_ended,
        may_end=steady.steps_left <= 1,
    )
    steady.advance()
    return op


def _new_op(placement: Placement, choice: Choice, session_no: int, step: int) -> ForwardOp:
    """Rows that differ from those of the step before, or move from one state to another."""
    rows, extends, decodes = placement.rows, choice.extends, choice.decodes
    num_extend, num_rows = len(extends), len(extends) + len(decodes)
    indices = decodes
    if num_extend:
        indices = np.array([extend.row for extend in extends], dtype=np.int32)
        if len(decodes):
            indices = np.concatenate((indices, decodes))
    places = indices.astype(np.intp)
    requests: list[Request] = placement.request_of_row.take(places).tolist()
    numbers, flags = rows.look_up(places)
    num_computed, row_lens = numbers[NUM_COMPUTED], numbers[NUM_PAGES]
    by_table = flags[PHASE] == _PREFILL_DONE  # of the decode rows; the others follow
    input_lens, sample = rows.ones[:num_rows].copy(), rows.yes[:num_rows].copy()
    first_decodes = by_table[num_extend:].nonzero()[0] if len(decodes) else _NO_PLACES
    if num_extend:
        input_lens[:num_extend] = [extend.input_len for extend in extends]
        by_table[:num_extend] = [
            transition_of(request.request_id, request.state, EVENT_OF_CAUSE[extend.cause]).full_refresh
            for request, extend in zip(requests, extends, strict=False)
        ]
    computed_after = num_computed + input_lens
    if num_extend:
        np.equal(computed_after[:num_extend], numbers[NUM_KNOWN, :num_extend], out=sample[:num_extend])
    begins = np.minimum(numbers[SENT_LEN], row_lens)
    full_refresh = _refresh_bits(placement, indices, by_table, flags)
    starts = begins * ~full_refresh
    op = ForwardOp(
        session_no=session_no,
        step=step,
        req_pool_indices=indices,
        row_generations=numbers[GENERATION],
        row_lens=row_lens,
        begins=begins,
        sizes=row_lens - begins,
        full_refresh=full_refresh,
        occupied_pages=rows.gather(places, starts),
        num_computed=num_computed,
        num_extend_rows=num_extend,
        input_lens=input_lens,
        input_ids=_input_ids(choice, requests, num_computed),
        sample=sample,
        released_rows=released_rows(placement),
        lease_starts=[
            lease_start(requests[index], int(num_computed[index]), placement.config.vocab_size)
            for index, extend in enumerate(extends)
            if extend.cause is not _CONTINUATION
        ],
        requests=requests,
        extend_causes=[extend.cause for extend in extends],
        first_decodes=by_table[num_extend:] if len(first_decodes) else None,
        num_logprobs=numbers[NUM_LOGPROBS] if rows.num_asking else None,
        num_ended=rows.num_ended,
    )
    rows.mark_sent(places, starts)
    rows.advance(places, computed_after, numbers[NUM_OUTSTANDING] + 1)
    if num_extend or len(first_decodes):
        _move_requests(placement, choice, requests, sample, first_decodes)
    return op


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


def _refresh_bits(placement: Placement, indices: Int32Array, by_table: BoolArray, flags: npt.NDArray[np.uint8]) -> BoolArray:
    policy, dirty, unsent = placement.config.refresh_policy, flags[DIRTY].view(np.bool_), flags[UNSENT].view(np.bool_)
    bits: BoolArray = unsent | dirty
    if policy is RefreshPolicy.TRANSITION:
        bits |= by_table
        return bits
    if policy is RefreshPolicy.TAIL_ONLY:
        return np.zeros(len(indices), dtype=np.bool_)
    if policy is RefreshPolicy.ALWAYS:
        return np.ones(len(indices), dtype=np.bool_)
    for index in np.flatnonzero(dirty & ~unsent).tolist():
        bits[index] = placement.rows.changed_since_sent(int(indices[index]))
    return bits


def _input_ids(choice: Choice, requests: list[Request], num_computed: Int32Array) -> Int32Array:
    if not choice.extends:
        return NO_TOKENS
    parts = [
        input_ids(extend, request, start)
        for extend, request, start in zip(choice.extends, requests, num_computed.tolist(), strict=False)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _move_requests(
    placement: Placement, choice: Choice, requests: list[Request], sample: BoolArray, first_decodes: npt.NDArray[np.intp]
) -> None:
    for index, extend in enumerate(choice.extends):
        move_extend(placement, extend, requests[index], whole=bool(sample[index]))
    phase = placement.rows.phase
    num_extend = len(choice.extends)
    for index in first_decodes.tolist():
        placement.keep(requests[num_extend + index])
        requests[num_extend + index].move(Event.SCHEDULE_DECODE, State.DECODING)
        phase[choice.decodes[index]] = Phase.DECODING
