"""A runtime gone mad: it answers rightly, with what the model says, or with those bytes changed."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
from fuzz_bytes import ByteMutator
from fuzz_columns import pack, pack_longs
from fuzz_fields import MAX_UINT64
from fuzz_model import FINGERPRINT_VOCABULARY, Result, RuntimeModel, Shape
from grpc import aio

from pagemirror.v1 import forward_pb2, runtime_pb2, runtime_pb2_grpc

SHAPE = Shape(page_size=4, num_pages=48, max_rows=6, width=16, vocab_size=FINGERPRINT_VOCABULARY, greedy_only=True)


class MadRuntime(runtime_pb2_grpc.RuntimeServiceServicer):
    """Serves one scheduler. `rate`: the share of answers that are changed."""

    def __init__(self, seed: int) -> None:
        self.rate = 0.0
        self.counts: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._bytes = ByteMutator(self._rng)
        self._model = RuntimeModel(SHAPE)
        self._last = b""
        self._server = aio.server()
        self._server.add_generic_rpc_handlers((self._handlers(),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    async def __aenter__(self) -> MadRuntime:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)

    def _handlers(self) -> grpc.GenericRpcHandler:
        methods = {
            "Execute": grpc.stream_stream_rpc_method_handler(self._execute, runtime_pb2.ExecuteRequest.FromString, bytes),
            "GetInfo": grpc.unary_unary_rpc_method_handler(self._get_info, None, bytes),
            "ReadRows": grpc.unary_unary_rpc_method_handler(self._read_rows, runtime_pb2.ReadRowsRequest.FromString, bytes),
        }
        return grpc.method_handlers_generic_handler("pagemirror.v1.RuntimeService", methods)

    @staticmethod
    def _info() -> runtime_pb2.RuntimeInfo:
        return runtime_pb2.RuntimeInfo(
            protocol_version=1,
            runtime_epoch=secrets.randbits(64) | 1,
            page_size=SHAPE.page_size,
            num_pages=SHAPE.num_pages,
            max_rows=SHAPE.max_rows,
            max_pages_per_row=SHAPE.width,
            vocab_size=SHAPE.vocab_size,
            model="fingerprint",
            architecture="fingerprint",
            world_size=1,
            device="cpu",
            dtype="int32",
            heartbeat_interval_s=0.2,
        )

    async def _get_info(self, request: bytes, context: Any) -> bytes:
        return self._info().SerializeToString()

    async def _read_rows(self, request: runtime_pb2.ReadRowsRequest, context: Any) -> bytes:
        rows = self._model.rows()
        response = runtime_pb2.ReadRowsResponse(
            session_no=self._model.session_no,
            last_step=self._model.last_step,
            rows=pack([row[0] for row in rows]),
            row_generations=pack([row[1] for row in rows]),
            row_lens=pack([row[2] for row in rows]),
            valid_lens=pack([row[3] for row in rows]),
            pages=pack([page for row in rows for page in row[4]]),
        )
        return self._changed(response.SerializeToString())

    async def _execute(self, requests: AsyncIterator[runtime_pb2.ExecuteRequest], context: Any) -> AsyncIterator[bytes]:
        first = await anext(aiter(requests))
        self._model.open(first.hello.session_no, first.hello.overlap_depth)
        beat = asyncio.create_task(self._beat(context))
        try:
            await context.write(runtime_pb2.ExecuteResponse(hello=self._info()).SerializeToString())
            async for request in requests:
                for answer in self._answers(request):
                    await context.write(answer)
                    if self._rng.random() < self.rate / 10:
                        await context.abort(self._rng.choice(list(grpc.StatusCode)[1:]), "mad")
        finally:
            beat.cancel()

    @staticmethod
    async def _beat(context: Any) -> None:
        while True:
            await asyncio.sleep(0.1)
            await context.write(runtime_pb2.ExecuteResponse(heartbeat=runtime_pb2.Heartbeat()).SerializeToString())

    def _answers(self, request: runtime_pb2.ExecuteRequest) -> list[bytes]:
        expected = self._model.take(request)
        answer = runtime_pb2.ExecuteResponse()
        if expected.reset_done:
            answer.reset_done.session_no = expected.reset_done
        elif expected.result is not None:
            answer.result.CopyFrom(_message(self._model.session_no, expected.result))
        else:
            code = min(expected.refusals)
            answer.refusal.session_no, answer.refusal.step = request.op.session_no, request.op.step
            answer.refusal.code = runtime_pb2.RefusalCode.Value(f"REFUSAL_CODE_{code}")
            self.counts[f"refused: {code}"] += 1
        data = answer.SerializeToString()
        before, self._last = self._last, data
        if self._rng.random() >= self.rate:
            return [data]
        self.counts["changed"] += 1
        kind = self._rng.randrange(20)
        if kind == 0:  # seldom: the scheduler waits for as long as it is told to
            return []
        if kind <= 2:
            return [data, data]
        if kind <= 4:
            return [before]
        if kind <= 10:
            self._change_fields(answer)
            return [answer.SerializeToString()]
        return [self._bytes.mutate(data, before)]

    def _change_fields(self, answer: runtime_pb2.ExecuteResponse) -> None:
        rng = self._rng
        if not answer.HasField("result"):
            answer.refusal.code = rng.choice((0, 1, 2, 3, 6, 99))
            answer.refusal.row = rng.choice((0, 1, 7, 2**32 - 1))
            answer.refusal.detail = "x" * rng.choice((0, 10, 100_000))
            return
        result = answer.result
        name = rng.choice([field.name for field in result.DESCRIPTOR.fields])
        if name in {"session_no", "step", "num_top"}:
            setattr(result, name, rng.choice((0, 1, 2, 2**31, MAX_UINT64 if name != "num_top" else 2**32 - 1)))
            return
        data = getattr(result, name)
        setattr(result, name, rng.choice((b"", data[:-1], data + b"\xff", data * 2, data + bytes(4), rng.randbytes(len(data)))))

    def _changed(self, data: bytes) -> bytes:
        if self._rng.random() >= self.rate:
            return data
        self.counts["changed"] += 1
        return self._bytes.mutate(data, b"\0" * 8)


def _message(session_no: int, result: Result) -> forward_pb2.StepResult:
    tokens = [0 if token is None else token for token in result.tokens]
    return forward_pb2.StepResult(
        session_no=session_no,
        step=result.step,
        tokens=pack(tokens),
        row_status=bytes(result.statuses),
        digests=pack_longs(result.digests),
    )
