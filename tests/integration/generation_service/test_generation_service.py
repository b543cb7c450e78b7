"""GenerationService over a real loopback server: requests from their first message to their account."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import numpy as np
import pytest

from pagemirror.v1 import generation_pb2
from scheduler_service.client import Ending

StackOf = Callable[..., AbstractAsyncContextManager[Any]]
Continuation = Callable[[Any, int], list[int]]

VOCAB_SIZE = 997


async def test_stream_names_the_request_first_and_ends_with_its_account(stack_of: StackOf) -> None:
    """The first message has the id, tokens are those of the definition, the last message counts them."""
    async with stack_of() as stack:
        pieces = [piece async for piece in stack.client.generate([1, 2, 3], max_tokens=6)]
        assert pieces[0].request_id.startswith("req-")
        assert [piece.request_id for piece in pieces[1:]] == [""] * (len(pieces) - 1)
        assert sum((piece.tokens for piece in pieces), []) == [20, 104, 629, 421, 384, 473]
        assert [piece.ending for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].ending == Ending("length", 3, 6, 0, 0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap_depth": 0},
        {"overlap_depth": 2, "refresh_policy": "diff"},
        {"refresh_policy": "always", "mixed": False},
        {"prefix_cache": False},
    ],
    ids=str,
)
async def test_concurrent_requests_in_a_tiny_pool_are_exact(
    stack_of: StackOf, continuation: Continuation, settings: dict[str, Any]
) -> None:
    """Twelve requests of shared prefixes in 14 pages are retracted and resumed, and each equals its definition."""
    async with stack_of(num_pages=14, max_pages_per_row=12, **settings) as stack:
        shared = list(range(100, 110))
        prompts = [shared[: 3 + n % 8] + [n, n + 1] for n in range(12)]
        results = await asyncio.gather(*(stack.run(prompt, 8 + n) for n, prompt in enumerate(prompts)))
        for n, (prompt, (tokens, ending)) in enumerate(zip(prompts, results, strict=True)):
            assert tokens == continuation(prompt, 8 + n)
            assert (ending.reason, ending.completion_tokens) == ("length", 8 + n)
        assert sum(ending.num_retractions for _, ending in results) > 0
        pages = stack.engine.core.stats()
        assert pages.private == 0
        assert pages.free + pages.cached == 14


async def test_second_request_uses_the_first_ones_pages(stack_of: StackOf) -> None:
    """Equal prompts match, other namespaces and opted-out requests do not."""
    async with stack_of() as stack:
        prompt = list(range(13))
        assert (await stack.run(prompt, 4))[1].cached_tokens == 0
        assert (await stack.run(prompt, 4))[1].cached_tokens == 12
        assert (await stack.run(prompt, 4, cache_namespace="other"))[1].cached_tokens == 0
        assert (await stack.run(prompt, 4, prefix_cache=False))[1].cached_tokens == 0


async def test_client_that_disconnects_frees_its_request(stack_of: StackOf, continuation: Continuation) -> None:
    """Cancelling the call ends the request: its id is unknown, its row and its pages are free, and the runtime hears of it."""
    async with stack_of() as stack:
        pieces = stack.client.generate([5, 6, 7], max_tokens=100, request_id="gone")
        assert await stack.first_token(pieces) == continuation([5, 6, 7], 100)[:1]
        assert (await stack.client.state("gone")).prompt_tokens == 3
        await pieces.aclose()
        await stack.until(lambda: not stack.engine.core.has_work)
        assert (await stack.refused(stack.client.state("gone"))).code is grpc.StatusCode.NOT_FOUND
        pages = stack.engine.core.stats()
        assert pages.free + pages.cached == 64

        async def leases() -> int:
            return len((await stack.engine.link.read_rows([], 10)).pages)

        while await leases():
            await asyncio.sleep(0.01)


async def test_bad_requests_change_nothing(stack_of: StackOf) -> None:
    """Each bad request has its status, names value and limit, and leaves the scheduler as it was."""
    async with stack_of(max_pages_per_row=4) as stack:
        client = stack.client
        cases: list[tuple[dict[str, Any], str]] = [
            ({"prompt": []}, "the prompt is empty"),
            ({"prompt": [1, 997]}, r"prompt token 1 is 997, but ids are in [0, 997)"),
            ({"prompt": [-1]}, r"prompt token 0 is -1"),
            ({"prompt": [1] * 17}, "17 tokens"),
            ({"prompt": [1], "max_tokens": 0}, "max_tokens is 0"),
            ({"prompt": [1], "max_tokens": -5}, "max_tokens is -5"),
            ({"prompt": [1], "temperature": -0.5}, "temperature is -0.5"),
            ({"prompt": [1], "temperature": float("nan")}, "temperature is nan"),
            ({"prompt": [1], "top_k": 0}, "top_k is 0"),
            ({"prompt": [1], "top_p": 0.0}, "top_p is 0.0"),
            ({"prompt": [1], "min_p": 1.5}, "min_p is 1.5"),
            ({"prompt": [1], "max_queue_wait_ms": 0}, "max_queue_wait_ms is 0"),
            ({"prompt": [1], "request_id": "x" * 257}, "request_id"),
            ({"prompt": [1], "seed": 2**64}, "out of range"),
        ]
        for arguments, words in cases:
            error = await stack.refused(stack.rest_of(client.generate(**arguments)))
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT, arguments
            assert words in error.details, error.details
        raw = generation_pb2.GenerateRequest(prompt=b"\1\0\0", max_tokens=1)
        with pytest.raises(grpc.aio.AioRpcError, match="multiple of 4") as caught:
            async for _ in client.stub.Generate(raw):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        info = (await client.info()).raw
        assert (info.num_waiting, info.num_running, info.num_retracted, info.free_pages) == (0, 0, 0, 64)
        assert (info.num_steps, info.max_prompt_len, info.num_ranks) == (0, 16, 1)
        assert (await stack.run([1] * 16, 5))[1].reason == "length"


async def test_info_states_model_limits_and_fill(stack_of: StackOf) -> None:
    """GetInfo repeats the runtime's facts and our settings; with a context limit a prompt leaves room for one token."""
    async with stack_of(max_context=20, stop_ids=(7, 9), overlap_depth=2, chunk_size=100) as stack:
        served = await stack.client.info()
        assert (served.model, served.vocab_size, served.default_stop_ids) == ("fingerprint", VOCAB_SIZE, (7, 9))
        raw = served.raw
        assert (raw.page_size, raw.num_pages, raw.max_rows, raw.max_pages_per_row) == (4, 64, 8, 32)
        assert (raw.token_budget, raw.chunk_size, raw.overlap_depth, raw.refresh_policy) == (32, 32, 2, "transition")
        assert (raw.max_context, raw.max_prompt_len) == (20, 19)
        assert (await stack.run([1] * 19, 5, ignore_default_stop_ids=True))[1].completion_tokens == 1
        assert (await stack.refused(stack.run([1] * 20, 1))).code is grpc.StatusCode.INVALID_ARGUMENT


async def test_id_of_a_live_request_is_taken(stack_of: StackOf, continuation: Continuation) -> None:
    """A second request with a live id is ALREADY_EXISTS and does not disturb the first; afterwards the id is free."""
    async with stack_of() as stack:
        pieces = stack.client.generate([1, 2, 3], max_tokens=40, request_id="twin")
        tokens = await stack.first_token(pieces)
        error = await stack.refused(stack.run([4], 1, request_id="twin"))
        assert error.code is grpc.StatusCode.ALREADY_EXISTS
        tokens += (await stack.rest_of(pieces))[0]
        assert tokens == continuation([1, 2, 3], 40)
        assert (await stack.run([4], 1, request_id="twin"))[0] == continuation([4], 1)


async def test_models_own_stop_ids_end_a_request_unless_ignored(stack_of: StackOf) -> None:
    """Ids the runtime states end the output, add to the client's own, and are left out when asked to."""
    async with stack_of(stop_ids=(629,)) as stack:
        tokens, ending = await stack.run([1, 2, 3], 6)
        assert (tokens, ending.reason) == ([20, 104, 629], "stop")
        tokens, ending = await stack.run([1, 2, 3], 6, stop_token_ids=[104])
        assert (tokens, ending.reason) == ([20, 104], "stop")
        tokens, ending = await stack.run([1, 2, 3], 6, ignore_default_stop_ids=True, stop_token_ids=[384])
        assert (tokens, ending.reason) == ([20, 104, 629, 421, 384], "stop")


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"min_new_tokens": 2},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"logit_bias": {1: 2.0}},
        {"num_logprobs": 3},
    ],
)
async def test_sampling_that_the_model_cannot_honour_is_refused(stack_of: StackOf, options: dict[str, Any]) -> None:
    """The fingerprint model has no logits: a parameter that needs them is INVALID_ARGUMENT by name, and never ignored."""
    async with stack_of() as stack:
        error = await stack.refused(stack.run([1], 1, **options))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        (name,) = options
        assert name in error.details
        assert "cannot honour it" in error.details
        assert (await stack.run([1, 2, 3], 2, top_k=3, seed=5))[0] == [20, 104]
        assert stack.engine.connection.session_no == 1


async def test_trace_context_reaches_the_request(stack_of: StackOf) -> None:
    """The call's `traceparent` becomes the request's."""
    async with stack_of() as stack:
        stack.engine.pause()
        message = generation_pb2.GenerateRequest(request_id="t", prompt=np.array([1], "<i4").tobytes(), max_tokens=1)
        call = stack.client.stub.Generate(message, metadata=(("traceparent", "00-ab-cd-01"),))
        await stack.until(lambda: stack.engine.core.num_waiting == 1)
        assert stack.engine.core.requests["t"].traceparent == "00-ab-cd-01"
        stack.engine.resume()
        async for _ in call:
            pass


async def test_an_error_of_ours_is_told_blandly(stack_of: StackOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unforeseen exception in a call becomes INTERNAL without its words."""
    async with stack_of() as stack:

        def explode(force: bool) -> int:
            raise KeyError("secret detail")

        monkeypatch.setattr(stack.engine, "reset_prefix_cache", explode)
        error = await stack.refused(stack.client.reset_prefix_cache())
        assert error.code is grpc.StatusCode.INTERNAL
        assert "secret" not in error.details


async def test_metrics_count_what_happened(stack_of: StackOf) -> None:
    """Requests, tokens, cached tokens and pages add up."""
    async with stack_of() as stack:
        prompt = list(range(13))
        await stack.run(prompt, 4)
        await stack.run(prompt, 6)
        await stack.refused(stack.run([], 6))
        await stack.until(lambda: stack.engine.core.num_in_flight == 0)
        value = stack.engine.metrics.registry.get_sample_value
        assert value("pagemirror_requests_total") == 2
        assert value("pagemirror_requests_finished_total", {"reason": "length"}) == 2
        assert value("pagemirror_requests_refused_total", {"error": "EmptyPromptError"}) == 1
        assert value("pagemirror_generated_tokens_total") == 10
        assert value("pagemirror_prompt_tokens_total") == 26
        assert value("pagemirror_cached_prompt_tokens_total") == 12
        assert value("pagemirror_steps_total") == stack.engine.num_steps
        assert value("pagemirror_step_seconds_count") == stack.engine.num_steps
