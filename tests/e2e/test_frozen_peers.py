"""A runtime in a process of its own, and peers that fall silent: stopped processes, and connections open on one end only.

The runtime asks a silent scheduler after half a second whether it is there; the engines here give a silent runtime a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc import aio

from pagemirror.v1 import forward_pb2, runtime_pb2, runtime_pb2_grpc
from scheduler_service.client import Client
from scheduler_service.engine_loop import EngineLoop, SubmitOptions
from scheduler_service.row_report import report_rows
from scheduler_service.settings import SchedulerSettings

Continuation = Callable[[list[int], int], list[int]]

LIMIT_S = 60.0
NOTICE_S = 1.0
CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))


class Runtime:
    """A runtime process, which can be stopped where it is: it keeps everything then, its connections too."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.address = address
        self.stop = lambda: process.send_signal(signal.SIGSTOP)
        self.go_on = lambda: process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def runtime(child_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """One runtime for all these tests: none of them ends it."""
    command = [sys.executable, "-m", "runtime_service", "--listen", "127.0.0.1:0", "--page-size", "4", "--num-pages", "256"]
    command += ["--keepalive-s", "0.5", "--heartbeat-interval-s", "0.1", "--grace-s", "0.2"]
    with (tmp_path_factory.mktemp("runtime") / "log").open("wb") as log:
        process = subprocess.Popen(command, env=child_env, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    yield Runtime(process, process.stdout.readline().decode().split()[4])
    process.send_signal(signal.SIGCONT)
    process.terminate()
    assert process.wait(LIMIT_S) == 0
    process.stdout.close()


class Line:
    """A TCP relay whose connections can fall silent without an end."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.num_chunks = 0
        """Pieces that came from the runtime."""
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def to(self, target: str) -> AsyncIterator[str]:
        """Relay to the target; yields the address to dial."""
        self._server = await asyncio.start_server(lambda reader, writer: self._accept(target, reader, writer), "127.0.0.1", 0)
        writers: list[asyncio.StreamWriter] = []
        self._writers = writers
        try:
            yield f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        finally:
            self._server.close()
            self.fall_silent()
            for writer in writers:
                writer.close()

    def fall_silent(self) -> None:
        """Forward nothing on the present connections any more; both ends believe that they are open. New ones work."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    def refuse(self) -> None:
        """Take no new connections."""
        self._server.close()

    def _accept(self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.append(writer)
        self._tasks.add(asyncio.create_task(self._relay(target, reader, writer)))

    async def _relay(self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = target.rpartition(":")
        from_runtime, to_runtime = await asyncio.open_connection(host, int(port))
        self._writers.append(to_runtime)
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(self._copy(reader, to_runtime), self._copy(from_runtime, writer, count=True))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, count: bool = False) -> None:
        while data := await reader.read(65536):
            self.num_chunks += count
            writer.write(data)
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def engine_on(address: str, **settings: Any) -> AsyncIterator[EngineLoop]:
    """A started engine whose invariants are audited after every step."""
    values = {"heartbeat_timeout": NOTICE_S, "startup_timeout": LIMIT_S, "check": True}
    engine = EngineLoop(SchedulerSettings(runtime=address, **(values | settings)))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()
    assert not engine.failed.is_set()


async def tokens_of(engine: EngineLoop, name: str, prompt: list[int], count: int) -> list[int]:
    """One request, start to end."""
    subscription = engine.submit(name, np.array(prompt, np.int32), SubmitOptions(max_tokens=count))
    tokens: list[int] = []
    async with asyncio.timeout(LIMIT_S):
        while not subscription.finished:
            tokens += await subscription.take()
    assert subscription.error is None
    return tokens


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop turn until the condition holds."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


# Stopped processes


def op(session_no: int, step: int, **columns: Any) -> runtime_pb2.ExecuteRequest:
    """An op of row 1, which begins a lease where `ids` are given and else decodes one token."""
    ids, generation, computed = columns.pop("ids", []), columns["generation"], columns.get("computed", 0)
    message = forward_pb2.ForwardOp(
        session_no=session_no,
        step=step,
        req_pool_indices=_i32(1),
        row_generations=_i32(generation),
        row_lens=_i32(2),
        begins=_i32(0 if ids else 2),
        sizes=_i32(2 if ids else 0),
        full_refresh=bytes([bool(ids)]),
        occupied_pages=_i32(*columns["pages"]) if ids else b"",
        num_computed=_i32(computed),
        num_extend_rows=int(bool(ids)),
        input_lens=_i32(len(ids) or 1),
        input_ids=_i32(*ids),
        sample=b"\x01",
        lease_starts=[forward_pb2.LeaseStart(req_pool_index=1, request_id="a")] if ids else [],
    )
    return runtime_pb2.ExecuteRequest(op=message)


def _i32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


async def test_ops_that_wait_in_a_stopped_runtime_die_with_their_session(runtime: Runtime) -> None:
    """Ops are on their way when the runtime stops; it wakes up to a newer session, which none of them touches any more."""

    def hello(session_no: int) -> runtime_pb2.ExecuteRequest:
        greeting = runtime_pb2.SchedulerHello(protocol_version=1, scheduler_epoch=77, session_no=session_no, overlap_depth=2)
        return runtime_pb2.ExecuteRequest(hello=greeting)

    async def answer(call: Any) -> runtime_pb2.ExecuteResponse:
        async with asyncio.timeout(LIMIT_S):
            while (response := await call.read()) is not aio.EOF:
                if response.WhichOneof("message") != "heartbeat":
                    return response
        raise AssertionError("the stream is over")

    async with contextlib.AsyncExitStack() as stack:
        channels = [aio.insecure_channel(runtime.address, options=CHANNEL_OPTIONS) for _ in range(2)]
        stubs = [runtime_pb2_grpc.RuntimeServiceStub(await stack.enter_async_context(channel)) for channel in channels]
        old, new = (stub.Execute() for stub in stubs)
        await old.write(hello(1))
        assert (await answer(old)).WhichOneof("message") == "hello"
        await old.write(op(1, 1, generation=1, pages=(1, 2), ids=[1, 2, 3]))
        assert (await answer(old)).result.tokens == _i32(20)
        runtime.stop()
        try:
            # The first one is right, the second one would be refused, the third one gives the row away.
            await old.write(op(1, 2, generation=1, computed=3))
            await old.write(op(1, 3, generation=1, computed=9))
            await old.write(op(1, 4, generation=2, pages=(9, 8), ids=[5, 5, 5]))
            greeting = asyncio.create_task(new.write(hello(2)))
            await asyncio.wait({greeting}, timeout=0.05)
        finally:
            runtime.go_on()
        await greeting
        assert (await answer(new)).WhichOneof("message") == "hello"
        rows = await stubs[1].ReadRows(runtime_pb2.ReadRowsRequest(), timeout=LIMIT_S)
        assert (rows.session_no, rows.last_step, rows.rows) == (2, 0, b"")
        await new.write(op(2, 1, generation=1, pages=(4, 3), ids=[1, 2, 3]))
        assert (await answer(new)).result.tokens == _i32(20)
        # The old stream is over, and none of its answers is to an op that came after the take-over.
        responses = [response async for response in _to_the_end(old)]
        assert len(responses) <= 3
        assert (await old.code()).name == "ABORTED"
        for step, token in ((2, 104), (3, 629), (4, 421)):
            await new.write(op(2, step, generation=1, computed=step + 1))
            assert (await answer(new)).result.tokens == _i32(token)
        rows = await stubs[1].ReadRows(runtime_pb2.ReadRowsRequest(), timeout=LIMIT_S)
        assert (rows.session_no, rows.last_step, rows.rows, rows.pages) == (2, 4, _i32(1), _i32(4, 3))
        for call in (old, new):
            call.cancel()


async def _to_the_end(call: Any) -> AsyncIterator[runtime_pb2.ExecuteResponse]:
    with contextlib.suppress(aio.AioRpcError):
        async with asyncio.timeout(LIMIT_S):
            while (response := await call.read()) is not aio.EOF:
                if response.WhichOneof("message") != "heartbeat":
                    yield response


async def test_stopped_runtime_loses_nothing(runtime: Runtime, continuation: Continuation) -> None:
    """Stopped in the middle of a generation and noticed by its silence, the runtime goes on in a new session, exactly."""
    async with engine_on(runtime.address, overlap_depth=2) as engine:
        request = asyncio.create_task(tokens_of(engine, "a", [1, 2, 3], 200))
        await until(lambda: engine.num_steps > 3)
        runtime.stop()
        try:
            await until(lambda: not engine.connection.connected)
            assert "no sign of life" in engine.connection.trouble
        finally:
            runtime.go_on()
        assert await request == continuation([1, 2, 3], 200)
        assert engine.connection.session_no > 1
        report = await report_rows(engine, LIMIT_S)
        assert all(pair.equal for pair in report.rows)


async def test_stopped_scheduler_is_succeeded_and_never_heard_again(
    runtime: Runtime, continuation: Continuation, commands: Any, child_env: dict[str, str], tmp_path: Path
) -> None:
    """A scheduler process is stopped, its runtime taken over; awake, it disturbs nobody, waits, and then finishes exactly."""
    first = ["scheduler", "--runtime", runtime.address, "--listen", "127.0.0.1:0", "--heartbeat-timeout", "1"]
    async with commands.serving([*first, "--overlap-depth", "2"], child_env, tmp_path / "log") as served:
        async with Client(served.target) as client:
            pieces = client.generate([1, 2, 3], max_tokens=400)
            tokens = (await anext(pieces)).tokens
            while not tokens:
                tokens = (await anext(pieces)).tokens
            served.process.send_signal(signal.SIGSTOP)
            try:
                async with engine_on(runtime.address, overlap_depth=2) as engine:
                    assert await tokens_of(engine, "b", [4, 5, 6], 30) == continuation([4, 5, 6], 30)
                    running = asyncio.create_task(tokens_of(engine, "c", [7, 8], 300))
                    served.process.send_signal(signal.SIGCONT)
                    await until(lambda: "is alive" in (tmp_path / "log").read_text())
                    report = await report_rows(engine, LIMIT_S)
                    assert [pair.equal for pair in report.rows] == [True] * len(report.rows)
                    assert await running == continuation([7, 8], 300)
                    assert await tokens_of(engine, "d", [9], 30) == continuation([9], 30)
                    assert (engine.connection.session_no, engine.connection.trouble) == (engine.core.session_no, "")
            finally:
                served.process.send_signal(signal.SIGCONT)
            async with asyncio.timeout(LIMIT_S):
                async for piece in pieces:
                    tokens += piece.tokens
        assert tokens == continuation([1, 2, 3], 400)


# Connections


async def test_half_open_connection_is_noticed_by_the_scheduler(runtime: Runtime, continuation: Continuation) -> None:
    """Nothing comes through any more and nothing says so: after the heartbeat limit a new connection replaces the old one."""
    line = Line()
    async with line.to(runtime.address) as address, engine_on(address) as engine:
        request = asyncio.create_task(tokens_of(engine, "a", [1, 2, 3], 200))
        await until(lambda: engine.num_steps > 3)
        began = asyncio.get_running_loop().time()
        line.fall_silent()
        await until(lambda: engine.connection.session_no > 1)
        assert asyncio.get_running_loop().time() - began >= NOTICE_S * 0.75
        assert "no sign of life" in engine.connection.trouble
        assert await request == continuation([1, 2, 3], 200)
        assert line.num_connections >= 2


async def test_half_open_connection_is_noticed_by_the_runtime(runtime: Runtime, continuation: Continuation) -> None:
    """A scheduler that can be reached no more keeps the runtime from the next one until keepalive has found out."""
    line = Line()
    async with line.to(runtime.address) as address, engine_on(address, runtime_timeout=LIMIT_S) as gone:
        assert await tokens_of(gone, "a", [1, 2, 3], 3) == [20, 104, 629]
        line.fall_silent()
        line.refuse()
        async with engine_on(runtime.address, startup_timeout=30.0) as engine:
            assert await tokens_of(engine, "b", [4, 5, 6], 30) == continuation([4, 5, 6], 30)


async def test_idle_stream_survives_keepalive(runtime: Runtime) -> None:
    """Through three seconds of heartbeats and pings, and no op, the connection and the session stay the same."""
    line = Line()
    async with line.to(runtime.address) as address, engine_on(address) as engine:
        assert await tokens_of(engine, "a", [1, 2, 3], 3) == [20, 104, 629]
        num_chunks = line.num_chunks
        await until(lambda: line.num_chunks > num_chunks + 30)
        assert await tokens_of(engine, "b", [1, 2, 3], 3) == [20, 104, 629]
        assert line.num_connections == 1
        assert engine.connection.trouble == ""
