"""Log probabilities over a session, with the small transformer: those that Generate returns."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest

from pagemirror.v1 import forward_pb2
from runtime_service import app as runtime_app
from runtime_service.settings import load_settings
from scheduler_service import session_servicer
from scheduler_service.session_client import Session

LIMIT_S = 60.0
PROMPT = list(b"The mirror never decides")


@pytest.mark.parametrize("piece", [256, 2], ids=["one message", "many messages"])
async def test_logprobs_are_those_of_generate(
    both_services: Callable[..., Any], request_of: Any, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """Requests of one session that want none, their own or several get theirs, also where a step takes several messages."""
    monkeypatch.setattr(session_servicer, "_PIECE_WITH_LOGPROBS", piece)
    settings = load_settings(model="tiny", page_size=4, num_pages=128, max_rows=16, device="cpu")
    load = functools.partial(runtime_app.load, settings)
    async with both_services(load, limit_s=LIMIT_S) as (_, client, _runner):
        wanted: list[int | None] = [None, 0, 3, None, 1, 20]
        session = await Session.open(client.stub)
        outputs = []
        for n, count in enumerate(wanted):
            sampling = forward_pb2.SamplingParams(temperature=0.7, seed=n, num_logprobs=count)
            request = request_of(f"r{n}", PROMPT[n:], 12, sampling=sampling, ignore_default_stop_ids=True)
            outputs.append(await session.submit(request))
        for n, (mine, theirs) in enumerate(
            zip(
                await asyncio.gather(*(_of_session(output) for output in outputs)),
                await asyncio.gather(*(_of_generate(client, n, count) for n, count in enumerate(wanted))),
                strict=True,
            )
        ):
            assert mine[0] == theirs[0], n
            assert mine[1] == pytest.approx(theirs[1], rel=1e-4)
            assert [token for token, _ in mine[2]] == [token for token, _ in theirs[2]]
            assert [value for _, value in mine[2]] == pytest.approx([value for _, value in theirs[2]], rel=1e-4)
            assert len(mine[1]) == (0 if wanted[n] is None else 12)
            assert len(mine[2]) == 12 * (wanted[n] or 0)
        await session.close()


Answer = tuple[list[int], list[float], list[tuple[int, float]]]


async def _of_session(output: Any) -> Answer:
    tokens: list[int] = []
    logprobs: list[float] = []
    top: list[tuple[int, float]] = []
    while True:
        piece = await output.take()
        tokens += piece.tokens
        logprobs += piece.logprobs
        top += zip(piece.top_tokens, piece.top_logprobs, strict=True)
        if piece.finished is not None:
            return tokens, logprobs, top


async def _of_generate(client: Any, n: int, count: int | None) -> Answer:
    tokens: list[int] = []
    logprobs: list[float] = []
    top: list[tuple[int, float]] = []
    pieces = client.generate(
        PROMPT[n:], max_tokens=12, temperature=0.7, seed=n, num_logprobs=count, ignore_default_stop_ids=True
    )
    async for piece in pieces:
        tokens += piece.tokens
        logprobs += piece.logprobs
        top += [pair for pairs in piece.top_logprobs for pair in pairs]
    return tokens, logprobs, top
