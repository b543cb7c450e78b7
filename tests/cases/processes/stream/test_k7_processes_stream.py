"""Cases B53, B57 and B67 to B69: messages, their sizes, their order and their fields."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio

from pagemirror.v1 import forward_pb2, generation_pb2, runtime_pb2
from scheduler_service.channels import CLIENT_OPTIONS
from scheduler_service.client import Client, RpcFailedError
from scheduler_service.core.errors import PagemirrorError
from scheduler_service.engine_loop import SubmitOptions
from scheduler_service.settings import SchedulerSettings

Continuation = Callable[[Sequence[int], int], list[int]]
Code = grpc.StatusCode


async def test_b53_messages_over_4_mib(harness: Any, stream: Any, pair: Any, continuation: Continuation) -> None:
    """One message above gRPC's default of 4 MiB ends the stream (grpc/grpc.io#1254, LangStream/langstream#744)."""
    # The private channel: 64 rows of 32,768 pages are 8 MiB of ids one way, and as many come back from ReadRows.
    num_rows, width = 64, 32_768
    shape = {"page_size": 1, "num_pages": num_rows * width, "max_rows": num_rows, "max_pages_per_row": width}
    async with stream.runtime(**shape) as runtime, aio.insecure_channel(runtime.address, options=CLIENT_OPTIONS) as channel:
        peer = stream.Peer(channel)
        await peer.hello()
        rows = np.arange(1, num_rows + 1, dtype="<i4")
        pages = np.arange(1, num_rows * width + 1, dtype="<i4")
        ones = np.ones_like(rows).tobytes()
        big = forward_pb2.ForwardOp(
            session_no=1,
            step=1,
            req_pool_indices=rows.tobytes(),
            row_generations=ones,
            row_lens=np.full_like(rows, width).tobytes(),
            begins=np.zeros_like(rows).tobytes(),
            sizes=np.full_like(rows, width).tobytes(),
            full_refresh=b"\x01" * num_rows,
            occupied_pages=pages.tobytes(),
            num_computed=np.zeros_like(rows).tobytes(),
            num_extend_rows=num_rows,
            input_lens=ones,
            input_ids=rows.tobytes(),
            sample=b"\x01" * num_rows,
            lease_starts=[forward_pb2.LeaseStart(req_pool_index=row, request_id=f"r{row}") for row in rows.tolist()],
        )
        assert big.ByteSize() > 8 << 20
        await peer.send(op=big)
        assert await peer.answer() == (1, [token + 1 for token in rows.tolist()])
        read = await peer.stub.ReadRows(runtime_pb2.ReadRowsRequest(), timeout=harness.limit_s)
        assert read.pages == pages.tobytes()

    # The public one: messages around 4 MiB reach the check of the prompt; one above the documented limit ends its own call.
    async with Client(pair.scheduler.address) as client:
        tokens: list[int] = []
        pieces = client.generate([1, 2, 3], max_tokens=500)
        async for piece in pieces:
            tokens += piece.tokens
            if tokens:
                break
        limit = SchedulerSettings.model_fields["max_message_mib"].default << 20
        for count in (1_048_574, 1_400_000, 1_403_606):
            with pytest.raises(RpcFailedError, match=f"{count} tokens|prompt") as caught:
                await harness.generate(client, [0] * count, 1)
            assert caught.value.code is Code.INVALID_ARGUMENT
        async with aio.insecure_channel(
            pair.scheduler.address, options=[("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
        ) as unlimited:
            call = unlimited.unary_stream(
                "/pagemirror.v1.GenerationService/Generate",
                request_serializer=generation_pb2.GenerateRequest.SerializeToString,
                response_deserializer=generation_pb2.GenerateResponse.FromString,
            )
            small = generation_pb2.GenerateRequest(prompt=stream.i32(1, 2, 3), max_tokens=500)
            other = aiter(call(small))
            await anext(other)
            with pytest.raises(aio.AioRpcError) as refused:
                async for _ in call(generation_pb2.GenerateRequest(prompt=bytes(limit))):
                    pass
            assert refused.value.code() is Code.RESOURCE_EXHAUSTED
            same_connection = [token async for part in other for token in np.frombuffer(part.tokens, "<i4").tolist()]
            assert same_connection == continuation([1, 2, 3], 500)
        async for piece in pieces:
            tokens += piece.tokens
        assert tokens == continuation([1, 2, 3], 500)


async def test_b57_lost_repeated_and_reordered_ops(harness: Any, stream: Any, continuation: Continuation) -> None:
    """After a gap recovery starts again and again, and duplicates are applied (ai-dynamo/dynamo#7072)."""
    prompt = [1, 2, 3, 4]
    tokens = continuation(prompt, 5)
    async with stream.runtime() as runtime, aio.insecure_channel(runtime.address, options=CLIENT_OPTIONS) as channel:
        peer = stream.Peer(channel)
        await peer.hello()
        sessions = iter(range(1, 100))
        session_no = next(sessions)

        def ops() -> dict[int, forward_pb2.ForwardOp]:
            rows = {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [1, 2, 3]}
            more = {step: {"begin": step - 1, "computed": step + 2} for step in (2, 3, 4)}
            made = {step: stream.op(step, rows[step], session_no=session_no, **more[step]) for step in more}
            return made | {1: stream.op(1, rows[1], prompt, session_no=session_no)}

        gap, skipped = "STEP_OUT_OF_ORDER", "SKIPPED"
        deliveries: list[tuple[list[int], list[Any], list[int]]] = [
            ([1, 3, 4], [(1, tokens[:1]), (3, gap), (4, skipped)], [1]),
            ([1, 2, 2, 3], [(1, tokens[:1]), (2, tokens[1:2]), (2, tokens[1:2]), (3, tokens[2:3])], [1, 2, 3]),
            ([1, 3, 2], [(1, tokens[:1]), (3, gap), (2, skipped)], [1]),
        ]
        for steps, answers, row in deliveries:
            made = ops()
            for step in steps:
                await peer.send(op=made[step])
            assert [await peer.answer() for _ in steps] == answers
            assert await peer.rows() == [row]
            # One resync: the request is prefilled again from the tokens that are known, and the next op applies.
            session_no = next(sessions)
            await peer.reset(session_no)
            assert await peer.rows() == []
            known = prompt + tokens[:3]
            await peer.send(op=stream.op(1, [1, 2, 3], known, session_no=session_no))
            await peer.send(op=stream.op(2, [1, 2, 3], computed=7, session_no=session_no))
            assert [await peer.answer(), await peer.answer()] == [(1, tokens[3:4]), (2, tokens[4:5])]
            assert await peer.rows() == [[1, 2, 3]]
            session_no = next(sessions)
            await peer.reset(session_no)

    for fault in ("lose", "repeat", "swap"):
        async with stream.runtime() as runtime:
            relay = stream.Relay(runtime.address, lambda number, fault=fault: fault if number == 5 else "")
            async with relay.listening() as address, stream.engine(address) as engine:
                prompts = {name: [n, 5, 6, 7] for n, name in enumerate("abc", start=1)}
                live = [
                    engine.submit(name, np.array(ids, np.int32), SubmitOptions(max_tokens=12)) for name, ids in prompts.items()
                ]
                outputs = await asyncio.gather(*map(stream.collect, live))
                assert outputs == [continuation(ids, 12) for ids in prompts.values()]
                assert engine.connection.session_no == 2, fault


async def test_b67_idle_and_half_closed_stream(harness: Any, stream: Any, continuation: Continuation) -> None:
    """A stream whose writer is idle or has ended loses its replies (grpc/grpc#21737, grpc/grpc#25372)."""
    async with (
        stream.runtime(waits=True, heartbeat_interval_s=0.05) as runtime,
        aio.insecure_channel(runtime.address, options=CLIENT_OPTIONS) as channel,
    ):
        peer = stream.Peer(channel)
        await peer.hello()
        tokens = continuation([1, 2, 3], 7)
        await peer.send(op=stream.op(1, [5, 6, 7], [1, 2, 3]))
        for step in range(2, 6):
            await peer.send(op=stream.op(step, [5, 6, 7], computed=step + 1))
        assert [await peer.answer() for _ in range(5)] == [(step, [tokens[step - 1]]) for step in range(1, 6)]
        for _ in range(10):  # idle for ten heartbeats
            response = await asyncio.wait_for(peer.call.read(), harness.limit_s)
            assert isinstance(response, runtime_pb2.ExecuteResponse)
            assert response.WhichOneof("message") == "heartbeat"
        gate, execute = threading.Event(), runtime.executor.execute

        def held(batch: Any) -> Any:
            assert gate.wait(harness.limit_s)
            return execute(batch)

        runtime.executor.execute = held
        await peer.send(op=stream.op(6, [5, 6, 7], computed=7))
        await peer.send(op=stream.op(7, [5, 6, 7], computed=8))
        await peer.call.done_writing()
        gate.set()
        assert [await peer.answer(), await peer.answer()] == [(6, [tokens[5]]), (7, [tokens[6]])]
        while (last := await asyncio.wait_for(peer.call.read(), harness.limit_s)) is not aio.EOF:
            assert last.WhichOneof("message") == "heartbeat"
        assert await peer.call.code() is Code.OK


async def test_b68_one_writer_a_stream(harness: Any, stream: Any, continuation: Continuation) -> None:
    """Two tasks write to one stream at once (grpc/grpc#7659, grpc/grpc-dotnet#902)."""
    async with stream.runtime(heartbeat_interval_s=0.01, num_pages=256, max_rows=64) as runtime:
        relay = stream.Relay(runtime.address)
        async with relay.listening() as address, stream.engine(address, overlap_depth=2) as engine:

            async def one(number: int) -> list[int]:
                options = SubmitOptions(max_tokens=20 + number % 7)
                subscription = engine.submit(f"r{number}", np.array([number, 1, 2], np.int32), options)
                tokens = await subscription.take()
                if number % 10 == 0 and not subscription.finished:
                    with contextlib.suppress(PagemirrorError):
                        engine.retract(f"r{number}")
                return await stream.collect(subscription, tokens)

            outputs = await asyncio.gather(*map(one, range(100)))
            assert outputs == [continuation([number, 1, 2], 20 + number % 7) for number in range(100)]
            assert engine.connection.session_no == 1, engine.connection.trouble
        assert relay.steps == [(1, step) for step in range(1, len(relay.steps) + 1)]


async def test_b69_zero_is_not_absent(harness: Any, stream: Any, pair: Any, continuation: Continuation) -> None:
    """A plain scalar that is 0 cannot be told from one that is missing (protocolbuffers/protobuf#8413, #1655)."""
    async with stream.runtime() as runtime, aio.insecure_channel(runtime.address, options=CLIENT_OPTIONS) as channel:
        for field in ("scheduler_epoch", "session_no", "protocol_version"):
            peer = stream.Peer(channel)
            with pytest.raises((aio.AioRpcError, AssertionError)):
                await peer.hello(**{field: 0})
            assert await peer.call.code() in {Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION}, field
        peer = stream.Peer(channel)
        await peer.hello()
        missing = {
            "session_no": "UNKNOWN_SESSION",
            "step": "STEP_OUT_OF_ORDER",
            "lease_starts": "LEASE_NOT_STARTED",
            "num_extend_rows": "NEVER_SAMPLED",
            **dict.fromkeys(
                ("req_pool_indices", "row_generations", "row_lens", "begins", "sizes", "full_refresh"), "MALFORMED"
            ),
            **dict.fromkeys(("occupied_pages", "num_computed", "input_lens", "input_ids", "sample"), "MALFORMED"),
        }
        zero = {
            "req_pool_indices": "ROW_OUT_OF_RANGE",
            "row_generations": "STALE_GENERATION",
            "occupied_pages": "PAGE_OUT_OF_RANGE",
            "row_lens": "LENGTH_MISMATCH",
            "input_lens": "MALFORMED",
        }
        session_no = 1
        for field, code in [*missing.items(), *((f"{name}=0", code) for name, code in zero.items())]:
            session_no += 1
            await peer.reset(session_no)
            op = stream.op(1, [3], [0], session_no=session_no)
            name, _, value = field.partition("=")
            if value:
                setattr(op, name, stream.i32(0))
            else:
                op.ClearField(name)
            await peer.send(op=op)
            assert (await peer.answer())[1] == code, field
            assert await peer.rows() == [], field
        # Token 0, begin 0, 0 computed and a cleared bit are values like any other.
        session_no += 1
        await peer.reset(session_no)
        await peer.send(op=stream.op(1, [3], [0], session_no=session_no))
        assert await peer.answer() == (1, [1])
    async with Client(pair.scheduler.address) as client:
        assert await harness.generate(client, [0], 3) == continuation([0], 3)
        request = generation_pb2.GenerateRequest(prompt=stream.i32(0))
        unset = [token async for part in client.stub.Generate(request) for token in np.frombuffer(part.tokens, "<i4").tolist()]
        assert unset == continuation([0], 16), "max_tokens that is not given has its default"
        bad: list[dict[str, Any]] = [{"prompt": []}, {"max_tokens": 0}, {"top_k": 0}, {"top_p": 0.0}, {"max_queue_wait_ms": 0}]
        for options in bad:
            with pytest.raises(RpcFailedError) as caught:
                await harness.generate(client, **({"prompt": [0], "count": 1, "temperature": 0.0} | _renamed(options)))
            assert caught.value.code is Code.INVALID_ARGUMENT, options


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    return {"count" if name == "max_tokens" else name: value for name, value in options.items()}
