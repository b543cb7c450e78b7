"""The runtime's stream over a real loopback server: results, refusals, repeats, resets, heartbeats, and their order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from pagemirror.v1 import runtime_pb2

Code = grpc.StatusCode
Start = Callable[..., Awaitable[Any]]
Connect = Callable[..., Any]
Within = Callable[..., Awaitable[Any]]
Continuation = Callable[[Any, int], list[int]]

IDS = (1, 2, 3)


async def test_steps_are_answered_in_order_with_exact_tokens(
    connect: Connect, ops: Any, continuation: Continuation, start: Start
) -> None:
    """Ops sent ahead of their results give the definition's tokens, one result each, in their order."""
    _, stub = await start()
    peer = connect(stub)
    await peer.hello()
    await peer.send(op=ops.prefill(1, 1, (5, 6), IDS))
    for step in range(2, 6):
        await peer.send(op=ops.decode(step, 1, 2, step + 1))
    assert (
        [await peer.result() for _ in range(5)]
        == [[token] for token in continuation(IDS, 5)]
        == [[20], [104], [629], [421], [384]]
    )
    await peer.no_more()


async def test_refused_op_then_skipped_until_reset(connect: Connect, ops: Any, within: Within, start: Start) -> None:
    """The first refusal names code, row and request; later ops are SKIPPED and change nothing; Reset starts afresh."""
    runtime, stub = await start()
    peer = connect(stub)
    await peer.hello()
    await peer.send(op=ops.prefill(1, 1, (5, 6), IDS))
    assert await peer.result() == [20]
    await peer.send(op=ops.decode(2, 1, 2, 4))
    refusal = (await peer.read()).refusal
    assert (refusal.code, refusal.row, refusal.request_id) == (runtime_pb2.REFUSAL_CODE_NOT_CONTIGUOUS, 1, "request-1")
    assert "num_computed 4 is not 3" in refusal.detail
    await peer.send(op=ops.decode(2, 1, 2, 3))
    await peer.send(op=ops.prefill(3, 2, (7,), IDS))
    assert [await peer.refusal(), await peer.refusal()] == [("SKIPPED", 2), ("SKIPPED", 3)]
    assert runtime.executor.num_executed == 1
    await peer.send(reset=runtime_pb2.Reset(session_no=2))
    assert (await peer.read()).reset_done.session_no == 2
    rows = await within(stub.ReadRows(runtime_pb2.ReadRowsRequest()))
    assert (rows.session_no, rows.last_step, rows.rows) == (2, 0, b"")
    await peer.send(op=ops.prefill(1, 1, (9,), IDS, session_no=2))
    assert await peer.result() == [20]
    await peer.no_more()


async def test_unreadable_bytes_are_refused_and_the_stream_stays_open(connect: Connect, ops: Any, start: Start) -> None:
    """A column of three bytes is MALFORMED, what follows is SKIPPED, and a Reset heals the stream."""
    _, stub = await start()
    peer = connect(stub)
    await peer.hello()
    await peer.send(op=ops.prefill(1, 1, (5,), IDS, sizes=b"123"))
    await peer.send(op=ops.prefill(1, 1, (5,), IDS, sizes=b"123"))
    assert [await peer.refusal(), await peer.refusal()] == [("MALFORMED", 1), ("SKIPPED", 1)]
    await peer.send(reset=runtime_pb2.Reset(session_no=9))
    await peer.read()
    await peer.send(op=ops.prefill(1, 1, (5,), IDS, session_no=9))
    assert await peer.result() == [20]


async def test_failed_step_is_a_refusal_without_the_exception(connect: Connect, ops: Any, start: Start) -> None:
    """An exception inside the model becomes STEP_FAILED; the peer sees no text of it."""
    runtime, stub = await start()
    peer = connect(stub)
    await peer.hello()
    runtime.executor.error = RuntimeError("secret path")
    await peer.send(op=ops.prefill(1, 1, (5,), IDS))
    refusal = (await peer.read()).refusal
    assert refusal.code == runtime_pb2.REFUSAL_CODE_STEP_FAILED
    assert "secret" not in refusal.detail
    await peer.send(op=ops.decode(2, 1, 1, 3))
    assert await peer.refusal() == ("SKIPPED", 2)


async def test_repeats_are_answered_from_memory(connect: Connect, ops: Any, start: Start) -> None:
    """The last overlap_depth + 1 steps are answered again without being executed; an older one is out of order."""
    runtime, stub = await start()
    peer = connect(stub)
    await peer.hello(overlap_depth=1)
    sent = [ops.prefill(1, 1, (5, 6), IDS), ops.decode(2, 1, 2, 3), ops.decode(3, 1, 2, 4)]
    for op in sent:
        await peer.send(op=op)
    tokens = [await peer.result() for _ in sent]
    await peer.send(op=sent[1])
    await peer.send(op=sent[2])
    assert [await peer.result(), await peer.result()] == tokens[1:]
    assert runtime.executor.num_executed == 3
    await peer.send(op=sent[0])
    assert await peer.refusal() == ("STEP_OUT_OF_ORDER", 1)


async def test_reset_drops_queued_ops_and_discards_the_running_result(
    connect: Connect, ops: Any, within: Within, continuation: Continuation, start: Start
) -> None:
    """A Reset sent while a step runs: that step finishes unheard, the queued op never runs, then comes ResetDone."""
    runtime, stub = await start()
    peer = connect(stub)
    await peer.hello()
    runtime.executor.gate.clear()
    await peer.send(op=ops.prefill(1, 1, (5,), IDS))
    await peer.send(op=ops.decode(2, 1, 1, 3))
    await runtime.executor.until_entered()
    await peer.send(reset=runtime_pb2.Reset(session_no=2))
    await peer.send(op=ops.prefill(1, 3, (7,), (4, 5), session_no=2))
    await within(runtime.until_queued(3))
    runtime.executor.gate.set()
    assert (await peer.read()).reset_done.session_no == 2
    assert await peer.result() == continuation((4, 5), 1)
    assert runtime.executor.num_executed == 2
    await peer.no_more()


async def test_reset_must_count_up(connect: Connect, start: Start) -> None:
    """A Reset to the present number ends the stream with both numbers."""
    _, stub = await start()
    peer = connect(stub)
    await peer.hello(session_no=4)
    await peer.send(reset=runtime_pb2.Reset(session_no=4))
    code, details = await peer.ended()
    assert code is Code.FAILED_PRECONDITION
    assert "session 4, which must be higher than the present one, 4" in details


async def test_heartbeats_come_while_a_step_runs(connect: Connect, ops: Any, start: Start) -> None:
    """A step that takes long does not silence the runtime; each beat names the last applied step."""
    runtime, stub = await start(heartbeat_interval_s=0.02)
    peer = connect(stub)
    await peer.hello()
    await peer.send(op=ops.prefill(1, 1, (5,), IDS))
    while (response := await peer.read()).WhichOneof("message") != "result":
        assert response.heartbeat.last_step in {0, 1}
    await runtime.executor.until_entered()
    runtime.executor.gate.clear()
    await peer.send(op=ops.decode(2, 1, 1, 3))
    await runtime.executor.until_entered()
    beats = [await peer.read() for _ in range(5)]
    assert [beat.WhichOneof("message") for beat in beats] == ["heartbeat"] * 5
    assert beats[-1].heartbeat.last_step == 1
    runtime.executor.gate.set()
    while (response := await peer.read()).WhichOneof("message") == "heartbeat":
        pass
    assert response.result.step == 2


async def test_flood_of_ops_is_answered_in_order(connect: Connect, ops: Any, continuation: Continuation, start: Start) -> None:
    """A peer that sends far more than its overlap depth is slowed down, not dropped, and gets every answer in order."""
    runtime, stub = await start()
    peer = connect(stub)
    await peer.hello()
    count = 300
    runtime.executor.gate.clear()
    await peer.send(op=ops.prefill(1, 1, (5,), (1,)))

    async def flood() -> None:
        for step in range(2, count):
            await peer.send(op=ops.decode(step, 1, 1, 1, sample=b"\x02"))

    flooding = asyncio.create_task(flood())
    await runtime.executor.until_entered()
    runtime.executor.gate.set()
    assert await peer.result() == continuation((1,), 1)
    answers = [await peer.refusal() for _ in range(2, count)]
    await flooding
    assert answers == [("MALFORMED", 2)] + [("SKIPPED", step) for step in range(3, count)]
