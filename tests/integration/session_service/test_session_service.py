"""GenerationService.Session over a real loopback server: many requests over one stream, each as Generate would serve it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from pagemirror.v1 import forward_pb2, generation_pb2

Code = grpc.StatusCode


async def test_many_requests_are_exact(bench: Callable[..., Any], request_of: Any, read_all: Any, continuation: Any) -> None:
    """Each of many requests of one session, more than there are rows, gets its own tokens and account."""
    async with bench() as served:
        session = await served.open()
        prompts = [[n, n + 1, *range(n % 7)] for n in range(150)]
        outputs = [await session.submit(request_of(f"r{n}", prompt, 5 + n % 20)) for n, prompt in enumerate(prompts)]
        results = await asyncio.gather(*(read_all(output) for output in outputs))
        for n, (tokens, finished) in enumerate(results):
            assert tokens == continuation(prompts[n], 5 + n % 20), n
            assert finished.reason == generation_pb2.FINISH_REASON_LENGTH
            assert (finished.prompt_tokens, finished.completion_tokens) == (len(prompts[n]), 5 + n % 20)
        await session.drain()
        assert session.num_live == 0


async def test_a_step_is_one_message(bench: Callable[..., Any], request_of: Any, continuation: Any) -> None:
    """Tokens of all requests of a step come in one message: there are hardly more messages than steps."""
    async with bench() as served:
        raw = served.raw()
        assert await raw.hello() == served.engine.settings.session_window
        await raw.send(*((n, request_of(f"r{n}", [n, 7], 40)) for n in range(1, 33)))
        await raw.call.done_writing()
        while await raw.read():
            pass
        assert await raw.call.code() is Code.OK
        assert raw.accepted == list(range(1, 33))
        assert raw.tokens == {n: continuation([n, 7], 40) for n in range(1, 33)}
        assert sorted(raw.ended) == list(range(1, 33))
        assert raw.num_messages <= served.engine.num_steps + 5 < 100


async def test_aborts(bench: Callable[..., Any], request_of: Any, read_all: Any, continuation: Any) -> None:
    """An aborted request ends with reason abort and a right beginning, others go on; aborts of what is over are ignored."""
    async with bench() as served:
        raw = served.raw()
        await raw.hello()
        await raw.send((1, request_of("a", [1, 2], 400)), (2, request_of("b", [3, 4], 30)), (3, request_of("c", [5], 400)))
        await raw.read_until(lambda: bool(raw.tokens.get(1) and raw.tokens.get(3)))
        await raw.send(aborts=[1])
        await raw.read_until(lambda: 1 in raw.ended and 2 in raw.ended)
        await served.client.abort("c")  # from elsewhere, by its id
        await raw.read_until(lambda: 3 in raw.ended)
        await raw.send((4, request_of("d", [9], 3)), aborts=[1, 2, 3, 4, 5, -1, 0])
        await raw.read_until(lambda: 4 in raw.ended)
        reasons = {number: end.finished.reason for number, end in raw.ended.items()}
        abort, length = generation_pb2.FINISH_REASON_ABORT, generation_pb2.FINISH_REASON_LENGTH
        assert reasons == {1: abort, 2: length, 3: abort, 4: abort}
        assert raw.tokens[1] == continuation([1, 2], 400)[: len(raw.tokens[1])]
        assert raw.tokens[2] == continuation([3, 4], 30)
        assert 4 not in raw.tokens
        raw.call.cancel()


async def test_session_cut_ends_its_requests_alone(
    bench: Callable[..., Any], request_of: Any, read_all: Any, continuation: Any
) -> None:
    """When a session's stream is cut its requests are aborted, those of another session and of Generate go on."""
    async with bench() as served:
        cut, other = await served.open(), await served.open()
        gone = [await cut.submit(request_of(f"gone{n}", [n], 450)) for n in range(20)]
        kept = await other.submit(request_of("kept", [1, 2, 3], 60))
        plain = asyncio.ensure_future(_generate(served.client, [4, 5], 60))
        await gone[-1].take()
        await cut.close()
        assert (await read_all(kept))[0] == continuation([1, 2, 3], 60)
        assert await plain == continuation([4, 5], 60)
        await served.until(lambda: not served.engine.core.requests)
        assert served.engine.core.stats().private == 0
        assert {(await served.refusal(output))[0] for output in gone} == {Code.CANCELLED}
        await other.close()
        await served.until(lambda: not served.engine._outboxes)


async def _generate(client: Any, prompt: list[int], count: int) -> list[int]:
    return sum([piece.tokens async for piece in client.generate(prompt, max_tokens=count)], [])


async def test_what_is_wrong_with_a_request_ends_that_request(
    bench: Callable[..., Any], request_of: Any, read_all: Any, continuation: Any
) -> None:
    """Bad requests end with the statuses and texts that Generate gives them; the session and its good requests go on."""
    async with bench(max_waiting=40) as served:
        session = await served.open()
        held = await session.submit(request_of("held", [1], 300))
        await held.accepted()
        bad = {
            "empty": request_of("x1", [], 5),
            "token": request_of("x2", [1_000_000], 5),
            "max_tokens": request_of("x3", [1], 0),
            "long": request_of("x4", [1] * 600, 5),
            "column": generation_pb2.GenerateRequest(request_id="x5", prompt=b"abc"),
            "wait": request_of("x6", [1], 5, max_queue_wait_ms=0),
            "sampling": request_of("x7", [1], 5, sampling=forward_pb2.SamplingParams(temperature=1.0)),
            "twice": request_of("held", [1], 5),
        }
        for what, request in bad.items():
            mine = await served.refusal(await session.submit(request))
            with pytest.raises(grpc.aio.AioRpcError) as theirs:
                await _drain(served.client.stub.Generate(request))
            assert mine == (theirs.value.code(), theirs.value.details()), what
        assert (await served.refusal(await session.submit(request_of("", [1], 5))))[0] is Code.INVALID_ARGUMENT
        good = await session.submit(request_of("good", [8, 9], 10))
        assert (await read_all(good))[0] == continuation([8, 9], 10)
        session.abort(held)
        assert (await read_all(held))[1].reason == generation_pb2.FINISH_REASON_ABORT
        await session.close()


async def _drain(call: Any) -> None:
    async for _ in call:
        pass


async def test_queue_wait_and_drain(bench: Callable[..., Any], request_of: Any, read_all: Any) -> None:
    """A request that waits too long ends with DEADLINE_EXCEEDED; when the scheduler drains, new ones get UNAVAILABLE, live ones
    come to their end, and so does the session.
    """
    async with bench(runtime_timeout=60) as served:
        session = await served.open()
        rows = [await session.submit(request_of(f"r{n}", [n], 350)) for n in range(64)]
        await asyncio.gather(*(output.take() for output in rows))
        late = await session.submit(request_of("late", [1], 5, max_queue_wait_ms=1))
        assert (await served.refusal(late))[0] is Code.DEADLINE_EXCEEDED
        draining = asyncio.ensure_future(served.engine.drain(30))
        await served.until(lambda: served.engine.draining)
        refused = await session.submit(request_of("new", [1], 5))
        assert (await served.refusal(refused))[0] is Code.UNAVAILABLE
        for output in rows[1:]:
            session.abort(output)
        assert (await read_all(rows[0]))[1].completion_tokens == 350
        await draining
        await asyncio.wait_for(session.over.wait(), 20)
        assert session.broken.code is Code.UNAVAILABLE
        assert "shutting down" in session.broken.details


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([generation_pb2.SessionRequest()], "the first message of a session must have the hello"),
        ([], "the first message of a session must have the hello"),
        ([generation_pb2.SessionRequest(hello={})] * 2, "only the first message of a session may have the hello"),
        (
            [generation_pb2.SessionRequest(hello={}, submits=[{"number": 2}])],
            "a submit has number 2, but the last one had 0",
        ),
        ([generation_pb2.SessionRequest(hello={}, aborts=b"abc")], "aborts has 3 bytes"),
    ],
    ids=["no hello", "nothing", "two hellos", "number", "column"],
)
async def test_messages_that_no_session_may_have(
    bench: Callable[..., Any], request_of: Any, messages: list[Any], words: str
) -> None:
    """The stream ends with INVALID_ARGUMENT and says why; requests that were live are aborted."""
    async with bench() as served:
        raw = served.raw()
        for message in messages:
            await raw.call.write(message)
        if not messages:
            await raw.call.done_writing()
        code, details = await raw.end()
        assert code is Code.INVALID_ARGUMENT
        assert words in details
        assert not served.engine._outboxes


async def test_bytes_that_are_no_message(bench: Callable[..., Any], request_of: Any) -> None:
    """They end the session with INVALID_ARGUMENT, and its live requests with it."""
    async with bench() as served:
        method = "/pagemirror.v1.GenerationService/Session"
        raw = served.raw(served.client._channel.stream_stream(method)())
        hello = generation_pb2.SessionRequest(hello={})
        hello.submits.add(number=1, request=request_of("a", [1], 400))
        await raw.call.write(hello.SerializeToString())
        await served.until(lambda: "a" in served.engine.core.requests)
        await raw.call.write(b"\xff\xff\xff")
        code, details = await raw.end()
        assert code is Code.INVALID_ARGUMENT
        assert "cannot be read" in details
        await served.until(lambda: not served.engine.core.requests)
