"""The scheduler's end of the runtime stream against a runtime that misbehaves on demand, over a real loopback server.

The runtime here is a small servicer of its own around the real `StepRunner` with the exact test model, so that outputs after a
recovery can be held against the definition.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest

from pagemirror.v1 import forward_pb2, runtime_pb2, runtime_pb2_grpc
from runtime_service import wire as runtime_wire
from runtime_service.errors import Refusal
from runtime_service.executors.fingerprint import FingerprintExecutor
from runtime_service.ops import RefusalCode
from runtime_service.req_to_page import ReqToPage
from runtime_service.session import SessionState
from runtime_service.step_runner import StepRunner
from scheduler_service.channels import bind
from scheduler_service.core.errors import InternalError
from scheduler_service.engine_loop import EngineLoop, SubmitOptions
from scheduler_service.errors import RuntimeMismatchError, RuntimeUnavailableError, StartError
from scheduler_service.settings import SchedulerSettings
from scheduler_service.subscription import Subscription

LIMIT_S = 20.0
VOCAB_SIZE = 997


def continuation(prompt: list[int], num_tokens: int) -> list[int]:
    """The fingerprint model by its definition."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(sum((i + 1) * (token + 1) for i, token in enumerate(tokens)) % VOCAB_SIZE)
    return tokens[len(prompt) :]


@dataclass
class Shape:
    """What the runtime says it can hold."""

    page_size: int = 4
    num_pages: int = 32
    max_rows: int = 8
    max_pages_per_row: int = 16
    protocol_version: int = 1


# What the runtime does instead of answering an op: it is given the number of the op over all sessions, from 1.
Fault = Callable[[int], str]


@dataclass
class MisbehavingRuntime(runtime_pb2_grpc.RuntimeServiceServicer):
    """`fault` names what becomes of the n-th op; "" is a true answer, the others are looked for in `_answer`."""

    shape: Shape = field(default_factory=Shape)
    fault: Fault = lambda number: ""
    heartbeat_s: float = 0.02
    num_streams: int = 0
    num_resets: int = 0
    num_ops: int = 0
    num_late: int = 0
    sessions: list[int] = field(default_factory=list)
    unanswered: int = 0
    most_unanswered: int = 0
    holder: int = 0  # epoch of the scheduler whose stream is alive
    silent: bool = False  # answers no op of this stream any more
    frozen: bool = False  # nor sends heartbeats
    held: runtime_pb2.ExecuteResponse | None = None  # a result to be sent too late

    def __post_init__(self) -> None:
        shape = self.shape
        limits = (shape.max_rows, shape.max_pages_per_row, shape.num_pages, shape.page_size)
        executor = FingerprintExecutor(num_pages=shape.num_pages, page_size=shape.page_size)
        self.runner = StepRunner(SessionState(*limits, VOCAB_SIZE), ReqToPage(*limits), executor)

    def info(self) -> runtime_pb2.RuntimeInfo:
        """Its hello."""
        shape = self.shape
        return runtime_pb2.RuntimeInfo(
            protocol_version=shape.protocol_version,
            runtime_epoch=7,
            page_size=shape.page_size,
            num_pages=shape.num_pages,
            max_rows=shape.max_rows,
            max_pages_per_row=shape.max_pages_per_row,
            vocab_size=VOCAB_SIZE,
            model="fingerprint",
        )

    async def GetInfo(self, request: Any, context: Any) -> runtime_pb2.RuntimeInfo:
        return self.info()

    async def Execute(self, requests: Any, context: Any) -> None:
        hello = (await anext(aiter(requests))).hello
        if self.holder not in {0, hello.scheduler_epoch}:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another scheduler's stream is alive")
        if hello.HasField("expect_page_size") and hello.expect_page_size != self.shape.page_size:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "page_size disagrees")
        self.num_streams += 1
        self.holder = hello.scheduler_epoch
        self.frozen = self.silent = False
        self.unanswered = 0
        self.sessions.append(hello.session_no)
        self.runner.open(hello.scheduler_epoch, hello.session_no, hello.overlap_depth)
        await context.write(runtime_pb2.ExecuteResponse(hello=self.info()))
        beat = asyncio.create_task(self._beat(context))
        try:
            async for request in requests:
                if request.WhichOneof("message") == "reset":
                    self.num_resets += 1
                    self.unanswered = 0
                    self.sessions.append(request.reset.session_no)
                    self.runner.reset(request.reset.session_no)
                    await self._send_late(context)
                    done = runtime_pb2.ResetDone(session_no=request.reset.session_no)
                    await context.write(runtime_pb2.ExecuteResponse(reset_done=done))
                    await self._send_late(context)
                    self.held = None
                else:
                    await self._answer(request.op, context)
        finally:
            beat.cancel()
            self.holder = 0
            self.runner.close()

    async def _send_late(self, context: Any) -> None:
        if self.held is not None:
            self.num_late += 1
            await context.write(self.held)

    async def _beat(self, context: Any) -> None:
        while True:
            await asyncio.sleep(self.heartbeat_s)
            if not self.frozen:
                await context.write(runtime_pb2.ExecuteResponse(heartbeat=runtime_pb2.Heartbeat()))

    async def _answer(self, message: forward_pb2.ForwardOp, context: Any) -> None:
        self.num_ops += 1
        self.unanswered += 1
        self.most_unanswered = max(self.most_unanswered, self.unanswered)
        await asyncio.sleep(0)  # ops that were sent ahead arrive before this one is answered
        fault = self.fault(self.num_ops)
        if fault == "break":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "broken on demand")
        self.frozen |= fault == "freeze"
        self.silent |= fault in {"ignore", "freeze"}
        if self.silent:
            return
        if fault == "late":
            self.held = runtime_wire.result_to_proto(self.runner.run(runtime_wire.op_from_proto(message)))  # type: ignore[arg-type]
        if fault in {"refuse", "late"}:
            refusal = Refusal(RefusalCode.GAP, 1, "a", "refused on demand", session_no=message.session_no, step=message.step)
            response = runtime_wire.refusal_to_proto(self.runner.refuse(refusal))
        else:
            outcome = self.runner.run(runtime_wire.op_from_proto(message))
            if isinstance(outcome, Refusal):
                response = runtime_wire.refusal_to_proto(outcome)
            else:
                if fault == "short":
                    outcome.tokens = outcome.tokens[:-1]
                    outcome.row_status = outcome.row_status[:-1]
                if fault == "alien_token":
                    outcome.tokens = np.full_like(outcome.tokens, VOCAB_SIZE)
                if fault == "wrong_step":
                    outcome.step += 1
                response = runtime_wire.result_to_proto(outcome)
        self.unanswered -= 1
        await context.write(response)


@contextlib.asynccontextmanager
async def listening(runtime: MisbehavingRuntime, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Serve the runtime; yields its address."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    runtime_pb2_grpc.add_RuntimeServiceServicer_to_server(runtime, server)
    bound = bind(server, address)
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def engine_on(address: str, **settings: Any) -> AsyncIterator[EngineLoop]:
    """A started engine whose invariants are audited after every step."""
    values = {"heartbeat_timeout": 30.0, "step_timeout": 30.0, "startup_timeout": LIMIT_S, "check": True, "chunk_size": 4}
    engine = EngineLoop(SchedulerSettings(runtime=address, **(values | settings)))
    try:
        async with asyncio.timeout(LIMIT_S):
            await engine.start()
        yield engine
    finally:
        await engine.stop()
    assert not engine.failed.is_set()


async def collect(subscription: Subscription) -> list[int]:
    """All tokens of a request; raises what ended it."""
    tokens: list[int] = []
    async with asyncio.timeout(LIMIT_S):
        while True:
            tokens += await subscription.take()
            if subscription.finished:
                if subscription.error:
                    raise subscription.error
                return tokens


PROMPTS = {f"r{n}": [n, 2 * n + 1, 3, 4, 5, 6, 7 + n] for n in range(4)}


async def run_all(engine: EngineLoop, num_tokens: int = 9) -> dict[str, list[int]]:
    """Run all prompts at once."""
    options = SubmitOptions(max_tokens=num_tokens)
    subscriptions = [engine.submit(name, np.array(prompt, np.int32), options) for name, prompt in PROMPTS.items()]
    outputs = await asyncio.gather(*map(collect, subscriptions))
    return dict(zip(PROMPTS, outputs, strict=True))


EXPECTED = {name: continuation(prompt, 9) for name, prompt in PROMPTS.items()}


async def test_first_numbers() -> None:
    """The tokens of the definition come back over the wire: 1, 2, 3 → 20 104 629 421 384 473."""
    async with listening(MisbehavingRuntime()) as address, engine_on(address) as engine:
        subscription = engine.submit("a", np.array([1, 2, 3], np.int32), SubmitOptions(max_tokens=6))
        assert await collect(subscription) == [20, 104, 629, 421, 384, 473]
        assert engine.num_steps > 0


@pytest.mark.parametrize("overlap_depth", [0, 1, 2])
async def test_window_is_overlap_depth_plus_one(overlap_depth: int) -> None:
    """Never more ops are unanswered than overlap_depth + 1, and outputs do not depend on it."""
    runtime = MisbehavingRuntime()
    async with listening(runtime) as address, engine_on(address, overlap_depth=overlap_depth) as engine:
        assert await run_all(engine) == EXPECTED
    assert runtime.most_unanswered <= overlap_depth + 1
    assert runtime.num_streams == 1
    assert runtime.num_resets == 0


@pytest.mark.parametrize("fault", ["refuse", "alien_token", "short", "wrong_step", "break"])
@pytest.mark.parametrize("overlap_depth", [0, 1])
async def test_one_fault_is_a_pause(fault: str, overlap_depth: int) -> None:
    """A refusal, a nonsensical result and a broken stream lose nothing: the same outputs come, from a later session."""
    runtime = MisbehavingRuntime(fault=lambda number: fault if number in {3, 7} else "")
    async with listening(runtime) as address, engine_on(address, overlap_depth=overlap_depth) as engine:
        assert await run_all(engine) == EXPECTED
        assert engine.metrics.registry.get_sample_value("pagemirror_runtime_connected") == 1
    assert runtime.sessions == sorted(set(runtime.sessions))
    assert len(runtime.sessions) == 3
    same_stream = fault in {"refuse", "alien_token"}
    assert (runtime.num_resets, runtime.num_streams) == ((2, 1) if same_stream else (0, 3))


async def test_silence_is_noticed() -> None:
    """A runtime that neither answers nor beats is given up after the heartbeat limit, and its successor serves."""
    runtime = MisbehavingRuntime(fault=lambda number: "freeze" if number == 4 else "")
    async with listening(runtime) as address, engine_on(address, heartbeat_timeout=0.3) as engine:
        assert await run_all(engine) == EXPECTED
        assert "no sign of life" in engine.connection.trouble
    assert runtime.num_streams == 2


async def test_step_limit_is_separate_from_heartbeats() -> None:
    """A runtime that beats but never answers a step is given up after the step limit."""
    runtime = MisbehavingRuntime(fault=lambda number: "ignore" if number == 4 else "")
    async with listening(runtime) as address, engine_on(address, heartbeat_timeout=0.5, step_timeout=0.4) as engine:
        assert await run_all(engine) == EXPECTED
        assert "took" in engine.connection.trouble
    assert runtime.num_streams == 2


async def test_late_result_of_an_old_session_is_dropped() -> None:
    """The true result of a refused op arrives before and after the reset, and its tokens are not delivered twice."""
    runtime = MisbehavingRuntime(fault=lambda number: "late" if number == 4 else "")
    async with listening(runtime) as address, engine_on(address) as engine:
        assert await run_all(engine) == EXPECTED
    assert runtime.num_resets == 1
    assert runtime.num_late == 2


async def test_no_runtime_for_too_long_is_unavailable_and_comes_back() -> None:
    """Clients wait through runtime_timeout, are then told UNAVAILABLE, and are served again when a runtime is back."""
    runtime = MisbehavingRuntime()
    async with contextlib.AsyncExitStack() as stack:
        first = contextlib.AsyncExitStack()
        address = await first.enter_async_context(listening(runtime))
        engine = await stack.enter_async_context(engine_on(address, runtime_timeout=0.4))
        subscription = engine.submit("a", np.array([1, 2, 3], np.int32), SubmitOptions(max_tokens=50))
        await subscription.take()
        await first.aclose()
        with pytest.raises(RuntimeUnavailableError, match=r"0\.4 s"):
            await collect(subscription)
        with pytest.raises(RuntimeUnavailableError):
            engine.submit("b", np.array([1], np.int32), SubmitOptions())
        await stack.enter_async_context(listening(runtime, address))
        async with asyncio.timeout(LIMIT_S):
            await engine.wait_quiet()
        assert await run_all(engine) == EXPECTED


async def test_fault_that_always_comes_back_ends_in_unavailable() -> None:
    """An op that is refused each time does not loop for ever: its clients get UNAVAILABLE after runtime_timeout."""
    runtime = MisbehavingRuntime(fault=lambda number: "refuse")
    async with listening(runtime) as address, engine_on(address, runtime_timeout=0.4) as engine:
        with pytest.raises(RuntimeUnavailableError, match="refused on demand"):
            await run_all(engine)
        assert runtime.num_resets > 1
        runtime.fault = lambda number: ""
        async with asyncio.timeout(LIMIT_S):
            await engine.wait_quiet()
        assert await run_all(engine) == EXPECTED


async def test_configured_value_that_disagrees_is_refused_with_both() -> None:
    """A page_size of our own that the runtime does not have ends the start, and the message has both values."""
    async with listening(MisbehavingRuntime()) as address:
        with pytest.raises(RuntimeMismatchError, match="page_size: the scheduler says 16, the runtime says 4"):
            async with engine_on(address, page_size=16):
                pass
        with pytest.raises(RuntimeMismatchError, match="num_pages: the scheduler says 31, the runtime says 32"):
            async with engine_on(address, num_pages=31):
                pass
        async with engine_on(address, page_size=4, num_pages=32, max_rows=8, max_pages_per_row=16) as engine:
            assert engine.config.num_pages == 32


async def test_other_protocol_version_is_refused() -> None:
    """A runtime of another protocol version is named as such."""
    async with listening(MisbehavingRuntime(Shape(protocol_version=2))) as address:
        with pytest.raises(RuntimeMismatchError, match="protocol_version: the scheduler says 1, the runtime says 2"):
            async with engine_on(address):
                pass


async def test_configuration_whose_largest_op_fits_no_message_is_refused() -> None:
    """At hello the largest possible op is held against 64 MiB, and the message says what to lower."""
    runtime = MisbehavingRuntime()
    async with listening(runtime) as address:
        runtime.shape.max_rows, runtime.shape.max_pages_per_row = 1024, 16384
        with pytest.raises(RuntimeMismatchError, match=r"67,108,864 bytes.*max_rows 1,024 and max_pages_per_row 16,384"):
            async with engine_on(address):
                pass


async def test_runtime_that_serves_another_scheduler_is_waited_for() -> None:
    """A second scheduler waits while the first one's stream is alive, and is served after it."""
    runtime = MisbehavingRuntime()
    async with listening(runtime) as address:
        async with engine_on(address) as first:
            with pytest.raises(StartError, match="another scheduler's stream is alive"):
                async with engine_on(address, startup_timeout=0.2):
                    pass
            assert await run_all(first) == EXPECTED
        async with engine_on(address) as second:
            assert await run_all(second) == EXPECTED


async def test_runtime_that_comes_back_with_another_shape_is_refused() -> None:
    """A successor with another pool cannot go on for the core: clients are told UNAVAILABLE with both values."""
    async with contextlib.AsyncExitStack() as stack:
        first = contextlib.AsyncExitStack()
        address = await first.enter_async_context(listening(MisbehavingRuntime()))
        engine = await stack.enter_async_context(engine_on(address, runtime_timeout=0.5))
        subscription = engine.submit("a", np.array([1, 2, 3], np.int32), SubmitOptions(max_tokens=50))
        await subscription.take()
        await first.aclose()
        await stack.enter_async_context(listening(MisbehavingRuntime(Shape(num_pages=31)), address))
        with pytest.raises(RuntimeUnavailableError, match="num_pages: the scheduler says 32, the runtime says 31"):
            await collect(subscription)


async def test_error_of_our_own_ends_streams_and_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contradiction inside the core is no pause: streams end with it, `failed` is set, and nothing more is accepted."""
    async with listening(MisbehavingRuntime()) as address:
        engine = EngineLoop(SchedulerSettings(runtime=address, heartbeat_timeout=30.0))
        await engine.start()

        def explode() -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(engine.core, "plan", explode)
        subscription = engine.submit("a", np.array([1, 2, 3], np.int32), SubmitOptions())
        with pytest.raises(InternalError, match="the scheduler failed"):
            await collect(subscription)
        assert engine.failed.is_set()
        with pytest.raises(InternalError):
            engine.submit("b", np.array([1], np.int32), SubmitOptions())
        await engine.stop()
