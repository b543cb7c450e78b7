"""GenerationService over a real loopback server, in front of the real runtime with the exact test model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import numpy as np
import pytest

from pagemirror.v1 import generation_pb2, generation_pb2_grpc
from runtime_service import app as runtime_app
from runtime_service.execution import ExecutionThread
from runtime_service.executors.base import Capacity
from runtime_service.executors.fingerprint import FingerprintExecutor
from runtime_service.servicer import RuntimeServicer
from runtime_service.settings import RuntimeSettings
from runtime_service.step_runner import StepRunner
from scheduler_service.channels import SERVER_OPTIONS, bind
from scheduler_service.client import Client, Ending, Piece, RpcFailedError
from scheduler_service.engine_loop import EngineLoop
from scheduler_service.generation_servicer import GenerationServicer
from scheduler_service.settings import SchedulerSettings

LIMIT_S = 30.0
VOCAB_SIZE = 997


def continuation(prompt: list[int], num_tokens: int) -> list[int]:
    """The fingerprint model by its definition."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(sum((i + 1) * (token + 1) for i, token in enumerate(tokens)) % VOCAB_SIZE)
    return tokens[len(prompt) :]


@dataclasses.dataclass
class Stack:
    """Both services in this process, and a client of each."""

    engine: EngineLoop
    client: Client
    executor: FingerprintExecutor
    runner: StepRunner

    async def run(self, prompt: list[int], num_tokens: int, **options: Any) -> tuple[list[int], Ending]:
        """One request, start to end."""
        tokens: list[int] = []
        ending = None
        async for piece in self.client.generate(prompt, max_tokens=num_tokens, **options):
            tokens += piece.tokens
            ending = piece.ending
        assert ending is not None
        return tokens, ending

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the event loop turn until the condition holds."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def stack_of(
    page_size: int = 4,
    num_pages: int = 64,
    max_rows: int = 8,
    max_pages_per_row: int = 32,
    stop_ids: tuple[int, ...] = (),
    max_context: int | None = None,
    **settings: Any,
) -> AsyncIterator[Stack]:
    """Start a runtime of this shape, a scheduler with these settings, and a client."""
    async with contextlib.AsyncExitStack() as stack:
        executor = FingerprintExecutor(num_pages=num_pages, page_size=page_size)
        executor._info = dataclasses.replace(executor.info, default_stop_ids=stop_ids)
        thread = ExecutionThread()
        stack.callback(thread.stop)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        servicer = RuntimeServicer(thread)
        servicer.register(server)
        address = bind(server, "127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, 0)
        stack.callback(servicer.shut_down)
        runtime_settings = RuntimeSettings(
            model="fingerprint", page_size=page_size, num_pages=num_pages, max_rows=max_rows, max_context=max_context
        )
        create = lambda _: (executor, Capacity(num_pages=num_pages, max_pages_per_row=max_pages_per_row))  # noqa: E731
        runner, facts = await thread.call(lambda: runtime_app.load(runtime_settings, create))
        servicer.set_ready(runner, facts)

        values = {"heartbeat_timeout": 30.0, "check": True, "chunk_size": 8, "token_budget": 32}
        engine = EngineLoop(SchedulerSettings(runtime=address, **(values | settings)))
        front = grpc.aio.server(options=SERVER_OPTIONS)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(engine), front)
        front_address = bind(front, "127.0.0.1:0")
        async with asyncio.timeout(LIMIT_S):
            await engine.start()
        stack.push_async_callback(engine.stop)
        await front.start()
        stack.push_async_callback(front.stop, 0)
        client = await stack.enter_async_context(Client(front_address))
        async with asyncio.timeout(LIMIT_S):
            yield Stack(engine, client, executor, runner)
        assert not engine.failed.is_set()
        assert executor.violations == []


async def first_token(pieces: AsyncIterator[Piece]) -> list[int]:
    """Tokens up to and including the first piece that has some."""
    async for piece in pieces:
        if piece.tokens:
            return piece.tokens
    raise AssertionError("the request ended without a token")


async def rest_of(pieces: AsyncIterator[Piece]) -> tuple[list[int], Ending | None]:
    """Everything that is still to come."""
    tokens: list[int] = []
    ending = None
    async for piece in pieces:
        tokens += piece.tokens
        ending = piece.ending
    return tokens, ending


async def refused(call: Awaitable[Any]) -> RpcFailedError:
    """The error with which a call ends."""
    with pytest.raises(RpcFailedError) as caught:
        await call
    return caught.value


async def test_stream_names_the_request_first_and_ends_with_its_account() -> None:
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
async def test_concurrent_requests_in_a_tiny_pool_are_exact(settings: dict[str, Any]) -> None:
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


async def test_second_request_uses_the_first_ones_pages() -> None:
    """Equal prompts match, other namespaces and opted-out requests do not."""
    async with stack_of() as stack:
        prompt = list(range(13))
        assert (await stack.run(prompt, 4))[1].cached_tokens == 0
        assert (await stack.run(prompt, 4))[1].cached_tokens == 12
        assert (await stack.run(prompt, 4, cache_namespace="other"))[1].cached_tokens == 0
        assert (await stack.run(prompt, 4, prefix_cache=False))[1].cached_tokens == 0


async def test_client_that_disconnects_frees_its_request() -> None:
    """Cancelling the call ends the request: its id is unknown, its row and its pages are free, and the runtime hears of it."""
    async with stack_of() as stack:
        pieces = stack.client.generate([5, 6, 7], max_tokens=100, request_id="gone")
        assert await first_token(pieces) == continuation([5, 6, 7], 100)[:1]
        assert (await stack.client.state("gone")).prompt_tokens == 3
        await pieces.aclose()
        await stack.until(lambda: not stack.engine.core.has_work)
        assert (await refused(stack.client.state("gone"))).code is grpc.StatusCode.NOT_FOUND
        pages = stack.engine.core.stats()
        assert pages.free + pages.cached == 64

        async def leases() -> int:
            return len((await stack.engine.link.read_rows([], 10)).pages)

        while await leases():
            await asyncio.sleep(0.01)


async def test_bad_requests_change_nothing() -> None:
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
            error = await refused(rest_of(client.generate(**arguments)))
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT, arguments
            assert words in error.details, error.details
        raw = generation_pb2.GenerateRequest(prompt=b"\1\0\0", max_tokens=1)
        with pytest.raises(grpc.aio.AioRpcError, match="multiple of 4") as caught:
            async for _ in client.stub.Generate(raw):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        info = (await client.info()).raw
        assert (info.num_waiting, info.num_running, info.num_retracted, info.free_pages) == (0, 0, 0, 64)
        assert (info.num_steps, info.max_prompt_len) == (0, 16)
        assert (await stack.run([1] * 16, 5))[1].reason == "length"


async def test_info_states_model_limits_and_fill() -> None:
    """GetInfo repeats the runtime's facts and our settings; with a context limit a prompt leaves room for one token."""
    async with stack_of(max_context=20, stop_ids=(7, 9), overlap_depth=2, chunk_size=100) as stack:
        served = await stack.client.info()
        assert (served.model, served.vocab_size, served.default_stop_ids) == ("fingerprint", VOCAB_SIZE, (7, 9))
        raw = served.raw
        assert (raw.page_size, raw.num_pages, raw.max_rows, raw.max_pages_per_row) == (4, 64, 8, 32)
        assert (raw.token_budget, raw.chunk_size, raw.overlap_depth, raw.refresh_policy) == (32, 32, 2, "transition")
        assert (raw.max_context, raw.max_prompt_len) == (20, 19)
        assert (await stack.run([1] * 19, 5, ignore_default_stop_ids=True))[1].completion_tokens == 1
        assert (await refused(stack.run([1] * 20, 1))).code is grpc.StatusCode.INVALID_ARGUMENT


async def test_id_of_a_live_request_is_taken() -> None:
    """A second request with a live id is ALREADY_EXISTS and does not disturb the first; afterwards the id is free."""
    async with stack_of() as stack:
        pieces = stack.client.generate([1, 2, 3], max_tokens=40, request_id="twin")
        tokens = await first_token(pieces)
        error = await refused(stack.run([4], 1, request_id="twin"))
        assert error.code is grpc.StatusCode.ALREADY_EXISTS
        tokens += (await rest_of(pieces))[0]
        assert tokens == continuation([1, 2, 3], 40)
        assert (await stack.run([4], 1, request_id="twin"))[0] == continuation([4], 1)


async def test_full_queue_and_long_wait() -> None:
    """Beyond max_waiting: RESOURCE_EXHAUSTED; a wait that is too long: DEADLINE_EXCEEDED; who runs is unharmed."""
    async with stack_of(max_rows=1, max_waiting=1) as stack:
        pieces = stack.client.generate([1, 2, 3], max_tokens=100, request_id="runs")
        tokens = await first_token(pieces)
        stack.engine.pause()  # so that the waiting one certainly waits
        waiting = asyncio.create_task(stack.run([4], 1, request_id="waits", max_queue_wait_ms=150))
        await stack.until(lambda: stack.engine.core.num_waiting == 1)
        error = await refused(stack.run([5], 1))
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1 requests wait" in error.details
        error = await refused(waiting)
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "max_queue_wait_ms = 150" in error.details
        stack.engine.resume()
        tokens += (await rest_of(pieces))[0]
        assert tokens == continuation([1, 2, 3], 100)


async def test_queue_limit_does_not_end_an_admitted_request() -> None:
    """max_queue_wait_ms counts to the first admission only: a request that runs longer than it ends as it should."""
    async with stack_of() as stack:
        pieces = stack.client.generate([1, 2, 3], max_tokens=60, max_queue_wait_ms=50)
        tokens = await first_token(pieces)
        stack.engine.pause()
        await asyncio.sleep(0.08)
        stack.engine.resume()
        tokens += (await rest_of(pieces))[0]
        assert tokens == continuation([1, 2, 3], 60)


async def test_abort_ends_the_stream_with_its_reason() -> None:
    """Abort closes the stream with reason abort and the tokens so far; an unknown id is NOT_FOUND."""
    async with stack_of() as stack:
        pieces = stack.client.generate([1, 2, 3], max_tokens=100, request_id="a")
        tokens = await first_token(pieces)
        await stack.client.abort("a")
        more, ending = await rest_of(pieces)
        tokens += more
        assert tokens == continuation([1, 2, 3], len(tokens))
        assert ending is not None
        assert (ending.reason, ending.completion_tokens) == ("abort", len(tokens))
        for call in (stack.client.abort("a"), stack.client.retract("a"), stack.client.state("a")):
            assert (await refused(call)).code is grpc.StatusCode.NOT_FOUND


async def test_retract_in_the_middle_changes_no_token() -> None:
    """Rows are taken away again and again while tokens stream; the output equals the definition and the account counts it."""
    async with stack_of() as stack:
        pieces = stack.client.generate([1, 2, 3, 4, 5, 6, 7], max_tokens=60, request_id="a")
        tokens = []
        retracted = 0
        async for piece in pieces:
            tokens += piece.tokens
            if piece.tokens and retracted < 5 and not piece.ending:
                try:
                    await stack.client.retract("a")
                    retracted += 1
                except RpcFailedError as error:
                    assert error.code in {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND}
            ending = piece.ending
        assert tokens == continuation([1, 2, 3, 4, 5, 6, 7], 60)
        assert retracted > 0
        assert ending is not None
        assert ending.num_retractions == retracted


async def test_retract_of_a_request_without_a_row_is_refused() -> None:
    """A request that waits holds no row: FAILED_PRECONDITION, and its state says that it waits."""
    async with stack_of(max_rows=1) as stack:
        pieces = stack.client.generate([1, 2, 3], max_tokens=100)
        await first_token(pieces)
        stack.engine.pause()
        waiting = asyncio.create_task(stack.run([4], 1, request_id="waits", priority=3))
        await stack.until(lambda: stack.engine.core.num_waiting == 1)
        assert (await refused(stack.client.retract("waits"))).code is grpc.StatusCode.FAILED_PRECONDITION
        state = await stack.client.state("waits")
        assert (state.state, state.row, state.priority) == (generation_pb2.REQUEST_STATE_SUBMITTED, 0, 3)
        stack.engine.resume()
        await pieces.aclose()
        assert (await waiting)[0] == continuation([4], 1)


async def test_rows_of_both_sides_are_equal_while_requests_run() -> None:
    """ListRows shows every holder with equal pages at one step, several times, and the requests go on undisturbed."""
    async with stack_of(num_pages=30) as stack:
        prompts = [[n, 1, 2, 3, 4, 5, 6] for n in range(5)]
        runs = [asyncio.create_task(stack.run(prompt, 40)) for prompt in prompts]
        await stack.until(lambda: stack.engine.core.num_running >= 3)
        steps = []
        for _ in range(5):
            found = await stack.client.rows()
            assert found.rows or all(run.done() for run in runs)
            assert all(row.equal and row.scheduler_pages == row.mirror_pages for row in found.rows)
            assert len({row.row for row in found.rows}) == len(found.rows)
            steps.append(found.step)
        assert steps == sorted(steps)
        for prompt, run in zip(prompts, runs, strict=True):
            assert (await run)[0] == continuation(prompt, 40)
        assert (await stack.client.rows()).rows == []


async def test_row_that_differs_is_shown_as_such() -> None:
    """When the mirror holds another page than the scheduler's row, ListRows says so and shows both."""
    async with stack_of() as stack:
        stream = stack.client.generate([1, 2, 3, 4, 5], max_tokens=100, request_id="a")
        await first_token(stream)
        stack.engine.pause()
        await stack.engine.wait_quiet()
        row = stack.engine.core.requests["a"].row
        pages = stack.engine.core.rows()[row][1].tolist()
        stack.runner.mirror.table[row, 0] = 63
        found = (await stack.client.rows()).rows[0]
        assert not found.equal
        assert found.scheduler_pages == pages
        assert found.mirror_pages == [63, *pages[1:]]
        stack.runner.mirror.table[row, 0] = pages[0]
        assert (await stack.client.rows()).rows[0].equal
        stack.engine.resume()
        await stream.aclose()


async def test_prefix_cache_reset_refused_then_forced_then_free() -> None:
    """While pages are in use a reset is FAILED_PRECONDITION; forced it changes no token; idle it frees all that is cached."""
    async with stack_of() as stack:
        prompt = list(range(20, 33))
        await stack.run(prompt, 2)
        pieces = stack.client.generate(prompt, max_tokens=60, request_id="a")
        tokens = await first_token(pieces)
        error = await refused(stack.client.reset_prefix_cache())
        assert error.code is grpc.StatusCode.FAILED_PRECONDITION
        assert "running requests use" in error.details
        assert await stack.client.reset_prefix_cache(force=True) >= 3
        more, ending = await rest_of(pieces)
        assert tokens + more == continuation(prompt, 60)
        assert ending is not None
        assert ending.num_retractions == 1
        cached = stack.engine.core.stats().cached
        assert cached > 0
        assert await stack.client.reset_prefix_cache() == cached
        assert stack.engine.core.stats().free == 64


async def test_models_own_stop_ids_end_a_request_unless_ignored() -> None:
    """Ids the runtime states end the output, add to the client's own, and are left out when asked to."""
    async with stack_of(stop_ids=(629,)) as stack:
        tokens, ending = await stack.run([1, 2, 3], 6)
        assert (tokens, ending.reason) == ([20, 104, 629], "stop")
        tokens, ending = await stack.run([1, 2, 3], 6, stop_token_ids=[104])
        assert (tokens, ending.reason) == ([20, 104], "stop")
        tokens, ending = await stack.run([1, 2, 3], 6, ignore_default_stop_ids=True, stop_token_ids=[384])
        assert (tokens, ending.reason) == ([20, 104, 629, 421, 384], "stop")


async def test_seed_is_drawn_once_where_the_client_gave_none() -> None:
    """A request that samples without a seed gets one of its own; a seed that was given, zero included, is kept."""
    async with stack_of(max_rows=1) as stack:
        stack.engine.pause()
        runs = [
            asyncio.create_task(stack.run([1], 1, request_id=name, **options))
            for name, options in {
                "x": {"temperature": 1.0},
                "y": {"temperature": 1.0},
                "zero": {"temperature": 1.0, "seed": 0},
                "greedy": {},
            }.items()
        ]
        await stack.until(lambda: stack.engine.core.num_waiting == 4)
        seeds = {name: request.sampling.seed for name, request in stack.engine.core.requests.items()}
        stack.engine.resume()
        await asyncio.gather(*runs)
        assert seeds["zero"] == seeds["greedy"] == 0
        assert len({0, seeds["x"], seeds["y"]}) == 3


async def test_trace_context_reaches_the_request() -> None:
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


async def test_drain_lets_live_requests_end_and_refuses_new_ones() -> None:
    """While draining, a running request ends as it should, and a new one is UNAVAILABLE."""
    async with stack_of() as stack:
        pieces = stack.client.generate([1, 2, 3], max_tokens=60)
        tokens = await first_token(pieces)
        draining = asyncio.create_task(stack.engine.drain(LIMIT_S))
        await stack.until(lambda: stack.engine.draining)
        error = await refused(stack.run([4], 1))
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in error.details
        tokens += (await rest_of(pieces))[0]
        assert tokens == continuation([1, 2, 3], 60)
        await draining


async def test_drain_ends_what_outlasts_its_grace() -> None:
    """When the grace is over, streams end with UNAVAILABLE after the tokens they had."""
    async with stack_of() as stack:
        pieces = stack.client.generate([1, 2, 3], max_tokens=100)
        await first_token(pieces)
        stack.engine.pause()
        await stack.engine.drain(0.05)
        assert (await refused(rest_of(pieces))).code is grpc.StatusCode.UNAVAILABLE
        assert not stack.engine.core.has_work


async def test_an_error_of_ours_is_told_blandly(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unforeseen exception in a call becomes INTERNAL without its words."""
    async with stack_of() as stack:

        def explode(force: bool) -> int:
            raise KeyError("secret detail")

        monkeypatch.setattr(stack.engine, "reset_prefix_cache", explode)
        error = await refused(stack.client.reset_prefix_cache())
        assert error.code is grpc.StatusCode.INTERNAL
        assert "secret" not in error.details


async def test_metrics_count_what_happened() -> None:
    """Requests, tokens, cached tokens and pages add up."""
    async with stack_of() as stack:
        prompt = list(range(13))
        await stack.run(prompt, 4)
        await stack.run(prompt, 6)
        await refused(stack.run([], 6))
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
