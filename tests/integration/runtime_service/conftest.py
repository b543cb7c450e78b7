"""A runtime served in this process with a model that can be held, and a peer that speaks the stream message by message."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from grpc import aio

from pagemirror.v1 import forward_pb2, runtime_pb2, runtime_pb2_grpc
from runtime_service.app import serve
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

    def __init__(self, settings: RuntimeSettings, *, short_steps: bool = False) -> None:
        super().__init__(num_pages=64, page_size=settings.page_size, short_steps=short_steps)
        self.threads: list[int] = []
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
        self.threads.append(threading.get_ident())
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

    def __init__(self, settings: RuntimeSettings, *, short_steps: bool = False) -> None:
        self.settings = settings
        self.executor = GatedExecutor(settings, short_steps=short_steps)
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

    async def begin(*, short_steps: bool = False, **given: Any) -> tuple[Runtime, runtime_pb2_grpc.RuntimeServiceAsyncStub]:
        given = {
            "listen": "127.0.0.1:0",
            "page_size": PAGE_SIZE,
            "max_rows": 8,
            "heartbeat_interval_s": 30.0,
            "grace_s": 0.2,
        } | given
        runtime = Runtime(load_settings(**given), short_steps=short_steps)
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


class Ops:
    """Ops of one row."""

    @staticmethod
    def prefill(
        step: int,
        row: int,
        pages: tuple[int, ...],
        ids: tuple[int, ...],
        *,
        session_no: int = 1,
        generation: int = 1,
        **more: Any,
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

    @staticmethod
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


@pytest.fixture
def make_runtime() -> Callable[[RuntimeSettings], Runtime]:
    """A runtime that the test connects to and shuts down itself."""
    return Runtime


@pytest.fixture
def connect() -> Callable[[runtime_pb2_grpc.RuntimeServiceAsyncStub], Peer]:
    """Opens one `Execute` stream."""
    return Peer


@pytest.fixture
def ops() -> type[Ops]:
    """How ops are written."""
    return Ops


@pytest.fixture(name="within")
def within_limit() -> Callable[[Awaitable[T]], Awaitable[T]]:
    """Awaits what must come in time."""
    return within
