"""Ops of any shape, serialised by protobuf and read by the runtime, are the ops that were written; broken bytes never crash."""

from __future__ import annotations

from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from pagemirror.v1 import forward_pb2, runtime_pb2
from runtime_service import wire
from runtime_service.errors import Refusal
from runtime_service.ops import NO_TOKEN, LeaseStart, SamplingParams, StepResult
from runtime_service.session import SessionState

INT32 = st.integers(-(2**31), 2**31 - 1)
UINT64 = st.integers(0, 2**64 - 1)
INT32_COLUMNS = (
    "req_pool_indices",
    "row_generations",
    "row_lens",
    "begins",
    "sizes",
    "occupied_pages",
    "num_computed",
    "input_lens",
    "input_ids",
    "released_rows",
)
BOOL_COLUMNS = ("full_refresh", "sample")
FLOAT32 = st.floats(0, 100, width=32)

lease_starts = st.builds(
    LeaseStart,
    req_pool_index=st.integers(0, 2**32 - 1),
    request_id=st.text(max_size=20),
    sampling=st.builds(
        SamplingParams,
        temperature=FLOAT32,
        top_k=st.none() | st.integers(0, 2**32 - 1),
        top_p=FLOAT32,
        min_p=FLOAT32,
        seed=UINT64,
        min_new_tokens=st.integers(0, 2**32 - 1),
        repetition_penalty=FLOAT32,
        presence_penalty=FLOAT32,
        frequency_penalty=FLOAT32,
        logit_bias=st.lists(st.tuples(st.integers(0, 2**32 - 1), FLOAT32), max_size=3).map(tuple),
        num_logprobs=st.none() | st.integers(0, 2**32 - 1),
    ),
    stop_ids=st.lists(INT32, max_size=3).map(tuple),
    prompt_len=st.integers(0, 2**32 - 1),
    traceparent=st.text(max_size=10),
    history=st.lists(INT32, max_size=3).map(lambda tokens: np.array(tokens, "<i4").tobytes()),
)


def to_message(lease: LeaseStart) -> forward_pb2.LeaseStart:
    """The lease start as a message, every sampling field set."""
    sampling = lease.sampling
    return forward_pb2.LeaseStart(
        req_pool_index=lease.req_pool_index,
        request_id=lease.request_id,
        sampling=forward_pb2.SamplingParams(
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
        ),
        stop_ids=np.array(lease.stop_ids, "<i4").tobytes(),
        prompt_len=lease.prompt_len,
        traceparent=lease.traceparent,
        history=lease.history,
    )


@given(
    session_no=UINT64,
    step=UINT64,
    num_extend_rows=st.integers(0, 2**32 - 1),
    ints=st.fixed_dictionaries({name: st.lists(INT32, max_size=8) for name in INT32_COLUMNS}),
    bools=st.fixed_dictionaries({name: st.lists(st.booleans(), max_size=8) for name in BOOL_COLUMNS}),
    leases=st.lists(lease_starts, max_size=3),
)
def test_op_round_trip(
    session_no: int,
    step: int,
    num_extend_rows: int,
    ints: dict[str, list[int]],
    bools: dict[str, list[bool]],
    leases: list[LeaseStart],
) -> None:
    """Whatever columns are written, exactly those are read, also after serialisation."""
    leases = leases[: len(ints["req_pool_indices"])]  # more of them than rows are refused
    columns: dict[str, Any] = {name: np.array(values, "<i4").tobytes() for name, values in ints.items()}
    columns |= {name: bytes(values) for name, values in bools.items()}
    message = forward_pb2.ForwardOp(
        session_no=session_no,
        step=step,
        num_extend_rows=num_extend_rows,
        lease_starts=[to_message(lease) for lease in leases],
        **columns,
    )
    op = wire.op_from_proto(forward_pb2.ForwardOp.FromString(message.SerializeToString()))
    assert (op.session_no, op.step, op.num_extend_rows) == (session_no, step, num_extend_rows)
    assert {name: getattr(op, name).tolist() for name in INT32_COLUMNS} == ints
    assert {name: getattr(op, name).tolist() for name in BOOL_COLUMNS} == bools
    assert op.lease_starts == leases


@given(tokens=st.lists(INT32, max_size=8), data=st.data(), session_no=UINT64, step=UINT64)
def test_result_round_trip(tokens: list[int], data: st.DataObject, session_no: int, step: int) -> None:
    """A result that is written and read is the same; an absent status column means that all rows are OK."""
    status = data.draw(st.lists(st.integers(0, 2), min_size=len(tokens), max_size=len(tokens)))
    result = StepResult(session_no, step, np.array(tokens, np.int32), np.array(status, np.uint8))
    written = wire.result_to_proto(result).SerializeToString()
    read = runtime_pb2.ExecuteResponse.FromString(written).result
    assert (read.session_no, read.step) == (session_no, step)
    assert np.frombuffer(read.tokens, "<i4").tolist() == tokens
    assert list(read.row_status or bytes(len(tokens))) == status


def look(session: SessionState, message: forward_pb2.ForwardOp) -> Refusal | None:
    """The refusal of an op, by wire or session, or None."""
    try:
        session.check(wire.op_from_proto(message))
    except Refusal as refusal:
        return refusal
    return None


@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_never_crash(data: bytes) -> None:
    """Bytes that protobuf can read become an op that is taken or refused, by wire or session; nothing else happens."""
    try:
        message = forward_pb2.ForwardOp.FromString(data)
    except DecodeError:
        return
    message.session_no, message.step = 1, 1
    session = SessionState(4, 8, 64, 4, 100)
    session.open(1, 1, 0)
    answer = look(session, message)
    assert answer is None or answer.detail


@given(
    columns=st.fixed_dictionaries(
        {name: st.lists(st.integers(-2, 6) | INT32, min_size=2, max_size=2) for name in INT32_COLUMNS}
    ),
    flags=st.fixed_dictionaries({name: st.lists(st.booleans(), min_size=2, max_size=2) for name in BOOL_COLUMNS}),
    num_extend_rows=st.integers(0, 3),
)
def test_hostile_columns_of_right_length_never_crash(
    columns: dict[str, list[int]], flags: dict[str, list[bool]], num_extend_rows: int
) -> None:
    """Columns that pass the length check, with any values, are taken or refused and looking at them leaves no row behind."""
    message = forward_pb2.ForwardOp(
        session_no=1,
        step=1,
        num_extend_rows=num_extend_rows,
        **{name: np.array(values, "<i4").tobytes() for name, values in columns.items()},  # type: ignore[arg-type]
        **{name: bytes(values) for name, values in flags.items()},  # type: ignore[arg-type]
    )
    session = SessionState(4, 8, 64, 4, 100)
    session.open(1, 1, 0)
    answer = look(session, message)
    assert answer is None or (answer.step == 1 and answer.detail)
    assert session.lease_rows().tolist() == []


def test_no_token_is_minus_one() -> None:
    """The entry for "no token" is the wire's."""
    result = StepResult(1, 1, np.array([NO_TOKEN], np.int32), np.zeros(1, np.uint8))
    assert wire.result_to_proto(result).result.tokens == b"\xff\xff\xff\xff"
