"""Steps shorter than the way to the execution thread run where they were read, as long as nobody else is at work."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from pagemirror.v1 import runtime_pb2
from runtime_service import execute_stream

Start = Callable[..., Awaitable[Any]]
Connect = Callable[..., Any]
Within = Callable[..., Awaitable[Any]]
Continuation = Callable[[Any, int], list[int]]

IDS = (1, 2, 3)


async def decode_steps(peer: Any, ops: Any, last: int) -> list[int]:
    """A request of three tokens, step by step up to this one; its tokens."""
    await peer.send(op=ops.prefill(1, 1, (5, 6), IDS))
    tokens = await peer.result()
    for step in range(2, last + 1):
        await peer.send(op=ops.decode(step, 1, 2, step + 1))
        tokens += await peer.result()
    return tokens


async def test_short_steps_run_in_the_event_loop(
    connect: Connect, ops: Any, continuation: Continuation, start: Start, within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them do, with the definition's tokens, and a look at the rows in between shows the last one."""
    monkeypatch.setattr(execute_stream, "SHORT_STEP_S", 1e9)
    runtime, stub = await start(short_steps=True)
    peer = connect(stub)
    await peer.hello()
    assert await decode_steps(peer, ops, 4) == continuation(IDS, 4)
    rows = await within(stub.ReadRows(runtime_pb2.ReadRowsRequest()))
    assert (rows.last_step, np.frombuffer(rows.pages, "<i4").tolist()) == (4, [5, 6])
    await peer.send(op=ops.decode(5, 1, 2, 6))
    assert await peer.result() == continuation(IDS, 5)[4:]
    assert set(runtime.executor.threads) == {threading.get_ident()}
    await peer.no_more()


async def test_long_steps_go_to_the_thread(
    connect: Connect, ops: Any, continuation: Continuation, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one that took too long in the event loop the next two, as many as are set here, do; then one is tried again."""
    monkeypatch.setattr(execute_stream, "SHORT_STEP_S", 0.0)
    monkeypatch.setattr(execute_stream, "LONG_STEPS", 2)
    runtime, stub = await start(short_steps=True)
    peer = connect(stub)
    await peer.hello()
    assert await decode_steps(peer, ops, 5) == continuation(IDS, 5)
    here = threading.get_ident()
    assert [thread == here for thread in runtime.executor.threads] == [True, False, False, True, False]
    await peer.no_more()


async def test_failed_short_step(connect: Connect, ops: Any, start: Start) -> None:
    """An error of the model is a STEP_FAILED, the stream goes on, and a reset mends it."""
    runtime, stub = await start(short_steps=True)
    peer = connect(stub)
    await peer.hello()
    runtime.executor.error = RuntimeError("broken")
    await peer.send(op=ops.prefill(1, 1, (5, 6), IDS))
    assert await peer.refusal() == ("STEP_FAILED", 1)
    runtime.executor.error = None
    await peer.send(reset=runtime_pb2.Reset(session_no=2))
    assert (await peer.read()).reset_done.session_no == 2
    await peer.send(op=ops.prefill(1, 1, (9,), IDS, session_no=2))
    assert await peer.result() == [20]
    await peer.no_more()
