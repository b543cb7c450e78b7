"""Everything that a client can make grow: the last value that is allowed, and the first that is not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagemirror.v1 import forward_pb2, generation_pb2, generation_pb2_grpc
from scheduler_service import generation_servicer
from scheduler_service.call_gate import MAX_CHECKS, MAX_OTHER_CALLS
from scheduler_service.channels import open_channel
from scheduler_service.columns import int32_to_bytes
from scheduler_service.core.parameters import MAX_BIAS_ENTRIES, MAX_STOP_IDS

Code = grpc.StatusCode
Serving = Callable[..., Any]
CHECK = "/grpc.health.v1.Health/Check"
GENERATE = "/pagemirror.v1.GenerationService/Generate"


def small(**fields: Any) -> generation_pb2.GenerateRequest:
    """A request of three prompt tokens and one more."""
    return generation_pb2.GenerateRequest(**{"prompt": int32_to_bytes([1, 2, 3]), "max_tokens": 1} | fields)


async def outcome(call: Any) -> tuple[grpc.StatusCode, str]:
    """Status and message of a call, whatever it answers."""
    async with asyncio.timeout(60):
        with contextlib.suppress(aio.AioRpcError):
            while isinstance(call, aio.UnaryStreamCall) and await call.read() is not aio.EOF:
                pass
        return await call.code(), await call.details()


async def test_calls_at_a_time(serving: Serving, until: Callable[..., Any]) -> None:
    """As many as the limit run, one more is refused and changes nothing, health answers meanwhile, and an end makes room."""
    async with serving(max_streams=3) as served, served.client() as client:
        streams = [client.generate([1, 2, n], max_tokens=400, request_id=f"r{n}") for n in range(3)]
        for stream in streams:
            await anext(stream)
        code, details = await outcome(client.stub.Generate(small(request_id="one more")))
        assert (code, details) == (
            Code.RESOURCE_EXHAUSTED,
            "3 calls are open already, which is the limit (--max-streams); try again later",
        )
        assert sorted(served.engine.core.requests) == ["r0", "r1", "r2"]
        health = health_pb2_grpc.HealthStub(client._channel)
        assert await health.Check(health_pb2.HealthCheckRequest()).code() is Code.OK
        await streams[0].aclose()
        await until(lambda: served.front.gate.num_open == 2)
        assert (await outcome(client.stub.Generate(small())))[0] is Code.OK
        for stream in streams[1:]:
            await stream.aclose()
        await until(lambda: served.front.gate.num_open == 0)


async def test_calls_of_health_do_not_keep_others_out(serving: Serving) -> None:
    """Watchers of health have a limit of their own; checks and requests are served beside as many of them as there can be."""
    async with serving() as served, served.client() as client:
        health = health_pb2_grpc.HealthStub(client._channel)
        watchers = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(MAX_OTHER_CALLS)]
        for watcher in watchers:
            assert (await watcher.read()).status == health_pb2.HealthCheckResponse.SERVING
        code, details = await outcome(health.Watch(health_pb2.HealthCheckRequest()))
        assert (code, details) == (Code.RESOURCE_EXHAUSTED, "64 calls are open already, which is the limit; try again later")
        assert (await outcome(health.Check(health_pb2.HealthCheckRequest())))[0] is Code.OK
        assert (await outcome(client.stub.Generate(small())))[0] is Code.OK
        for watcher in watchers:
            watcher.cancel()


async def test_checks_of_health_that_ask_nothing(serving: Serving, until: Callable[..., Any]) -> None:
    """Checks whose request does not come keep others out until their time is over, and no longer; requests are served."""
    async with serving() as served, served.client() as client:
        gate = served.front.gate
        gate._request_timeout_s = 3600
        health = health_pb2_grpc.HealthStub(client._channel)
        mute = [client._channel.stream_stream(CHECK)() for _ in range(MAX_CHECKS)]
        await until(lambda: gate._open[CHECK] == MAX_CHECKS)
        assert (await outcome(health.Check(health_pb2.HealthCheckRequest())))[0] is Code.RESOURCE_EXHAUSTED
        assert (await outcome(client.stub.Generate(small())))[0] is Code.OK
        for call in mute:
            call.cancel()
        await until(lambda: gate._open[CHECK] == 0)
        gate._request_timeout_s = 0.1
        assert (await outcome(client._channel.stream_stream(CHECK)()))[0] is Code.DEADLINE_EXCEEDED
        gate._request_timeout_s = 60
        assert (await outcome(health.Check(health_pb2.HealthCheckRequest())))[0] is Code.OK


async def test_streams_of_one_connection(serving: Serving, until: Callable[..., Any]) -> None:
    """On a full connection the next call waits at the client, where one on another is served, and in the end it is, too."""
    async with serving(max_streams=1) as served, served.client() as client, served.client() as other:
        health = health_pb2_grpc.HealthStub(client._channel)
        watchers = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(MAX_OTHER_CALLS)]
        mute = [client._channel.stream_stream(CHECK)() for _ in range(MAX_CHECKS)]
        await until(lambda: served.front.gate._open == {"": MAX_OTHER_CALLS, CHECK: MAX_CHECKS})
        full = client._channel.stream_stream(GENERATE)()
        await until(lambda: served.front.gate.num_open == 1)
        served.front.gate._limits["/pagemirror.v1.GenerationService/"] = 3  # what holds the next one back is the connection
        waiting = client.stub.Generate(small())
        assert (await outcome(other.stub.Generate(small())))[0] is Code.OK
        await until(lambda: served.front.gate.num_open == 1)
        assert not waiting.done()
        full.cancel()
        assert (await outcome(waiting))[0] is Code.OK
        for call in watchers + mute:
            call.cancel()


async def test_connections_at_a_time(serving: Serving) -> None:
    """As many as the limit are served, one more is closed, and an end makes room."""
    async with serving(max_connections=3) as served:
        channels = [open_channel(served.front.address) for _ in range(4)]
        stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in channels]
        for stub in stubs[:3]:
            assert (await outcome(stub.Generate(small())))[0] is Code.OK
        assert (await outcome(stubs[3].Generate(small())))[0] is Code.UNAVAILABLE
        await channels[0].close()
        call = stubs[3].Generate(small(), wait_for_ready=True, timeout=60)
        assert (await outcome(call))[0] is Code.OK
        for channel in channels[1:]:
            await channel.close()


async def test_size_of_a_request(serving: Serving) -> None:
    """A message of the limit is read (and its prompt is too long for the model), one byte more is not."""
    async with serving(max_message_mib=1) as served, served.client() as client:
        request = small(prompt=b"\0" * (2**20 - 64))
        request.request_id = "x" * (2**20 - request.ByteSize() - 2)
        assert request.ByteSize() == 2**20
        code, details = await outcome(client.stub.Generate(request))
        assert code is Code.INVALID_ARGUMENT
        assert "the prompt has 262128 tokens" in details
        request.request_id += "x"
        code, details = await outcome(client.stub.Generate(request))
        assert (code, details) == (Code.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (1048577 vs. 1048576)")
        assert served.engine.core.requests == {}
        assert (await outcome(client.stub.Generate(small())))[0] is Code.OK


async def test_size_of_the_headers(serving: Serving) -> None:
    """Headers of 15 KiB pass, of 17 KiB do not."""
    async with serving() as served, served.client() as client:
        for kib, code in ((15, Code.OK), (17, Code.RESOURCE_EXHAUSTED)):
            call = client.stub.GetInfo(generation_pb2.GetInfoRequest(), metadata=(("x-filler", "x" * (kib * 1024)),))
            assert (await outcome(call))[0] is code


@pytest.mark.parametrize(
    ("last", "first", "words"),
    [
        ({"request_id": "i" * 256}, {"request_id": "i" * 257}, "request_id is .* but must be a text of 1 to 256 characters"),
        ({"cache_namespace": "n" * 256}, {"cache_namespace": "n" * 257}, "cache_namespace is 'a text of 257 characters'"),
        (
            {"stop_token_ids": int32_to_bytes([5] * MAX_STOP_IDS)},
            {"stop_token_ids": int32_to_bytes([5] * (MAX_STOP_IDS + 1))},
            "stop_ids is '1025 ids', but must be at most 1024 ids",
        ),
        ({"prompt": int32_to_bytes([1] * 512)}, {"prompt": int32_to_bytes([1] * 513)}, "the prompt has 513 tokens, but .* 512"),
    ],
    ids=["request id", "namespace", "stop ids", "prompt"],
)
async def test_fields_of_a_request(serving: Serving, last: dict[str, Any], first: dict[str, Any], words: str) -> None:
    """The longest value is served; the next is refused with INVALID_ARGUMENT, both numbers, and no trace."""
    import re

    async with serving() as served, served.client() as client:
        assert (await outcome(client.stub.Generate(small(**last))))[0] is Code.OK
        code, details = await outcome(client.stub.Generate(small(**first)))
        assert code is Code.INVALID_ARGUMENT
        assert re.search(words, details)
        assert served.engine.core.requests == {}


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (MAX_BIAS_ENTRIES, "logit_bias.token is 0, but must be named once"),
        (MAX_BIAS_ENTRIES + 1, "'1025 entries', but must be at"),
    ],
)
async def test_entries_of_logit_bias(serving: Serving, count: int, words: str) -> None:
    """1,024 entries are looked at one by one (this vocabulary is smaller, so one comes twice), 1,025 are not."""
    async with serving() as served, served.client() as client:
        bias = [forward_pb2.LogitBias(token=n % 997, bias=1) for n in range(count)]
        code, details = await outcome(client.stub.Generate(small(sampling=forward_pb2.SamplingParams(logit_bias=bias))))
        assert code is Code.INVALID_ARGUMENT
        assert words in details


async def test_trace_context(serving: Serving) -> None:
    """256 characters are passed on, one more is refused."""
    async with serving() as served, served.client() as client:
        for length, expected in ((256, Code.OK), (257, Code.INVALID_ARGUMENT)):
            call = client.stub.Generate(small(), metadata=(("traceparent", "t" * length),))
            code, details = await outcome(call)
            assert code is expected
        assert "traceparent is 'a text of 257 characters', but must be at most 256 characters" in details
        assert served.engine.core.requests == {}


async def test_requests_that_wait(serving: Serving, until: Callable[..., Any]) -> None:
    """As many as the limit wait, one more is refused, and those that wait are untouched."""
    async with serving(max_waiting=2, runtime_options={"max_rows": 1}) as served, served.client() as client:
        running = client.generate([1], max_tokens=400, request_id="runs")
        assert (await anext(running)).request_id == "runs"
        await until(lambda: served.engine.core.num_running == 1)
        waiting = [client.generate([n], max_tokens=1, request_id=f"w{n}") for n in range(2)]
        for stream in waiting:
            await anext(stream)
        code, details = await outcome(client.stub.Generate(small(request_id="one more")))
        assert (code, details) == (
            Code.RESOURCE_EXHAUSTED,
            "request 'one more': the queue is full, 2 requests wait already; try again later",
        )
        assert sorted(served.engine.core.requests) == ["runs", "w0", "w1"]
        await running.aclose()
        assert [len([piece async for piece in stream]) >= 1 for stream in waiting] == [True, True]


async def test_text_of_a_status(serving: Serving) -> None:
    """However long what a client sent, it gets back at most 1,024 bytes of it."""
    async with serving() as served, served.client() as client:
        code, details = await outcome(client.stub.Abort(generation_pb2.AbortRequest(request_id="ü" * 6000)))
        assert code is Code.NOT_FOUND
        assert 1020 <= len(details.encode()) <= 1024
        assert details.endswith("ü…")


async def test_listing_of_rows(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing that no message can hold is refused before it is made; one at the limit is not."""
    async with serving() as served, served.client() as client:
        stream = client.generate([1, 2, 3], max_tokens=400)
        await anext(stream)
        assert (await anext(stream)).tokens
        size = 2048 + 4 * 2 * 128  # one row, at most 128 pages from each side
        monkeypatch.setattr(generation_servicer, "MAX_MESSAGE_BYTES", size)
        assert (await outcome(client.stub.ListRows(generation_pb2.ListRowsRequest())))[0] is Code.OK
        monkeypatch.setattr(generation_servicer, "MAX_MESSAGE_BYTES", 2048)
        code, details = await outcome(client.stub.ListRows(generation_pb2.ListRowsRequest()))
        assert code is Code.RESOURCE_EXHAUSTED
        assert details.endswith("bytes, a message has at most 2048")
        await stream.aclose()


async def test_call_without_a_request(serving: Serving, until: Callable[..., Any], token_file: Path) -> None:
    """A call whose request does not come is ended after its time, one that is closed without one at once; a stranger's call is
    refused before it has sent anything.
    """
    async with serving(token_file=token_file) as served, served.client(token_file=token_file) as client:
        served.front.gate._request_timeout_s = 0.2
        open_call = client._channel.stream_stream(GENERATE)
        assert await outcome(open_call()) == (Code.UNAUTHENTICATED, "a valid bearer token is needed")
        call = open_call(metadata=client.metadata())
        await until(lambda: served.front.gate.num_open == 1)
        assert await outcome(call) == (Code.DEADLINE_EXCEEDED, "the call was opened 0.2 s ago, and its request has not come")
        await until(lambda: served.front.gate.num_open == 0)
        served.front.gate._request_timeout_s = 60
        call = open_call(metadata=client.metadata())
        await call.done_writing()
        assert await outcome(call) == (Code.INVALID_ARGUMENT, "the call has no request")
        await until(lambda: served.front.gate.num_open == 0)
        assert (await outcome(client.stub.Generate(small(), metadata=client.metadata())))[0] is Code.OK


async def test_end_of_a_client_leaves_nothing(serving: Serving, until: Callable[..., Any]) -> None:
    """Calls that are cut off at any moment are over for the gate, too, and no task of theirs stays."""
    async with serving() as served, served.client() as client:
        await client.info()
        before = len(asyncio.all_tasks())
        for n in range(20):
            call = client.stub.Generate(small(max_tokens=300))
            if n % 2:
                assert await call.read() is not aio.EOF
            call.cancel()
        await until(lambda: served.front.gate.num_open == 0 and not served.engine.core.requests)
        await until(lambda: len(asyncio.all_tasks()) <= before)
