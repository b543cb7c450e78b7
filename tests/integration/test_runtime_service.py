"""The runtime's gRPC service over a real loopback server: sessions, order, takeover, refusals, heartbeats, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagemirror.v1 import forward_pb2, runtime_pb2, runtime_pb2_grpc
from runtime_service.app import serve
from runtime_service.errors import AddressInUseError
from runtime_service.execution import ExecutionThread
from runtime_service.executors.base import Capacity, ExecutionResult
from runtime_service.executors.fingerprint import FingerprintExecutor
from runtime_service.forward_batch import ForwardBatch
from runtime_service.settings import RuntimeSettings, load_settings

Code = grpc.StatusCode
T = TypeVar("T")

WAIT_S = 20.0
PAGE_SIZE = 4
EPOCH = 0x1234
CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 64 * 1024 * 1024))


async def within(what: Awaitable[T]) -> T:
    """The value of `what`, or a failure when it takes too long."""
    return await asyncio.wait_for(what, WAIT_S)


class GatedExecutor(FingerprintExecutor):
    """The fingerprint model whose steps can be held and made to fail from the test."""

    def __init__(self, settings: RuntimeSettings) -> None:
        super().__init__(num_pages=64, page_size=settings.page_size)
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.load_gate = threading.Event()
        self.load_gate.set()
        self.error: Exception | None = None
        self.num_executed = 0

    def warm_up(self) -> None:
        assert self.load_gate.wait(WAIT_S)

    def execute(self, batch: ForwardBatch) -> ExecutionResult:
        self.num_executed += 1
        self.entered.release()
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return super().execute(batch)

    async def until_entered(self) -> None:
        """Wait until a step has begun."""
        assert await asyncio.to_thread(self.entered.acquire, timeout=WAIT_S)


class Runtime:
    """A runtime served in this process, and how to reach it."""

    def __init__(self, settings: RuntimeSettings) -> None:
        self.settings = settings
        self.executor = GatedExecutor(settings)
        self.thread = ExecutionThread()
        self.stop = asyncio.Event()
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(
            serve(settings, self.thread, stop=self.stop, create=self._create, announce=self.ready.set_result)
        )
        self.channel: aio.Channel | None = None

    def _create(self, settings: RuntimeSettings) -> tuple[GatedExecutor, Capacity]:
        return self.executor, Capacity(num_pages=64, max_pages_per_row=8)

    async def connect(self) -> runtime_pb2_grpc.RuntimeServiceAsyncStub:
        """A stub on a channel of its own."""
        address = self.settings.listen
        if address.endswith(":0"):
            line = await within(self.ready)
            address = line.split()[4]
        self.channel = aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return runtime_pb2_grpc.RuntimeServiceStub(self.channel)

    async def until_queued(self, num_jobs: int) -> None:
        """Wait until that many jobs wait behind the one that runs, that is, until the runtime has read them."""
        while self.thread.num_queued < num_jobs:
            await asyncio.sleep(0.001)

    async def shut_down(self) -> None:
        """Stop serving and let the execution thread end."""
        self.executor.gate.set()
        self.executor.load_gate.set()
        self.stop.set()
        with contextlib.suppress(Exception):
            await within(asyncio.shield(self.task))
        if self.channel is not None:
            await self.channel.close()
        assert await asyncio.to_thread(self.thread.join, WAIT_S)


Start = Callable[..., Awaitable[tuple[Runtime, "runtime_pb2_grpc.RuntimeServiceAsyncStub"]]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts runtimes on loopback ports; ends them all."""
    started: list[Runtime] = []

    async def begin(**given: Any) -> tuple[Runtime, runtime_pb2_grpc.RuntimeServiceAsyncStub]:
        given = {
            "listen": "127.0.0.1:0",
            "page_size": PAGE_SIZE,
            "max_rows": 8,
            "heartbeat_interval_s": 30.0,
            "grace_s": 0.2,
        } | given
        runtime = Runtime(load_settings(**given))
        started.append(runtime)
        return runtime, await runtime.connect()

    yield begin
    for runtime in started:
        await runtime.shut_down()


class Peer:
    """One `Execute` stream, driven message by message."""

    def __init__(self, stub: runtime_pb2_grpc.RuntimeServiceAsyncStub) -> None:
        self.call = stub.Execute()

    async def send(self, **message: Any) -> None:
        """Write one ExecuteRequest."""
        await within(self.call.write(runtime_pb2.ExecuteRequest(**message)))

    async def hello(
        self, session_no: int = 1, epoch: int = EPOCH, overlap_depth: int = 2, **more: Any
    ) -> runtime_pb2.RuntimeInfo:
        """Say hello and read the runtime's."""
        await self.say_hello(session_no, epoch, overlap_depth, **more)
        return (await self.read()).hello

    async def say_hello(self, session_no: int = 1, epoch: int = EPOCH, overlap_depth: int = 2, **more: Any) -> None:
        """Say hello."""
        fields = {"protocol_version": 1, "scheduler_epoch": epoch, "session_no": session_no, "overlap_depth": overlap_depth}
        await self.send(hello=runtime_pb2.SchedulerHello(**(fields | more)))

    async def read(self) -> runtime_pb2.ExecuteResponse:
        """The next message, which must come."""
        response = await within(self.call.read())
        assert isinstance(response, runtime_pb2.ExecuteResponse), response
        return response

    async def result(self) -> list[int]:
        """The tokens of the next message, which must be a result."""
        response = await self.read()
        assert response.WhichOneof("message") == "result", response
        return np.frombuffer(response.result.tokens, "<i4").tolist()

    async def refusal(self) -> tuple[str, int]:
        """Code and step of the next message, which must be a refusal."""
        response = await self.read()
        assert response.WhichOneof("message") == "refusal", response
        return runtime_pb2.RefusalCode.Name(response.refusal.code).removeprefix("REFUSAL_CODE_"), response.refusal.step

    async def ended(self) -> tuple[grpc.StatusCode, str]:
        """Status with which the stream ends."""
        code = await within(self.call.code())
        return code, await self.call.details() or ""

    async def no_more(self) -> None:
        """Half-close, and see that nothing but OK follows."""
        await self.call.done_writing()
        assert await within(self.call.read()) is aio.EOF
        assert (await self.ended())[0] is Code.OK


def i32(*values: int) -> bytes:
    """Values as an int32 column."""
    return np.array(values, "<i4").tobytes()


def prefill(
    step: int, row: int, pages: tuple[int, ...], ids: tuple[int, ...], *, session_no: int = 1, generation: int = 1, **more: Any
) -> forward_pb2.ForwardOp:
    """An op that begins a lease of one row."""
    columns: dict[str, Any] = {
        "session_no": session_no,
        "step": step,
        "req_pool_indices": i32(row),
        "row_generations": i32(generation),
        "row_lens": i32(len(pages)),
        "begins": i32(0),
        "sizes": i32(len(pages)),
        "full_refresh": b"\x01",
        "occupied_pages": i32(*pages),
        "num_computed": i32(0),
        "num_extend_rows": 1,
        "input_lens": i32(len(ids)),
        "input_ids": i32(*ids),
        "sample": b"\x01",
        "lease_starts": [forward_pb2.LeaseStart(req_pool_index=row, request_id=f"request-{row}")],
    }
    return forward_pb2.ForwardOp(**(columns | more))


def decode(step: int, row: int, row_len: int, computed: int, *, session_no: int = 1, **more: Any) -> forward_pb2.ForwardOp:
    """An op of one decode row that appends no page."""
    columns: dict[str, Any] = {
        "session_no": session_no,
        "step": step,
        "req_pool_indices": i32(row),
        "row_generations": i32(1),
        "row_lens": i32(row_len),
        "begins": i32(row_len),
        "sizes": i32(0),
        "full_refresh": b"\x00",
        "num_computed": i32(computed),
        "input_lens": i32(1),
        "sample": b"\x01",
    }
    return forward_pb2.ForwardOp(**(columns | more))


def expected_tokens(ids: tuple[int, ...], count: int) -> list[int]:
    """The fingerprint model by its definition."""
    tokens = list(ids)
    for _ in range(count):
        tokens.append(sum((i + 1) * (token + 1) for i, token in enumerate(tokens)) % 997)
    return tokens[len(ids) :]


IDS = (1, 2, 3)


async def test_hello_and_get_info_state_the_same_facts(start: Start) -> None:
    """The hello carries the pool and the limits; GetInfo says the same without a session."""
    _, stub = await start()
    peer = Peer(stub)
    info = await peer.hello(expect_page_size=PAGE_SIZE, expect_num_pages=64, expect_max_rows=8, expect_max_pages_per_row=8)
    assert (info.protocol_version, info.page_size, info.num_pages, info.max_rows, info.max_pages_per_row) == (1, 4, 64, 8, 8)
    assert (info.vocab_size, info.max_context, info.model, info.world_size) == (997, 0, "fingerprint", 1)
    assert info.runtime_epoch != 0
    assert await within(stub.GetInfo(runtime_pb2.GetRuntimeInfoRequest())) == info
    await peer.no_more()


async def test_steps_are_answered_in_order_with_exact_tokens(start: Start) -> None:
    """Ops sent ahead of their results give the definition's tokens, one result each, in their order."""
    _, stub = await start()
    peer = Peer(stub)
    await peer.hello()
    await peer.send(op=prefill(1, 1, (5, 6), IDS))
    for step in range(2, 6):
        await peer.send(op=decode(step, 1, 2, step + 1))
    assert (
        [await peer.result() for _ in range(5)]
        == [[token] for token in expected_tokens(IDS, 5)]
        == [[20], [104], [629], [421], [384]]
    )
    await peer.no_more()


async def test_half_close_answers_everything_then_ends_ok(start: Start) -> None:
    """Ops queued behind a running step are still executed after a half-close."""
    runtime, stub = await start()
    peer = Peer(stub)
    await peer.hello()
    runtime.executor.gate.clear()
    await peer.send(op=prefill(1, 1, (5,), IDS))
    await peer.send(op=decode(2, 1, 1, 3))
    await peer.call.done_writing()
    await runtime.executor.until_entered()
    runtime.executor.gate.set()
    assert [await peer.result(), await peer.result()] == [[20], [104]]
    assert await within(peer.call.read()) is aio.EOF
    assert (await peer.ended())[0] is Code.OK


async def test_refused_op_then_skipped_until_reset(start: Start) -> None:
    """The first refusal names code, row and request; later ops are SKIPPED and change nothing; Reset starts afresh."""
    runtime, stub = await start()
    peer = Peer(stub)
    await peer.hello()
    await peer.send(op=prefill(1, 1, (5, 6), IDS))
    assert await peer.result() == [20]
    await peer.send(op=decode(2, 1, 2, 4))
    refusal = (await peer.read()).refusal
    assert (refusal.code, refusal.row, refusal.request_id) == (runtime_pb2.REFUSAL_CODE_NOT_CONTIGUOUS, 1, "request-1")
    assert "num_computed 4 is not 3" in refusal.detail
    await peer.send(op=decode(2, 1, 2, 3))
    await peer.send(op=prefill(3, 2, (7,), IDS))
    assert [await peer.refusal(), await peer.refusal()] == [("SKIPPED", 2), ("SKIPPED", 3)]
    assert runtime.executor.num_executed == 1
    await peer.send(reset=runtime_pb2.Reset(session_no=2))
    assert (await peer.read()).reset_done.session_no == 2
    rows = await within(stub.ReadRows(runtime_pb2.ReadRowsRequest()))
    assert (rows.session_no, rows.last_step, rows.rows) == (2, 0, b"")
    await peer.send(op=prefill(1, 1, (9,), IDS, session_no=2))
    assert await peer.result() == [20]
    await peer.no_more()


async def test_unreadable_bytes_are_refused_and_the_stream_stays_open(start: Start) -> None:
    """A column of three bytes is MALFORMED, what follows is SKIPPED, and a Reset heals the stream."""
    _, stub = await start()
    peer = Peer(stub)
    await peer.hello()
    await peer.send(op=prefill(1, 1, (5,), IDS, sizes=b"123"))
    await peer.send(op=prefill(1, 1, (5,), IDS, sizes=b"123"))
    assert [await peer.refusal(), await peer.refusal()] == [("MALFORMED", 1), ("SKIPPED", 1)]
    await peer.send(reset=runtime_pb2.Reset(session_no=9))
    await peer.read()
    await peer.send(op=prefill(1, 1, (5,), IDS, session_no=9))
    assert await peer.result() == [20]


async def test_failed_step_is_a_refusal_without_the_exception(start: Start) -> None:
    """An exception inside the model becomes STEP_FAILED; the peer sees no text of it."""
    runtime, stub = await start()
    peer = Peer(stub)
    await peer.hello()
    runtime.executor.error = RuntimeError("secret path")
    await peer.send(op=prefill(1, 1, (5,), IDS))
    refusal = (await peer.read()).refusal
    assert refusal.code == runtime_pb2.REFUSAL_CODE_STEP_FAILED
    assert "secret" not in refusal.detail
    await peer.send(op=decode(2, 1, 1, 3))
    assert await peer.refusal() == ("SKIPPED", 2)


async def test_repeats_are_answered_from_memory(start: Start) -> None:
    """The last overlap_depth + 1 steps are answered again without being executed; an older one is out of order."""
    runtime, stub = await start()
    peer = Peer(stub)
    await peer.hello(overlap_depth=1)
    ops = [prefill(1, 1, (5, 6), IDS), decode(2, 1, 2, 3), decode(3, 1, 2, 4)]
    for op in ops:
        await peer.send(op=op)
    tokens = [await peer.result() for _ in ops]
    await peer.send(op=ops[1])
    await peer.send(op=ops[2])
    assert [await peer.result(), await peer.result()] == tokens[1:]
    assert runtime.executor.num_executed == 3
    await peer.send(op=ops[0])
    assert await peer.refusal() == ("STEP_OUT_OF_ORDER", 1)


async def test_reset_drops_queued_ops_and_discards_the_running_result(start: Start) -> None:
    """A Reset sent while a step runs: that step finishes unheard, the queued op never runs, then comes ResetDone."""
    runtime, stub = await start()
    peer = Peer(stub)
    await peer.hello()
    runtime.executor.gate.clear()
    await peer.send(op=prefill(1, 1, (5,), IDS))
    await peer.send(op=decode(2, 1, 1, 3))
    await runtime.executor.until_entered()
    await peer.send(reset=runtime_pb2.Reset(session_no=2))
    await peer.send(op=prefill(1, 3, (7,), (4, 5), session_no=2))
    await within(runtime.until_queued(3))
    runtime.executor.gate.set()
    assert (await peer.read()).reset_done.session_no == 2
    assert await peer.result() == expected_tokens((4, 5), 1)
    assert runtime.executor.num_executed == 2
    await peer.no_more()


async def test_reset_must_count_up(start: Start) -> None:
    """A Reset to the present number ends the stream with both numbers."""
    _, stub = await start()
    peer = Peer(stub)
    await peer.hello(session_no=4)
    await peer.send(reset=runtime_pb2.Reset(session_no=4))
    code, details = await peer.ended()
    assert code is Code.FAILED_PRECONDITION
    assert "session 4, which must be higher than the present one, 4" in details


async def test_higher_session_of_the_same_scheduler_takes_over(start: Start) -> None:
    """The older stream ends with ABORTED at once; its queued op never runs; its running step's result goes nowhere."""
    runtime, stub = await start()
    old, new = Peer(stub), Peer(stub)
    await old.hello(session_no=1)
    runtime.executor.gate.clear()
    await old.send(op=prefill(1, 1, (5,), IDS))
    await old.send(op=decode(2, 1, 1, 3))
    await runtime.executor.until_entered()
    await within(runtime.until_queued(1))
    await new.say_hello(session_no=2)
    code, details = await old.ended()
    assert (code, details) == (Code.ABORTED, "session 2 took over from 1")
    runtime.executor.gate.set()
    assert (await new.read()).hello.page_size == PAGE_SIZE
    rows = await within(stub.ReadRows(runtime_pb2.ReadRowsRequest()))
    assert (rows.session_no, rows.rows) == (2, b"")
    await new.send(op=prefill(1, 1, (8,), IDS, session_no=2))
    assert await new.result() == [20]
    assert runtime.executor.num_executed == 2
    await new.no_more()


@pytest.mark.parametrize("session_no", [3, 2])
async def test_older_session_is_refused(start: Start, session_no: int) -> None:
    """An equal or lower number of the same scheduler is refused while its stream lives, and after it has ended."""
    _, stub = await start()
    present = Peer(stub)
    await present.hello(session_no=3)
    for _ in range(2):
        late = Peer(stub)
        await late.say_hello(session_no=session_no)
        code, details = await late.ended()
        assert code is Code.FAILED_PRECONDITION
        assert f"session {session_no} is not higher than" in details
        if not present.call.done():
            await present.no_more()


async def test_another_scheduler_waits_for_the_end_of_the_stream(start: Start) -> None:
    """A second scheduler is refused while the first one's stream is alive, which is not disturbed; afterwards it is served."""
    _, stub = await start()
    first, second = Peer(stub), Peer(stub)
    await first.hello()
    await first.send(op=prefill(1, 1, (5,), IDS))
    assert await first.result() == [20]
    await second.say_hello(epoch=EPOCH + 1, session_no=9)
    code, details = await second.ended()
    assert code is Code.FAILED_PRECONDITION
    assert "0x0000000000001234 is alive" in details
    await first.send(op=decode(2, 1, 1, 3))
    assert await first.result() == [104]
    await first.no_more()
    third = Peer(stub)
    await third.hello(epoch=EPOCH + 1)
    rows = await within(stub.ReadRows(runtime_pb2.ReadRowsRequest()))
    assert (rows.session_no, rows.last_step, rows.rows) == (1, 0, b"")


async def test_vanished_scheduler_frees_the_stream(start: Start) -> None:
    """A cancelled stream's running step finishes, its queued op is dropped, and the next scheduler is served."""
    runtime, stub = await start()
    gone = Peer(stub)
    await gone.hello()
    runtime.executor.gate.clear()
    await gone.send(op=prefill(1, 1, (5,), IDS))
    await gone.send(op=decode(2, 1, 1, 3))
    await runtime.executor.until_entered()
    await within(runtime.until_queued(1))
    gone.call.cancel()
    while True:
        # The runtime learns of the cancellation in its own time; until then it refuses.
        following = Peer(stub)
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
    await following.send(op=prefill(1, 1, (6,), IDS))
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
async def test_refused_hellos(start: Start, fields: dict[str, int], code: grpc.StatusCode, message: str) -> None:
    """A hello that does not fit ends its stream with both values, and does not end the stream that is there."""
    _, stub = await start()
    present, wrong = Peer(stub), Peer(stub)
    await present.hello()
    await wrong.say_hello(**({"session_no": 2} | fields))
    ended, details = await wrong.ended()
    assert ended is code
    assert message in details
    await present.send(op=prefill(1, 1, (5,), IDS))
    assert await present.result() == [20]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"reset": runtime_pb2.Reset(session_no=1)}, "first message must be a hello, it is reset"),
        ({"op": forward_pb2.ForwardOp()}, "it is op"),
        ({}, "it is empty"),
    ],
)
async def test_first_message_must_be_a_hello(start: Start, message: dict[str, Any], words: str) -> None:
    """Anything else as the first message is INVALID_ARGUMENT."""
    _, stub = await start()
    peer = Peer(stub)
    await peer.send(**message)
    code, details = await peer.ended()
    assert code is Code.INVALID_ARGUMENT
    assert words in details


async def test_stream_without_a_message(start: Start) -> None:
    """A stream that is closed at once is told why."""
    _, stub = await start()
    peer = Peer(stub)
    await peer.call.done_writing()
    assert await peer.ended() == (Code.INVALID_ARGUMENT, "the stream was closed before its hello")


@pytest.mark.parametrize(
    ("message", "words"), [({}, "no member set"), ({"hello": runtime_pb2.SchedulerHello(session_no=7)}, "a second hello")]
)
async def test_later_messages_are_ops_and_resets(start: Start, message: dict[str, Any], words: str) -> None:
    """An empty message and a second hello are INVALID_ARGUMENT."""
    _, stub = await start()
    peer = Peer(stub)
    await peer.hello()
    await peer.send(**message)
    code, details = await peer.ended()
    assert code is Code.INVALID_ARGUMENT
    assert words in details


async def test_heartbeats_come_while_a_step_runs(start: Start) -> None:
    """A step that takes long does not silence the runtime; each beat names the last applied step."""
    runtime, stub = await start(heartbeat_interval_s=0.02)
    peer = Peer(stub)
    await peer.hello()
    await peer.send(op=prefill(1, 1, (5,), IDS))
    while (response := await peer.read()).WhichOneof("message") != "result":
        assert response.heartbeat.last_step in {0, 1}
    await runtime.executor.until_entered()
    runtime.executor.gate.clear()
    await peer.send(op=decode(2, 1, 1, 3))
    await runtime.executor.until_entered()
    beats = [await peer.read() for _ in range(5)]
    assert [beat.WhichOneof("message") for beat in beats] == ["heartbeat"] * 5
    assert beats[-1].heartbeat.last_step == 1
    runtime.executor.gate.set()
    while (response := await peer.read()).WhichOneof("message") == "heartbeat":
        pass
    assert response.result.step == 2


async def test_read_rows(start: Start) -> None:
    """Rows are those between two ops, with the step they belong to; asking for nothing asks for every lease."""
    _, stub = await start()
    peer = Peer(stub)
    await peer.hello(session_no=6)
    await peer.send(op=prefill(1, 3, (5, 9), IDS, session_no=6, generation=4))
    await peer.send(op=prefill(2, 2, (7,), IDS, session_no=6))
    await peer.result()
    await peer.result()
    everything = await within(stub.ReadRows(runtime_pb2.ReadRowsRequest()))
    assert everything == runtime_pb2.ReadRowsResponse(
        session_no=6,
        last_step=2,
        rows=i32(2, 3),
        row_generations=i32(1, 4),
        row_lens=i32(1, 2),
        valid_lens=i32(1, 2),
        pages=i32(7, 5, 9),
    )
    chosen = await within(stub.ReadRows(runtime_pb2.ReadRowsRequest(rows=i32(3, 1))))
    assert (chosen.rows, chosen.row_generations, chosen.pages) == (i32(3, 1), i32(4, 0), i32(5, 9))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (i32(0), "row 0 is outside [1, 8]"),
        (i32(9), "row 9 is outside"),
        (b"123", "rows has 3 bytes"),
        (i32(*[1] * 9), "9 row numbers"),
    ],
)
async def test_read_rows_refuses_bad_numbers(start: Start, rows: bytes, words: str) -> None:
    """Row numbers out of range, unreadable ones and too many are INVALID_ARGUMENT."""
    _, stub = await start()
    with pytest.raises(aio.AioRpcError) as caught:
        await within(stub.ReadRows(runtime_pb2.ReadRowsRequest(rows=rows)))
    assert caught.value.code() is Code.INVALID_ARGUMENT
    assert words in (caught.value.details() or "")


async def test_flood_of_ops_is_answered_in_order(start: Start) -> None:
    """A peer that sends far more than its overlap depth is slowed down, not dropped, and gets every answer in order."""
    runtime, stub = await start()
    peer = Peer(stub)
    await peer.hello()
    count = 300
    runtime.executor.gate.clear()
    await peer.send(op=prefill(1, 1, (5,), (1,)))

    async def flood() -> None:
        for step in range(2, count):
            await peer.send(op=decode(step, 1, 1, 1, sample=b"\x02"))

    flooding = asyncio.create_task(flood())
    await runtime.executor.until_entered()
    runtime.executor.gate.set()
    assert await peer.result() == expected_tokens((1,), 1)
    answers = [await peer.refusal() for _ in range(2, count)]
    await flooding
    assert answers == [("MALFORMED", 2)] + [("SKIPPED", step) for step in range(3, count)]


async def test_calls_wait_until_the_model_is_warm(start: Start) -> None:
    """While the model loads the port answers and health says NOT_SERVING; the hello comes after warm-up."""
    # The port must be known before the runtime is ready, so this one listens on a socket.
    path = f"/tmp/pagemirror-test-{os.getpid()}-warm.sock"
    settings = load_settings(listen=f"unix:{path}", page_size=PAGE_SIZE, grace_s=0.2)
    runtime = Runtime(settings)
    runtime.executor.load_gate.clear()
    try:
        stub = await runtime.connect()
        assert runtime.channel is not None
        health = health_pb2_grpc.HealthStub(runtime.channel)
        request = health_pb2.HealthCheckRequest(service="pagemirror.v1.RuntimeService")
        status = await within(health.Check(request, wait_for_ready=True))
        assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING
        peer = Peer(stub)
        await peer.say_hello()
        reading = asyncio.ensure_future(peer.call.read())
        info = asyncio.ensure_future(stub.GetInfo(runtime_pb2.GetRuntimeInfoRequest()))
        await within(health.Check(request))
        assert not reading.done()
        assert not info.done()
        runtime.executor.load_gate.set()
        hello = await within(reading)
        assert isinstance(hello, runtime_pb2.ExecuteResponse)
        assert hello.hello == await within(info)
        assert (await within(health.Check(request))).status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await runtime.shut_down()
    assert not await asyncio.to_thread(os.path.exists, path)


async def test_shutdown_ends_streams_with_unavailable(start: Start) -> None:
    """Asked to stop with a step running, the runtime ends the stream first and does not wait for the step."""
    runtime, stub = await start()
    peer = Peer(stub)
    await peer.hello()
    runtime.executor.gate.clear()
    await peer.send(op=prefill(1, 1, (5,), IDS))
    await runtime.executor.until_entered()
    runtime.stop.set()
    assert await peer.ended() == (Code.UNAVAILABLE, "the runtime is shutting down")
    await within(asyncio.shield(runtime.task))


async def test_address_in_use_is_refused(start: Start, tmp_path: Path) -> None:
    """A second runtime on a taken port or socket fails before it loads a model, and the first goes on serving."""
    for listen in ("127.0.0.1:0", f"unix:{tmp_path}/r.sock"):
        first, stub = await start(listen=listen)
        address = (await within(first.ready)).split()[4]
        second = Runtime(load_settings(listen=address, page_size=PAGE_SIZE))
        with pytest.raises(AddressInUseError, match="cannot listen on"):
            await within(asyncio.shield(second.task))
        await second.shut_down()
        assert second.executor.num_executed == 0
        assert not second.ready.done()
        assert (await within(stub.GetInfo(runtime_pb2.GetRuntimeInfoRequest()))).page_size == PAGE_SIZE


async def test_dead_socket_is_replaced(start: Start, tmp_path: Path) -> None:
    """A socket that nobody serves any more does not keep the next runtime from starting."""
    path = tmp_path / "r.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    _, stub = await start(listen=f"unix:{path}")
    assert (await within(stub.GetInfo(runtime_pb2.GetRuntimeInfoRequest(), wait_for_ready=True))).page_size == PAGE_SIZE


async def test_model_that_cannot_be_loaded_ends_the_process(start: Start) -> None:
    """What loading raises ends `serve`, and calls that waited for the model get UNAVAILABLE."""
    listen = f"unix:/tmp/pagemirror-test-{os.getpid()}-load.sock"
    runtime = Runtime(load_settings(listen=listen, page_size=PAGE_SIZE, grace_s=0.2))
    runtime.executor.load_gate.clear()
    runtime.executor.warm_up = _fail_to_warm_up(runtime.executor)  # type: ignore[method-assign]
    stub = await runtime.connect()
    info = asyncio.ensure_future(stub.GetInfo(runtime_pb2.GetRuntimeInfoRequest(), wait_for_ready=True))
    assert runtime.channel is not None
    health = health_pb2_grpc.HealthStub(runtime.channel)
    await within(health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True))
    runtime.executor.load_gate.set()
    with pytest.raises(RuntimeError, match="no such weights"):
        await within(asyncio.shield(runtime.task))
    with pytest.raises(aio.AioRpcError) as caught:
        await within(info)
    assert caught.value.code() is Code.UNAVAILABLE
    await runtime.shut_down()


def _fail_to_warm_up(executor: GatedExecutor) -> Callable[[], None]:
    def fail() -> None:
        assert executor.load_gate.wait(WAIT_S)
        raise RuntimeError("no such weights")

    return fail
