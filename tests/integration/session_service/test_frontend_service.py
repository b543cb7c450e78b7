"""A front end in front of a scheduler, over real loopback servers: what it answers is what the scheduler would answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagemirror.v1 import generation_pb2
from scheduler_service import frontend_worker
from scheduler_service.client import Client, RpcFailedError
from scheduler_service.columns import int32_to_bytes
from scheduler_service.frontend_settings import load_frontend_settings

Code = grpc.StatusCode
LIMIT_S = 30.0


@contextlib.asynccontextmanager
async def front_of(scheduler: str, **settings: Any) -> AsyncIterator[Client]:
    """One worker in this process, and a client of it."""
    given = load_frontend_settings(scheduler=scheduler, listen="127.0.0.1:0", grace=5.0, **settings)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.ensure_future(frontend_worker.serve(given, ready.set_result))
    try:
        async with asyncio.timeout(LIMIT_S):
            async with Client(await ready) as client:
                yield client
    finally:
        if serving.done():
            serving.result()  # raises what ended it
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def is_serving(client: Client) -> bool:
    """What its health service says."""
    stub = health_pb2_grpc.HealthStub(client._channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest())
    return answer.status == health_pb2.HealthCheckResponse.SERVING


async def connected(client: Client) -> None:
    """Wait until it has a session."""
    async with asyncio.timeout(LIMIT_S):
        while not await is_serving(client):
            await asyncio.sleep(0.01)


async def run(client: Client, prompt: list[int], count: int, **options: Any) -> tuple[list[int], Any]:
    """One request, start to end."""
    pieces = [piece async for piece in client.generate(prompt, max_tokens=count, **options)]
    return sum([piece.tokens for piece in pieces], []), pieces[-1].ending


async def test_many_clients_are_exact(bench: Callable[..., Any], continuation: Any) -> None:
    """More requests than rows through two front ends: each gets its own tokens and account, and the scheduler has two calls."""
    async with bench() as served, front_of(served.client.target) as one, front_of(served.client.target) as two:
        await connected(one)
        await connected(two)
        prompts = [[n, n + 1, *range(n % 5)] for n in range(120)]
        results = await asyncio.gather(*(run((one, two)[n % 2], prompt, 5 + n % 9) for n, prompt in enumerate(prompts)))
        for n, (tokens, ending) in enumerate(results):
            assert tokens == continuation(prompts[n], 5 + n % 9), n
            assert (ending.reason, ending.prompt_tokens, ending.completion_tokens) == ("length", len(prompts[n]), 5 + n % 9)
        assert len(served.engine._outboxes) == 2


async def test_statuses_are_the_schedulers(bench: Callable[..., Any]) -> None:
    """Refused requests and other calls end with the same code and words as at the scheduler."""
    async with bench(max_message_mib=1) as served, front_of(served.client.target) as front:
        await connected(front)
        held = front.generate([1], max_tokens=400, request_id="held")
        await anext(held)
        info = (await front.info()).raw
        assert (info.num_waiting + info.num_running, info.model) == (1, "fingerprint")
        bad: list[dict[str, Any]] = [
            {"prompt": b""},
            {"prompt": int32_to_bytes([10**6])},
            {"prompt": b"abc"},
            {"prompt": int32_to_bytes([1] * 600)},
            {"prompt": int32_to_bytes([1]), "max_tokens": 0},
            {"prompt": int32_to_bytes([1]), "request_id": "held"},
            {"prompt": int32_to_bytes([1]), "request_id": "x" * 300},
            {"prompt": int32_to_bytes([1]), "max_queue_wait_ms": 0},
            {"prompt": int32_to_bytes([1]), "stop_token_ids": int32_to_bytes([1] * 5000)},
        ]
        for fields in bad:
            request = generation_pb2.GenerateRequest(**{"request_id": "bad"} | fields)
            assert await ending(front, request) == await ending(served.client, request), fields
        for method, request in (
            ("Abort", generation_pb2.AbortRequest(request_id="none")),
            ("Retract", generation_pb2.RetractRequest(request_id="none")),
            ("GetState", generation_pb2.GetStateRequest(request_id="none")),
        ):
            failures = []
            for client in (front, served.client):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await getattr(client.stub, method)(request)
                failures.append((caught.value.code(), caught.value.details()))
            assert failures[0] == failures[1], method
        await front.retract("held")
        assert (await front.state("held")).num_retractions == 1
        assert [row.request_id for row in (await front.rows()).rows] in (["held"], [])
        await front.reset_prefix_cache(force=True)
        await front.abort("held")
        assert [piece async for piece in held][-1].ending.reason == "abort"


async def ending(client: Client, request: generation_pb2.GenerateRequest) -> tuple[grpc.StatusCode, str | None]:
    """Status of a call that is refused."""
    call = client.stub.Generate(request)
    return await code_of(call), await call.details()


async def test_request_too_large_for_the_scheduler_is_refused_alone(bench: Callable[..., Any], continuation: Any) -> None:
    """A front end that takes larger requests than its scheduler refuses them itself: the session and its requests go on."""
    async with bench(max_message_mib=1) as served, front_of(served.client.target, max_message_mib=4) as front:
        await connected(front)
        other = asyncio.ensure_future(run(front, [3, 4], 100))
        code, details = await ending(front, generation_pb2.GenerateRequest(prompt=bytes(2**20)))
        assert code is Code.RESOURCE_EXHAUSTED
        assert "--max-message-mib" in details
        assert (await other)[0] == continuation([3, 4], 100)
        assert len(served.engine._outboxes) == 1


async def test_client_that_leaves_aborts_its_request_alone(bench: Callable[..., Any], continuation: Any) -> None:
    """Its request ends at the scheduler, another one of the same front end goes on."""
    async with bench() as served, front_of(served.client.target) as front:
        await connected(front)
        gone = front.generate([1], max_tokens=450, request_id="gone")
        other = asyncio.ensure_future(run(front, [2], 200))
        async for piece in gone:
            if piece.tokens:
                break
        await gone.aclose()
        await served.until(lambda: "gone" not in served.engine.core.requests)
        assert (await other)[0] == continuation([2], 200)
        assert served.engine.core.stats().private == 0


async def test_without_a_scheduler_it_is_unavailable_and_comes_back(bench: Callable[..., Any], continuation: Any) -> None:
    """Before there is a scheduler, and after its session was cut, calls end with UNAVAILABLE; then it connects again."""
    async with front_of("127.0.0.1:1") as front:
        for _ in range(3):
            with pytest.raises(RpcFailedError) as caught:
                await run(front, [1], 3)
            assert caught.value.code is Code.UNAVAILABLE
            assert "this front end has no scheduler now" in caught.value.details
        with pytest.raises(RpcFailedError, match="no scheduler now"):
            await front.info()
        assert not await is_serving(front)
    async with bench() as served, front_of(served.client.target) as front:
        await connected(front)
        running = front.generate([1], max_tokens=450)
        await anext(running)
        [outbox] = served.engine._outboxes
        outbox.fail(RuntimeError("of the test"))
        with pytest.raises(RpcFailedError) as caught:
            async for _ in running:
                pass
        assert caught.value.code is Code.UNAVAILABLE
        await served.until(lambda: len(served.engine._outboxes) == 1 and outbox not in served.engine._outboxes)
        await connected(front)
        assert (await run(front, [5], 4))[0] == continuation([5], 4)


async def test_slow_client_of_a_front_end(bench: Callable[..., Any], continuation: Any) -> None:
    """A client that reads too little loses its request as at the scheduler; others of the front end do not wait."""
    async with bench() as served, front_of(served.client.target, max_unread_tokens=50) as front:
        await connected(front)
        options = (("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1))
        async with grpc.aio.insecure_channel(front.target, options=options) as channel:
            request = generation_pb2.GenerateRequest(request_id="slow", prompt=int32_to_bytes([1]), max_tokens=450)
            call = channel.unary_stream(
                "/pagemirror.v1.GenerationService/Generate",
                request_serializer=generation_pb2.GenerateRequest.SerializeToString,
                response_deserializer=generation_pb2.GenerateResponse.FromString,
            )(request)
            await call.read()
            assert (await run(front, [7], 300))[0] == continuation([7], 300)
            await served.until(lambda: "slow" not in served.engine.core.requests)
            assert await code_of(call) is Code.RESOURCE_EXHAUSTED
            assert await call.details() == "request 'slow': its output was left unread beyond 50 values (--max-unread-tokens)"


async def code_of(call: Any) -> grpc.StatusCode:
    """Read on to the end."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code()
