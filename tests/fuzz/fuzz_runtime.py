"""A scheduler gone mad: sessions of right and mutated ops against one runtime process, each answer held against the model."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter, deque
from typing import Any

import grpc
from fuzz_answers import answer_fault, rows_fault
from fuzz_bytes import ByteMutator
from fuzz_columns import tagged, varint
from fuzz_fields import FieldMutator
from fuzz_model import Expected, RuntimeModel, Shape
from fuzz_probe import reading_op
from fuzz_sequences import Sequence, Source
from google.protobuf.message import DecodeError
from grpc import aio

from pagemirror.v1 import forward_pb2, runtime_pb2, runtime_pb2_grpc

WAIT_S = 100.0
OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 64 << 20), ("grpc.use_local_subchannel_pool", 1))
NUM_SEQUENCES = 40
OPS_PER_SEQUENCE = 10
MAX_SESSION_NO = 2**63


class FuzzError(AssertionError):
    """What was wrong, and how to see it again."""

    def __init__(self, what: str, seed: int, messages: list[bytes]) -> None:
        lines = "".join(f"    bytes.fromhex({message.hex()!r}),\n" for message in messages[-40:])
        super().__init__(f"{what[:2000]}\nseed {seed}; the session's messages, the last one is it:\n[\n{lines}]")


class MadScheduler:
    """One stream to one runtime at a time."""

    def __init__(self, address: str, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._address = address
        self._fields, self._bytes = FieldMutator(self.rng), ByteMutator(self.rng)
        self._call: Any = None
        self._pending: deque[tuple[Expected, forward_pb2.ForwardOp]] = deque()
        self._log: list[bytes] = []
        self._epoch = 0
        self._session_no = 0
        self._tokens: dict[int, list[bytes]] = {}

    async def __aenter__(self) -> MadScheduler:
        self._channel = aio.insecure_channel(self._address, options=OPTIONS)
        self._stub = runtime_pb2_grpc.RuntimeServiceStub(self._channel)
        self._execute = self._channel.stream_stream("/pagemirror.v1.RuntimeService/Execute")
        info = await self._stub.GetInfo(runtime_pb2.GetRuntimeInfoRequest())
        self.shape = Shape.of(info)
        self.model = RuntimeModel(self.shape)
        source = Source(random.Random(self.seed), self.shape)
        self.sequences = [source.sequence(OPS_PER_SEQUENCE) for _ in range(NUM_SEQUENCES)]
        self._draw_epoch()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    @property
    def num_mutated(self) -> int:
        """Mutated ops that the runtime looked at; those it SKIPPED are not among them."""
        return self.counts["mutated"]

    # -- a life

    async def fuzz(self, num_ops: int) -> None:
        """Sessions with mutated ops until the runtime has looked at so many of them."""
        goal = self.num_mutated + num_ops
        while self.num_mutated < goal:
            await self._session()

    async def reference(self, sequence: Sequence) -> None:
        """A clean session: every token as the model says, or, where it cannot say, as the first time."""
        await self._begin()
        answers: list[bytes] = []
        for op in sequence.ops:
            await self._send(self._numbered(op).SerializeToString(), answers=answers)
        await self._flush(answers)
        first = self._tokens.setdefault(self.sequences.index(sequence), answers)
        if first != answers:
            raise self._error(f"a clean session gives {answers}, and at first gave {first}")
        await self._compare_rows()
        self.counts["reference sessions"] += 1

    async def replay(self, messages: list[bytes]) -> None:
        """Send what a failure has printed, on a stream of its own; each answer is held against the model."""
        hello = runtime_pb2.ExecuteRequest.FromString(messages[0]).hello
        self._session_no = hello.session_no
        await self._open(hello.overlap_depth)
        for message in messages[1:]:
            await self._send((message,))
        await self._flush()
        await self._compare_rows()

    async def close(self) -> None:
        """Half-close the stream; the runtime forgets every row."""
        if self._call is not None:
            await self._call.done_writing()
            self._check_end(await self._end_of_stream(), "OK")
        self.model.close()
        await self._compare_rows()

    async def _session(self) -> None:
        rng = self.rng
        probe = reading_op(self.model) if self.shape.greedy_only and rng.random() < 0.4 else None
        await self._begin()
        if probe is not None:
            await self._send(self._numbered(probe).SerializeToString())
            if rng.random() < 0.7:
                await self._begin()
        sequence = rng.choice(self.sequences)
        rate = rng.choice((0.15, 0.4, 1.0))
        for base in sequence.ops:
            mutated = rng.random() < rate
            op = self._numbered(base)
            data = self._mutated(op, sequence) if mutated else op.SerializeToString()
            await self._send(data, mutated=mutated)
            if self._call is None or self.model.broken:
                break
        for _ in range(rng.choice((0, 0, 0, 0, 2)) if self._call is not None and self.model.broken else 0):
            await self._send(self._mutated(self._numbered(rng.choice(sequence.ops)), sequence), mutated=True)
            if self._call is None:
                break
        await self._flush()
        await self._compare_rows()
        self.counts["sessions"] += 1

    def _mutated(self, op: forward_pb2.ForwardOp, sequence: Sequence) -> bytes | tuple[bytes]:
        """The op's bytes, or, in a tuple, those of the message around it."""
        rng = self.rng
        draw = rng.random()
        if draw < 0.05:  # an update is lost, or comes again
            op = self._numbered(rng.choice(sequence.ops))
        if draw < 0.85:
            self._fields.mutate(op, self.model)
            return op.SerializeToString()
        other = rng.choice(sequence.ops).SerializeToString()
        if draw < 0.98:
            return self._bytes.mutate(op.SerializeToString(), other)
        return (self._bytes.mutate(tagged(2, op.SerializeToString()), tagged(3, b"\x08" + varint(self._session_no + 1))),)

    def _numbered(self, op: forward_pb2.ForwardOp) -> forward_pb2.ForwardOp:
        numbered = forward_pb2.ForwardOp()
        numbered.CopyFrom(op)
        numbered.session_no, numbered.step = self.model.session_no, self.model.last_step + 1
        return numbered

    # -- the stream

    def _draw_epoch(self) -> None:
        # Not of the seed: the runtime may remember the epoch of an earlier run.
        self._epoch, self._session_no = secrets.randbits(64) | 1, 0

    async def _begin(self) -> None:
        """A new session, by Reset or, where there is no stream, by a hello."""
        await self._flush()  # a reset drops what is not answered yet
        if self._session_no >= MAX_SESSION_NO:
            await self.close()
            self._draw_epoch()
        self._session_no += self.rng.choice((1, 1, 1, 2, 50))
        if self._call is not None:
            await self._send((tagged(3, b"\x08" + varint(self._session_no)),), keep_log=False)
            return
        await self._open(self.rng.choice((0, 1, 2)))

    async def _open(self, depth: int) -> None:
        hello = runtime_pb2.SchedulerHello(
            protocol_version=1, scheduler_epoch=self._epoch, session_no=self._session_no, overlap_depth=depth
        )
        self._log = [runtime_pb2.ExecuteRequest(hello=hello).SerializeToString()]
        self._call = self._execute()
        await self._call.write(self._log[0])
        answer = await self._read()
        if answer.WhichOneof("message") != "hello":
            raise self._error(f"a hello is due, {answer} came")
        self.model.open(self._session_no, depth)

    async def _send(
        self,
        data: bytes | tuple[bytes],
        *,
        mutated: bool = False,
        keep_log: bool = True,
        answers: list[bytes] | None = None,
    ) -> None:
        """Write one message; its answer is awaited later, if it is that of an op or a reset."""
        data = data[0] if isinstance(data, tuple) else tagged(2, data)
        message: runtime_pb2.ExecuteRequest | None = runtime_pb2.ExecuteRequest()
        try:
            message.ParseFromString(data)
        except DecodeError:
            message = None
        is_op = message is not None and message.WhichOneof("message") == "op"
        if not is_op:
            await self._flush(answers)  # it may end the stream, and with it answers that are still due
        if not keep_log:
            self._log = self._log[:1]
        self._log.append(data)
        expected = self.model.take(message)
        self._count(expected, mutated=mutated)
        await self._call.write(data)
        if expected.status:
            self._check_end(await self._end_of_stream(), expected.status)
            return
        if expected.reset_done:
            self._session_no = expected.reset_done
        self._pending.append((expected, message.op))
        if len(self._pending) > 12:
            await self._flush(answers)

    def _count(self, expected: Expected, *, mutated: bool) -> None:
        what = expected.status or ("accepted" if not expected.refusals else "|".join(sorted(expected.refusals)))
        if not mutated:
            self.counts["unmutated"] += 1
            return
        self.counts["skipped" if what == "SKIPPED" else "mutated"] += 1
        self.counts[f"mutated: {what}"] += 1

    async def _flush(self, answers: list[bytes] | None = None) -> None:
        """Read every answer that is due."""
        while self._pending:
            expected, op = self._pending.popleft()
            answer = await self._read()
            if fault := answer_fault(answer, op, expected, self.shape):
                raise self._error(f"{fault}; what came is {answer}")
            if answer.HasField("refusal"):
                self.counts[f"refused: {runtime_pb2.RefusalCode.Name(answer.refusal.code)}"] += 1
            if answers is not None and answer.HasField("result"):
                answers.append(answer.result.tokens)

    async def _read(self) -> runtime_pb2.ExecuteResponse:
        while True:
            try:
                data = await asyncio.wait_for(self._call.read(), WAIT_S)
            except (aio.AioRpcError, TimeoutError) as error:
                raise self._error(f"an answer is due, but {error!r}") from error
            if data is aio.EOF:
                raise self._error(f"the stream ended with {await self._call.code()}: {await self._call.details()}")
            answer = runtime_pb2.ExecuteResponse.FromString(data)
            if not answer.HasField("heartbeat"):
                return answer

    async def _end_of_stream(self) -> tuple[grpc.StatusCode, str]:
        """Status and message; heartbeats before it are read, since the status comes behind them."""
        call, self._call = self._call, None
        try:
            while (data := await asyncio.wait_for(call.read(), WAIT_S)) is not aio.EOF:
                if not runtime_pb2.ExecuteResponse.FromString(data).HasField("heartbeat"):
                    raise self._error(f"the end of the stream is due, {data!r} came")
        except aio.AioRpcError as error:
            return error.code(), error.details() or ""
        except TimeoutError as error:
            raise self._error("the stream does not end") from error
        return await call.code(), await call.details() or ""

    def _check_end(self, end: tuple[grpc.StatusCode, str], status: str) -> None:
        code, detail = end
        if code.name != status or len(detail.encode()) > 1024:
            raise self._error(f"the stream ended with {code.name} ({detail}), {status} is due")
        self.counts[f"ended: {status}"] += 1

    async def rows_now(self) -> runtime_pb2.ReadRowsResponse:
        """What ReadRows says of every row that has a lease."""
        return await asyncio.wait_for(self._stub.ReadRows(runtime_pb2.ReadRowsRequest()), WAIT_S)

    async def _compare_rows(self) -> None:
        response = await self.rows_now()
        fault = rows_fault(response, self.model.rows())
        last_step = self.model.last_step
        if (response.session_no, response.last_step) != (self.model.session_no, last_step):
            fault = f"ReadRows is of step {response.last_step} of session {response.session_no}, {last_step} was applied"
        if fault:
            raise self._error(fault)

    def _error(self, what: str) -> FuzzError:
        return FuzzError(what, self.seed, self._log)
