"""A runtime that misbehaves on demand, over a real loopback server, and an engine in front of it.

The runtime here is a small servicer of its own around the real `StepRunner` with the exact test model, so that outputs after a
recovery can be held against the definition.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest
import structlog

from pagemirror.v1 import forward_pb2, runtime_pb2, runtime_pb2_grpc
from runtime_service import wire as runtime_wire
from runtime_service.errors import Refusal
from runtime_service.executors.fingerprint import FingerprintExecutor
from runtime_service.ops import RefusalCode, StepResult
from runtime_service.req_to_page import ReqToPage
from runtime_service.session import SessionState
from runtime_service.step_runner import StepRunner
from scheduler_service.channels import bind
from scheduler_service.engine_loop import EngineLoop, SubmitOptions
from scheduler_service.settings import SchedulerSettings
from scheduler_service.subscription import Subscription

LIMIT_S = 60.0
VOCAB_SIZE = 997
PROMPTS = {f"r{n}": [n, 2 * n + 1, 3, 4, 5, 6, 7 + n] for n in range(4)}


@dataclass
class Shape:
    """What the runtime says it can hold."""

    page_size: int = 4
    num_pages: int = 32
    max_rows: int = 8
    max_pages_per_row: int = 16
    protocol_version: int = 1
    rank: int = 0
    world_size: int = 1
    model: str = "fingerprint"


# What the runtime does instead of answering an op: it is given the number of the op over all sessions, from 1.
Fault = Callable[[int], str]


@dataclass
class MisbehavingRuntime(runtime_pb2_grpc.RuntimeServiceServicer):
    """`fault` names what becomes of the n-th op; "" is a true answer, the others are looked for in `_answer`."""

    shape: Shape = field(default_factory=Shape)
    fault: Fault = lambda number: ""
    kills: Callable[[forward_pb2.ForwardOp], bool] = lambda message: False
    """Ops with which the stream breaks."""
    refuses: Callable[[forward_pb2.ForwardOp], tuple[int, str] | None] = lambda message: None
    """Row and request for whose sake an op is refused."""
    heartbeat_s: float = 0.02
    num_streams: int = 0
    num_resets: int = 0
    num_ops: int = 0
    num_late: int = 0
    lie: Callable[[int, StepResult], None] = lambda number, result: None
    """Changes the true result of the n-th op, over all sessions, before it is sent."""
    ops: list[bytes] = field(default_factory=list)  # as they came
    num_skipped: int = 0
    sessions: list[int] = field(default_factory=list)
    unanswered: int = 0
    most_unanswered: int = 0
    holder: int = 0  # epoch of the scheduler whose stream is alive
    silent: bool = False  # answers no op of this stream any more
    frozen: bool = False  # nor sends heartbeats
    held: runtime_pb2.ExecuteResponse | None = None  # a result to be sent too late

    def __post_init__(self) -> None:
        self._writing = asyncio.Lock()
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
            model=shape.model,
            rank=shape.rank,
            world_size=shape.world_size,
        )

    async def GetInfo(self, request: Any, context: Any) -> runtime_pb2.RuntimeInfo:
        return self.info()

    async def ReadRows(self, request: runtime_pb2.ReadRowsRequest, context: Any) -> runtime_pb2.ReadRowsResponse:
        return runtime_wire.rows_to_proto(self.runner.read_rows(runtime_wire.rows_from_proto(request)))

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
        await self._write(context, runtime_pb2.ExecuteResponse(hello=self.info()))
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
                    await self._write(context, runtime_pb2.ExecuteResponse(reset_done=done))
                    await self._send_late(context)
                    self.held = None
                else:
                    await self._answer(request.op, context)
        finally:
            beat.cancel()
            self.holder = 0
            self.runner.close()

    async def _write(self, context: Any, response: runtime_pb2.ExecuteResponse) -> None:
        async with self._writing:  # a stream takes one write at a time
            await context.write(response)

    async def _send_late(self, context: Any) -> None:
        if self.held is not None:
            self.num_late += 1
            await self._write(context, self.held)

    async def _beat(self, context: Any) -> None:
        while True:
            await asyncio.sleep(self.heartbeat_s)
            if not self.frozen:
                await self._write(context, runtime_pb2.ExecuteResponse(heartbeat=runtime_pb2.Heartbeat()))

    async def _answer(self, message: forward_pb2.ForwardOp, context: Any) -> None:
        self.num_ops += 1
        self.ops.append(message.SerializeToString())
        self.unanswered += 1
        self.most_unanswered = max(self.most_unanswered, self.unanswered)
        await asyncio.sleep(0)  # ops that were sent ahead arrive before this one is answered
        fault = self.fault(self.num_ops)
        blamed = self.refuses(message)
        if blamed:
            fault = "refuse"
        if fault == "break" or self.kills(message):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "broken on demand")
        self.frozen |= fault == "freeze"
        self.silent |= fault in {"ignore", "freeze"}
        if self.silent:
            return
        if fault == "late":
            self.held = runtime_wire.result_to_proto(self.runner.run(runtime_wire.op_from_proto(message)))  # type: ignore[arg-type]
        if fault in {"refuse", "late"}:
            refusal = Refusal(
                RefusalCode.GAP, *(blamed or (1, "a")), "refused on demand", session_no=message.session_no, step=message.step
            )
            response = runtime_wire.refusal_to_proto(self.runner.refuse(refusal))
        else:
            outcome = self.runner.run(runtime_wire.op_from_proto(message))
            if isinstance(outcome, Refusal):
                self.num_skipped += outcome.code is RefusalCode.SKIPPED
                response = runtime_wire.refusal_to_proto(outcome)
            else:
                self.lie(self.num_ops, outcome)
                if fault == "short":
                    outcome.tokens = outcome.tokens[:-1]
                    outcome.row_status = outcome.row_status[:-1]
                if fault == "alien_token":
                    outcome.tokens = np.full_like(outcome.tokens, VOCAB_SIZE)
                if fault == "wrong_step":
                    outcome.step += 1
                response = runtime_wire.result_to_proto(outcome)
        self.unanswered -= 1
        await self._write(context, response)


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


@dataclass(frozen=True)
class Clients:
    """Requests to an engine, without a connection in between; `expected` is what `run_all` must return."""

    expected: Mapping[str, list[int]]

    @staticmethod
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

    @staticmethod
    def submit_all(engine: EngineLoop, num_tokens: int = 9) -> list[Subscription]:
        """Submit all prompts at once."""
        options = SubmitOptions(max_tokens=num_tokens)
        return [engine.submit(name, np.array(prompt, np.int32), options) for name, prompt in PROMPTS.items()]

    async def run_all(self, engine: EngineLoop, num_tokens: int = 9) -> dict[str, list[int]]:
        """Run all prompts at once."""
        outputs = await asyncio.gather(*map(self.collect, self.submit_all(engine, num_tokens)))
        return dict(zip(PROMPTS, outputs, strict=True))


@pytest.fixture(autouse=True)
def _captured_logs() -> Iterator[None]:
    """Steps fail here by the dozen, and structlog's default way of printing their tracebacks takes longer than all else."""
    with structlog.testing.capture_logs():
        yield


@pytest.fixture
def make_runtime() -> Callable[..., MisbehavingRuntime]:
    """A runtime with a fault, by default none; other keyword arguments are its shape."""

    def make(fault: Fault = lambda number: "", **shape: Any) -> MisbehavingRuntime:
        return MisbehavingRuntime(Shape(**shape), fault)

    return make


@pytest.fixture(name="listening")
def listening_runtime() -> Callable[..., contextlib.AbstractAsyncContextManager[str]]:
    """Serves a runtime; yields its address."""
    return listening


@pytest.fixture(name="engine_on")
def engine_on_address() -> Callable[..., contextlib.AbstractAsyncContextManager[EngineLoop]]:
    """Starts an engine on an address; keyword arguments are its settings."""
    return engine_on


@pytest.fixture
def clients(continuation: Callable[[list[int], int], list[int]]) -> Clients:
    """Four requests of nine tokens each."""
    return Clients({name: continuation(prompt, 9) for name, prompt in PROMPTS.items()})
