"""Sampling parameters through the gateway's port, with the small transformer: what is drawn is what GenerationService draws."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from runtime_service import app as runtime_app
from runtime_service.settings import RuntimeSettings
from scheduler_service.client import Client

PROMPT = list(b"Once upon a page")
Serving = Callable[..., AbstractAsyncContextManager[tuple[Any, Client]]]


@pytest.fixture
def serving(both_services: Callable[..., Any], serve_port: Callable[..., Any], api: str) -> Serving:
    """The port of one of the services in front of `tiny`, and a client of GenerationService."""

    @contextlib.asynccontextmanager
    async def serve() -> AsyncIterator[tuple[Any, Client]]:
        settings = RuntimeSettings(model="tiny", device="cpu", page_size=4, num_pages=256, max_rows=8)
        load = functools.partial(runtime_app.load, settings)
        async with both_services(load, limit_s=60.0, chunk_size=16) as (engine, client, _), serve_port(engine, api) as served:
            yield served, client

    return serve


async def drawn(client: Client, **options: Any) -> tuple[list[int], list[float], list[list[tuple[int, float]]]]:
    """Tokens, log probabilities and most probable tokens by GenerationService."""
    tokens: list[int] = []
    logprobs: list[float] = []
    top: list[list[tuple[int, float]]] = []
    async for piece in client.generate(PROMPT, max_tokens=10, **options):
        tokens, logprobs, top = tokens + piece.tokens, logprobs + piece.logprobs, top + piece.top_logprobs
    return tokens, logprobs, top


async def test_parameters_reach_the_sampler(serving: Serving) -> None:
    """Each message's words for a parameter mean what GenerationService's mean; zeros of unset fields mean nothing."""
    async with serving() as (served, client):
        plain = served.api.name == "vllm"
        ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"temperature": 0.0}, {}),
            ({"temperature": 1.5, "seed": 11}, {"temperature": 1.5, "seed": 11}),
            ({"temperature": 1.5, "seed": 11, "top_k": 4}, {"temperature": 1.5, "seed": 11, "top_k": 4}),
            ({"temperature": 1.5, "seed": 11, "top_k": 0 if plain else -1}, {"temperature": 1.5, "seed": 11}),
            ({"temperature": 1.5, "seed": 11, "top_p": 0.5}, {"temperature": 1.5, "seed": 11, "top_p": 0.5}),
            ({"temperature": 1.5, "seed": 11, "min_p": 0.2}, {"temperature": 1.5, "seed": 11, "min_p": 0.2}),
            ({"repetition_penalty": 2.0}, {"repetition_penalty": 2.0}),
            ({"presence_penalty": 1.5, "frequency_penalty": 0.5}, {"presence_penalty": 1.5, "frequency_penalty": 0.5}),
            ({"logit_bias": {(97 if plain else "97"): 50.0}}, {"logit_bias": {97: 50.0}}),
        ]
        for asked, same in ways:
            _, complete = await served.run(PROMPT, 10, **asked)
            assert list(complete.output_ids) == (await drawn(client, **same))[0], asked
        _, complete = await served.run(PROMPT, 10, temperature=1.5, seed=11)
        assert len(set(complete.output_ids)) > 2


async def test_unset_temperature_draws(serving: Serving) -> None:
    """Where a message leaves the temperature out it is 1, as it is for users of OpenAI's API; without a seed one is drawn."""
    async with serving() as (served, client):
        request = served.api.request(PROMPT, 10, seed=5)
        request.sampling_params.ClearField("temperature")
        (message,) = [message async for message in served.stub.Generate(request)]
        assert list(message.complete.output_ids) == (await drawn(client, temperature=1.0, seed=5))[0]
        outputs = {tuple((await served.run(PROMPT, 10, temperature=2.0))[1].output_ids) for _ in range(2)}
        assert len(outputs) == 2


async def test_each_completion_draws_with_a_seed_of_its_own(serving: Serving) -> None:
    """Completion i of a seed s is that of the seed s + i alone."""
    async with serving() as (served, client):
        _, completes = await served.run_all(PROMPT, 10, temperature=1.5, seed=20, n=3)
        for index in range(3):
            alone = await drawn(client, temperature=1.5, seed=20 + index)
            assert list(completes[index].output_ids) == alone[0]


@pytest.mark.parametrize("count", [0, 3])
async def test_log_probabilities_go_with_their_tokens(serving: Serving, count: int) -> None:
    """In chunks those of the chunk's tokens, at the end those of all; as many of the most probable tokens as wanted."""
    async with serving() as (served, client):
        tokens, logprobs, top = await drawn(client, num_logprobs=count)
        collected: list[Any] = []
        async for message in served.stub.Generate(served.api.request(PROMPT, 10, logprobs=count, stream=True)):
            if message.HasField("chunk"):
                assert list(message.chunk.output_logprobs.token_ids) == list(message.chunk.token_ids)
                collected += message.chunk.output_logprobs.token_logprobs
            else:
                found = message.complete.output_logprobs
                assert list(found.token_ids) == list(message.complete.output_ids) == tokens
                assert list(found.token_logprobs) == collected == pytest.approx(logprobs)
                pairs = [list(zip(entry.token_ids, entry.values, strict=True)) for entry in found.top_logprobs]
                assert [[token for token, _ in entry] for entry in pairs] == [[token for token, _ in entry] for entry in top]
                assert all(len(entry) == count for entry in pairs)


async def test_minimum_length_holds_stop_ids_back(serving: Serving) -> None:
    """A stop id is not drawn before the minimum."""
    async with serving() as (served, client):
        first = (await drawn(client))[0][0]
        keep = {"no_stop_trim": True} if served.api.name == "tokenspeed" else {}
        _, complete = await served.run(PROMPT, 10, stop_token_ids=[first], **keep)
        assert list(complete.output_ids) == [first]
        _, complete = await served.run(PROMPT, 10, stop_token_ids=[first], min_tokens=4)
        assert first not in list(complete.output_ids)[:4]
        assert complete.completion_tokens >= 4
