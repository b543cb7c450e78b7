"""The scheduler's process with a gateway's port: its readiness line, both ports, and an orderly end with calls open on it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from scheduler_service.client import Client

RUNTIME_READY = re.compile(r"pagemirror runtime ready on (\S+)")
READY = re.compile(r"pagemirror ready on (\S+) \(model fingerprint; vllm on (\S+)\)\n$")
LIMIT_S = 60.0


def request(max_tokens: int) -> vllm_engine_pb2.GenerateRequest:
    """A greedy stream of the prompt 1, 2, 3."""
    return vllm_engine_pb2.GenerateRequest(
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[1, 2, 3]),
        sampling_params=vllm_engine_pb2.SamplingParams(temperature=0, max_tokens=max_tokens),
        stream=True,
    )


async def read_all(call: Any) -> None:
    """A stream to its end, whose status comes behind what is unread."""
    async for _ in call:
        pass


async def test_gateway_port_of_a_scheduler_process(
    commands: Any, continuation: Callable[[list[int], int], list[int]], child_env: dict[str, str], short_tmp: Path
) -> None:
    """Both ports answer with the same tokens; after SIGTERM a running stream comes to its end, and listeners are let go."""
    env = child_env | {"TMPDIR": str(short_tmp)}
    runtime = ["runtime", "--listen", f"unix:{short_tmp}/r.sock", "--model", "fingerprint", "--num-pages", "600"]
    scheduler = ["scheduler", "--runtime", f"unix:{short_tmp}/r.sock", "--listen", "127.0.0.1:0", "--heartbeat-timeout", "30"]
    gateway = ["--gateway-listen", f"unix:{short_tmp}/g.sock", "--api", "vllm"]
    async with contextlib.AsyncExitStack() as stack:
        _, served = await asyncio.gather(  # the scheduler waits for the runtime
            stack.enter_async_context(commands.serving(runtime, env, short_tmp / "runtime.log", RUNTIME_READY)),
            stack.enter_async_context(commands.serving([*scheduler, *gateway], env, short_tmp / "log", READY)),
        )
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"unix:{short_tmp}/g.sock"))
        await stack.enter_async_context(asyncio.timeout(LIMIT_S))
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        async with Client(served.target) as client:
            tokens = [token async for piece in client.generate([1, 2, 3], max_tokens=6) for token in piece.tokens]
        answers = [message async for message in stub.Generate(request(6))]
        assert list(answers[-1].complete.output_ids) == tokens == continuation([1, 2, 3], 6)

        listening = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        await listening.initial_metadata()
        running = aiter(stub.Generate(request(500)))
        await anext(running)
        served.process.send_signal(signal.SIGTERM)
        answers = [message async for message in running]
        assert list(answers[-1].complete.output_ids) == continuation([1, 2, 3], 500)
        assert await served.end() == 0, served.errors.read_text()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(listening)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
