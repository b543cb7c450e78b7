"""Core ops ↔ messages of `pagemirror.v1`, as pure pairs `x_to_proto` / `x_from_proto`.

Columns are little-endian arrays in `bytes` fields, so a conversion is one `tobytes` or one `numpy.frombuffer` a column, and
never work per row. What a peer says is checked here: everything that comes out of a `from_proto` has the shape it should have.
"""

from __future__ import annotations

import math
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
    Int32Array,
    LeaseStart,
    RowStatus,
    SamplingParams,
    StepResult,
)
from scheduler_service.errors import ProtocolError, RuntimeMismatchError, shorten

PROTOCOL_VERSION = 1
"""Version of the private protocol that this scheduler speaks."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Limit of one message, both ways, on both channels."""

MAX_LEASE_BYTES = 32 * 1024 * 1024
"""Most that the lease starts of one op take, penalty histories included; less where the columns leave less."""

_MAX_NAME_LEN = 4096
_FIXED_ROW_BYTES = 64  # columns of one row other than its pages, rounded up


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


@dataclass(frozen=True, slots=True)
class RuntimeFacts:
    """What a runtime says of itself in its hello; see `RuntimeInfo` in runtime.proto."""

    protocol_version: int
    runtime_epoch: int
    page_size: int
    num_pages: int
    max_rows: int
    max_pages_per_row: int
    vocab_size: int
    max_context: int
    default_stop_ids: tuple[int, ...]
    model: str
    architecture: str
    tokenizer_path: str
    rank: int
    world_size: int
    device: str
    dtype: str
    heartbeat_interval_s: float


@dataclass(frozen=True, slots=True)
class MirrorRows:
    """Rows of the mirror at one moment: `pages` maps row number → its valid entries, `row_lens` → its stated length."""

    session_no: int
    last_step: int
    pages: dict[int, Int32Array]
    row_lens: dict[int, int]


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
        full_refresh=op.full_refresh.astype(np.bool_, copy=False).tobytes(),
        num_computed=int32_to_bytes(op.num_computed),
        input_lens=int32_to_bytes(op.input_lens),
        sample=op.sample.astype(np.bool_, copy=False).tobytes(),
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
    where = f"result of step {message.step}"
    tokens = int32_of_peer(message.tokens, f"{where}: tokens")
    if message.num_tokens and (int32_of_peer(message.num_tokens, f"{where}: num_tokens") != 1).any():
        raise ProtocolError(f"{where}: num_tokens is other than 1 for a row, and no step that was asked for gives several")
    if len(tokens) != num_rows:
        raise ProtocolError(f"{where}: {len(tokens)} tokens for {num_rows} rows")
    status: npt.NDArray[np.uint8] | None = None
    if message.row_status:
        status = np.frombuffer(message.row_status, dtype=np.uint8)
        if len(status) != num_rows:
            raise ProtocolError(f"{where}: {len(status)} row states for {num_rows} rows")
        if status.max() > max(RowStatus):
            raise ProtocolError(f"{where}: row state {status.max()} is unknown")
    result = StepResult(message.session_no, message.step, tokens, status)
    result.apply_us, result.step_us = message.apply_us, message.step_us
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
    return result


def refusal_from_proto(message: runtime_pb2.Refusal) -> StepRefusal:
    """A code this scheduler does not know becomes UNSPECIFIED and is named in the detail."""
    try:
        code, detail = RefusalCode(message.code), message.detail
    except ValueError:
        code, detail = RefusalCode.UNSPECIFIED, f"(code {message.code}) {message.detail}"
    return StepRefusal(message.session_no, message.step, code, message.row, shorten(message.request_id), shorten(detail))


def facts_from_proto(message: runtime_pb2.RuntimeInfo) -> RuntimeFacts:
    """A runtime's hello.

    Raises:
        RuntimeMismatchError: it speaks another version of the protocol.
        ProtocolError: the column of stop ids is malformed, or a name is too long.
    """
    if message.protocol_version != PROTOCOL_VERSION:
        raise RuntimeMismatchError("protocol_version", PROTOCOL_VERSION, message.protocol_version)
    for name in ("model", "architecture", "tokenizer_path", "device", "dtype"):
        if (length := len(getattr(message, name))) > _MAX_NAME_LEN:
            raise ProtocolError(f"hello: {name} has {length} characters, but at most {_MAX_NAME_LEN} are taken")
    return RuntimeFacts(
        protocol_version=message.protocol_version,
        runtime_epoch=message.runtime_epoch,
        page_size=message.page_size,
        num_pages=message.num_pages,
        max_rows=message.max_rows,
        max_pages_per_row=message.max_pages_per_row,
        vocab_size=message.vocab_size,
        max_context=message.max_context,
        default_stop_ids=tuple(int32_of_peer(message.default_stop_ids, "hello: default_stop_ids").tolist()),
        model=message.model,
        architecture=message.architecture,
        tokenizer_path=message.tokenizer_path,
        rank=message.rank,
        world_size=message.world_size,
        device=message.device,
        dtype=message.dtype,
        heartbeat_interval_s=message.heartbeat_interval_s,
    )


def mirror_rows_from_proto(message: runtime_pb2.ReadRowsResponse) -> MirrorRows:
    """Rows of the mirror. Raises ProtocolError when the columns do not fit together."""
    rows = int32_of_peer(message.rows, "ReadRows: rows")
    row_lens = int32_of_peer(message.row_lens, "ReadRows: row_lens")
    valid_lens = int32_of_peer(message.valid_lens, "ReadRows: valid_lens")
    pages = int32_of_peer(message.pages, "ReadRows: pages")
    if not len(rows) == len(row_lens) == len(valid_lens) or (valid_lens < 0).any() or int(valid_lens.sum()) != len(pages):
        raise ProtocolError(
            f"ReadRows: {len(rows)} rows, {len(row_lens)} row_lens, {len(valid_lens)} valid_lens and {len(pages)} pages"
            " do not fit together"
        )
    parts = np.split(pages, np.cumsum(valid_lens)[:-1]) if len(rows) else []
    return MirrorRows(
        session_no=message.session_no,
        last_step=message.last_step,
        pages=dict(zip(rows.tolist(), parts, strict=True)),
        row_lens=dict(zip(rows.tolist(), row_lens.tolist(), strict=True)),
    )


def check_message_limit(facts: RuntimeFacts, token_budget: int) -> None:
    """Refuse a configuration whose largest op would not fit into one message; ops are never split.

    Raises:
        RuntimeMismatchError: max_rows * (4 * max_pages_per_row + 64) + 4 * token_budget is over 64 MiB.
    """
    largest = _column_bytes(facts, token_budget)
    if largest > MAX_MESSAGE_BYTES:
        raise RuntimeMismatchError(
            "largest op",
            f"at most {MAX_MESSAGE_BYTES:,} bytes a message",
            f"max_rows {facts.max_rows:,} and max_pages_per_row {facts.max_pages_per_row:,}",
            f"with token_budget {token_budget:,} that is up to {largest:,} bytes; lower one of the three"
            f" (max_rows at most {_most_rows(facts, token_budget):,})",
        )


def max_lease_bytes(facts: RuntimeFacts, token_budget: int) -> int:
    """What the lease starts of one op may take, so that it fits into one message beside its columns."""
    return max(0, min(MAX_LEASE_BYTES, MAX_MESSAGE_BYTES - _column_bytes(facts, token_budget)))


def _column_bytes(facts: RuntimeFacts, token_budget: int) -> int:
    return facts.max_rows * (4 * facts.max_pages_per_row + _FIXED_ROW_BYTES) + 4 * token_budget


def _most_rows(facts: RuntimeFacts, token_budget: int) -> int:
    return max(0, math.floor((MAX_MESSAGE_BYTES - 4 * token_budget) / (4 * facts.max_pages_per_row + _FIXED_ROW_BYTES)))
