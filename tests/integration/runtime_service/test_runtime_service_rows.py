"""ReadRows over a real loopback server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio

from pagemirror.v1 import runtime_pb2

Code = grpc.StatusCode
Start = Callable[..., Awaitable[Any]]
Connect = Callable[..., Any]
Within = Callable[..., Awaitable[Any]]

IDS = (1, 2, 3)


def i32(*values: int) -> bytes:
    """Values as an int32 column."""
    return np.array(values, "<i4").tobytes()


async def test_read_rows(connect: Connect, ops: Any, within: Within, start: Start) -> None:
    """Rows are those between two ops, with the step they belong to; asking for nothing asks for every lease."""
    _, stub = await start()
    peer = connect(stub)
    await peer.hello(session_no=6)
    await peer.send(op=ops.prefill(1, 3, (5, 9), IDS, session_no=6, generation=4))
    await peer.send(op=ops.prefill(2, 2, (7,), IDS, session_no=6))
    await peer.result()
    await peer.result()
    everything = await within(stub.ReadRows(runtime_pb2.ReadRowsRequest()))
    assert everything == runtime_pb2.ReadRowsResponse(
        session_no=6,
        last_step=2,
        rows=i32(2, 3),
        row_generations=i32(1, 4),
        row_lens=i32(1, 2),
        valid_lens=i32(1, 2),
        pages=i32(7, 5, 9),
    )
    chosen = await within(stub.ReadRows(runtime_pb2.ReadRowsRequest(rows=i32(3, 1))))
    assert (chosen.rows, chosen.row_generations, chosen.pages) == (i32(3, 1), i32(4, 0), i32(5, 9))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (i32(0), "row 0 is outside [1, 8]"),
        (i32(9), "row 9 is outside"),
        (b"123", "rows has 3 bytes"),
        (i32(*[1] * 9), "9 row numbers"),
    ],
)
async def test_read_rows_refuses_bad_numbers(within: Within, start: Start, rows: bytes, words: str) -> None:
    """Row numbers out of range, unreadable ones and too many are INVALID_ARGUMENT."""
    _, stub = await start()
    with pytest.raises(aio.AioRpcError) as caught:
        await within(stub.ReadRows(runtime_pb2.ReadRowsRequest(rows=rows)))
    assert caught.value.code() is Code.INVALID_ARGUMENT
    assert words in (caught.value.details() or "")
