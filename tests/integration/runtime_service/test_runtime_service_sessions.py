"""The runtime's sessions over a real loopback server: hellos, takeover, and streams that break the protocol."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc import aio

from pagemirror.v1 import forward_pb2, runtime_pb2

Code = grpc.StatusCode
Start = Callable[..., Awaitable[Any]]
Connect = Callable[..., Any]
Within = Callable[..., Awaitable[Any]]

PAGE_SIZE = 4
EPOCH = 0x1234
IDS = (1, 2, 3)


async def test_hello_and_get_info_state_the_same_facts(connect: Connect, within: Within, start: Start) -> None:
    """The hello carries the pool and the limits; GetInfo says the same without a session."""
    _, stub = await start()
    peer = connect(stub)
    info = await peer.hello(expect_page_size=PAGE_SIZE, expect_num_pages=64, expect_max_rows=8, expect_max_pages_per_row=8)
    assert (info.protocol_version, info.page_size, info.num_pages, info.max_rows, info.max_pages_per_row) == (1, 4, 64, 8, 8)
    assert (info.vocab_size, info.max_context, info.model, info.world_size) == (997, 0, "fingerprint", 1)
    assert info.runtime_epoch != 0
    assert await within(stub.GetInfo(runtime_pb2.GetRuntimeInfoRequest())) == info
    await peer.no_more()


async def test_higher_session_of_the_same_scheduler_takes_over(
    connect: Connect, ops: Any, within: Within, start: Start
) -> None:
    """The older stream ends with ABORTED at once; its queued op never runs; its running step's result goes nowhere."""
    runtime, stub = await start()
    old, new = connect(stub), connect(stub)
    await old.hello(session_no=1)
    runtime.executor.gate.clear()
    await old.send(op=ops.prefill(1, 1, (5,), IDS))
    await old.send(op=ops.decode(2, 1, 1, 3))
    await runtime.executor.until_entered()
    await within(runtime.until_queued(1))
    await new.say_hello(session_no=2)
    code, details = await old.ended()
    assert (code, details) == (Code.ABORTED, "session 2 took over from 1")
    runtime.executor.gate.set()
    assert (await new.read()).hello.page_size == PAGE_SIZE
    rows = await within(stub.ReadRows(runtime_pb2.ReadRowsRequest()))
    assert (rows.session_no, rows.rows) == (2, b"")
    await new.send(op=ops.prefill(1, 1, (8,), IDS, session_no=2))
    assert await new.result() == [20]
    assert runtime.executor.num_executed == 2
    await new.no_more()


@pytest.mark.parametrize("session_no", [3, 2])
async def test_older_session_is_refused(connect: Connect, start: Start, session_no: int) -> None:
    """An equal or lower number of the same scheduler is refused while its stream lives, and after it has ended."""
    _, stub = await start()
    present = connect(stub)
    await present.hello(session_no=3)
    for _ in range(2):
        late = connect(stub)
        await late.say_hello(session_no=session_no)
        code, details = await late.ended()
        assert code is Code.FAILED_PRECONDITION
        assert f"session {session_no} is not higher than" in details
        if not present.call.done():
            await present.no_more()


async def test_another_scheduler_waits_for_the_end_of_the_stream(
    connect: Connect, ops: Any, within: Within, start: Start
) -> None:
    """A second scheduler is refused while the first one's stream is alive, which is not disturbed; afterwards it is served."""
    _, stub = await start()
    first, second = connect(stub), connect(stub)
    await first.hello()
    await first.send(op=ops.prefill(1, 1, (5,), IDS))
    assert await first.result() == [20]
    await second.say_hello(epoch=EPOCH + 1, session_no=9)
    code, details = await second.ended()
    assert code is Code.FAILED_PRECONDITION
    assert "0x0000000000001234 is alive" in details
    await first.send(op=ops.decode(2, 1, 1, 3))
    assert await first.result() == [104]
    await first.no_more()
    third = connect(stub)
    await third.hello(epoch=EPOCH + 1)
    rows = await within(stub.ReadRows(runtime_pb2.ReadRowsRequest()))
    assert (rows.session_no, rows.last_step, rows.rows) == (1, 0, b"")


async def test_vanished_scheduler_frees_the_stream(connect: Connect, ops: Any, within: Within, start: Start) -> None:
    """A cancelled stream's running step finishes, its queued op is dropped, and the next scheduler is served."""
    runtime, stub = await start()
    gone = connect(stub)
    await gone.hello()
    runtime.executor.gate.clear()
    await gone.send(op=ops.prefill(1, 1, (5,), IDS))
    await gone.send(op=ops.decode(2, 1, 1, 3))
    await runtime.executor.until_entered()
    await within(runtime.until_queued(1))
    gone.call.cancel()
    while True:
        # The runtime learns of the cancellation in its own time; until then it refuses.
        following = connect(stub)
        await following.say_hello(epoch=EPOCH + 1)
        reading = asyncio.ensure_future(following.call.read())
        ending = asyncio.ensure_future(following.call.code())
        await asyncio.wait({reading, ending}, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            break
        with contextlib.suppress(aio.AioRpcError):
            await reading
    runtime.executor.gate.set()
    hello = await within(reading)
    assert isinstance(hello, runtime_pb2.ExecuteResponse)
    assert hello.WhichOneof("message") == "hello"
    await following.send(op=ops.prefill(1, 1, (6,), IDS))
    assert await following.result() == [20]
    assert runtime.executor.num_executed == 2
    ending.cancel()


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        (
            {"expect_page_size": 16},
            Code.FAILED_PRECONDITION,
            "page_size is 16 in the scheduler's configuration and 4 in the runtime",
        ),
        ({"expect_num_pages": 63}, Code.FAILED_PRECONDITION, "num_pages is 63 in the scheduler's configuration and 64"),
        ({"expect_max_rows": 9}, Code.FAILED_PRECONDITION, "max_rows is 9"),
        ({"expect_max_pages_per_row": 7}, Code.FAILED_PRECONDITION, "max_pages_per_row is 7"),
        ({"protocol_version": 2}, Code.FAILED_PRECONDITION, "protocol version 2, this runtime 1"),
        ({"protocol_version": 0}, Code.FAILED_PRECONDITION, "protocol version 0"),
        ({"scheduler_epoch": 0}, Code.INVALID_ARGUMENT, "must not be 0"),
        ({"session_no": 0}, Code.INVALID_ARGUMENT, "must not be 0"),
        ({"overlap_depth": 3}, Code.INVALID_ARGUMENT, "overlap_depth is 3, it must be at most 2"),
    ],
)
async def test_refused_hellos(
    connect: Connect, ops: Any, start: Start, fields: dict[str, int], code: grpc.StatusCode, message: str
) -> None:
    """A hello that does not fit ends its stream with both values, and does not end the stream that is there."""
    _, stub = await start()
    present, wrong = connect(stub), connect(stub)
    await present.hello()
    await wrong.say_hello(**({"session_no": 2} | fields))
    ended, details = await wrong.ended()
    assert ended is code
    assert message in details
    await present.send(op=ops.prefill(1, 1, (5,), IDS))
    assert await present.result() == [20]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"reset": runtime_pb2.Reset(session_no=1)}, "first message must be a hello, it is reset"),
        ({"op": forward_pb2.ForwardOp()}, "it is op"),
        ({}, "it is empty"),
    ],
)
async def test_first_message_must_be_a_hello(connect: Connect, start: Start, message: dict[str, Any], words: str) -> None:
    """Anything else as the first message is INVALID_ARGUMENT."""
    _, stub = await start()
    peer = connect(stub)
    await peer.send(**message)
    code, details = await peer.ended()
    assert code is Code.INVALID_ARGUMENT
    assert words in details


async def test_stream_without_a_message(connect: Connect, start: Start) -> None:
    """A stream that is closed at once is told why."""
    _, stub = await start()
    peer = connect(stub)
    await peer.call.done_writing()
    assert await peer.ended() == (Code.INVALID_ARGUMENT, "the stream was closed before its hello")


@pytest.mark.parametrize(
    ("message", "words"), [({}, "no member set"), ({"hello": runtime_pb2.SchedulerHello(session_no=7)}, "a second hello")]
)
async def test_later_messages_are_ops_and_resets(connect: Connect, start: Start, message: dict[str, Any], words: str) -> None:
    """An empty message and a second hello are INVALID_ARGUMENT."""
    _, stub = await start()
    peer = connect(stub)
    await peer.hello()
    await peer.send(**message)
    code, details = await peer.ended()
    assert code is Code.INVALID_ARGUMENT
    assert words in details
