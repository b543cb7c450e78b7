"""The runtime as a process: what it prints, how it ends, and what it says when it cannot begin."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc
import pytest
from grpc import aio

from pagemirror.v1 import runtime_pb2, runtime_pb2_grpc

T = TypeVar("T")

WAIT_S = 60.0
CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0),)

Spawn = Callable[..., Awaitable[asyncio.subprocess.Process]]


async def within(what: Awaitable[T]) -> T:
    """The value of `what`, or a failure when it takes too long."""
    return await asyncio.wait_for(what, WAIT_S)


@pytest.fixture
async def spawn(child_env: dict[str, str]) -> AsyncIterator[Spawn]:
    """Starts processes of the test interpreter; kills what is left of them."""
    processes: list[asyncio.subprocess.Process] = []

    async def begin(*arguments: str) -> asyncio.subprocess.Process:
        pipe = subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, env=child_env, stdin=pipe, stdout=pipe, stderr=pipe
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


RUNTIME = ("-m", "runtime_service", "--grace-s", "0.2")


async def first_line(process: asyncio.subprocess.Process) -> str:
    """The first line on stdout."""
    assert process.stdout is not None
    return (await within(process.stdout.readline())).decode()


async def test_process_life(spawn: Spawn) -> None:
    """One readiness line, service, and exit 0 on SIGTERM after UNAVAILABLE."""
    process = await spawn(*RUNTIME, "--listen", "127.0.0.1:0", "--page-size", "4", "--max-rows", "3")
    line = await first_line(process)
    address = line.split()[4]
    facts = "(model fingerprint, device cpu, dtype int32, page_size 4, num_pages 4096, max_rows 3)"
    assert line == f"pagemirror runtime ready on {address} {facts}\n"
    async with aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        call = runtime_pb2_grpc.RuntimeServiceStub(channel).Execute()
        hello = runtime_pb2.SchedulerHello(protocol_version=1, scheduler_epoch=1, session_no=1)
        await within(call.write(runtime_pb2.ExecuteRequest(hello=hello)))
        answer = await within(call.read())
        assert isinstance(answer, runtime_pb2.ExecuteResponse)
        assert answer.hello.max_rows == 3
        process.send_signal(signal.SIGTERM)
        assert await within(call.code()) is grpc.StatusCode.UNAVAILABLE
    assert await within(process.wait()) == 0


async def test_process_ends_with_its_parent(spawn: Spawn) -> None:
    """With --exit-with-parent the runtime ends when that process does, without a signal of its own."""
    parent = await spawn("-c", "input()")
    process = await spawn(*RUNTIME, "--listen", "127.0.0.1:0", "--exit-with-parent", str(parent.pid))
    assert "ready on" in await first_line(process)
    parent.kill()
    await parent.wait()
    assert await within(process.wait()) == 0


async def test_unknown_model_ends_the_process(spawn: Spawn) -> None:
    """A model that is not there: exit 1, one line on stderr that names it, nothing on stdout."""
    process = await spawn(*RUNTIME, "--listen", "127.0.0.1:0", "--model", "no/such/model", "--log-level", "error")
    output, errors = await within(process.communicate())
    assert (process.returncode, output) == (1, b"")
    expected = "error: --model: no/such/model is neither 'fingerprint' nor 'tiny' nor the path of an existing directory\n"
    assert errors.decode() == expected
