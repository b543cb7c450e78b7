"""What a stream reads in the moment in which it ends, before its tasks are cancelled."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from pagemirror.v1 import forward_pb2, runtime_pb2
from runtime_service.execute_stream import EndStream, ExecuteStream
from runtime_service.execution import ExecutionThread

EPOCH = 7


class RecordingRunner:
    """Notes every call that could touch a session."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def open(self, scheduler_epoch: int, session_no: int, overlap_depth: int) -> None:
        self.calls.append(("open", session_no))

    def reset(self, session_no: int) -> None:
        self.calls.append(("reset", session_no))

    def launch(self, op: Any) -> Any:
        self.calls.append(("launch", op.session_no))
        raise AssertionError("an op of an ended stream was executed")


@pytest.fixture
def thread() -> Iterator[ExecutionThread]:
    """An execution thread."""
    thread = ExecutionThread()
    yield thread
    thread.stop()


@pytest.mark.parametrize("kind", ["op", "reset"])
async def test_what_is_read_after_the_end_touches_no_session(thread: ExecutionThread, kind: str) -> None:
    """A successor took over while this stream had a message at hand: neither an op nor a reset of it reaches the runner."""
    runner = RecordingRunner()
    hello = runtime_pb2.SchedulerHello(scheduler_epoch=EPOCH, session_no=3, overlap_depth=1)
    stream = ExecuteStream(hello, thread, runner)  # type: ignore[arg-type]
    late = {
        "op": runtime_pb2.ExecuteRequest(op=forward_pb2.ForwardOp(session_no=3, step=1)),
        "reset": runtime_pb2.ExecuteRequest(reset=runtime_pb2.Reset(session_no=5)),
    }[kind]

    async def requests() -> AsyncIterator[runtime_pb2.ExecuteRequest]:
        stream.end(grpc.StatusCode.ABORTED, "session 4 took over from 3")
        yield late

    async def write(response: runtime_pb2.ExecuteResponse) -> None:
        pass

    with pytest.raises(EndStream, match="session 4 took over"):
        await stream.serve(requests(), write, runtime_pb2.ExecuteResponse(), heartbeat_interval_s=30.0)
    await thread.call(lambda: None)
    assert runner.calls == [("open", 3)]
    assert stream.session_no == 0
