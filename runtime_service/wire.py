"""Between `pagemirror.v1` messages and plain arrays. Bytes that cannot be read as columns are refused here.

Columns are `numpy.frombuffer` views of the message's bytes: read-only, little-endian, no copy and no Python work per row.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pagemirror.v1 import forward_pb2, runtime_pb2
from runtime_service.errors import MAX_REQUEST_ID_LEN, Refusal
from runtime_service.executors.base import ModelInfo
from runtime_service.next_step import NextStep
from runtime_service.ops import (
    NO_DIGESTS,
    NO_ROWS,
    BoolArray,
    ForwardOp,
    Int32Array,
    LeaseStart,
    RefusalCode,
    SamplingParams,
    StepResult,
    UInt64Array,
)
from runtime_service.sampling_checks import MAX_BIAS_ENTRIES
from runtime_service.step_runner import RowsSnapshot

ExecuteRequest = runtime_pb2.ExecuteRequest
ExecuteResponse = runtime_pb2.ExecuteResponse
SchedulerHello = runtime_pb2.SchedulerHello
ForwardOpMessage = forward_pb2.ForwardOp

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_STOP_IDS = 4096
"""Of one lease; a client may name 1,024, and the model has its own."""

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_UINT64 = np.dtype("<u8")
_BOOLS = b"\0\1"
_EMPTY_BOOL: BoolArray = np.empty(0, dtype=np.bool_)
_BIG_ENDIAN_HOST = sys.byteorder == "big"


class MalformedColumnError(ValueError):
    """Bytes that are no column of their type; `str()` names the column."""


@dataclass(frozen=True, slots=True)
class RuntimeFacts:
    """What this runtime tells a scheduler about itself; field by field `RuntimeInfo` of runtime.proto."""

    model: ModelInfo
    runtime_epoch: int
    page_size: int
    num_pages: int
    max_rows: int
    max_pages_per_row: int
    max_context: int
    heartbeat_interval_s: float
    rank: int = 0
    world_size: int = 1


def int32_column(data: bytes, name: str) -> Int32Array:
    """View a column of little-endian int32; raises MalformedColumnError when the bytes are no whole number of entries."""
    if len(data) & 3:
        raise MalformedColumnError(f"{name} has {len(data)} bytes, which is no multiple of 4")
    if not data:
        return NO_ROWS
    column = np.frombuffer(data, _INT32)
    return column.astype(np.int32) if _BIG_ENDIAN_HOST else column


def uint64_column(data: bytes, name: str) -> UInt64Array:
    """View a column of little-endian uint64; raises MalformedColumnError when the bytes are no whole number of entries."""
    if len(data) & 7:
        raise MalformedColumnError(f"{name} has {len(data)} bytes, which is no multiple of 8")
    if not data:
        return NO_DIGESTS
    column = np.frombuffer(data, _UINT64)
    return column.astype(np.uint64) if _BIG_ENDIAN_HOST else column


def bool_column(data: bytes, name: str) -> BoolArray:
    """View a column of bools, one byte each; raises MalformedColumnError for a byte that is neither 0 nor 1."""
    if not data:
        return _EMPTY_BOOL
    if data.translate(None, _BOOLS):  # what is left without them
        raise MalformedColumnError(f"{name} holds {max(data)}, a bool is 0 or 1")
    return np.frombuffer(data, np.bool_)


def to_bytes(column: npt.NDArray[Any], dtype: np.dtype[Any] = _INT32) -> bytes:
    """Pack an array as a column of `dtype`, little-endian."""
    return column.astype(dtype, copy=False).tobytes()


def op_from_proto(message: forward_pb2.ForwardOp, foreseen: NextStep | None = None) -> ForwardOp:
    """Read an op; its arrays view the message's bytes. Where the message is what was foreseen, the op is `foreseen.op`.

    Raises Refusal: MALFORMED, or BAD_SAMPLING for a missing seed or too many entries of logit_bias.
    """
    try:
        if foreseen is not None and _is_foreseen(message, foreseen):
            foreseen.op.occupied_pages = int32_column(message.occupied_pages, "occupied_pages")
            return foreseen.op
        # Known before any of them is looked at; there may be millions.
        if (num_starts := len(message.lease_starts)) > (num_rows := len(message.req_pool_indices) // 4):
            raise Refusal(RefusalCode.MALFORMED, detail=f"{num_starts} lease starts for {num_rows} rows")
        return ForwardOp(
            session_no=message.session_no,
            step=message.step,
            req_pool_indices=int32_column(message.req_pool_indices, "req_pool_indices"),
            row_generations=int32_column(message.row_generations, "row_generations"),
            row_lens=int32_column(message.row_lens, "row_lens"),
            begins=int32_column(message.begins, "begins"),
            sizes=int32_column(message.sizes, "sizes"),
            full_refresh=bool_column(message.full_refresh, "full_refresh"),
            occupied_pages=int32_column(message.occupied_pages, "occupied_pages"),
            num_computed=int32_column(message.num_computed, "num_computed"),
            num_extend_rows=message.num_extend_rows,
            input_lens=int32_column(message.input_lens, "input_lens"),
            input_ids=int32_column(message.input_ids, "input_ids"),
            sample=bool_column(message.sample, "sample"),
            released_rows=int32_column(message.released_rows, "released_rows"),
            lease_starts=[_lease_start_from_proto(lease) for lease in message.lease_starts] if num_starts else [],
            row_digests=uint64_column(message.row_digests, "row_digests"),
            verify_rows=int32_column(message.verify_rows, "verify_rows"),
            verify_digests=uint64_column(message.verify_digests, "verify_digests"),
        )
    except MalformedColumnError as error:
        code, row, request_id, detail = RefusalCode.MALFORMED, 0, "", str(error)
    except Refusal as fault:
        code, row, request_id, detail = fault.code, fault.row, fault.request_id, fault.detail
    # A new one, outside of the handlers: one that this frame held would keep frame and message until the next collection.
    raise Refusal(code, row, request_id, detail, session_no=message.session_no, step=message.step)


def _is_foreseen(message: forward_pb2.ForwardOp, foreseen: NextStep) -> bool:
    """Whether everything but the pages is."""
    op, columns = foreseen.op, foreseen.columns
    return (
        message.num_computed == columns.num_computed
        and message.step == op.step
        and message.session_no == op.session_no
        and message.req_pool_indices == columns.req_pool_indices
        and message.sizes == columns.sizes
        and message.row_generations == columns.row_generations
        and message.row_lens == columns.row_lens
        and message.begins == columns.begins
        and message.full_refresh == columns.full_refresh
        and message.input_lens == columns.input_lens
        and message.sample == columns.sample
        and not message.num_extend_rows
        and not message.lease_starts
        and not message.input_ids
        and not message.released_rows
        and not message.row_digests
        and not message.verify_rows
        and not message.verify_digests
    )


def _lease_start_from_proto(message: forward_pb2.LeaseStart) -> LeaseStart:
    sampling, row, request_id = message.sampling, message.req_pool_index, message.request_id
    if len(request_id) > MAX_REQUEST_ID_LEN:
        detail = f"row {row}: a request id of {len(request_id)} characters, at most {MAX_REQUEST_ID_LEN} are allowed"
        raise Refusal(RefusalCode.MALFORMED, row, detail=detail)
    if (num_ids := len(message.stop_ids) // 4) > MAX_STOP_IDS:
        detail = f"row {row} of request {request_id!r}: {num_ids} stop ids, at most {MAX_STOP_IDS} are allowed"
        raise Refusal(RefusalCode.MALFORMED, row, request_id, detail)
    if (num_entries := len(sampling.logit_bias)) > MAX_BIAS_ENTRIES:
        detail = f"row {row} of request {request_id!r}: logit_bias has {num_entries} entries, {MAX_BIAS_ENTRIES} are the most"
        raise Refusal(RefusalCode.BAD_SAMPLING, row, request_id, detail)
    # A seed made up here would differ between runtimes and resumes, so a random draw without one is refused.
    if sampling.temperature != 0 and not sampling.HasField("seed"):
        detail = f"row {row} of request {request_id!r}: temperature {sampling.temperature:g} without a seed"
        raise Refusal(RefusalCode.BAD_SAMPLING, row, request_id, detail)
    return LeaseStart(
        req_pool_index=message.req_pool_index,
        request_id=message.request_id,
        sampling=SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k if sampling.HasField("top_k") else None,
            top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
            min_p=sampling.min_p,
            seed=sampling.seed,
            min_new_tokens=sampling.min_new_tokens,
            repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=tuple((entry.token, entry.bias) for entry in sampling.logit_bias),
            num_logprobs=sampling.num_logprobs if sampling.HasField("num_logprobs") else None,
        ),
        stop_ids=tuple(int32_column(message.stop_ids, "lease_starts.stop_ids").tolist()),
        prompt_len=message.prompt_len,
        traceparent=message.traceparent,
        history=_whole_int32s(message.history, "lease_starts.history"),
    )


def _whole_int32s(data: bytes, name: str) -> bytes:
    int32_column(data, name)
    return data


def result_to_proto(result: StepResult) -> runtime_pb2.ExecuteResponse:
    """The answer to an op that was executed. The status column is left out when every row is fine."""
    response = runtime_pb2.ExecuteResponse()
    message = response.result
    message.session_no, message.step, message.tokens = result.session_no, result.step, to_bytes(result.tokens)
    message.apply_us, message.step_us = result.apply_us, result.step_us
    if result.logprobs is not None:
        message.logprobs = to_bytes(result.logprobs, _FLOAT32)
        if result.top_tokens is not None and result.top_logprobs is not None and result.top_tokens.shape[1]:
            message.num_top = result.top_tokens.shape[1]
            message.top_tokens = to_bytes(result.top_tokens)
            message.top_logprobs = to_bytes(result.top_logprobs, _FLOAT32)
    if len(result.digests):
        message.digests = to_bytes(result.digests, _UINT64)
    if np.count_nonzero(result.row_status):
        message.row_status = to_bytes(result.row_status, np.dtype(np.uint8))
    return response


def refusal_to_proto(refusal: Refusal) -> runtime_pb2.ExecuteResponse:
    """The answer to an op that was not executed, or failed."""
    message = runtime_pb2.Refusal(
        session_no=refusal.session_no,
        step=refusal.step,
        code=runtime_pb2.RefusalCode.ValueType(refusal.code),
        row=refusal.row,
        request_id=refusal.request_id,
        detail=refusal.detail,
    )
    return runtime_pb2.ExecuteResponse(refusal=message)


def hello_to_proto(facts: RuntimeFacts) -> runtime_pb2.ExecuteResponse:
    """The runtime's hello."""
    return runtime_pb2.ExecuteResponse(hello=info_to_proto(facts))


def info_to_proto(facts: RuntimeFacts) -> runtime_pb2.RuntimeInfo:
    """What the runtime states in its hello and in GetInfo."""
    model = facts.model
    return runtime_pb2.RuntimeInfo(
        protocol_version=PROTOCOL_VERSION,
        runtime_epoch=facts.runtime_epoch,
        page_size=facts.page_size,
        num_pages=facts.num_pages,
        max_rows=facts.max_rows,
        max_pages_per_row=facts.max_pages_per_row,
        vocab_size=model.vocab_size,
        max_context=facts.max_context,
        default_stop_ids=to_bytes(np.array(model.default_stop_ids, dtype=np.int32)),
        model=model.name,
        architecture=model.architecture,
        tokenizer_path=str(model.tokenizer_path) if model.tokenizer_path else "",
        rank=facts.rank,
        world_size=facts.world_size,
        device=model.device,
        dtype=model.dtype,
        heartbeat_interval_s=facts.heartbeat_interval_s,
    )


def rows_from_proto(message: runtime_pb2.ReadRowsRequest) -> Int32Array | None:
    """Row numbers to read; None: every row that has a lease. Raises MalformedColumnError."""
    return int32_column(message.rows, "rows") if message.rows else None


def rows_to_proto(snapshot: RowsSnapshot) -> runtime_pb2.ReadRowsResponse:
    """Rows of the mirror at one moment."""
    return runtime_pb2.ReadRowsResponse(
        session_no=snapshot.session_no,
        last_step=snapshot.last_step,
        rows=to_bytes(snapshot.rows),
        row_generations=to_bytes(snapshot.row_generations),
        row_lens=to_bytes(snapshot.row_lens),
        valid_lens=to_bytes(snapshot.valid_lens),
        pages=to_bytes(snapshot.pages),
    )


def heartbeat_to_proto(last_step: int) -> runtime_pb2.ExecuteResponse:
    """The sign of life between answers."""
    return runtime_pb2.ExecuteResponse(heartbeat=runtime_pb2.Heartbeat(last_step=last_step))


def reset_done_to_proto(session_no: int) -> runtime_pb2.ExecuteResponse:
    """The answer to a Reset."""
    return runtime_pb2.ExecuteResponse(reset_done=runtime_pb2.ResetDone(session_no=session_no))
