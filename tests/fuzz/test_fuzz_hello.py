"""Mutated first messages: each opens a session, or ends its stream with a status that fits."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from typing import Any

from fuzz_bytes import ByteMutator
from fuzz_fields import MAX_UINT32, MAX_UINT64
from fuzz_model import Shape
from fuzz_runtime import OPTIONS
from google.protobuf.message import DecodeError
from grpc import aio

from pagemirror.v1 import runtime_pb2, runtime_pb2_grpc

WAIT_S = 100.0
SHARE = 1 / 10
"""Of the number of messages: each has a stream of its own."""
BAD, DIFFERS = "INVALID_ARGUMENT", "FAILED_PRECONDITION"


class Greeter:
    """Draws hellos of one scheduler, and of others."""

    def __init__(self, seed: int, shape: Shape) -> None:
        self.rng = random.Random(seed)
        self.epoch = secrets.randbits(64) | 1
        self.present = self.epoch
        self.highest = 0
        self.shape = {
            "expect_page_size": shape.page_size,
            "expect_num_pages": shape.num_pages,
            "expect_max_rows": shape.max_rows,
            "expect_max_pages_per_row": shape.width,
        }
        self._bytes = ByteMutator(self.rng)

    def draw(self) -> bytes:
        rng = self.rng
        hello = runtime_pb2.SchedulerHello(
            protocol_version=rng.choice((1, 1, 1, 1, 0, 2, MAX_UINT32)),
            scheduler_epoch=rng.choice((self.epoch, self.epoch, self.epoch, 0, secrets.randbits(64))),
            session_no=rng.choice((self.highest + 1,) * 5 + (0, self.highest, max(self.highest - 1, 0))),
            overlap_depth=rng.choice((0, 1, 2, 2, 3, MAX_UINT32)),
        )
        for name, value in self.shape.items():
            if rng.random() < 0.2:
                setattr(hello, name, rng.choice((value, value, value + 1, 0, MAX_UINT32)))
        data = runtime_pb2.ExecuteRequest(hello=hello).SerializeToString()
        return self._bytes.mutate(data, data) if rng.random() < 0.3 else data

    def right(self, data: bytes) -> set[str]:
        """The statuses that fit; empty: the session is opened."""
        try:
            request = runtime_pb2.ExecuteRequest.FromString(data)
        except DecodeError:
            return {BAD}
        if request.WhichOneof("message") != "hello":
            return {BAD}
        hello, found = request.hello, set()
        if hello.protocol_version != 1:
            found.add(DIFFERS)
        if hello.scheduler_epoch == 0 or hello.session_no == 0 or hello.overlap_depth > 2:
            found.add(BAD)
        if any(hello.HasField(name) and getattr(hello, name) != value for name, value in self.shape.items()):
            found.add(DIFFERS)
        if hello.scheduler_epoch == self.present and hello.session_no <= self.highest:
            found.add(DIFFERS)
        if not found:
            self.present, self.highest = hello.scheduler_epoch, hello.session_no
            if self.highest > MAX_UINT64 // 2 or self.present != self.epoch:
                self.epoch = secrets.randbits(64) | 1  # drawn from now on; a runtime knows the numbers of one scheduler
        return found


async def test_mutated_hellos(runtimes: dict[str, Any], num_ops: int, seed: int) -> None:
    """A stream begins with a hello that is right in every field, or ends at once."""
    served = runtimes["pages of 1"]
    counts: Counter[str] = Counter()
    async with aio.insecure_channel(served.address, options=OPTIONS) as channel:
        info = await runtime_pb2_grpc.RuntimeServiceStub(channel).GetInfo(runtime_pb2.GetRuntimeInfoRequest())
        greeter = Greeter(seed, Shape.of(info))
        execute = channel.stream_stream("/pagemirror.v1.RuntimeService/Execute")
        for _ in range(round(num_ops * SHARE)):
            data = greeter.draw()
            right = greeter.right(data)
            call = execute()
            await call.write(data)
            await call.done_writing()
            kinds, status = [], "OK"
            try:
                async with asyncio.timeout(WAIT_S):
                    while (answer := await call.read()) is not aio.EOF:
                        kinds.append(runtime_pb2.ExecuteResponse.FromString(answer).WhichOneof("message"))
            except aio.AioRpcError as error:
                status = error.code().name
            where = f"seed {seed}, bytes.fromhex({data.hex()!r})"
            assert (status in right) if right else (status, kinds[:1]) == ("OK", ["hello"]), (status, kinds, right, where)
            assert set(kinds) <= {"hello", "heartbeat"}, where
            assert not (right and "hello" in kinds), where
            counts[status] += 1
    assert set(counts) == {"OK", BAD, DIFFERS}
    served.assert_unharmed()
