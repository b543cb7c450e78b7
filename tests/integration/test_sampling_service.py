"""Sampling over both services and a real loopback server, with the small transformer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

import grpc
import numpy as np
import pytest
import torch

from runtime_service import app as runtime_app
from runtime_service.executors.transformer import TransformerExecutor, create_transformer
from runtime_service.forward_batch import ForwardBatch
from runtime_service.settings import RuntimeSettings
from scheduler_service.client import Client, Ending, RpcFailedError
from scheduler_service.engine_loop import EngineLoop

Serving = Callable[..., AbstractAsyncContextManager["Stack"]]

LIMIT_S = 60.0
PAGE_SIZE = 4
PROMPT = list(b"The mirror never decides")


@dataclasses.dataclass
class Answer:
    """Everything one request returned."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    ending: Ending | None = None


@dataclasses.dataclass
class Stack:
    """Both services in this process, and a client of each."""

    engine: EngineLoop
    client: Client
    executor: TransformerExecutor

    async def run(self, prompt: list[int], max_tokens: int, *, retract_after: int = 0, **options: Any) -> Answer:
        """One request, start to end; its row is taken away once when it has returned `retract_after` tokens."""
        answer = Answer()
        async for piece in self.client.generate(prompt, max_tokens=max_tokens, ignore_default_stop_ids=True, **options):
            answer.tokens += piece.tokens
            answer.logprobs += piece.logprobs
            answer.top += piece.top_logprobs
            answer.ending = piece.ending
            if retract_after and len(answer.tokens) >= retract_after:
                await self.client.retract(options["request_id"])
                retract_after = 0
        assert answer.ending is not None
        assert len(answer.tokens) == max_tokens
        return answer


@contextlib.asynccontextmanager
async def serve_tiny(both_services: Callable[..., Any], **settings: Any) -> AsyncIterator[Stack]:
    """A runtime with `tiny`, a scheduler with these settings, and a client."""
    load = functools.partial(runtime_app.load, tiny_settings())
    values = {"chunk_size": 8, "token_budget": 64} | settings
    async with both_services(load, limit_s=LIMIT_S, **values) as (engine, client, runner):
        yield Stack(engine, client, cast(TransformerExecutor, runner.executor))


@pytest.fixture(name="serving")
def serving_tiny(both_services: Callable[..., Any]) -> Serving:
    """Both services with `tiny`; keyword arguments are the scheduler's settings."""
    return functools.partial(serve_tiny, both_services)


def tiny_settings() -> RuntimeSettings:
    """The small seeded Llama with room for 16 requests."""
    return RuntimeSettings(model="tiny", device="cpu", page_size=PAGE_SIZE, num_pages=512, max_rows=16)


def prefill(tokens: list[int]) -> ForwardBatch:
    """One row that computes all of its tokens at once, in pages 1, 2, 3, …"""
    count = len(tokens)
    positions, zero = torch.arange(count), torch.zeros(1, dtype=torch.int64)
    return ForwardBatch(
        req_to_page=torch.arange(1, -(-count // PAGE_SIZE) + 1, dtype=torch.int32)[None],
        page_size=PAGE_SIZE,
        rows=zero,
        num_computed=zero,
        input_lens=torch.tensor([count]),
        seq_lens=torch.tensor([count]),
        query_indptr=torch.tensor([0, count]),
        input_ids=torch.tensor(tokens),
        positions=positions,
        token_rows=torch.zeros(count, dtype=torch.int64),
        out_cache_loc=positions + PAGE_SIZE,
        num_extend_rows=1,
        host_rows=np.zeros(1, dtype=np.int32),
        host_num_computed=np.zeros(1, dtype=np.int32),
        host_input_lens=np.array([count], dtype=np.int32),
        sample=np.ones(1, dtype=np.bool_),
        clamped=np.zeros(1, dtype=np.bool_),
    )


def logits_of(prompt: list[int], output: list[int]) -> torch.Tensor:
    """Logits from which each output token was chosen, float32 [len(output), vocab]: one prefill for each, by a fresh model."""
    executor, _ = create_transformer(tiny_settings())
    return torch.stack([executor.forward(prefill(prompt + output[:i]), np.array([0]))[0] for i in range(len(output))])


async def test_seeded_text_is_the_same_alone_and_among_fifteen_others(serving: Serving) -> None:
    """Temperature 0.8 and seed 7 give the same tokens whoever else is in the batch, whatever they ask for."""
    chosen: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 7, "num_logprobs": 2}
    async with serving(prefix_cache=False) as stack:
        alone = await stack.run(PROMPT, 24, **chosen)
        assert (await stack.run(PROMPT, 24, **(chosen | {"seed": 8}))).tokens != alone.tokens
        kinds: list[dict[str, Any]] = [
            {},
            {"temperature": 1.2, "seed": 3},
            {"presence_penalty": 1.0, "num_logprobs": 5},
            {"logit_bias": {65: 5.0}, "min_new_tokens": 3, "stop_token_ids": [65]},
            {"temperature": 2.0, "repetition_penalty": 1.3, "top_k": 40},
        ]
        others = [stack.run([*PROMPT[i:], i], 20, **(kinds[i % len(kinds)] | {"stop_token_ids": []})) for i in range(15)]
        together, *_ = await asyncio.gather(stack.run(PROMPT, 24, **chosen), *others)
    assert together.tokens == alone.tokens
    assert np.allclose(together.logprobs, alone.logprobs, atol=1e-4)


async def test_log_probabilities_equal_those_of_one_prefill(serving: Serving) -> None:
    """Over chunks and decode steps, log probabilities are log_softmax of the logits that one whole prefill gives."""
    async with serving() as stack:
        greedy, drawn, plain = await asyncio.gather(
            stack.run(PROMPT, 12, num_logprobs=3),
            stack.run(PROMPT[:9], 12, num_logprobs=0, temperature=1.5, top_k=30, seed=5),
            stack.run(PROMPT, 12),
        )
    assert (plain.logprobs, plain.top, plain.tokens) == ([], [], greedy.tokens)
    for prompt, answer, count in ((PROMPT, greedy, 3), (PROMPT[:9], drawn, 0)):
        values = logits_of(prompt, answer.tokens).log_softmax(-1)
        assert np.allclose(answer.logprobs, values[torch.arange(12), answer.tokens].numpy(), atol=1e-4)
        assert [len(top) for top in answer.top] == [count] * 12
        if count:
            best = values.topk(count)
            assert [[token for token, _ in top] for top in answer.top] == best.indices.tolist()
            assert np.allclose([[value for _, value in top] for top in answer.top], best.values.numpy(), atol=1e-4)
            assert [top[0][0] for top in answer.top] == answer.tokens


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "num_logprobs": 2},
        {"frequency_penalty": 1.0, "temperature": 0.9, "seed": 11, "logit_bias": {32: 2.0}},
    ],
)
async def test_penalties_across_a_retraction_are_those_without(serving: Serving, options: dict[str, Any]) -> None:
    """A request that loses its row and resumes, from the prefix cache and in chunks, returns what one that keeps it returns."""
    async with serving(chunk_size=5) as stack:
        whole = await stack.run(PROMPT, 30, **options)
        resumed = await stack.run(PROMPT, 30, retract_after=12, request_id="r", **options)
        unpenalised = await stack.run(PROMPT, 30, seed=options.get("seed"), temperature=options.get("temperature"))
    assert resumed.ending is not None
    assert resumed.ending.num_retractions == 1
    assert resumed.tokens == whole.tokens
    assert np.allclose(resumed.logprobs, whole.logprobs, atol=1e-4)
    assert unpenalised.tokens != whole.tokens


async def test_bias_and_minimum_length_rule_the_text(serving: Serving) -> None:
    """A bias of 100 forces a token, one of -100 forbids it, and stop ids come only after min_new_tokens."""
    async with serving() as stack:
        forced = await stack.run(PROMPT, 5, logit_bias={65: 100.0})
        assert forced.tokens == [65] * 5
        first = (await stack.run(PROMPT, 1)).tokens[0]
        assert (await stack.run(PROMPT, 1, logit_bias={first: -100.0})).tokens != [first]
        pieces = [
            piece
            async for piece in stack.client.generate(
                PROMPT, max_tokens=20, logit_bias={65: 100.0, 66: 50.0}, stop_token_ids=[65], min_new_tokens=4
            )
        ]
        assert [token for piece in pieces for token in piece.tokens] == [66] * 4 + [65]
        assert pieces[-1].ending is not None
        assert pieces[-1].ending.reason == "stop"


async def test_seed_is_drawn_once_where_the_client_gave_none(serving: Serving) -> None:
    """A request that samples without a seed gets one of its own; a seed that was given, zero included, is kept."""
    async with serving() as stack:
        stack.engine.pause()
        kinds: dict[str, dict[str, Any]] = {
            "x": {"temperature": 1.0},
            "y": {"temperature": 1.0},
            "zero": {"temperature": 1.0, "seed": 0},
            "greedy": {},
        }
        runs = [asyncio.create_task(stack.run([1], 1, request_id=name, **options)) for name, options in kinds.items()]
        while stack.engine.core.num_waiting < 4:
            await asyncio.sleep(0.005)
        seeds = {name: request.sampling.seed for name, request in stack.engine.core.requests.items()}
        stack.engine.resume()
        await asyncio.gather(*runs)
    assert seeds["zero"] == seeds["greedy"] == 0
    assert len({0, seeds["x"], seeds["y"]}) == 3


async def test_parameters_out_of_range_name_field_value_and_range(serving: Serving) -> None:
    """INVALID_ARGUMENT, before anything runs; the server goes on serving."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, but must be in (0, 100]"),
        ({"presence_penalty": 3.0}, "presence_penalty is 3.0, but must be in [-2, 2]"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan, but must be a finite number"),
        ({"logit_bias": {259: 1.0}}, "logit_bias.token is 259, but must be an integer from 0 to 258"),
        ({"logit_bias": {5: -101.0}}, "logit_bias.bias is -101.0, but must be in [-100, 100]"),
        ({"num_logprobs": 21}, "num_logprobs is 21, but must be an integer from 0 to 20"),
    ]
    async with serving() as stack:
        for options, expected in cases:
            with pytest.raises(RpcFailedError) as caught:
                await stack.run(PROMPT, 1, **options)
            assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
            assert expected in caught.value.details
        assert stack.engine.num_steps == 0
        await stack.run(PROMPT, 1)
