"""What the fuzzer has found, each fault by itself."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import grpc
import pytest
from fuzz_columns import pack
from fuzz_runtime import OPTIONS, MadScheduler
from grpc import aio

from pagemirror.v1 import forward_pb2
from runtime_service import wire
from runtime_service.errors import MAX_DETAIL_BYTES, MAX_REQUEST_ID_LEN, Refusal
from runtime_service.ops import RefusalCode

NO_MESSAGE = b"\xff\xff\xff"
LOST_UPDATE = [  # as a failure prints them: a hello, a prefill of pages 3 and 4, and a tail update that begins a page too late
    bytes.fromhex("0a0f080111070000000000000018012001"),
    bytes.fromhex(
        "1252080110011a04010000002204010000002a04020000003204000000003a04020000004201014a0803000000040000005204000000005801"
        "6204020000006a0805000000060000007201018201050801120161"
    ),
    bytes.fromhex(
        "123a080110021a04010000002204010000002a04040000003204030000003a04010000004201004a0406000000520402000000620401000000"
        "720101"
    ),
]


def refused(**fields: Any) -> Refusal:
    """The refusal of an op with one row and one lease start of these fields."""
    start = forward_pb2.LeaseStart(req_pool_index=1, **fields)
    with pytest.raises(Refusal) as caught:
        wire.op_from_proto(forward_pb2.ForwardOp(session_no=3, step=7, req_pool_indices=pack([1]), lease_starts=[start]))
    return caught.value


async def test_printed_messages_are_replayed(runtimes: dict[str, Any], seed: int) -> None:
    """What a failure prints is enough to see it again, here one that is none: a lost update is refused, the row stays."""
    async with MadScheduler(runtimes["pages of 1"].address, seed) as mad:
        await mad.replay(LOST_UPDATE)
        assert mad.counts["refused: REFUSAL_CODE_GAP"] == 1
        assert mad.model.rows() == [(1, 1, 2, 2, [3, 4])]
        await mad.close()


@pytest.mark.parametrize("method", ["ReadRows", "GetInfo"])
async def test_unreadable_message_to_a_runtime(runtimes: dict[str, Any], method: str) -> None:
    """Bytes that are no message are the caller's fault, not UNKNOWN with the text of an exception."""
    async with aio.insecure_channel(runtimes["pages of 1"].address, options=OPTIONS) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await channel.unary_unary(f"/pagemirror.v1.RuntimeService/{method}")(NO_MESSAGE)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith("a message of 3 bytes cannot be read")


async def test_unreadable_message_in_a_stream(runtimes: dict[str, Any]) -> None:
    """It ends the stream like any other message that is out of place."""
    async with aio.insecure_channel(runtimes["pages of 1"].address, options=OPTIONS) as channel:
        call = channel.stream_stream("/pagemirror.v1.RuntimeService/Execute")()
        await call.write(NO_MESSAGE)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("service", ["pagemirror.v1.GenerationService/Abort", "grpc.health.v1.Health/Check"])
async def test_unreadable_message_to_a_scheduler(scheduler: Any, service: str) -> None:
    """Every service of the port, also those that are a library's."""
    async with aio.insecure_channel(scheduler.address, options=OPTIONS) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{service}")(NO_MESSAGE)
        with pytest.raises(aio.AioRpcError) as streamed:
            await channel.unary_stream("/pagemirror.v1.GenerationService/Generate")(NO_MESSAGE).read()
    assert {caught.value.code(), streamed.value.code()} == {grpc.StatusCode.INVALID_ARGUMENT}


def test_detail_is_bounded_in_bytes() -> None:
    """A character may take four bytes, and three more of each in a trailer."""
    detail = Refusal(RefusalCode.MALFORMED, detail="\U0001f600" * 1024).detail
    assert len(detail.encode()) == MAX_DETAIL_BYTES - 1  # whole characters and the mark
    assert detail == "\U0001f600" * 255 + "…"


def test_request_id_is_bounded() -> None:
    """What is repeated in every refusal, and kept for each row, has a limit."""
    assert refused(request_id="x" * (MAX_REQUEST_ID_LEN + 1)).code is RefusalCode.MALFORMED
    refusal = refused(request_id="x" * MAX_REQUEST_ID_LEN, stop_ids=b"\1")
    assert "no multiple of 4" in refusal.detail


def test_lists_of_a_lease_are_counted_first() -> None:
    """Millions of entries that are too many anyway are not turned into Python objects."""
    assert refused(stop_ids=pack([0] * (wire.MAX_STOP_IDS + 1))).detail.endswith("4097 stop ids, at most 4096 are allowed")
    bias = [forward_pb2.LogitBias(token=1)] * 1025
    assert refused(sampling=forward_pb2.SamplingParams(logit_bias=bias)).code is RefusalCode.BAD_SAMPLING
    with pytest.raises(Refusal, match="2 lease starts for 1 rows"):
        wire.op_from_proto(
            forward_pb2.ForwardOp(req_pool_indices=pack([1]), lease_starts=[forward_pb2.LeaseStart(req_pool_index=1)] * 2)
        )


def test_refused_message_is_not_kept() -> None:
    """A refusal that its own traceback holds keeps an op of many mebibytes until the collector happens to run."""
    starts = [forward_pb2.LeaseStart(req_pool_index=1, stop_ids=b"\1")]
    op = forward_pb2.ForwardOp(session_no=3, step=7, req_pool_indices=pack([1]), lease_starts=starts)
    kept = None
    gc.disable()
    try:
        wire.op_from_proto(op)
    except Refusal as refusal:
        assert (refusal.code, refusal.session_no, refusal.step) == (RefusalCode.MALFORMED, 3, 7)
        kept = weakref.ref(refusal)
    finally:
        gc.enable()
    assert kept is not None
    assert kept() is None
