"""A runtime and an engine in this process behind real loopback servers, and peers that speak the stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from grpc import aio

from pagemirror.v1 import forward_pb2, runtime_pb2, runtime_pb2_grpc
from runtime_service import app as runtime_app
from runtime_service.execution import ExecutionThread
from runtime_service.executors.fingerprint import FingerprintExecutor
from runtime_service.settings import load_settings as load_runtime_settings
from scheduler_service.channels import CLIENT_OPTIONS, SERVER_OPTIONS, bind
from scheduler_service.engine_loop import EngineLoop
from scheduler_service.settings import SchedulerSettings

LIMIT_S = 60.0


def i32(*values: int) -> bytes:
    """Values as an int32 column."""
    return np.array(values, "<i4").tobytes()


def op_of(
    step: int,
    pages: Sequence[int],
    ids: Sequence[int] = (),
    *,
    row: int = 1,
    begin: int | None = None,
    computed: int = 0,
    session_no: int = 1,
    **more: Any,
) -> forward_pb2.ForwardOp:
    """An op of one row: with ids the first of a lease and whole, without ids a decode step that sends pages from `begin` on."""
    first = bool(ids)
    begin = 0 if first else len(pages) if begin is None else begin
    columns: dict[str, Any] = {
        "session_no": session_no,
        "step": step,
        "req_pool_indices": i32(row),
        "row_generations": i32(1),
        "row_lens": i32(len(pages)),
        "begins": i32(begin),
        "sizes": i32(len(pages) - begin),
        "full_refresh": bytes([first]),
        "occupied_pages": i32(*pages[begin:]),
        "num_computed": i32(computed),
        "num_extend_rows": int(first),
        "input_lens": i32(len(ids) or 1),
        "input_ids": i32(*ids),
        "sample": b"\x01",
        "lease_starts": [forward_pb2.LeaseStart(req_pool_index=row, request_id=f"request-{row}")] if first else [],
    }
    return forward_pb2.ForwardOp(**(columns | more))


class Peer:
    """One `Execute` stream, driven message by message."""

    def __init__(self, channel: aio.Channel) -> None:
        self.stub = runtime_pb2_grpc.RuntimeServiceStub(channel)
        self.call = self.stub.Execute()

    async def send(self, **message: Any) -> None:
        """Write one ExecuteRequest."""
        await asyncio.wait_for(self.call.write(runtime_pb2.ExecuteRequest(**message)), LIMIT_S)

    async def hello(self, session_no: int = 1, epoch: int = 0x1234, **more: Any) -> runtime_pb2.RuntimeInfo:
        """Say hello and read the runtime's."""
        fields = {"protocol_version": 1, "scheduler_epoch": epoch, "session_no": session_no, "overlap_depth": 2}
        await self.send(hello=runtime_pb2.SchedulerHello(**(fields | more)))
        return (await self.read()).hello

    async def read(self) -> runtime_pb2.ExecuteResponse:
        """The next message that is no heartbeat, which must come."""
        while True:
            response = await asyncio.wait_for(self.call.read(), LIMIT_S)
            assert isinstance(response, runtime_pb2.ExecuteResponse), response
            if response.WhichOneof("message") != "heartbeat":
                return response

    async def answer(self) -> tuple[int, str | list[int]]:
        """Step and tokens of the next result, or step and code of the next refusal."""
        response = await self.read()
        if response.WhichOneof("message") == "result":
            return response.result.step, np.frombuffer(response.result.tokens, "<i4").tolist()
        assert response.WhichOneof("message") == "refusal", response
        code = runtime_pb2.RefusalCode.Name(response.refusal.code).removeprefix("REFUSAL_CODE_")
        return response.refusal.step, code

    async def reset(self, session_no: int) -> None:
        """Begin a new session on this stream."""
        await self.send(reset=runtime_pb2.Reset(session_no=session_no))
        assert (await self.read()).reset_done.session_no == session_no

    async def rows(self) -> list[list[int]]:
        """The valid part of every row that has a lease."""
        response = await self.stub.ReadRows(runtime_pb2.ReadRowsRequest(), timeout=LIMIT_S)
        pages = np.frombuffer(response.pages, "<i4").tolist()
        return [[pages.pop(0) for _ in range(count)] for count in np.frombuffer(response.valid_lens, "<i4").tolist()]


class Relay(runtime_pb2_grpc.RuntimeServiceServicer):
    """Stands between an engine and a runtime, message by message.

    `fault(n)` says what becomes of the n-th op: "" (it passes), lose, repeat or swap. `change` may change a response.
    """

    def __init__(
        self,
        target: str,
        fault: Callable[[int], str] = lambda number: "",
        change: Callable[[runtime_pb2.ExecuteResponse], None] = lambda response: None,
        delay_s: float = 0.0,
    ) -> None:
        self.ops: list[bytes] = []
        """Every op as its sender wrote it."""
        self._fault, self._change, self._delay_s = fault, change, delay_s
        self._channel = aio.insecure_channel(target, options=CLIENT_OPTIONS)
        self._stub = runtime_pb2_grpc.RuntimeServiceStub(self._channel)

    @property
    def steps(self) -> list[tuple[int, int]]:
        """Session and step of every op."""
        messages = map(forward_pb2.ForwardOp.FromString, self.ops)
        return [(message.session_no, message.step) for message in messages]

    async def GetInfo(self, request: Any, context: Any) -> Any:
        return await self._stub.GetInfo(request)

    async def Execute(self, requests: Any, context: Any) -> None:
        upstream = self._stub.Execute()
        forwarding = asyncio.create_task(self._forward(requests, upstream))
        try:
            async for response in upstream:
                self._change(response)
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                await context.write(response)
        finally:
            forwarding.cancel()
            upstream.cancel()

    async def _forward(self, requests: Any, upstream: Any) -> None:
        held = None
        async for request in requests:
            fault = ""
            if request.WhichOneof("message") == "op":
                self.ops.append(request.op.SerializeToString())
                fault = self._fault(len(self.ops))
            if fault == "swap":
                held = request
                continue
            if fault != "lose":
                await upstream.write(request)
            if fault == "repeat":
                await upstream.write(request)
            if held is not None:
                await upstream.write(held)
                held = None
        await upstream.done_writing()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Serve; yields the address."""
        server = aio.server(options=SERVER_OPTIONS)
        runtime_pb2_grpc.add_RuntimeServiceServicer_to_server(self, server)
        address = bind(server, "127.0.0.1:0")
        await server.start()
        try:
            yield address
        finally:
            await server.stop(0)
            await self._channel.close()


@dataclass
class LocalRuntime:
    """A runtime in this process behind a real loopback server."""

    address: str
    executor: FingerprintExecutor


class Stream:
    """What the cases about the stream share."""

    op, i32 = staticmethod(op_of), staticmethod(i32)
    Peer, Relay = Peer, Relay

    @staticmethod
    @contextlib.asynccontextmanager
    async def runtime(*, waits: bool = False, **given: Any) -> AsyncIterator[LocalRuntime]:
        """A runtime of the fingerprint model; other keyword arguments are its settings.

        `waits`: its steps will be made to wait, so they are not announced as short ones, which run in the event loop.
        """
        defaults = {"listen": "127.0.0.1:0", "page_size": 4, "max_rows": 8, "num_pages": 64, "max_pages_per_row": 16}
        settings = load_runtime_settings(**(defaults | {"heartbeat_interval_s": 0.2, "grace_s": 0.2} | given))
        thread, stop = ExecutionThread(), asyncio.Event()
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        made: list[Any] = []

        def create(settings: Any) -> Any:
            executor, capacity = runtime_app.create_executor(settings)
            if waits:
                executor = FingerprintExecutor(capacity.num_pages, settings.page_size)
            made.append((executor, capacity))
            return made[-1]

        task = asyncio.create_task(runtime_app.serve(settings, thread, stop=stop, create=create, announce=ready.set_result))
        try:
            await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED, timeout=LIMIT_S)
            yield LocalRuntime((await ready).split()[4], made[0][0])
        finally:
            stop.set()
            await asyncio.wait({task}, timeout=LIMIT_S)
            assert await asyncio.to_thread(thread.join, LIMIT_S)
        assert made[0][0].violations == []

    @staticmethod
    @contextlib.asynccontextmanager
    async def engine(address: str, **settings: Any) -> AsyncIterator[EngineLoop]:
        """A started engine in this process, audited after every step."""
        defaults = {"heartbeat_timeout": 30.0, "step_timeout": 60.0, "startup_timeout": LIMIT_S, "check": True}
        engine = EngineLoop(SchedulerSettings(runtime=address, **(defaults | settings)))
        try:
            async with asyncio.timeout(LIMIT_S):
                await engine.start()
            yield engine
        finally:
            await engine.stop()
        assert not engine.failed.is_set()

    @staticmethod
    async def collect(subscription: Any, tokens: list[int] | None = None) -> list[int]:
        """All tokens of a request of an engine; raises what ended it."""
        tokens = [] if tokens is None else tokens
        async with asyncio.timeout(LIMIT_S):
            while True:
                tokens += await subscription.take()
                if subscription.finished:
                    if subscription.error:
                        raise subscription.error
                    return tokens


@pytest.fixture(scope="session")
def stream() -> type[Stream]:
    """Servers in this process, and peers."""
    return Stream
