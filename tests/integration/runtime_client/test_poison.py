"""A request that makes each step fail that it is in, or the runtime die: it ends with INTERNAL, and nobody else notices more
than a pause. All over a real loopback stream, with the exact test model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest

from scheduler_service.engine_loop import EngineLoop, SubmitOptions
from scheduler_service.errors import RequestFailedError
from scheduler_service.grpc_status import status_of

MakeRuntime = Callable[..., Any]
Listening = Callable[..., AbstractAsyncContextManager[str]]
EngineOn = Callable[..., AbstractAsyncContextManager[EngineLoop]]
Definition = Callable[[list[int], int], list[int]]

POISON = 900


def raise_on(runtime: Any, is_poison: Callable[[Any, list[int]], bool]) -> None:
    """Make the runtime's model fail the steps whose batch and token ids are poison."""
    execute = runtime.runner.executor.execute

    def execute_or_raise(batch: Any) -> Any:
        if is_poison(batch, batch.input_ids.tolist()):
            raise FloatingPointError("poison")
        return execute(batch)

    runtime.runner.executor.execute = execute_or_raise


async def outcomes(clients: Any, engine: EngineLoop, prompts: dict[str, list[int]], num_tokens: int) -> dict[str, Any]:
    """Tokens of each prompt, or the error with which it ended."""
    options = SubmitOptions(max_tokens=num_tokens)
    subscriptions = [engine.submit(name, np.array(prompt, np.int32), options) for name, prompt in prompts.items()]
    results = await asyncio.gather(*map(clients.collect, subscriptions), return_exceptions=True)
    return dict(zip(prompts, results, strict=True))


async def test_one_poison_row_among_256(
    make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any, continuation: Definition
) -> None:
    """255 requests are exact; the one whose token makes the model raise ends with INTERNAL, after three failed steps in all."""
    runtime = make_runtime(num_pages=2048, max_rows=256)
    raise_on(runtime, lambda batch, ids: POISON in ids)
    prompts = {f"r{n}": [n, 2, 3] for n in range(256)}
    prompts["r100"] = [100, POISON, 3]
    async with listening(runtime) as address, engine_on(address, check=False, chunk_size=64) as engine:
        # One token each, since the model may say any token by itself and would then be given it.
        found = await outcomes(clients, engine, prompts, 1)
    failure = found.pop("r100")
    assert isinstance(failure, RequestFailedError)
    assert status_of(failure)[0].name == "INTERNAL"
    assert found == {name: continuation(prompts[name], 1) for name in found}
    assert runtime.num_resets == 3
    assert runtime.num_streams == 1


@pytest.mark.parametrize("overlap_depth", [0, 2])
async def test_poison_in_the_second_chunk(
    make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any, overlap_depth: int
) -> None:
    """The poisonous token is the sixth of the prompt and chunks have four: neighbours that decode meanwhile are exact."""
    runtime = make_runtime()
    raise_on(runtime, lambda batch, ids: POISON in ids and batch.num_extend_rows > 0)
    async with listening(runtime) as address, engine_on(address, overlap_depth=overlap_depth) as engine:
        bad = engine.submit("bad", np.array([1, 2, 3, 4, 5, POISON, 7], np.int32), SubmitOptions(max_tokens=4))
        assert await clients.run_all(engine) == clients.expected
        with pytest.raises(RequestFailedError, match="'bad' failed"):
            await clients.collect(bad)


@pytest.mark.parametrize("overlap_depth", [0, 1])
async def test_poison_in_decode_steps_only(
    make_runtime: MakeRuntime,
    listening: Listening,
    engine_on: EngineOn,
    clients: Any,
    continuation: Definition,
    overlap_depth: int,
) -> None:
    """Each reset is followed by a prefill that gives the bad request a token; it ends all the same."""
    runtime = make_runtime()
    bad_rows: set[int] = set()
    start_leases = runtime.runner.executor.start_leases

    def note_rows(leases: Any) -> None:
        bad_rows.difference_update(lease.req_pool_index for lease in leases)
        bad_rows.update(lease.req_pool_index for lease in leases if lease.request_id == "bad")
        start_leases(leases)

    runtime.runner.executor.start_leases = note_rows
    raise_on(runtime, lambda batch, ids: bool(bad_rows & set(batch.host_rows[batch.num_extend_rows :].tolist())))
    async with listening(runtime) as address, engine_on(address, overlap_depth=overlap_depth) as engine:
        bad = engine.submit("bad", np.array([1, 2, 3], np.int32), SubmitOptions(max_tokens=50))
        assert await clients.run_all(engine) == clients.expected
        with pytest.raises(RequestFailedError):
            await clients.collect(bad)
        assert bad.request.output == continuation([1, 2, 3], 50)[: bad.request.num_output]
        assert bad.request.num_output <= 4
    assert runtime.num_resets <= 3


async def test_two_poisons(make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any) -> None:
    """Two bad requests, one of which fails in its second chunk: both end, the four others are exact."""
    runtime = make_runtime()
    raise_on(runtime, lambda batch, ids: bool({POISON, POISON + 1} & set(ids)) and batch.num_extend_rows > 0)
    async with listening(runtime) as address, engine_on(address) as engine:
        bad = [
            engine.submit("bad0", np.array([POISON, 2], np.int32), SubmitOptions(max_tokens=4)),
            engine.submit("bad1", np.array([1, 2, 3, 4, POISON + 1], np.int32), SubmitOptions(max_tokens=4)),
        ]
        assert await clients.run_all(engine) == clients.expected
        for subscription in bad:
            with pytest.raises(RequestFailedError):
                await clients.collect(subscription)


@pytest.mark.parametrize("overlap_depth", [0, 2])
async def test_poison_that_kills_the_runtime(
    make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any, overlap_depth: int
) -> None:
    """The stream breaks whenever the bad request is in an op: it ends after three times alone, the four others are exact."""
    runtime = make_runtime()
    runtime.kills = lambda message: str(POISON) in str(np.frombuffer(message.input_ids, "<i4").tolist())
    async with listening(runtime) as address, engine_on(address, overlap_depth=overlap_depth) as engine:
        bad = engine.submit("bad", np.array([1, POISON, 3], np.int32), SubmitOptions(max_tokens=4))
        assert await clients.run_all(engine) == clients.expected
        with pytest.raises(RequestFailedError):
            await clients.collect(bad)
    assert runtime.num_streams == 6


async def test_refused_row_does_not_disturb_the_others(
    make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any, continuation: Definition
) -> None:
    """An op refused for row B's sake while a later op is already sent: A's next tokens are 629, 421, not 29."""
    runtime = make_runtime()
    refused: list[str] = []

    def refuse_b(message: Any) -> tuple[int, str] | None:
        for lease in message.lease_starts:
            if lease.request_id == "B" and not refused:
                refused.append("B")
                return lease.req_pool_index, "B"
        return None

    runtime.refuses = refuse_b
    async with listening(runtime) as address, engine_on(address, overlap_depth=2) as engine:
        a = engine.submit("A", np.array([1, 2, 3], np.int32), SubmitOptions(max_tokens=6))
        while a.request.num_output < 2:
            await asyncio.sleep(0)
        b = engine.submit("B", np.array([4, 5], np.int32), SubmitOptions(max_tokens=6))
        assert await clients.collect(a) == [20, 104, 629, 421, 384, 473]
        assert await clients.collect(b) == continuation([4, 5], 6)
    assert refused == ["B"]
    assert runtime.num_resets == 1
    assert runtime.num_skipped >= 1, "a later op was on its way"
