"""The runtime's stream with a model whose results are read late: overlap on the wire, failures, resets, reads of rows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch

from pagemirror.v1 import runtime_pb2, runtime_pb2_grpc
from runtime_service.executors.base import ExecutionResult
from runtime_service.executors.fingerprint import FingerprintExecutor
from runtime_service.forward_batch import ForwardBatch
from runtime_service.settings import RuntimeSettings, load_settings

WAIT_S = 20.0
IDS = (1, 2, 3)


class HeldResult:
    """A step whose tokens are on the device, and reach the host when the test lets them."""

    def __init__(self, result: ExecutionResult, error: Exception | None) -> None:
        self.over = threading.Event()
        self._error = error
        self._result = result
        self._tokens = torch.from_numpy(result.tokens.astype(np.int64))

    @property
    def device_tokens(self) -> torch.Tensor | None:
        return self._tokens

    def ready(self) -> bool:
        return self.over.is_set()

    def wait(self) -> ExecutionResult:
        assert self.over.wait(WAIT_S)
        if self._error is not None:
            raise self._error
        return self._result


class HeldExecutor(FingerprintExecutor):
    """The fingerprint model, computed when launched, read when the test says so."""

    def __init__(self, settings: RuntimeSettings) -> None:
        super().__init__(num_pages=64, page_size=settings.page_size)
        self.gate = self.load_gate = threading.Event()  # what the runtime of these tests opens at its end
        self.steps: list[HeldResult] = []
        self.fail_late: dict[int, Exception] = {}

    def execute(self, batch: ForwardBatch) -> HeldResult:  # type: ignore[override]
        self.steps.append(HeldResult(super().execute(batch), self.fail_late.get(len(self.steps) + 1)))
        return self.steps[-1]

    async def until_launched(self, num_steps: int) -> None:
        """Wait until that many steps were launched."""
        async with asyncio.timeout(WAIT_S):
            while len(self.steps) < num_steps:
                await asyncio.sleep(0.001)

    def let_go(self, *numbers: int) -> None:
        """These steps, counted from 1, are over."""
        for number in numbers:
            self.steps[number - 1].over.set()


Rig = tuple[HeldExecutor, "runtime_pb2_grpc.RuntimeServiceAsyncStub", Any]


@pytest.fixture
async def rig(make_runtime: Callable[[RuntimeSettings], Any], connect: Callable[..., Any]) -> AsyncIterator[Rig]:
    """A served model that is read late, a stub, and a peer that has said hello with overlap depth 1."""
    settings = load_settings(listen="127.0.0.1:0", page_size=4, max_rows=8, heartbeat_interval_s=30.0, grace_s=0.2)
    runtime = make_runtime(settings)
    executor = runtime.executor = HeldExecutor(settings)
    stub = await runtime.connect()
    peer = connect(stub)
    await peer.hello(overlap_depth=1)
    yield executor, stub, peer
    executor.let_go(*range(1, len(executor.steps) + 1))
    await runtime.shut_down()


async def test_next_op_is_launched_before_the_result_is_read(rig: Rig, ops: Any) -> None:
    """Op 2 is on the device while op 1 is not read; op 3 waits for its turn; results come in order and are exact."""
    executor, _, peer = rig
    await peer.send(op=ops.prefill(1, 1, (5, 6), IDS))
    await executor.until_launched(1)
    await peer.send(op=ops.decode(2, 1, 2, 3))
    await peer.send(op=ops.decode(3, 1, 2, 4))
    await executor.until_launched(2)
    executor.let_go(2)
    assert len(executor.steps) == 2, "overlap_depth + 1 steps and no more"
    executor.let_go(1)
    assert await peer.result() == [20]
    await executor.until_launched(3)
    executor.let_go(3)
    assert [await peer.result(), await peer.result()] == [[104], [629]]
    await peer.no_more()


async def test_failure_that_is_found_late_fails_the_right_step(rig: Rig, ops: Any) -> None:
    """A step that runs out of memory on the device is refused as itself, the launched one behind it is SKIPPED."""
    executor, _, peer = rig
    executor.fail_late = {2: torch.OutOfMemoryError("late")}
    await peer.send(op=ops.prefill(1, 1, (5, 6), IDS))
    await executor.until_launched(1)
    executor.let_go(1)
    assert await peer.result() == [20]
    await peer.send(op=ops.decode(2, 1, 2, 3))
    await peer.send(op=ops.decode(3, 1, 2, 4))
    await peer.send(op=ops.decode(4, 1, 2, 5))
    await executor.until_launched(3)
    executor.let_go(2, 3)
    assert [await peer.refusal() for _ in range(3)] == [("OUT_OF_MEMORY", 2), ("SKIPPED", 3), ("SKIPPED", 4)]
    assert len(executor.steps) == 3
    await peer.send(reset=runtime_pb2.Reset(session_no=2))
    assert (await peer.read()).reset_done.session_no == 2
    await peer.send(op=ops.prefill(1, 1, (9,), IDS, session_no=2))
    await executor.until_launched(4)
    executor.let_go(4)
    assert await peer.result() == [20]
    await peer.no_more()


async def test_reset_does_not_wait_for_pending_steps(rig: Rig, ops: Any) -> None:
    """A Reset is answered while steps of the old session are still on the device; their results are never sent."""
    executor, _, peer = rig
    await peer.send(op=ops.prefill(1, 1, (5, 6), IDS))
    await executor.until_launched(1)
    await peer.send(reset=runtime_pb2.Reset(session_no=2))
    assert (await peer.read()).reset_done.session_no == 2
    await peer.send(op=ops.prefill(1, 1, (9,), (7,), session_no=2))
    await executor.until_launched(2)
    executor.let_go(1, 2)
    assert await peer.result() == [8]
    await peer.no_more()


async def test_new_hello_drops_pending_steps(rig: Rig, ops: Any, connect: Callable[..., Any]) -> None:
    """A higher session on a new stream is served although a step of the old one was never read."""
    executor, stub, peer = rig
    await peer.send(op=ops.prefill(1, 1, (5, 6), IDS))
    await executor.until_launched(1)
    following = connect(stub)
    await following.hello(2)
    await following.send(op=ops.prefill(1, 1, (9,), (7,), session_no=2))
    await executor.until_launched(2)
    executor.let_go(2)
    assert await following.result() == [8]
    await following.no_more()


async def test_half_close_answers_pending_steps(rig: Rig, ops: Any) -> None:
    """The stream ends only after the results of what was launched."""
    executor, _, peer = rig
    await peer.send(op=ops.prefill(1, 1, (5, 6), IDS))
    await peer.send(op=ops.decode(2, 1, 2, 3))
    await executor.until_launched(2)
    await peer.call.done_writing()
    executor.let_go(1, 2)
    assert [await peer.result(), await peer.result()] == [[20], [104]]


async def test_read_rows_is_of_one_moment(rig: Rig, ops: Any, within: Callable[[Awaitable[Any]], Awaitable[Any]]) -> None:
    """ReadRows sees the rows and the step number of the last op before it, with the results of all of them sent."""
    executor, stub, peer = rig
    await peer.send(op=ops.prefill(1, 1, (5, 6), IDS))
    await peer.send(op=ops.prefill(2, 2, (7,), (4,)))
    await executor.until_launched(2)
    reading = asyncio.ensure_future(stub.ReadRows(runtime_pb2.ReadRowsRequest()))
    executor.let_go(1, 2)
    rows = await within(reading)
    assert (rows.last_step, np.frombuffer(rows.rows, "<i4").tolist()) == (2, [1, 2])
    assert np.frombuffer(rows.pages, "<i4").tolist() == [5, 6, 7]
    assert [await peer.result(), await peer.result()] == [[20], [5]]
    await peer.no_more()
