"""Columns of bytes to arrays and back: what is read, what is refused, what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagemirror.v1 import forward_pb2, runtime_pb2
from runtime_service import wire
from runtime_service.errors import Refusal
from runtime_service.executors.base import ModelInfo
from runtime_service.ops import RefusalCode, RowStatus, SamplingParams, StepResult
from runtime_service.step_runner import RowsSnapshot


def i32(values: Any) -> bytes:
    """Values as the bytes of an int32 column."""
    return np.array(values, dtype="<i4").tobytes()


def test_int32_column_views_little_endian_bytes() -> None:
    """The bytes are stated, not made by numpy: 1, -1, 2^31 - 1 and -2^31, least significant byte first."""
    data = bytes([1, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 127, 0, 0, 0, 128])
    column = wire.int32_column(data, "x")
    assert column.tolist() == [1, -1, 2**31 - 1, -(2**31)]
    assert column.dtype == np.int32
    assert not column.flags.owndata
    assert wire.to_bytes(column) == data


def test_empty_columns() -> None:
    """An absent field is the empty column of its type."""
    assert (wire.int32_column(b"", "x").dtype, len(wire.int32_column(b"", "x"))) == (np.int32, 0)
    assert (wire.bool_column(b"", "x").dtype, len(wire.bool_column(b"", "x"))) == (np.bool_, 0)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 4095])
def test_int32_column_refuses_partial_entries(size: int) -> None:
    """A length that is no multiple of four is named with its column."""
    with pytest.raises(wire.MalformedColumnError, match=f"begins has {size} bytes"):
        wire.int32_column(bytes(size), "begins")


def test_bool_column() -> None:
    """Bytes 0 and 1 are bools, 2 is not: it would be true in one place and unequal to true in another."""
    assert wire.bool_column(b"\x00\x01", "x").tolist() == [False, True]
    with pytest.raises(wire.MalformedColumnError, match="sample holds 2"):
        wire.bool_column(b"\x00\x02", "sample")


def test_unset_op_is_an_op_without_rows() -> None:
    """Every unset field has its documented meaning; numbers that may not be 0 are the session's to refuse."""
    op = wire.op_from_proto(forward_pb2.ForwardOp())
    assert (op.num_rows, op.session_no, op.step, op.num_extend_rows, op.lease_starts) == (0, 0, 0, 0, [])
    assert len(op.released_rows) == 0


COLUMNS = [
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
]


@pytest.mark.parametrize("column", COLUMNS)
def test_each_column_is_read_from_its_own_field(column: str) -> None:
    """One field set at a time reaches the attribute of its name and no other."""
    op = wire.op_from_proto(forward_pb2.ForwardOp(**{column: i32([4, 5])}))  # type: ignore[arg-type]
    assert {name: getattr(op, name).tolist() for name in COLUMNS if len(getattr(op, name))} == {column: [4, 5]}


@pytest.mark.parametrize("column", [*COLUMNS, "full_refresh", "sample"])
def test_malformed_bytes_are_refused_with_session_and_step(column: str) -> None:
    """Unreadable bytes in any column give MALFORMED for that op."""
    with pytest.raises(Refusal) as caught:
        wire.op_from_proto(forward_pb2.ForwardOp(session_no=3, step=9, **{column: b"\x02\x02\x02"}))  # type: ignore[arg-type]
    refusal = caught.value
    assert (refusal.code, refusal.session_no, refusal.step, refusal.row) == (RefusalCode.MALFORMED, 3, 9, 0)
    assert column in refusal.detail


def test_lease_start_defaults() -> None:
    """Unset sampling is greedy with each field's stated default."""
    message = forward_pb2.LeaseStart(req_pool_index=2, request_id="a")
    op = wire.op_from_proto(forward_pb2.ForwardOp(req_pool_indices=bytes(4), lease_starts=[message]))
    assert op.lease_starts[0].sampling == SamplingParams()
    assert (op.lease_starts[0].req_pool_index, op.lease_starts[0].request_id, op.lease_starts[0].stop_ids) == (2, "a", ())


def test_lease_start_values() -> None:
    """Every field arrives; a top_k of 0 that was set stays 0, so that it can be refused."""
    message = forward_pb2.LeaseStart(
        req_pool_index=2,
        request_id="a",
        stop_ids=i32([7, 8]),
        prompt_len=5,
        traceparent="00-x",
        sampling=forward_pb2.SamplingParams(temperature=0.5, top_k=0, top_p=0.75, min_p=0.25, seed=2**64 - 1, min_new_tokens=3),
    )
    lease = wire.op_from_proto(forward_pb2.ForwardOp(req_pool_indices=bytes(4), lease_starts=[message])).lease_starts[0]
    assert lease.sampling == SamplingParams(0.5, 0, 0.75, 0.25, 2**64 - 1, 3)
    assert (lease.stop_ids, lease.prompt_len, lease.traceparent) == ((7, 8), 5, "00-x")


def test_random_sampling_without_a_seed_is_refused() -> None:
    """A seed made up by the runtime would not survive a resume, so the scheduler must send one; a seed of 0 is one."""
    sampling = forward_pb2.SamplingParams(temperature=0.5)
    message = forward_pb2.LeaseStart(req_pool_index=2, request_id="a", sampling=sampling)
    with pytest.raises(Refusal, match=r"row 2 of request 'a': temperature 0\.5 without a seed") as caught:
        wire.op_from_proto(forward_pb2.ForwardOp(session_no=1, step=1, req_pool_indices=bytes(4), lease_starts=[message]))
    assert (caught.value.code, caught.value.row, caught.value.request_id) == (RefusalCode.BAD_SAMPLING, 2, "a")
    message.sampling.seed = 0
    op = wire.op_from_proto(forward_pb2.ForwardOp(req_pool_indices=bytes(4), lease_starts=[message]))
    assert op.lease_starts[0].sampling.seed == 0


def test_result_leaves_the_status_out_when_all_is_well() -> None:
    """No status bytes for a plain step, one byte a row as soon as one row is not OK."""
    tokens = np.array([5, -1], np.int32)
    plain = wire.result_to_proto(StepResult(3, 9, tokens, np.zeros(2, np.uint8))).result
    assert (plain.session_no, plain.step, plain.tokens, plain.row_status) == (3, 9, b"\x05\0\0\0\xff\xff\xff\xff", b"")
    status = np.array([RowStatus.OK, RowStatus.CLAMPED], np.uint8)
    assert wire.result_to_proto(StepResult(3, 9, tokens, status)).result.row_status == b"\x00\x02"


@pytest.mark.parametrize("code", list(RefusalCode))
def test_refusal_codes_are_those_of_the_wire(code: RefusalCode) -> None:
    """Name and number of every code are the same on both sides, and all fields travel."""
    assert runtime_pb2.RefusalCode.Name(runtime_pb2.RefusalCode.ValueType(code)) == f"REFUSAL_CODE_{code.name}"
    message = wire.refusal_to_proto(Refusal(code, 4, "a", "why", session_no=2, step=3)).refusal
    assert message == runtime_pb2.Refusal(
        session_no=2, step=3, code=runtime_pb2.RefusalCode.ValueType(code), row=4, request_id="a", detail="why"
    )


def test_no_wire_code_is_missing() -> None:
    """Every code of the protocol has its member here."""
    assert sorted([0, *RefusalCode]) == sorted(runtime_pb2.RefusalCode.values())


def test_row_statuses_are_those_of_the_wire() -> None:
    """Name and number of every status are the same on both sides."""
    assert {f"ROW_STATUS_{status.name}": int(status) for status in RowStatus} == dict(forward_pb2.RowStatus.items())


def test_info() -> None:
    """The hello states every fact; a model without tokenizer and stop ids leaves them empty."""
    model = ModelInfo("models/x", "LlamaForCausalLM", 1000, 2048, (2, 7), Path("/m/x"), "cuda:0", "bfloat16")
    facts = wire.RuntimeFacts(model, 2**64 - 1, 16, 4096, 256, 512, 1024, 0.5)
    info = wire.info_to_proto(facts)
    expected = runtime_pb2.RuntimeInfo(
        protocol_version=1,
        runtime_epoch=2**64 - 1,
        page_size=16,
        num_pages=4096,
        max_rows=256,
        max_pages_per_row=512,
        vocab_size=1000,
        max_context=1024,
        default_stop_ids=i32([2, 7]),
        model="models/x",
        architecture="LlamaForCausalLM",
        tokenizer_path="/m/x",
        rank=0,
        world_size=1,
        device="cuda:0",
        dtype="bfloat16",
        heartbeat_interval_s=0.5,
    )
    assert info == expected
    assert wire.hello_to_proto(facts).hello == info
    bare = wire.info_to_proto(wire.RuntimeFacts(ModelInfo("f", "f", 1, 0, (), None, "cpu", "int32"), 1, 1, 1, 1, 1, 0, 1))
    assert (bare.default_stop_ids, bare.tokenizer_path, bare.max_context) == (b"", "", 0)


def test_rows() -> None:
    """A snapshot travels column by column; an empty request means all rows."""
    columns = [np.array(values, np.int32) for values in ([3, 1], [5, 0], [3, 0], [2, 0], [7, 8])]
    response = wire.rows_to_proto(RowsSnapshot(4, 6, *columns))
    assert response == runtime_pb2.ReadRowsResponse(
        session_no=4,
        last_step=6,
        rows=i32([3, 1]),
        row_generations=i32([5, 0]),
        row_lens=i32([3, 0]),
        valid_lens=i32([2, 0]),
        pages=i32([7, 8]),
    )
    assert wire.rows_from_proto(runtime_pb2.ReadRowsRequest()) is None
    asked = wire.rows_from_proto(runtime_pb2.ReadRowsRequest(rows=i32([9])))
    assert asked is not None
    assert asked.tolist() == [9]


def test_small_answers() -> None:
    """Heartbeat and ResetDone carry their one number."""
    assert wire.heartbeat_to_proto(8).heartbeat.last_step == 8
    assert wire.reset_done_to_proto(3).reset_done.session_no == 3
