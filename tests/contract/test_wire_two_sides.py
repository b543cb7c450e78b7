"""What the scheduler's wire module writes is what the runtime's reads, and the other way round, through real bytes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemirror.v1 import forward_pb2, runtime_pb2
from runtime_service import ops as runtime_ops
from runtime_service import wire as runtime_wire
from runtime_service.errors import Refusal
from runtime_service.executors.base import ModelInfo
from runtime_service.step_runner import RowsSnapshot
from scheduler_service import wire as scheduler_wire
from scheduler_service import wire_facts
from scheduler_service.core import ops as core_ops
from scheduler_service.errors import ProtocolError

COLUMNS = [
    "req_pool_indices",
    "row_generations",
    "row_lens",
    "begins",
    "sizes",
    "full_refresh",
    "occupied_pages",
    "num_computed",
    "input_lens",
    "input_ids",
    "sample",
    "released_rows",
]
int32s = st.integers(-(2**31), 2**31 - 1)
uint64s = st.integers(0, 2**64 - 1)
names = st.text(max_size=20)


@st.composite
def samplings(draw: st.DrawFn) -> core_ops.SamplingParams:
    """Parameters as the core checked them: floats that float32 holds."""
    temperature = draw(st.one_of(st.just(0.0), st.floats(0.125, 100, width=32)))
    return core_ops.SamplingParams(
        temperature=temperature,
        top_k=draw(st.none() | st.integers(1, 2**31 - 1)),
        top_p=draw(st.floats(0.125, 1, width=32)),
        min_p=draw(st.floats(0, 1, width=32)),
        seed=draw(st.integers(0, 2**64 - 1)),
        min_new_tokens=draw(st.integers(0, 2**31 - 1)),
        repetition_penalty=draw(st.floats(0.125, 100, width=32)),
        presence_penalty=draw(st.floats(-2, 2, width=32)),
        frequency_penalty=draw(st.floats(-2, 2, width=32)),
        logit_bias=tuple(draw(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 100, width=32)), max_size=3))),
        num_logprobs=draw(st.none() | st.integers(0, 20)),
    )


@st.composite
def forward_ops(draw: st.DrawFn) -> core_ops.ForwardOp:
    """Any columns whatever: the wire neither knows nor checks what they mean."""

    def column() -> np.ndarray:
        return np.array(draw(st.lists(int32s, max_size=6)), dtype=np.int32)

    def flags() -> np.ndarray:
        return np.array(draw(st.lists(st.booleans(), max_size=6)), dtype=np.bool_)

    def digests() -> np.ndarray:
        return np.array(draw(st.lists(uint64s, max_size=6)), dtype=np.uint64)

    rows = column()  # a lease start each, at most
    asks = draw(st.booleans())
    return core_ops.ForwardOp(
        session_no=draw(st.integers(0, 2**64 - 1)),
        step=draw(st.integers(0, 2**64 - 1)),
        req_pool_indices=rows,
        row_generations=column(),
        row_lens=column(),
        begins=column(),
        sizes=column(),
        full_refresh=flags(),
        occupied_pages=column(),
        num_computed=column(),
        num_extend_rows=draw(st.integers(0, 2**32 - 1)),
        input_lens=column(),
        input_ids=column(),
        sample=flags(),
        released_rows=column(),
        lease_starts=[
            core_ops.LeaseStart(
                req_pool_index=draw(st.integers(0, 2**31 - 1)),
                request_id=draw(names),
                sampling=draw(samplings()),
                stop_ids=tuple(draw(st.lists(st.integers(0, 2**31 - 1), max_size=4))),
                prompt_len=draw(st.integers(0, 2**31 - 1)),
                traceparent=draw(names),
                history=np.array(draw(st.lists(int32s, max_size=5)), "<i4").tobytes(),
            )
            for _ in range(draw(st.integers(0, len(rows))))
        ],
        row_digests=digests() if asks else None,
        verify_rows=column() if asks else None,
        verify_digests=digests() if asks else None,
    )


@given(forward_ops())
def test_op_arrives_as_it_was_sent(op: core_ops.ForwardOp) -> None:
    """Every column, scalar and lease of any op is equal on both sides, dtypes included."""
    data = scheduler_wire.op_to_proto(op).SerializeToString()
    arrived = runtime_wire.op_from_proto(forward_pb2.ForwardOp.FromString(data))
    assert (arrived.session_no, arrived.step, arrived.num_extend_rows) == (op.session_no, op.step, op.num_extend_rows)
    for name in COLUMNS:
        sent, got = getattr(op, name), getattr(arrived, name)
        assert got.dtype == sent.dtype, name
        assert got.tolist() == sent.tolist(), name
    for name, kind in (("row_digests", np.uint64), ("verify_rows", np.int32), ("verify_digests", np.uint64)):
        sent, got = getattr(op, name), getattr(arrived, name)
        assert got.dtype == kind, name
        assert got.tolist() == ([] if sent is None else sent.tolist()), name
    assert [dataclasses.asdict(lease) for lease in arrived.lease_starts] == [
        dataclasses.asdict(lease) for lease in op.lease_starts
    ]


@given(
    st.lists(st.tuples(st.integers(-1, 996), st.sampled_from(list(runtime_ops.RowStatus))), max_size=8),
    st.integers(1, 2**63),
)
def test_result_arrives_as_it_was_sent(rows: list[tuple[int, runtime_ops.RowStatus]], step: int) -> None:
    """Tokens and row states are equal on both sides; a status column that is left out means all fine."""
    tokens = np.array([token for token, _ in rows], dtype=np.int32)
    status = np.array([state for _, state in rows], dtype=np.uint8)
    response = runtime_wire.result_to_proto(runtime_ops.StepResult(7, step, tokens, status))
    message = runtime_pb2.ExecuteResponse.FromString(response.SerializeToString())
    assert message.WhichOneof("message") == "result"
    arrived = scheduler_wire.result_from_proto(message.result, len(rows))
    assert (arrived.session_no, arrived.step) == (7, step)
    assert arrived.tokens.tolist() == tokens.tolist()
    got = np.zeros(len(rows), np.uint8) if arrived.row_status is None else arrived.row_status
    assert got.tolist() == status.tolist()


@given(st.lists(uint64s, max_size=6))
def test_digests_arrive_as_they_were_sent(digests: list[int]) -> None:
    """All 64 bits of each digest are equal on both sides, however many there are; none at all is None."""
    result = runtime_ops.StepResult(7, 1, np.zeros(0, np.int32), np.zeros(0, np.uint8), digests=np.array(digests, np.uint64))
    sent = runtime_wire.result_to_proto(result).SerializeToString()
    arrived = scheduler_wire.result_from_proto(runtime_pb2.ExecuteResponse.FromString(sent).result, 0)
    assert (arrived.digests.tolist() if arrived.digests is not None else []) == digests


def test_digests_that_are_no_column_are_refused() -> None:
    """Bytes that are no whole number of 64-bit entries are no digests, on either side."""
    with pytest.raises(ProtocolError, match="digests: 12 bytes are no column of uint64"):
        scheduler_wire.result_from_proto(forward_pb2.StepResult(digests=bytes(12)), 0)
    for name in ("row_digests", "verify_digests"):
        with pytest.raises(Refusal, match=f"{name} has 12 bytes") as caught:
            runtime_wire.op_from_proto(forward_pb2.ForwardOp(step=3, **{name: bytes(12)}))
        assert (caught.value.code, caught.value.step) == (runtime_ops.RefusalCode.MALFORMED, 3)


@given(st.integers(1, 6), st.none() | st.integers(0, 20), st.data())
def test_log_probabilities_arrive_as_they_were_sent(num_rows: int, width: int | None, data: st.DataObject) -> None:
    """All three columns are equal on both sides, entries that nobody asked for included; None when no row asked."""
    result = runtime_ops.StepResult(7, 1, np.arange(num_rows, dtype=np.int32), np.zeros(num_rows, np.uint8))
    floats = st.floats(-(2.0**100), 0, width=32) | st.just(float("nan"))
    if width is not None:
        size = num_rows * width
        column = lambda count: np.array(data.draw(st.lists(floats, min_size=count, max_size=count)), np.float32)  # noqa: E731
        tokens = data.draw(st.lists(int32s, min_size=size, max_size=size))
        result.logprobs = column(num_rows)
        result.top_tokens = np.array(tokens, np.int32).reshape(num_rows, width)
        result.top_logprobs = column(size).reshape(num_rows, width)
    sent = runtime_wire.result_to_proto(result).SerializeToString()
    arrived = scheduler_wire.result_from_proto(runtime_pb2.ExecuteResponse.FromString(sent).result, num_rows)
    for name in ("logprobs", "top_tokens", "top_logprobs"):
        before, after = getattr(result, name), getattr(arrived, name)
        if width is None or (width == 0 and name != "logprobs"):
            assert after is None
        else:
            assert (after.dtype, after.shape) == (before.dtype, before.shape)
            assert np.array_equal(after, before, equal_nan=name != "top_tokens")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", bytes(4)),
        ("logprobs", bytes(9)),
        ("top_tokens", bytes(8)),
        ("top_tokens", bytes(3)),
        ("top_logprobs", b""),
        ("num_top", 2),
    ],
)
def test_log_probabilities_that_do_not_fit_are_refused(name: str, value: object) -> None:
    """A column that has not num_top entries per row, or none per row, is no result."""
    message = forward_pb2.StepResult(
        tokens=bytes(8), logprobs=bytes(8), num_top=3, top_tokens=bytes(24), top_logprobs=bytes(24)
    )
    scheduler_wire.result_from_proto(message, 2)
    setattr(message, name, value)
    with pytest.raises(ProtocolError, match="result of step 0"):
        scheduler_wire.result_from_proto(message, 2)


def test_every_refusal_arrives_with_its_code() -> None:
    """All codes of the runtime are codes of the scheduler, with row, request and words."""
    for code in runtime_ops.RefusalCode:
        refusal = Refusal(code, 3, "ä", "why", session_no=5, step=6)
        data = runtime_wire.refusal_to_proto(refusal).SerializeToString()
        arrived = scheduler_wire.refusal_from_proto(runtime_pb2.ExecuteResponse.FromString(data).refusal)
        assert arrived == scheduler_wire.StepRefusal(5, 6, scheduler_wire.RefusalCode[code.name], 3, "ä", "why")


def test_hello_arrives_with_every_field() -> None:
    """What the runtime states of itself is what the scheduler plans with; no field is lost."""
    model = ModelInfo("m", "arch", 997, 64, (2, 1), None, "cpu", "int32")
    facts = runtime_wire.RuntimeFacts(
        model=model,
        runtime_epoch=2**64 - 1,
        page_size=16,
        num_pages=99,
        max_rows=8,
        max_pages_per_row=12,
        max_context=60,
        heartbeat_interval_s=0.5,
        rank=1,
        world_size=2,
    )
    data = runtime_wire.info_to_proto(facts).SerializeToString()
    arrived = wire_facts.facts_from_proto(runtime_pb2.RuntimeInfo.FromString(data))
    assert dataclasses.asdict(arrived) == {
        "protocol_version": 1,
        "runtime_epoch": 2**64 - 1,
        "page_size": 16,
        "num_pages": 99,
        "max_rows": 8,
        "max_pages_per_row": 12,
        "vocab_size": 997,
        "max_context": 60,
        "default_stop_ids": (2, 1),
        "model": "m",
        "architecture": "arch",
        "tokenizer_path": "",
        "rank": 1,
        "world_size": 2,
        "device": "cpu",
        "dtype": "int32",
        "heartbeat_interval_s": 0.5,
    }


def test_mirror_rows_arrive_apart() -> None:
    """Rows read from the mirror are the same rows on the other side."""
    column = lambda *values: np.array(values, dtype=np.int32)  # noqa: E731
    snapshot = RowsSnapshot(4, 9, column(1, 3), column(2, 5), column(7, 2), column(3, 2), column(9, 8, 7, 6, 5))
    data = runtime_wire.rows_to_proto(snapshot).SerializeToString()
    arrived = wire_facts.mirror_rows_from_proto(runtime_pb2.ReadRowsResponse.FromString(data))
    assert (arrived.session_no, arrived.last_step, arrived.row_lens) == (4, 9, {1: 7, 3: 2})
    assert {row: pages.tolist() for row, pages in arrived.pages.items()} == {1: [9, 8, 7], 3: [6, 5]}
