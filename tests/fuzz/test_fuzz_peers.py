"""Peers that attack a runtime by other means than a single op: floods, full messages, cancelled streams, broken connections."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
import pytest
from fuzz_columns import pack, tagged, varint
from fuzz_runtime import OPTIONS, MadScheduler
from grpc import aio

from pagemirror.v1 import forward_pb2, runtime_pb2, runtime_pb2_grpc

Code = grpc.StatusCode
T = TypeVar("T")

WAIT_S = 100.0
BLOCKED_S = 1.0
"""A write that has not ended by then waits for us to read."""
MAX_GROWTH_MIB = 256
"""More than allocators keep after messages of 16 to 64 MiB, less than those take if they are kept."""
MAX_RESETS = 10_000
Request = runtime_pb2.ExecuteRequest


async def within(what: Awaitable[T]) -> T:
    return await asyncio.wait_for(what, WAIT_S)


@pytest.fixture
def served(runtimes: dict[str, Any]) -> Any:
    """The runtime under attack."""
    return runtimes["pages of 4"]


@pytest.fixture
async def channel(served: Any) -> AsyncIterator[aio.Channel]:
    """A channel of its own."""
    async with aio.insecure_channel(served.address, options=OPTIONS) as opened:
        yield opened


@pytest.fixture
def stub(channel: aio.Channel) -> runtime_pb2_grpc.RuntimeServiceAsyncStub:
    """For messages that are some."""
    return runtime_pb2_grpc.RuntimeServiceStub(channel)


@pytest.fixture
async def unharmed(served: Any, seed: int) -> AsyncIterator[None]:
    """Afterwards every session is over, and a clean one gives every token."""
    before = served.usage()
    yield
    async with MadScheduler(served.address, seed) as mad:
        async with asyncio.timeout(WAIT_S):
            while (await mad.rows_now()).session_no:
                await asyncio.sleep(0.02)
        await mad.reference(mad.sequences[0])
        await mad.close()
    served.assert_unharmed()
    assert served.usage()["mib"] <= before["mib"] + MAX_GROWTH_MIB


Hello = Callable[..., Request]


@pytest.fixture
def hello(seed: int) -> Hello:
    """A hello of one scheduler, or of another."""

    def make(session_no: int, epoch: int = 0) -> Request:
        return Request(
            hello=runtime_pb2.SchedulerHello(
                protocol_version=1, scheduler_epoch=epoch or seed, session_no=session_no, overlap_depth=2
            )
        )

    return make


async def next_answer(call: Any) -> runtime_pb2.ExecuteResponse:
    """The next message that is no heartbeat."""
    while True:
        answer = await within(call.read())
        assert answer is not aio.EOF
        if isinstance(answer, bytes):
            answer = runtime_pb2.ExecuteResponse.FromString(answer)
        if not answer.HasField("heartbeat"):
            return answer


async def status_of(call: Any) -> Code:
    """With what one call ends."""
    try:
        await within(call)
    except aio.AioRpcError as error:
        return error.code()
    return Code.OK


@pytest.mark.usefixtures("unharmed")
async def test_floods_of_calls(stub: runtime_pb2_grpc.RuntimeServiceAsyncStub, seed: int) -> None:
    """Hundreds of ReadRows and GetInfo at once are answered, refused for their bytes, or turned away for their number."""
    rng = random.Random(seed)
    draws = [
        lambda: rng.randbytes(rng.randint(0, 40)),
        lambda: pack([rng.randint(-1, 10) for _ in range(8)]),
        lambda: bytes(80_000),
    ]
    reads = [status_of(stub.ReadRows(runtime_pb2.ReadRowsRequest(rows=rng.choice(draws)()))) for _ in range(400)]
    infos = [status_of(stub.GetInfo(runtime_pb2.GetRuntimeInfoRequest())) for _ in range(400)]
    found = await asyncio.gather(*reads, *infos)
    # UNAVAILABLE comes from HTTP/2, for streams that were begun before the peer could know how many there may be.
    assert set(found[:400]) <= {Code.OK, Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE}
    assert set(found[400:]) <= {Code.OK, Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE}


@pytest.mark.usefixtures("unharmed")
async def test_read_rows_of_every_kind(stub: runtime_pb2_grpc.RuntimeServiceAsyncStub) -> None:
    """Row numbers in range are read, however often they are named; others, and columns that are none, are INVALID_ARGUMENT."""
    read = lambda rows: status_of(stub.ReadRows(runtime_pb2.ReadRowsRequest(rows=rows)))  # noqa: E731
    for rows in (b"", pack([1]), pack([8, 8, 1, 8])):
        assert await read(rows) is Code.OK
    for rows in (b"\1", pack([0]), pack([9]), pack([-1]), pack([2**31 - 1]), pack([1] * 9), bytes(2**22)):
        assert await read(rows) is Code.INVALID_ARGUMENT


@pytest.mark.usefixtures("unharmed")
async def test_many_streams(stub: runtime_pb2_grpc.RuntimeServiceAsyncStub, served: Any, hello: Hello) -> None:
    """Other schedulers' streams are refused beside a live one; silent ones take the places there are, and no more."""
    live = stub.Execute()
    await within(live.write(hello(1)))
    assert (await within(live.read())).HasField("hello")
    others = [stub.Execute() for _ in range(40)]
    for number, other in enumerate(others):
        await within(other.write(hello(1, epoch=number + 1)))
    assert {await within(other.code()) for other in others} == {Code.FAILED_PRECONDITION}
    async with aio.insecure_channel(served.address, options=OPTIONS) as channel:
        silent = [runtime_pb2_grpc.RuntimeServiceStub(channel).Execute() for _ in range(100)]
        async with asyncio.timeout(WAIT_S):
            while await status_of(stub.GetInfo(runtime_pb2.GetRuntimeInfoRequest())) is not Code.RESOURCE_EXHAUSTED:
                await asyncio.sleep(0.01)
        await within(live.write(Request(reset=runtime_pb2.Reset(session_no=2))))
        assert (await next_answer(live)).reset_done.session_no == 2
        for call in silent:
            call.cancel()
    live.cancel()


@pytest.mark.usefixtures("unharmed")
async def test_resets_in_a_flood(served: Any, hello: Hello) -> None:
    """A peer that only writes is made to wait; when it reads, each reset has its answer, in order."""
    # A connection that does not read ahead for us.
    channel = aio.insecure_channel(served.address, options=(*OPTIONS, ("grpc.http2.bdp_probe", 0)))
    call = channel.stream_stream("/pagemirror.v1.RuntimeService/Execute")()
    await within(call.write(hello(1).SerializeToString()))
    before = served.usage()["mib"]
    padding = tagged(100, bytes(20_000))  # of an unknown field: connections hold some hundred kilobytes
    number, blocked = 1, False
    while not blocked:
        number += 1
        reset = tagged(3, b"\x08" + varint(number)) + padding
        write = asyncio.ensure_future(call.write(reset))
        _, pending = await asyncio.wait({write}, timeout=BLOCKED_S)
        blocked = bool(pending)  # never cancelled: that would cancel the call
        assert number < MAX_RESETS
    assert served.usage()["mib"] <= before + MAX_GROWTH_MIB
    assert (await next_answer(call)).HasField("hello")
    assert [(await next_answer(call)).reset_done.session_no for _ in range(number - 1)] == list(range(2, number + 1))
    await within(write)
    await within(call.done_writing())
    while await within(call.read()) is not aio.EOF:  # heartbeats
        pass
    assert await within(call.code()) is Code.OK
    await channel.close()


@pytest.mark.usefixtures("unharmed")
async def test_cancelled_in_the_middle(stub: runtime_pb2_grpc.RuntimeServiceAsyncStub, hello: Hello, served: Any) -> None:
    """Streams that are cancelled with a hello, ops or answers under way leave nothing behind."""
    op = forward_pb2.ForwardOp(
        session_no=1,
        step=1,
        req_pool_indices=pack([1]),
        row_generations=pack([1]),
        row_lens=pack([1]),
        begins=pack([0]),
        sizes=pack([1]),
        full_refresh=b"\1",
        occupied_pages=pack([1]),
        num_computed=pack([0]),
        num_extend_rows=1,
        input_lens=pack([1]),
        input_ids=pack([1]),
        sample=b"\1",
        lease_starts=[forward_pb2.LeaseStart(req_pool_index=1)],
    )
    for number in range(1, 61):
        call = stub.Execute()
        op.session_no = 2 * number
        reset = runtime_pb2.Reset(session_no=2 * number + 1)
        messages = [hello(2 * number), Request(op=op), Request(op=op), Request(reset=reset)]
        for sent in messages[: number % 5]:
            await within(call.write(sent))
        if number % 5 and number % 3 == 0:
            answer = await within(call.read())
            assert answer is aio.EOF or answer.HasField("hello")
        call.cancel()
        assert await within(call.code()) is Code.CANCELLED


def full(number: int) -> dict[str, tuple[str, bytes]]:
    """Ops as large as a message may be, and what each is answered."""
    lease = tagged(16, b"\x08\x01")
    one_row = {
        "req_pool_indices": pack([1]),
        "row_generations": pack([1]),
        "row_lens": pack([number]),
        "begins": pack([0]),
        "sizes": pack([number]),
        "full_refresh": b"\1",
        "num_computed": pack([0]),
        "num_extend_rows": 1,
        "input_lens": pack([1]),
        "input_ids": pack([1]),
        "sample": b"\1",
    }
    start = lambda **fields: [forward_pb2.LeaseStart(req_pool_index=1, **fields)]  # noqa: E731
    op = lambda **fields: forward_pb2.ForwardOp(**(one_row | fields)).SerializeToString()  # noqa: E731
    ones = dict.fromkeys(_COLUMNS, pack([1] * 2000))
    one_page = {"row_lens": pack([1]), "sizes": pack([1]), "occupied_pages": pack([1])}
    bias = [forward_pb2.LogitBias(token=1, bias=1.0)] * (number // 16)
    return {
        "rows": ("MALFORMED", op(req_pool_indices=bytes(4 * number))),
        "the same row": ("ROW_REPEATED", op(**ones, full_refresh=b"\1" * 2000, sample=b"\1" * 2000)),
        "pages": ("PAGE_OUT_OF_RANGE", op(occupied_pages=bytes(4 * number), lease_starts=start())),
        "the same page": ("PAGE_REPEATED", op(occupied_pages=b"\1\0\0\0" * number, lease_starts=start())),
        "tokens": ("ROW_TOO_SHORT", op(**one_page, input_lens=pack([number]), input_ids=bytes(4 * number))),
        "lease starts": ("MALFORMED", op() + lease * 1_000_000),
        "a request id": ("MALFORMED", op(lease_starts=start(request_id="x" * 4 * number))),
        "a trace": ("MALFORMED", op(lease_starts=start(traceparent="x" * 4 * number))),
        "stop ids": ("MALFORMED", op(lease_starts=start(stop_ids=bytes(4 * number)))),
        "a history": ("MALFORMED", op(**one_page, lease_starts=start(history=bytes(4 * number)))),
        "biases": ("BAD_SAMPLING", op(lease_starts=start(sampling=forward_pb2.SamplingParams(logit_bias=bias)))),
        "unknown fields": ("MALFORMED", op() + b"\xa0\x06\x01" * number),
        "digests": ("MALFORMED", op(row_digests=bytes(8 * (number // 2)))),
    }


_COLUMNS = ("req_pool_indices", "row_generations", "row_lens", "begins", "sizes", "num_computed", "input_lens")


@pytest.mark.usefixtures("unharmed")
async def test_full_messages(channel: aio.Channel, hello: Hello) -> None:
    """Ops of many mebibytes are refused like small ones, in seconds; one over the limit ends its stream."""
    call = channel.stream_stream("/pagemirror.v1.RuntimeService/Execute")()
    await within(call.write(hello(1).SerializeToString()))
    await within(call.read())
    session_no = 1
    for name, (code, data) in full(4 << 20).items():
        session_no += 1
        await within(call.write(Request(reset=runtime_pb2.Reset(session_no=session_no)).SerializeToString()))
        numbered = data + forward_pb2.ForwardOp(session_no=session_no, step=1).SerializeToString()
        await within(call.write(tagged(2, numbered)))
        assert (await next_answer(call)).HasField("reset_done")
        answer = await next_answer(call)
        found = runtime_pb2.RefusalCode.Name(answer.refusal.code).removeprefix("REFUSAL_CODE_")
        assert (name, found) == (name, code), answer
    await within(call.write(bytes(64 << 20) + b"\0"))
    with pytest.raises(aio.AioRpcError) as caught:
        await next_answer(call)
    assert caught.value.code() is Code.RESOURCE_EXHAUSTED
