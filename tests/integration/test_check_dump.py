"""`--check` in a served process: what the engine did can be read from its dump, and a failed invariant ends in one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from runtime_service import app as runtime_app
from runtime_service.execution import ExecutionThread
from runtime_service.executors.base import PendingResult
from runtime_service.forward_batch import ForwardBatch
from runtime_service.servicer import RuntimeServicer
from runtime_service.settings import RuntimeSettings
from runtime_service.step_runner import StepRunner
from scheduler_service import app, simulate
from scheduler_service.channels import SERVER_OPTIONS, bind
from scheduler_service.client import Client, RpcFailedError
from scheduler_service.core.ops import ForwardOp, StepResult
from scheduler_service.dump import dump_text
from scheduler_service.engine_loop import EngineLoop
from scheduler_service.in_process_runtime import InProcessRuntime
from scheduler_service.recorder import RecordingScheduler
from scheduler_service.scenario import load_scenario, parse_scenario
from scheduler_service.settings import SchedulerSettings
from scheduler_service.simulation import Simulation

LIMIT_S = 100.0

Op = tuple[object, ...]


def essence(op: ForwardOp, *, ids: bool) -> Op:
    columns = (
        op.req_pool_indices, op.row_lens, op.begins, op.sizes, op.full_refresh, op.occupied_pages, op.num_computed,
        op.input_lens, op.sample, op.released_rows, *([op.input_ids] if ids else []),
    )  # fmt: skip
    return (op.step, op.num_extend_rows, *(tuple(column.tolist()) for column in columns))


def replayed(text: str, monkeypatch: pytest.MonkeyPatch, *, ids: bool) -> tuple[list[Op], Simulation]:
    """Simulate a text; the ops that were sent, and the simulation at its end."""
    ops: list[Op] = []
    execute = InProcessRuntime.run

    def spy(self: InProcessRuntime, op: ForwardOp, *args: Any) -> StepResult | str:
        ops.append(essence(op, ids=ids))
        return execute(self, op, *args)

    monkeypatch.setattr(InProcessRuntime, "run", spy)
    simulation = Simulation(parse_scenario(text, "dump.yaml"))
    while simulation.step() is not None:
        pass
    return ops, simulation


def record(engine: EngineLoop, *, ids: bool) -> list[Op]:
    """Every op that the engine plans from now on."""
    sent: list[Op] = []
    core = engine.core
    for name in ("plan", "flush_releases"):

        def spy(call: Callable[[], ForwardOp | None]) -> ForwardOp | None:
            op = call()
            if op is not None:
                sent.append(essence(op, ids=ids))
            return op

        setattr(core, name, functools.partial(spy, getattr(core, name)))
    return sent


@pytest.fixture
def serving(both_services: Callable[..., Any]) -> Callable[..., AbstractAsyncContextManager[Any]]:
    """Both services with a small runtime of this model, audited after every step."""

    def serve(model: str, **settings: Any) -> AbstractAsyncContextManager[Any]:
        shape = {"page_size": 4, "num_pages": 24, "max_rows": 4, "max_pages_per_row": 16}
        runtime = RuntimeSettings(model=model, device="cpu", **shape)
        values = {"check": True, "chunk_size": 6, "token_budget": 24} | settings
        services: AbstractAsyncContextManager[Any] = both_services(
            functools.partial(runtime_app.load, runtime), limit_s=LIMIT_S, **values
        )
        return services

    return serve


def fail_once(runner: StepRunner) -> None:
    """The runtime's next step raises."""
    execute = runner.executor.execute

    def fail(batch: ForwardBatch) -> PendingResult:
        runner.executor.execute = execute  # type: ignore[method-assign]
        raise RuntimeError("a fault of the test")

    runner.executor.execute = fail  # type: ignore[method-assign]


async def trouble(engine: EngineLoop, client: Client, rng: random.Random) -> None:
    """One thing that happens to the requests in the middle of their work."""
    names = list(engine.core.requests)
    with contextlib.suppress(RpcFailedError):
        kind = rng.choices(["retract", "abort", "cache"], [6, 1, 2])[0]
        if kind == "cache":
            await client.reset_prefix_cache(force=rng.random() < 0.5)
        elif names:
            await (client.retract if kind == "retract" else client.abort)(rng.choice(names))


async def many_lives(
    engine: EngineLoop, client: Client, runner: StepRunner, rng: random.Random, vocab_size: int, **options: Any
) -> None:
    """Two dozen requests, six at a time, with shared prefixes, amid trouble; three steps fail."""
    said: list[list[int]] = []

    async def one(number: int) -> None:
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 6))]
        if said and rng.random() < 0.6:
            prompt = rng.choice(said) + prompt
        prompt, tokens = prompt[-40:], []
        with contextlib.suppress(RpcFailedError):
            async for piece in client.generate(
                prompt,
                max_tokens=rng.randint(1, 14),
                request_id=f"r{number % 25}-{number}" if number % 3 else "",
                priority=rng.choice([0, 0, 1]),
                cache_namespace=rng.choice(["", "", "tenant"]),
                prefix_cache=rng.random() < 0.9,
                stop_token_ids=rng.sample(range(vocab_size), vocab_size // 20),
                **options,
            ):
                tokens += piece.tokens
                if rng.random() < 0.25:
                    await trouble(engine, client, rng)
        said.append(prompt + tokens)

    waiting = list(range(24))

    async def worker() -> None:
        while waiting:
            number = waiting.pop()
            if number in {6, 12, 18}:
                fail_once(runner)
            await one(number)

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(worker())


@pytest.mark.parametrize("overlap_depth", [1, 2])
async def test_dump_of_a_served_engine_replays_its_ops(
    overlap_depth: int, serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retracted, aborted, cut off: simulating the dump sends every op that the engine has sent, token ids included."""
    rng = random.Random(overlap_depth)
    async with serving("fingerprint", overlap_depth=overlap_depth) as (engine, client, runner):
        sent = record(engine, ids=True)
        await many_lives(engine, client, runner, rng, 997)
        text = dump_text(engine.core)
    ops, simulation = replayed(text, monkeypatch, ids=True)
    assert len(sent) > 40
    assert ops[: len(sent)] == sent
    assert simulation.summary.violations == []
    assert "step_failed: 1" in text
    assert "restart_runtime: true" in text


async def test_dump_of_a_model_that_samples_replays_its_ops(
    serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other tokens from a larger vocabulary, drawn at random, pages, rows and lengths are the same."""
    rng = random.Random(7)
    async with serving("tiny") as (engine, client, runner):
        sent = record(engine, ids=False)
        await many_lives(engine, client, runner, rng, 250, temperature=1.0, ignore_default_stop_ids=True)
        text = dump_text(engine.core)
    ops, simulation = replayed(text, monkeypatch, ids=False)
    assert len(sent) > 40
    assert ops[: len(sent)] == sent
    assert simulation.summary.violations == []


async def test_no_recording_without_check(serving: Callable[..., Any]) -> None:
    """A server that does not audit keeps no history."""
    async with serving("fingerprint", check=False) as (engine, client, _):
        assert [piece async for piece in client.generate([1, 2, 3], max_tokens=2)]
        assert not isinstance(engine.core, RecordingScheduler)
        assert engine.core.placement.rows.sent_pages is None


@contextlib.asynccontextmanager
async def running_runtime() -> AsyncIterator[str]:
    """A runtime with the fingerprint model; its address."""
    async with contextlib.AsyncExitStack() as stack:
        thread = ExecutionThread()
        stack.callback(thread.stop)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        servicer = RuntimeServicer(thread)
        servicer.register(server)
        address = bind(server, "127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, 0)
        stack.callback(servicer.shut_down)
        settings = RuntimeSettings(model="fingerprint", page_size=4, num_pages=24, max_rows=4, max_pages_per_row=16)
        servicer.set_ready(*await thread.call(functools.partial(runtime_app.load, settings)))
        yield address


async def test_failed_invariant_ends_in_a_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is lost: clients get INTERNAL, the log names a file that tells it and can be replayed, the status is 1."""
    engines: list[EngineLoop] = []

    class Observed(EngineLoop):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            engines.append(self)

    monkeypatch.setattr(app, "EngineLoop", Observed)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with asyncio.timeout(LIMIT_S), running_runtime() as runtime:
        settings = SchedulerSettings(runtime=runtime, listen="127.0.0.1:0", check=True, dump_dir=tmp_path)
        with structlog.testing.capture_logs() as logs:
            server = asyncio.create_task(app.serve(settings, ready.set_result))
            address = (await ready).split()[3]
            async with Client(address) as client:
                assert [piece async for piece in client.generate([1, 2, 3, 4, 5], max_tokens=3)]
                pieces = client.generate([1, 2, 3, 4, 6], max_tokens=40, request_id="A")
                while not (await anext(pieces)).tokens:
                    pass
                lost = int(engines[0].core.placement.pool.take(1)[0])
                with pytest.raises(RpcFailedError) as caught:
                    async for _ in pieces:
                        pass
            assert caught.value.code is grpc.StatusCode.INTERNAL
            assert await server == 1
    (path,) = tmp_path.iterdir()
    (entry,) = [entry for entry in logs if entry["event"] == "dump_written"]
    assert entry["path"] == str(path)
    comment = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert "# InvariantViolation:" in comment
    assert [line for line in comment if line.startswith("#   private pages are") and str(lost) in line]
    assert [line for line in comment if "'A' decoding" in line]
    assert simulate.main([path], json_output=True) == 0  # it was no call that lost the page
    scenario = load_scenario(path)
    assert (scenario.config.num_pages, scenario.config.page_size) == (24, 4)
