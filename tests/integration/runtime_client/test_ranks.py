"""Several runtimes that receive the same ops: what is delivered, and what comes of a rank that lies, refuses, dies, freezes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest

from scheduler_service.engine_loop import EngineLoop, SubmitOptions
from scheduler_service.errors import RequestFailedError, RuntimeMismatchError, StartError
from scheduler_service.row_report import report_rows

MakeRuntime = Callable[..., Any]
Listening = Callable[..., AbstractAsyncContextManager[str]]
EngineOn = Callable[..., AbstractAsyncContextManager[EngineLoop]]
OnRanks = Callable[..., AbstractAsyncContextManager[tuple[EngineLoop, list[Any]]]]

LIMIT_S = 60.0


@pytest.fixture
def on_ranks(make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn) -> OnRanks:
    """An engine on so many replicas; `faults` maps a rank to its fault, other arguments are settings."""

    @contextlib.asynccontextmanager
    async def start(
        num_ranks: int, faults: dict[int, Any] | None = None, **settings: Any
    ) -> AsyncIterator[tuple[EngineLoop, list[Any]]]:
        ranks = [make_runtime() for _ in range(num_ranks)]
        for rank, fault in (faults or {}).items():
            ranks[rank].fault = fault
        async with contextlib.AsyncExitStack() as stack:
            addresses = [await stack.enter_async_context(listening(runtime)) for runtime in ranks]
            engine = await stack.enter_async_context(engine_on(",".join(addresses), **settings))
            yield engine, ranks

    return start


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("overlap_depth", [0, 2])
async def test_ranks_receive_the_same_bytes(on_ranks: OnRanks, clients: Any, num_ranks: int, overlap_depth: int) -> None:
    """Outputs are exact, no rank was ever reset, each got the very same ops, and the window is that of one runtime."""
    async with on_ranks(num_ranks, overlap_depth=overlap_depth) as (engine, ranks):
        assert await clients.run_all(engine) == clients.expected
        async with asyncio.timeout(LIMIT_S):
            await engine.wait_quiet()
        assert engine.link.num_ranks == num_ranks
    assert ranks[0].ops
    assert all(runtime.ops == ranks[0].ops for runtime in ranks)
    assert [runtime.sessions for runtime in ranks] == [[1]] * num_ranks
    assert max(runtime.most_unanswered for runtime in ranks) <= overlap_depth + 1


@pytest.mark.parametrize("liar", [0, 1, 2])
async def test_rank_that_lies_about_one_token(on_ranks: OnRanks, clients: Any, liar: int) -> None:
    """One wrong token of one rank is not delivered, whichever rank it is: all are reset together, and the outputs are exact."""
    async with on_ranks(3) as (engine, ranks):

        def lie(number: int, result: Any) -> None:
            if number == 5:
                result.tokens = result.tokens.copy()
                result.tokens[-1] = (result.tokens[-1] + 1) % 997

        ranks[liar].lie = lie
        assert await clients.run_all(engine) == clients.expected
        assert "the ranks disagree about row" in engine.connection.trouble
        assert f"rank {liar or 1} (127.0.0.1:" in engine.connection.trouble
        assert engine.metrics.registry.get_sample_value("pagemirror_resets_total", {"cause": "ranks"}) == 1
    assert [runtime.sessions for runtime in ranks] == [[1, 2]] * 3
    assert [(runtime.num_streams, runtime.num_resets) for runtime in ranks] == [(1, 1)] * 3


async def test_rank_that_says_another_row_status(on_ranks: OnRanks, clients: Any) -> None:
    """A row that is not finite on one rank only is a disagreement, not the end of the request."""
    async with on_ranks(2) as (engine, ranks):

        def lie(number: int, result: Any) -> None:
            if number == 4:
                result.row_status = np.full_like(result.row_status, 1)

        ranks[1].lie = lie
        assert await clients.run_all(engine) == clients.expected
    assert [runtime.num_resets for runtime in ranks] == [1, 1]


async def test_rank_that_always_lies_about_one_request(on_ranks: OnRanks, clients: Any) -> None:
    """A request on which the ranks never agree ends with INTERNAL, and alone; the others are exact."""
    async with on_ranks(2) as (engine, ranks):
        runner = ranks[1].runner
        launch = runner.launch
        ops: list[Any] = []
        runner.launch = lambda op: ops.append(op) or launch(op)

        def lie(number: int, result: Any) -> None:
            bad = [i for i, row in enumerate(ops[-1].req_pool_indices.tolist()) if runner.session.request_ids.get(row) == "bad"]
            result.tokens = result.tokens.copy()
            result.tokens[bad] = 1

        ranks[1].lie = lie
        bad = engine.submit("bad", np.array([1, 2, 3], np.int32), SubmitOptions(max_tokens=6))
        assert await clients.run_all(engine) == clients.expected
        with pytest.raises(RequestFailedError):
            await clients.collect(bad)
    assert ranks[0].sessions == ranks[1].sessions


@pytest.mark.parametrize("refuser", [0, 1])
async def test_refusal_of_one_rank_wins(on_ranks: OnRanks, clients: Any, refuser: int) -> None:
    """One rank refuses what the other has executed: both are reset, and the trouble names rank and address."""
    async with on_ranks(2, {refuser: lambda number: "refuse" if number == 4 else ""}) as (engine, ranks):
        assert await clients.run_all(engine) == clients.expected
        assert f"rank {refuser} ({engine.link.targets[refuser]}): refused on demand" in engine.connection.trouble
    assert [runtime.sessions for runtime in ranks] == [[1, 2]] * 2


@pytest.mark.parametrize("victim", [0, 1])
async def test_rank_whose_stream_breaks(on_ranks: OnRanks, clients: Any, victim: int) -> None:
    """The other ranks are reset on their own streams, the lost one by a new stream, all to the same session."""
    async with on_ranks(3, {victim: lambda number: "break" if number in {3, 8} else ""}) as (engine, ranks):
        assert await clients.run_all(engine) == clients.expected
        assert f"rank {victim}: " in engine.connection.trouble
    for rank, runtime in enumerate(ranks):
        assert runtime.sessions == [1, 2, 3]
        assert (runtime.num_streams, runtime.num_resets) == ((3, 0) if rank == victim else (1, 2))


@pytest.mark.parametrize(("fault", "limits"), [("freeze", {"heartbeat_timeout": 0.4}), ("ignore", {"step_timeout": 0.4})])
async def test_rank_that_does_not_answer(on_ranks: OnRanks, clients: Any, fault: str, limits: dict[str, float]) -> None:
    """A frozen rank, and one that beats but does not answer, hold the others up for the configured time and no longer."""
    async with on_ranks(2, {1: lambda number: fault if number == 4 else ""}, **limits) as (engine, ranks):
        assert await clients.run_all(engine) == clients.expected
        assert "rank 1: " in engine.connection.trouble
    assert [runtime.num_streams for runtime in ranks] == [1, 2]
    assert [runtime.sessions for runtime in ranks] == [[1, 2]] * 2


async def test_rank_that_is_killed_and_comes_back(
    make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any, continuation: Any
) -> None:
    """While one rank is away nothing is executed by the other; when a successor listens there, all goes on exactly."""
    first, second, successor = make_runtime(), make_runtime(), make_runtime()
    async with contextlib.AsyncExitStack() as stack:
        first_address = await stack.enter_async_context(listening(first))
        life = contextlib.AsyncExitStack()
        address = await life.enter_async_context(listening(second))
        engine = await stack.enter_async_context(engine_on(f"{first_address},{address}"))
        subscription = engine.submit("a", np.array([1, 2, 3], np.int32), SubmitOptions(max_tokens=40))
        tokens = await subscription.take()
        await life.aclose()
        async with asyncio.timeout(LIMIT_S):
            while first.num_resets < 2:
                await asyncio.sleep(0.01)
        num_ops = first.num_ops
        assert not engine.connection.connected
        await stack.enter_async_context(listening(successor, address))
        assert await clients.run_all(engine) == clients.expected
        assert tokens + await clients.collect(subscription) == continuation([1, 2, 3], 40)
        async with asyncio.timeout(LIMIT_S):
            await engine.wait_quiet()
        assert successor.num_ops > 0
        assert first.ops[num_ops:] == successor.ops


async def test_mirror_of_every_rank_is_compared(on_ranks: OnRanks, clients: Any, continuation: Any) -> None:
    """A listing shows the first rank whose mirror differs; with equal mirrors it shows rank 0's."""
    async with on_ranks(2) as (engine, ranks):
        subscription = engine.submit("a", np.array(range(9), np.int32), SubmitOptions(max_tokens=50))
        while subscription.request.num_output < 2:
            await asyncio.sleep(0)
        engine.pause()
        report = await report_rows(engine, LIMIT_S)
        assert [(pair.equal, pair.rank) for pair in report.rows] == [(True, 0)]
        table = ranks[1].runner.mirror.table
        row, entry = report.rows[0].request.row, int(report.rows[0].mirror_pages[1])
        table[row, 1] = 30
        report = await report_rows(engine, LIMIT_S)
        assert [(pair.equal, pair.rank) for pair in report.rows] == [(False, 1)]
        assert report.rows[0].mirror_pages[1] == 30
        assert report.rows[0].scheduler_pages[1] == entry
        table[row, 1] = entry
        engine.resume()
        assert await clients.collect(subscription) == continuation(range(9), 50)


# What must agree


async def test_ranks_of_other_sizes_are_refused(make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn) -> None:
    """A rank with another page size ends the start; both values and both addresses are named."""
    async with listening(make_runtime()) as a, listening(make_runtime(page_size=8)) as b:
        with pytest.raises(RuntimeMismatchError, match=f"page_size: the scheduler says 4, the runtime says 8.*{a}.*{b}"):
            async with engine_on(f"{a},{b}"):
                pass
        with pytest.raises(RuntimeMismatchError, match=f"page_size: the scheduler says 4, the runtime says 8; at {b}"):
            async with engine_on(f"{a},{b}", page_size=4):
                pass


async def test_stated_ranks(make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any) -> None:
    """Ranks are taken as stated, in whatever order they are listed; a part of a world, and a rank twice, are refused."""
    async with contextlib.AsyncExitStack() as stack:
        runtimes = [make_runtime(rank=rank, world_size=2) for rank in (0, 1, 1)]
        first, second, twin = [await stack.enter_async_context(listening(runtime)) for runtime in runtimes]
        async with engine_on(f"{second},{first}") as engine:
            assert engine.link.targets == (first, second)
            assert await clients.run_all(engine) == clients.expected
        with pytest.raises(RuntimeMismatchError, match=f"world_size: the scheduler says 1, the runtime says 2; so {first}"):
            async with engine_on(first):
                pass
        with pytest.raises(RuntimeMismatchError, match=f"rank: .*the runtime says 1; so stated both {second} and {twin}"):
            async with engine_on(f"{second},{twin}"):
                pass


async def test_start_waits_for_every_rank(make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn) -> None:
    """A rank that nobody serves is waited for until startup_timeout, and named."""
    async with listening(make_runtime()) as a:
        async with listening(make_runtime()) as b:
            pass
        with pytest.raises(StartError, match=b):
            async with engine_on(f"{a},{b}", startup_timeout=0.2):
                pass


async def test_schedulers_do_not_hold_ranks_against_each_other(
    make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any
) -> None:
    """Two schedulers start at once and each reaches another rank first: one of them gives way, and both serve in the end."""

    async def serve_once(addresses: str) -> None:
        async with engine_on(addresses) as engine:
            assert await clients.run_all(engine) == clients.expected

    async with listening(make_runtime()) as a, listening(make_runtime()) as b:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(serve_once(f"{a},{b}"), serve_once(f"{b},{a}"))
