"""Steps on the wire: core ops and what answers them ↔ messages of `pagemirror.v1`, as pure pairs `x_to_proto` / `x_from_proto`.

Columns are little-endian arrays in `bytes` fields, so a conversion is one `tobytes` or one `numpy.frombuffer` a column, and
never work per row. What a peer says is checked here: everything that comes out of a `from_proto` has the shape it should have.
What the runtime says of itself is in `wire_facts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from pagemirror.v1 import forward_pb2, runtime_pb2
from scheduler_service.columns import float32_of_peer, int32_of_peer, int32_to_bytes, uint64_of_peer, uint64_to_bytes
from scheduler_service.core.ops import (
    GREEDY,
    ForwardOp,
    LeaseStart,
    RowStatus,
    SamplingParams,
    StepResult,
)
from scheduler_service.errors import ProtocolError, shorten

_INT32 = np.dtype("<i4")


class RefusalCode(IntEnum):
    """Why the runtime did not execute an op; the numbers are those of the wire, `runtime.proto` explains each."""

    UNSPECIFIED = 0
    SKIPPED = 1
    STEP_FAILED = 2
    OUT_OF_MEMORY = 3
    UNKNOWN_SESSION = 4
    STEP_OUT_OF_ORDER = 5
    MALFORMED = 6
    ROW_OUT_OF_RANGE = 7
    ROW_REPEATED = 8
    STALE_GENERATION = 9
    LEASE_NOT_STARTED = 10
    LENGTH_MISMATCH = 11
    GAP = 12
    NOT_CONTIGUOUS = 13
    ROW_TOO_SHORT = 14
    NEVER_SAMPLED = 15
    PAGE_OUT_OF_RANGE = 16
    PAGE_REPEATED = 17
    TOKEN_OUT_OF_RANGE = 18
    BAD_SAMPLING = 19


@dataclass(frozen=True, slots=True)
class StepRefusal:
    """The runtime did not execute an op, or could not finish it. `row` is 0 when no row is to blame."""

    session_no: int
    step: int
    code: RefusalCode
    row: int
    request_id: str
    detail: str

    @override
    def __str__(self) -> str:
        blame = f" (row {self.row}, request {self.request_id!r})" if self.row else ""
        return f"step {self.step} of session {self.session_no}: {self.code.name}{blame}: {self.detail}"


def sampling_to_proto(sampling: SamplingParams) -> forward_pb2.SamplingParams:
    """Every field set, so that both sides agree on what a default is; what None means stays unset."""
    return forward_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        min_new_tokens=sampling.min_new_tokens,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=[forward_pb2.LogitBias(token=token, bias=bias) for token, bias in sampling.logit_bias],
        num_logprobs=sampling.num_logprobs,
    )


def sampling_from_proto(message: forward_pb2.SamplingParams) -> SamplingParams:
    """Unset fields take their defaults; values that are set are taken as they are and checked by the core."""
    return SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else 0.0,
        top_k=message.top_k if message.HasField("top_k") else None,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p if message.HasField("min_p") else 0.0,
        seed=message.seed if message.HasField("seed") else 0,
        min_new_tokens=message.min_new_tokens if message.HasField("min_new_tokens") else 0,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty if message.HasField("presence_penalty") else 0.0,
        frequency_penalty=message.frequency_penalty if message.HasField("frequency_penalty") else 0.0,
        logit_bias=tuple((entry.token, entry.bias) for entry in message.logit_bias),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
    )


def lease_to_proto(lease: LeaseStart) -> forward_pb2.LeaseStart:
    """One entry of `ForwardOp.lease_starts`; an unset `sampling` is greedy."""
    return forward_pb2.LeaseStart(
        req_pool_index=lease.req_pool_index,
        request_id=lease.request_id,
        sampling=None if lease.sampling is GREEDY or lease.sampling == GREEDY else sampling_to_proto(lease.sampling),
        stop_ids=int32_to_bytes(lease.stop_ids) if lease.stop_ids else b"",
        prompt_len=lease.prompt_len,
        traceparent=lease.traceparent,
        history=lease.history,
    )


def op_to_proto(op: ForwardOp) -> forward_pb2.ForwardOp:
    """The message of one step. `requests` and `causes` stay here."""
    message = forward_pb2.ForwardOp(
        session_no=op.session_no,
        step=op.step,
        req_pool_indices=int32_to_bytes(op.req_pool_indices),
        row_generations=int32_to_bytes(op.row_generations),
        row_lens=int32_to_bytes(op.row_lens),
        begins=int32_to_bytes(op.begins),
        sizes=int32_to_bytes(op.sizes),
        full_refresh=op.full_refresh.tobytes(),
        num_computed=int32_to_bytes(op.num_computed),
        input_lens=int32_to_bytes(op.input_lens),
        sample=op.sample.tobytes(),
    )
    # What most steps do not have is set only where it is there.
    if len(op.occupied_pages):
        message.occupied_pages = int32_to_bytes(op.occupied_pages)
    if op.num_extend_rows:
        message.num_extend_rows = op.num_extend_rows
    if len(op.input_ids):
        message.input_ids = int32_to_bytes(op.input_ids)
    if len(op.released_rows):
        message.released_rows = int32_to_bytes(op.released_rows)
    if op.lease_starts:
        message.lease_starts.extend([lease_to_proto(lease) for lease in op.lease_starts])
    if op.row_digests is not None:
        message.row_digests = uint64_to_bytes(op.row_digests)
    if op.verify_rows is not None:
        message.verify_rows = int32_to_bytes(op.verify_rows)
    if op.verify_digests is not None:
        message.verify_digests = uint64_to_bytes(op.verify_digests)
    return message


def result_from_proto(message: forward_pb2.StepResult, num_rows: int) -> StepResult:
    """The answer to an op of `num_rows` rows.

    Raises:
        ProtocolError: a column has not one entry per row (num_top entries for the top tokens), or a row's status is none the
            protocol knows.
    """
    step, data = message.step, message.tokens
    if len(data) != 4 * num_rows:
        found = len(int32_of_peer(data, f"result of step {step}: tokens"))
        raise ProtocolError(f"result of step {step}: {found} tokens for {num_rows} rows")
    if message.num_tokens and (int32_of_peer(message.num_tokens, f"result of step {step}: num_tokens") != 1).any():
        raise ProtocolError(
            f"result of step {step}: num_tokens is other than 1 for a row, and no step that was asked for gives several"
        )
    tokens = np.frombuffer(data, dtype=_INT32)
    result = StepResult(message.session_no, step, tokens)
    result.apply_us, result.step_us = message.apply_us, message.step_us
    if message.row_status:
        result.row_status = _row_status(message, num_rows)
    if message.logprobs or message.num_top or message.digests:
        _add_extras(result, message, num_rows)
    return result


def _row_status(message: forward_pb2.StepResult, num_rows: int) -> npt.NDArray[np.uint8]:
    status = np.frombuffer(message.row_status, dtype=np.uint8)
    if len(status) != num_rows:
        raise ProtocolError(f"result of step {message.step}: {len(status)} row states for {num_rows} rows")
    if status.max() > max(RowStatus):
        raise ProtocolError(f"result of step {message.step}: row state {status.max()} is unknown")
    return status


def _add_extras(result: StepResult, message: forward_pb2.StepResult, num_rows: int) -> None:
    """Log probabilities and digests, which most results do not have."""
    where = f"result of step {message.step}"
    if message.logprobs:
        result.logprobs = float32_of_peer(message.logprobs, f"{where}: logprobs", num_rows)
    if message.num_top:
        size = num_rows * message.num_top
        top_tokens = int32_of_peer(message.top_tokens, f"{where}: top_tokens")
        if len(top_tokens) != size:
            raise ProtocolError(f"{where}: {len(top_tokens)} top_tokens, {size} belong to {num_rows} rows of {message.num_top}")
        top_logprobs = float32_of_peer(message.top_logprobs, f"{where}: top_logprobs", size)
        result.top_tokens = top_tokens.reshape(num_rows, message.num_top)
        result.top_logprobs = top_logprobs.reshape(num_rows, message.num_top)
    if message.digests:
        result.digests = uint64_of_peer(message.digests, f"{where}: digests")


def refusal_from_proto(message: runtime_pb2.Refusal) -> StepRefusal:
    """A code this scheduler does not know becomes UNSPECIFIED and is named in the detail."""
    try:
        code, detail = RefusalCode(message.code), message.detail
    except ValueError:
        code, detail = RefusalCode.UNSPECIFIED, f"(code {message.code}) {message.detail}"
    return StepRefusal(message.session_no, message.step, code, message.row, shorten(message.request_id), shorten(detail))
