"""The runtime's server from its start to its end: loading, addresses, shutdown."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagemirror.v1 import runtime_pb2
from runtime_service.errors import AddressInUseError
from runtime_service.settings import load_settings

Code = grpc.StatusCode
Start = Callable[..., Awaitable[Any]]
Connect = Callable[..., Any]
Within = Callable[..., Awaitable[Any]]
MakeRuntime = Callable[..., Any]

WAIT_S = 20.0
PAGE_SIZE = 4
IDS = (1, 2, 3)


async def test_calls_wait_until_the_model_is_warm(
    make_runtime: MakeRuntime, connect: Connect, within: Within, start: Start
) -> None:
    """While the model loads the port answers and health says NOT_SERVING; the hello comes after warm-up."""
    # The port must be known before the runtime is ready, so this one listens on a socket.
    path = f"/tmp/pagemirror-test-{os.getpid()}-warm.sock"
    settings = load_settings(listen=f"unix:{path}", page_size=PAGE_SIZE, grace_s=0.2)
    runtime = make_runtime(settings)
    runtime.executor.load_gate.clear()
    try:
        stub = await runtime.connect()
        assert runtime.channel is not None
        health = health_pb2_grpc.HealthStub(runtime.channel)
        request = health_pb2.HealthCheckRequest(service="pagemirror.v1.RuntimeService")
        status = await within(health.Check(request, wait_for_ready=True))
        assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING
        peer = connect(stub)
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


async def test_shutdown_ends_streams_with_unavailable(connect: Connect, ops: Any, within: Within, start: Start) -> None:
    """Asked to stop with a step running, the runtime ends the stream first and does not wait for the step."""
    runtime, stub = await start()
    peer = connect(stub)
    await peer.hello()
    runtime.executor.gate.clear()
    await peer.send(op=ops.prefill(1, 1, (5,), IDS))
    await runtime.executor.until_entered()
    runtime.stop.set()
    assert await peer.ended() == (Code.UNAVAILABLE, "the runtime is shutting down")
    await within(asyncio.shield(runtime.task))


async def test_address_in_use_is_refused(make_runtime: MakeRuntime, within: Within, start: Start, tmp_path: Path) -> None:
    """A second runtime on a taken port or socket fails before it loads a model, and the first goes on serving."""
    for listen in ("127.0.0.1:0", f"unix:{tmp_path}/r.sock"):
        first, stub = await start(listen=listen)
        address = (await within(first.ready)).split()[4]
        second = make_runtime(load_settings(listen=address, page_size=PAGE_SIZE))
        with pytest.raises(AddressInUseError, match="cannot listen on"):
            await within(asyncio.shield(second.task))
        await second.shut_down()
        assert second.executor.num_executed == 0
        assert not second.ready.done()
        assert (await within(stub.GetInfo(runtime_pb2.GetRuntimeInfoRequest()))).page_size == PAGE_SIZE


async def test_dead_socket_is_replaced(within: Within, start: Start, tmp_path: Path) -> None:
    """A socket that nobody serves any more does not keep the next runtime from starting."""
    path = tmp_path / "r.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    _, stub = await start(listen=f"unix:{path}")
    assert (await within(stub.GetInfo(runtime_pb2.GetRuntimeInfoRequest(), wait_for_ready=True))).page_size == PAGE_SIZE


async def test_model_that_cannot_be_loaded_ends_the_process(make_runtime: MakeRuntime, within: Within, start: Start) -> None:
    """What loading raises ends `serve`, and calls that waited for the model get UNAVAILABLE."""
    listen = f"unix:/tmp/pagemirror-test-{os.getpid()}-load.sock"
    runtime = make_runtime(load_settings(listen=listen, page_size=PAGE_SIZE, grace_s=0.2))
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


def _fail_to_warm_up(executor: Any) -> Callable[[], None]:
    def fail() -> None:
        assert executor.load_gate.wait(WAIT_S)
        raise RuntimeError("no such weights")

    return fail
