"""Sessions that send too much or read too little: what is kept for them is bounded, and nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from grpc import aio

from pagemirror.v1 import generation_pb2, generation_pb2_grpc
from scheduler_service import session_servicer

Code = grpc.StatusCode
TINY_WINDOW = (("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1))


@pytest.fixture
async def narrow() -> AsyncIterator[Callable[[str], Any]]:
    """Stubs over connections that let hardly anything be sent to them beyond what is read."""
    channels: list[aio.Channel] = []

    def open_stub(target: str) -> Any:
        channels.append(aio.insecure_channel(target, options=TINY_WINDOW))
        return generation_pb2_grpc.GenerationServiceStub(channels[-1])

    yield open_stub
    for channel in channels:
        await channel.close()


async def test_flood_is_throttled_by_the_window(bench: Callable[..., Any], request_of: Any, continuation: Any) -> None:
    """A session that sends many times its window has never more live requests than that, and gets all of them in the end."""
    async with bench(session_window=5, max_waiting=0) as served:
        raw = served.raw()
        assert await raw.hello() == 5
        prompts = {n: [n % 100, n % 7] for n in range(1, 301)}
        for first in range(1, 301, 50):
            await raw.send(*((n, request_of(f"r{n}", prompts[n], 4)) for n in range(first, first + 50)))
        await raw.call.done_writing()
        most = 0
        while await raw.read():
            most = max(most, len(served.engine.core.requests))
        assert raw.tokens == {n: continuation(prompt, 4) for n, prompt in prompts.items()}
        assert 1 <= most <= 5


async def test_flood_of_bad_requests_waits_for_its_reader(bench: Callable[..., Any], request_of: Any, narrow: Any) -> None:
    """Refusals take room in the window until they are written: who does not read them cannot make them pile up."""
    async with bench(session_window=8) as served:
        call = narrow(served.client.target).Session()
        await call.write(generation_pb2.SessionRequest(hello={}))
        await call.read()

        no_column = generation_pb2.GenerateRequest(request_id="x", prompt=bytes(10_001))

        async def flood() -> None:
            for first in range(1, 4001, 100):
                message = generation_pb2.SessionRequest()
                for n in range(first, first + 100):
                    message.submits.add(number=n, request=no_column)
                await call.write(message)

        flooding = asyncio.ensure_future(flood())
        [outbox] = await _outboxes(served)
        await served.until(lambda: outbox.num_held == 8)
        seen = []
        for _ in range(50):
            await asyncio.sleep(0.002)
            seen.append(outbox.num_held)
        assert set(seen) == {8}
        assert not flooding.done()  # it is not read any more
        ended = 0
        while ended < 4000:
            message = await asyncio.wait_for(call.read(), 20)
            assert all(end.status == Code.INVALID_ARGUMENT.value[0] for end in message.ended)
            ended += len(message.ended)
        await flooding
        call.cancel()


async def _outboxes(served: Any) -> Any:
    await served.until(lambda: bool(served.engine._outboxes))
    return served.engine._outboxes


async def test_output_left_unread_ends_its_requests(
    bench: Callable[..., Any], request_of: Any, narrow: Any, read_all: Any, continuation: Any
) -> None:
    """A front end that does not read loses the requests of which too much is unread, not others; what it then reads is a right
    beginning and the reason.
    """
    async with bench(max_unread_tokens=100) as served:
        raw = served.raw(narrow(served.client.target).Session())
        await raw.hello()
        await raw.send(*((n, request_of(f"slow{n}", [n], 450)) for n in range(1, 41)), (41, request_of("short", [99], 50)))
        fast = await served.open()
        outputs = [await fast.submit(request_of(f"fast{n}", [n, n], 100)) for n in range(8)]
        assert [(await read_all(output))[0] for output in outputs] == [continuation([n, n], 100) for n in range(8)]
        await served.until(lambda: not served.engine.core.requests)
        assert served.engine.core.stats().private == 0
        await raw.read_until(lambda: len(raw.ended) == 41)
        lost = [number for number, end in raw.ended.items() if end.status == Code.RESOURCE_EXHAUSTED.value[0]]
        assert len(lost) == 40
        assert raw.ended[41].finished.completion_tokens == 50
        for number in lost:
            assert raw.tokens[number] == continuation([number], 450)[: len(raw.tokens[number])]
            words = f"request 'slow{number}': its output was left unread beyond 100 values (--max-unread-tokens)"
            assert raw.ended[number].detail == words
        await raw.send((42, request_of("again", [4], 3)))
        await raw.read_until(lambda: 42 in raw.ended)
        assert raw.tokens[42] == continuation([4], 3)
        raw.call.cancel()
        await fast.close()


async def test_session_that_reads_nothing_is_cut_off(bench: Callable[..., Any], request_of: Any, narrow: Any) -> None:
    """After the time to write its stream ends with RESOURCE_EXHAUSTED, and its requests with it."""
    async with bench(write_timeout=0.4, max_unread_tokens=100_000) as served:
        raw = served.raw(narrow(served.client.target).Session())
        await raw.hello()
        await raw.send(*((n, request_of(f"r{n}", [n], 450)) for n in range(1, 41)))
        await _outboxes(served)
        await served.until(lambda: not served.engine._outboxes)
        assert not served.engine.core.requests
        assert await raw.end() == (Code.RESOURCE_EXHAUSTED, "nothing was read for 0.4 s (--write-timeout)")


async def test_reader_of_one_request_is_late(
    bench: Callable[..., Any], request_of: Any, read_all: Any, continuation: Any
) -> None:
    """The helper keeps so much for a request whose reader is late, and ends it beyond; the session's others do not wait."""
    async with bench() as served:
        session = await served.open(max_unread=50)
        late = await session.submit(request_of("late", [1], 450))
        in_time = await session.submit(request_of("in time", [2], 50))
        others = [await session.submit(request_of(f"r{n}", [n, 5], 200)) for n in range(5)]
        results = await asyncio.gather(*(read_all(output) for output in others))
        assert [tokens for tokens, _ in results] == [continuation([n, 5], 200) for n in range(5)]
        await served.until(lambda: not served.engine.core.requests)
        assert (await read_all(in_time))[0] == continuation([2], 50)
        words = "request 'late': its output was left unread beyond 50 values (--max-unread-tokens)"
        assert await served.refusal(late) == (Code.RESOURCE_EXHAUSTED, words)
        await session.close()


async def test_hello_must_come_in_time(bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that says nothing does not stay."""
    monkeypatch.setattr(session_servicer, "HELLO_TIMEOUT_S", 0.2)
    async with bench() as served:
        call = served.client.stub.Session()
        with pytest.raises(aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 20)
        assert caught.value.code() is Code.INVALID_ARGUMENT
        assert caught.value.details() == "the session was opened 0.2 s ago, and its hello has not come"


async def test_numbers_end_where_their_column_does(
    bench: Callable[..., Any], request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that has used up its numbers ends, and its requests with it, before one is taken in that has none."""
    monkeypatch.setattr(session_servicer, "MAX_NUMBER", 2)
    async with bench() as served:
        raw = served.raw(served.client.stub.Session())
        await raw.hello()
        await raw.send(*((n, request_of(f"r{n}", [n], 450)) for n in range(1, 4)))
        assert await raw.end() == (Code.INVALID_ARGUMENT, "a session has at most 2 requests; open another one")
        await served.until(lambda: not served.engine.core.requests)


async def test_session_is_a_call_like_others(bench: Callable[..., Any]) -> None:
    """It counts among the calls at a time."""
    async with bench(max_streams=2) as served:
        sessions = [await served.open(), await served.open()]
        with pytest.raises(Exception, match="2 calls are open already, which is the limit"):
            await served.open()
        for session in sessions:
            await session.close()
