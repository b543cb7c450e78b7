"""Everything of the gateway's port but Generate: what is served, how full it is, health, the tokenizer, the cache, events."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

GatewayOf = Callable[..., AbstractAsyncContextManager[Any]]


async def test_model_and_server_are_described(gateway: GatewayOf, word_tokenizer: Path) -> None:
    """Limits, ids and names are those of the runtime; a model without logits asks for temperature 0 by default."""
    async with gateway(max_context=100, stop_ids=(7, 9), gateway_tokenizer=word_tokenizer) as served:
        info = await served.stub.GetModelInfo(served.api.pb2.GetModelInfoRequest())
        assert (info.served_model_name, info.tokenizer_path) == ("fingerprint", str(word_tokenizer))
        assert (info.vocab_size, info.max_context_length, info.max_req_input_len) == (997, 100, 99)
        assert list(info.eos_token_ids) == [7, 9]
        assert json.loads(info.default_sampling_params_json) == {"temperature": 0.0}
        assert not info.supports_vision
        server = await served.stub.GetServerInfo(served.api.pb2.GetServerInfoRequest())
        assert server.active_requests == 0
        if served.api.name == "vllm":
            assert info.is_generation
            assert (server.block_size, server.max_num_seqs, server.data_parallel_size) == (4, 8, 1)
        else:
            assert server.max_total_num_tokens == 256
            assert server.server_args["page_size"] == 4


async def test_loads_follow_the_requests(gateway: GatewayOf) -> None:
    """Running and waiting requests and the pool's fill, as of the call."""
    async with gateway(max_rows=1) as served:
        request = served.api.pb2.GetLoadsRequest(include=["all"])
        (load,) = (await served.stub.GetLoads(request)).loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.token_usage) == (0, 0, 0.0)
        assert (load.max_total_num_tokens, load.max_running_requests) == (256, 1)
        call = served.stub.Generate(served.api.request([1, 2, 3], None, stream=True, n=2))
        await call.read()
        (load,) = (await served.stub.GetLoads(request)).loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (1, 1, 2)
        assert 0 < load.num_used_tokens <= 256
        assert load.token_usage == load.num_used_tokens / 256
        if served.api.name == "tokenspeed":
            assert load.queues.waiting == 1
        call.cancel()
        other = await served.stub.GetLoads(served.api.pb2.GetLoadsRequest(dp_rank=1))
        assert list(other.loads) == []


async def test_health_of_both_kinds(gateway: GatewayOf) -> None:
    """The service's own check, which a gateway asks, and that of grpc.health.v1 under the service's name."""
    async with gateway() as served:
        assert (await served.stub.HealthCheck(served.api.pb2.HealthCheckRequest())).healthy
        health = health_pb2_grpc.HealthStub(served.channel)
        name = {"tokenspeed": "tokenspeed.grpc.scheduler.TokenSpeedScheduler", "vllm": "vllm.grpc.engine.VllmEngine"}
        for service in ("", name[served.api.name]):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        served.drain()
        unwell = await served.stub.HealthCheck(served.api.pb2.HealthCheckRequest())
        assert not unwell.healthy
        assert unwell.message
        code, _ = await served.refused(served.api.request([1]))
        assert code is grpc.StatusCode.UNAVAILABLE


async def test_tokenizer_comes_in_parts_with_its_digest(gateway: GatewayOf, word_tokenizer: Path) -> None:
    """The parts make a zip with the tokenizer's files; the last part, and only that one, has its SHA-256."""
    async with gateway(gateway_tokenizer=word_tokenizer) as served:
        chunks = [chunk async for chunk in served.stub.GetTokenizer(served.api.common.GetTokenizerRequest())]
        data = b"".join(chunk.data for chunk in chunks)
        assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert sorted(archive.namelist()) == ["tokenizer.json", "tokenizer_config.json"]


async def test_tokenizer_that_is_not_there(gateway: GatewayOf) -> None:
    """NOT_FOUND, with the option that names one."""
    async with gateway() as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.GetTokenizer(served.api.common.GetTokenizerRequest()).read()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert "--gateway-tokenizer" in (caught.value.details() or "")


async def test_cache_is_flushed_when_nothing_uses_it(gateway: GatewayOf) -> None:
    """At once when idle; not while a request uses cached pages; after it, when there is time to wait."""
    async with gateway() as served:
        flush = served.stub.FlushCache
        request = served.api.common.FlushCacheRequest
        await served.run(list(range(20)), 2)
        assert served.engine.core.stats().cached > 0
        assert (await flush(request())).success
        assert served.engine.core.stats().cached == 0
        await served.run(list(range(20)), 2)
        call = served.stub.Generate(served.api.request(list(range(20)), None, stream=True, request_id="user"))
        await call.read()
        refused = await flush(request())
        assert not refused.success
        assert refused.message
        waiting = asyncio.ensure_future(flush(request(timeout_s=30)))
        await served.stub.Abort(served.api.abort("user"))
        assert (await waiting).success


async def test_events_begin_with_metadata(gateway: GatewayOf) -> None:
    """A subscriber learns at once that it is one, before there is any event."""
    async with gateway() as served:
        call = served.stub.SubscribeKvEvents(served.api.common.SubscribeKvEventsRequest())
        async with asyncio.timeout(30):
            await call.initial_metadata()
        assert not call.done()
        call.cancel()


async def test_events_can_be_switched_off(gateway: GatewayOf) -> None:
    """A subscriber is told that there are none before anything else, so that it asks no more."""
    async with gateway(page_events=False) as served:
        call = served.stub.SubscribeKvEvents(served.api.common.SubscribeKvEventsRequest())
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_what_is_not_served_is_said_to_be_unimplemented(gateway: GatewayOf) -> None:
    """Profiles, and vLLM's embeddings."""
    async with gateway() as served:
        calls = [
            served.stub.StartProfile(served.api.common.StartProfileRequest()),
            served.stub.StopProfile(served.api.common.StopProfileRequest()),
        ]
        if served.api.name == "vllm":
            calls.append(served.stub.Embed(served.api.pb2.EmbedRequest()))
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_bytes_that_are_no_message_are_refused(gateway: GatewayOf) -> None:
    """As on the public port: INVALID_ARGUMENT for a request, a plain method and the service's whole life after them."""
    async with gateway() as served:
        service = {"tokenspeed": "tokenspeed.grpc.scheduler.TokenSpeedScheduler", "vllm": "vllm.grpc.engine.VllmEngine"}
        for method in ("Generate", "Abort", "GetLoads"):
            call = served.channel.unary_stream(f"/{service[served.api.name]}/{method}")(b"\xff\xff\xff")
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT, method
        assert (await served.run([1, 2, 3], 4))[1].finish_reason == "length"


async def test_full_port_still_takes_aborts(gateway: GatewayOf) -> None:
    """Requests have a limit of their own, --max-streams; what ends them has another."""
    async with gateway(max_streams=3) as served:
        await served.run([1], 1)  # a front end has asked the scheduler all that it needs to know
        calls = [served.stub.Generate(served.api.request([1, n], None, request_id=f"r{n}", stream=True)) for n in range(3)]
        await asyncio.gather(*(call.read() for call in calls))
        code, details = await served.refused(served.api.request([1]))
        assert (code, "--max-streams" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        await asyncio.gather(*(served.stub.Abort(served.api.abort(f"r{n}")) for n in range(3)))
        await served.until(lambda: not served.engine.core.requests)
