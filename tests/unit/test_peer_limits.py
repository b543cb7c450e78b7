"""What a peer on the private link may say at most, and how long it may say nothing: both sides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from pagemirror.v1 import runtime_pb2
from runtime_service import errors as runtime_errors
from runtime_service import wire as runtime_wire
from runtime_service.execute_stream import EndStream, ExecuteStream
from runtime_service.execution import ExecutionThread
from scheduler_service.errors import ProtocolError
from scheduler_service.wire import refusal_from_proto
from scheduler_service.wire_facts import PROTOCOL_VERSION, facts_from_proto


def test_names_in_a_hello() -> None:
    """A name of 4,096 characters is taken, one more is a fault of the protocol."""
    facts = facts_from_proto(runtime_pb2.RuntimeInfo(protocol_version=PROTOCOL_VERSION, model="m" * 4096))
    assert facts.model == "m" * 4096
    for name in ("model", "architecture", "tokenizer_path", "device", "dtype"):
        hello = runtime_pb2.RuntimeInfo(protocol_version=PROTOCOL_VERSION, **{name: "m" * 4097})
        with pytest.raises(ProtocolError, match=f"hello: {name} has 4097 characters, but at most 4096 are taken"):
            facts_from_proto(hello)


def test_texts_of_a_refusal() -> None:
    """A runtime's detail and request id are kept up to 1 KiB of UTF-8 each."""
    refusal = refusal_from_proto(runtime_pb2.Refusal(code=2, detail="ü" * 512, request_id="r" * 1024))
    assert (refusal.detail, refusal.request_id) == ("ü" * 512, "r" * 1024)
    refusal = refusal_from_proto(runtime_pb2.Refusal(code=2, detail="ü" * 513, request_id="r" * 1025))
    assert (refusal.detail, refusal.request_id) == ("ü" * 510 + "…", "r" * 1021 + "…")


def test_text_of_a_status_of_the_runtime() -> None:
    """A call of the runtime ends with at most 1 KiB of text."""
    assert EndStream(grpc.StatusCode.ABORTED, "x" * 1024).detail == "x" * 1024
    assert EndStream(grpc.StatusCode.ABORTED, "x" * 1025).detail == "x" * 1021 + "…"
    assert runtime_errors.shorten("a\ud800") == "a?"


async def test_scheduler_that_reads_nothing_loses_its_stream() -> None:
    """The stream ends after the time in which nothing could be written; one that reads, however slowly, is kept."""
    thread = ExecutionThread()
    runner: Any = SimpleNamespace(open=lambda *_: None)
    hello = runtime_pb2.SchedulerHello(scheduler_epoch=1, session_no=1)
    over = asyncio.Event()

    async def requests() -> AsyncIterator[Any]:
        await over.wait()
        return
        yield

    async def serve(write: Any) -> None:
        stream = ExecuteStream(hello, thread, runner, write_timeout_s=0.05)
        await stream.serve(requests(), write, runtime_wire.ExecuteResponse(), 0.01)

    async def blocked(_: Any) -> None:
        await asyncio.Event().wait()

    with pytest.raises(EndStream, match=r"RESOURCE_EXHAUSTED: the scheduler has read nothing for 0.05 s"):
        await asyncio.wait_for(serve(blocked), 30)

    written = 0

    async def slow(_: Any) -> None:
        nonlocal written
        await asyncio.sleep(0.001)
        written += 1
        if written == 15:
            over.set()

    await asyncio.wait_for(serve(slow), 30)
    assert written >= 15
    thread.stop()
    assert await asyncio.to_thread(thread.join, 30)
