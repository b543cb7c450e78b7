"""Generate over a real loopback server with the gateway's stubs: tokens, ends, stops, aborts, for both services."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest

GatewayOf = Callable[..., AbstractAsyncContextManager[Any]]
Continuation = Callable[[Any, int], list[int]]


async def test_plain_request_is_one_exact_completion(gateway: GatewayOf, continuation: Continuation) -> None:
    """Without `stream` there is one message, with all tokens and the account."""
    async with gateway() as served:
        chunks, complete = await served.run([1, 2, 3, 4, 5], 6, request_id="plain")
        assert chunks == []
        assert list(complete.output_ids) == continuation([1, 2, 3, 4, 5], 6)
        assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", 5, 6)
        assert (complete.cached_tokens, complete.WhichOneof("matched_stop")) == (0, None)
        assert (await served.run([1, 2, 3, 4, 5], 6))[1].cached_tokens == 4


async def test_stream_is_the_same_in_pieces(gateway: GatewayOf, continuation: Continuation) -> None:
    """Chunks have what is new, in order; the last message has all of it."""
    async with gateway() as served:
        chunks, complete = await served.run([7, 8, 9], 12, stream=True)
        assert sum(chunks, []) == list(complete.output_ids) == continuation([7, 8, 9], 12)
        assert len(chunks) > 1
        assert all(chunks)


async def test_request_without_a_limit_takes_the_room_that_is_left(gateway: GatewayOf, continuation: Continuation) -> None:
    """An unset max_tokens means the model's context."""
    async with gateway(max_context=20) as served:
        _, complete = await served.run([1, 2, 3], None)
        assert list(complete.output_ids) == continuation([1, 2, 3], 17)
        assert complete.finish_reason == "length"


async def test_stop_ids_end_the_output(gateway: GatewayOf, continuation: Continuation) -> None:
    """A stop id of the request or of the model ends it; vLLM's output has it, TokenSpeed's only where it is to stay."""
    tokens = continuation([5, 6], 20)
    async with gateway(stop_ids=(tokens[9],)) as served:
        tokenspeed = served.api.name == "tokenspeed"
        _, complete = await served.run([5, 6], 20, stop_token_ids=[tokens[4]])
        assert list(complete.output_ids) == tokens[: 4 if tokenspeed else 5]
        assert (complete.finish_reason, complete.completion_tokens) == ("stop", 5)
        assert complete.matched_token_id == tokens[4]
        chunks, complete = await served.run([5, 6], 20, stream=True)
        assert sum(chunks, []) == list(complete.output_ids) == tokens[: 9 if tokenspeed else 10]
        assert complete.WhichOneof("matched_stop") == ("matched_token_id" if tokenspeed else None)
        _, complete = await served.run([5, 6], 20, ignore_eos=True)
        assert list(complete.output_ids) == tokens
        if tokenspeed:
            _, complete = await served.run([5, 6], 20, no_stop_trim=True)
            assert list(complete.output_ids) == tokens[:10]


async def test_stop_string_ends_the_request_at_its_token(
    gateway: GatewayOf, continuation: Continuation, word_tokenizer: Path
) -> None:
    """The text is searched as it comes; the output ends with the token that completes the string, and its pages are free."""
    tokens = continuation([3, 1, 4], 40)
    stop = f"w{tokens[3]} w{tokens[4]}"
    async with gateway(gateway_tokenizer=word_tokenizer) as served:
        for stream in (False, True):
            chunks, complete = await served.run([3, 1, 4], None, stream=stream, stop=["nowhere", stop])
            assert list(complete.output_ids) == tokens[:5]
            assert sum(chunks, []) == (tokens[:5] if stream else [])
            assert (complete.finish_reason, complete.matched_stop_str) == ("stop", stop)
            assert (complete.completion_tokens, complete.prompt_tokens) == (5, 3)
            if served.linked is not None:
                await served.until(lambda: not served.engine.core.requests)
            assert not served.engine.core.requests
        ended = served.engine.metrics.registry.get_sample_value
        reason = "stop" if served.linked is None else "abort"  # which is all that a session can say
        assert ended("pagemirror_requests_finished_total", {"reason": reason, "model_name": "fingerprint"}) == 2
        _, complete = await served.run([3, 1, 4], 6, stop=["nowhere"])
        assert (list(complete.output_ids), complete.finish_reason) == (tokens[:6], "length")


async def test_stop_string_needs_a_tokenizer(gateway: GatewayOf) -> None:
    """The model has none, and none is named: the field is refused by name."""
    async with gateway() as served:
        code, details = await served.refused(served.api.request([1], stop=["x"]))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "stop cannot be honoured" in details


async def test_several_completions_of_one_request(gateway: GatewayOf, continuation: Continuation) -> None:
    """`n` completions come over one call, told apart by index, each with one end."""
    async with gateway() as served:
        chunks, completes = await served.run_all([2, 4, 6], 9, stream=True, n=3, request_id="three")
        assert sorted(completes) == [0, 1, 2]
        for index, complete in completes.items():
            assert sum(chunks[index], []) == list(complete.output_ids) == continuation([2, 4, 6], 9)
        assert not served.engine.core.requests


@pytest.mark.parametrize("count", [1, 2])
async def test_abort_ends_all_of_a_request(gateway: GatewayOf, count: int) -> None:
    """A unary Abort ends every completion as such, frees its pages, and may be repeated."""
    async with gateway(num_pages=32) as served:
        call = served.stub.Generate(served.api.request([1, 2, 3], None, request_id="long", stream=True, n=count))
        messages = aiter(call)
        message = await anext(messages)
        assert message.chunk.token_ids
        assert len(served.engine.core.requests) == count
        await served.stub.Abort(served.api.abort("long"))
        if served.linked is not None:  # a front end has answered when its word is on the way
            await served.until(lambda: not served.engine.core.requests)
        assert not served.engine.core.requests
        assert served.engine.core.stats().private == 0
        ends = [message.complete async for message in messages if message.HasField("complete")]
        assert sorted((end.index, end.finish_reason) for end in ends) == [(index, "abort") for index in range(count)]
        await served.stub.Abort(served.api.abort("long"))
        await served.stub.Abort(served.api.abort("never there"))


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelled_call_ends_its_request(gateway: GatewayOf, stream: bool) -> None:
    """A client that cancels leaves nothing behind, and its Abort that comes after is harmless."""
    async with gateway() as served:
        call = served.stub.Generate(served.api.request([1, 2, 3], None, request_id="gone", stream=stream, n=2))
        reading = asyncio.ensure_future(call.read())
        await served.until(lambda: served.engine.core.num_running == 2)
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await served.until(lambda: not served.engine.core.requests)
        assert served.engine.core.stats().private == 0
        await served.stub.Abort(served.api.abort("gone"))


async def test_refused_requests_have_the_statuses_of_the_table(gateway: GatewayOf) -> None:
    """What is wrong with a request is told as it is by the scheduler's own service."""
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    async with gateway(max_context=20) as served:
        request = served.api.request
        refused = {
            "the prompt is empty": request([]),
            "prompt token 1 is 997": request([1, 997]),
            "prompt token 0 is 4294967295": request([2**32 - 1]),
            "max_context = 20": request(list(range(20))),
            "max_tokens is 0": request([1], 0),
            f"{served.api.max_tokens} is 4294967295": request([1], 2**32 - 1),
            "temperature is 1": request([1], temperature=1.0),
            "n is 129": request([1], n=129),
            "num_logprobs is 2": request([1], logprobs=2),
            "stop_ids is 4294967295": request([1], stop_token_ids=[2**32 - 1]),
            "stop is ''": request([1], stop=[""]),
        }
        for words, message in refused.items():
            code, details = await served.refused(message)
            assert (code, words in details) == (invalid, True), (words, details)
        assert not served.engine.core.requests


async def test_full_queue_and_taken_ids(gateway: GatewayOf) -> None:
    """A request beyond the queue is RESOURCE_EXHAUSTED, a live id ALREADY_EXISTS; of a refused fan-out nothing stays."""
    async with gateway(max_rows=1, max_waiting=1) as served:
        call = served.stub.Generate(served.api.request([1, 2], None, request_id="first", stream=True))
        await call.read()
        code, _ = await served.refused(served.api.request([1], request_id="first"))
        assert code is grpc.StatusCode.ALREADY_EXISTS
        code, details = await served.refused(served.api.request([1], n=3))
        assert (code, "the queue is full" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        if served.linked is not None:
            await served.until(lambda: len(served.engine.core.requests) == 1)
        assert list(served.engine.core.requests) == ["first"]
        call.cancel()
        await served.until(lambda: not served.engine.core.requests)
