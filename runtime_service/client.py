"""A scheduler's end of `RuntimeService`, for a scheduler in another process: one thread, one op at a time or several.

    with RuntimeClient("127.0.0.1:50061") as runtime:
        op = adapter.forward_op(plan)               # its session is runtime.session_no
        result = runtime.run(op)                    # StepResult, or raises Refusal
        rows = runtime.read_rows()                  # the mirror's rows, to compare

`send` and `receive` keep up to `overlap_depth + 1` ops on their way. After a refusal nothing is executed until `reset`. A
runtime that is gone, or silent for longer than `timeout_s`, is a `RuntimeUnavailableError`, and this client is over then.
pagemirror's own scheduler does not use this: it has an event loop to serve.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import grpc
import numpy as np

from pagemirror.v1 import forward_pb2, runtime_pb2, runtime_pb2_grpc
from runtime_service.errors import Refusal, RuntimeServiceError
from runtime_service.ops import ForwardOp, Int32Array, LeaseStart, RefusalCode, SamplingParams, StepResult
from runtime_service.wire import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, int32_column, to_bytes, uint64_column

_UINT8, _UINT64 = np.dtype(np.uint8), np.dtype(np.uint64)
_FLOAT32 = np.dtype("<f4")

CLOSE_TIMEOUT_S = 1.0
"""How long `close` waits for the runtime to end the session, before it is cancelled."""


class RuntimeUnavailableError(RuntimeServiceError):
    """The runtime does not answer, or has ended the stream: `code` and text are those of the gRPC status."""

    def __init__(self, target: str, error: grpc.RpcError) -> None:
        # What grpc raises has these, which its stubs do not know.
        code: grpc.StatusCode = getattr(error, "code", lambda: grpc.StatusCode.UNKNOWN)()
        details = getattr(error, "details", lambda: None)() or str(error)
        super().__init__(f"the runtime at {target}: {code.name}: {details}")
        self.target = target
        self.code = code


class _NoAnswer(grpc.RpcError):
    """What gRPC itself does not say: nothing came in time, or nothing will."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


class RuntimeClient:
    """One session with the runtime at `target` (`HOST:PORT` or `unix:/PATH`), open while the context is.

    Args:
        overlap_depth: ops that may be sent beyond the one whose result is awaited, 0 to 2.
        credentials: for TLS; None: plaintext.
        timeout_s: longest wait for one answer, however many heartbeats come; the model is loaded by the time of the hello.

    Raises RuntimeUnavailableError, whose code is that of the status: UNAVAILABLE where nobody answers, FAILED_PRECONDITION
    where another scheduler is being served, DEADLINE_EXCEEDED after `timeout_s`, CANCELLED once it is closed.
    """

    def __init__(
        self,
        target: str,
        *,
        overlap_depth: int = 0,
        credentials: grpc.ChannelCredentials | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        options = [
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.enable_http_proxy", 0),
        ]
        self._target = target
        self._timeout_s = timeout_s
        self._channel = (
            grpc.insecure_channel(target, options) if credentials is None else grpc.secure_channel(target, credentials, options)
        )
        self._stub = runtime_pb2_grpc.RuntimeServiceStub(self._channel)
        self._outgoing: queue.SimpleQueue[runtime_pb2.ExecuteRequest | None] = queue.SimpleQueue()
        self._answers = self._stub.Execute(iter(self._outgoing.get, None))
        self._over: grpc.RpcError | None = None
        self._num_unanswered = 0
        # gRPC's own iterator waits for ever, so that a thread reads it.
        self._incoming: queue.SimpleQueue[runtime_pb2.ExecuteResponse | grpc.RpcError] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="pagemirror-answers", daemon=True)
        self._reader.start()
        self.session_no = 1
        hello = runtime_pb2.SchedulerHello(
            protocol_version=PROTOCOL_VERSION,
            scheduler_epoch=secrets.randbits(64) | 1,
            session_no=self.session_no,
            overlap_depth=overlap_depth,
        )
        self._outgoing.put(runtime_pb2.ExecuteRequest(hello=hello))
        try:
            self.info: runtime_pb2.RuntimeInfo = self._next().hello
            """What the runtime is: its hello."""
        except BaseException:
            self.close()
            raise

    def run(self, op: ForwardOp) -> StepResult:
        """Send one op and wait for its result. Raises Refusal, RuntimeUnavailableError."""
        self.send(op)
        return self.receive()

    def send(self, op: ForwardOp) -> None:
        """Send one op; its answer comes in its turn. Raises RuntimeUnavailableError where it is known that none will."""
        self._require_open()
        self._outgoing.put(runtime_pb2.ExecuteRequest(op=op_to_proto(op)))
        self._num_unanswered += 1

    def receive(self) -> StepResult:
        """The answer to the oldest op that has none; RuntimeError where none is due.

        Raises Refusal, RuntimeUnavailableError.
        """
        if not self._num_unanswered:
            raise RuntimeError("receive() without send(): every op is answered")
        answer = self._next()
        self._num_unanswered -= 1
        if answer.WhichOneof("message") == "refusal":
            refusal = answer.refusal
            raise Refusal(
                RefusalCode(refusal.code),
                refusal.row,
                refusal.request_id,
                refusal.detail,
                session_no=refusal.session_no,
                step=refusal.step,
            )
        return result_from_proto(answer.result)

    def reset(self) -> int:
        """Begin the next session with every row dropped; answers that are outstanding are thrown away. Its number."""
        self._require_open()
        self.session_no += 1
        self._outgoing.put(runtime_pb2.ExecuteRequest(reset=runtime_pb2.Reset(session_no=self.session_no)))
        while self._next().WhichOneof("message") != "reset_done":
            pass
        self._num_unanswered = 0
        return self.session_no

    def read_rows(self) -> dict[int, Int32Array]:
        """The valid part of every mirror row that has a lease, read between two ops. Raises RuntimeUnavailableError."""
        self._require_open()
        with self._errors():
            answer = self._stub.ReadRows(runtime_pb2.ReadRowsRequest(), timeout=self._timeout_s)
        rows, lens = int32_column(answer.rows, "rows"), int32_column(answer.valid_lens, "valid_lens")
        pages = np.split(int32_column(answer.pages, "pages"), np.cumsum(lens)[:-1]) if len(rows) else []
        return dict(zip(rows.tolist(), pages, strict=True))

    def close(self) -> None:
        """End the session; the runtime drops its rows, and is free for another scheduler. Harmless when it is over."""
        self._outgoing.put(None)
        if self._over is None:
            self._over = _NoAnswer(grpc.StatusCode.CANCELLED, "this client is closed")
            self._reader.join(CLOSE_TIMEOUT_S)
        self._answers.cancel()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _next(self) -> runtime_pb2.ExecuteResponse:
        """The next answer that is no heartbeat."""
        self._require_open()
        try:
            answer = self._incoming.get(timeout=self._timeout_s)
        except queue.Empty:
            answer = _NoAnswer(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {self._timeout_s:g} s")
        if not isinstance(answer, grpc.RpcError):
            return answer
        self._over = answer
        self.close()
        raise RuntimeUnavailableError(self._target, answer) from answer

    def _require_open(self) -> None:
        if self._over is not None:
            raise RuntimeUnavailableError(self._target, self._over) from self._over

    def _read(self) -> None:
        try:
            for answer in self._answers:
                if answer.WhichOneof("message") != "heartbeat":
                    self._incoming.put(answer)
        except grpc.RpcError as error:
            self._incoming.put(error)
        except Exception as error:  # of gRPC's own, of bytes that are no message for instance
            self._incoming.put(_NoAnswer(grpc.StatusCode.INTERNAL, repr(error)))
        else:
            self._incoming.put(_NoAnswer(grpc.StatusCode.UNAVAILABLE, "it has ended the stream"))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise RuntimeUnavailableError(self._target, error) from error


def op_to_proto(op: ForwardOp) -> forward_pb2.ForwardOp:
    """The message of an op."""
    message = forward_pb2.ForwardOp(
        session_no=op.session_no,
        step=op.step,
        req_pool_indices=to_bytes(op.req_pool_indices),
        row_generations=to_bytes(op.row_generations),
        row_lens=to_bytes(op.row_lens),
        begins=to_bytes(op.begins),
        sizes=to_bytes(op.sizes),
        full_refresh=to_bytes(op.full_refresh, _UINT8),
        occupied_pages=to_bytes(op.occupied_pages),
        num_computed=to_bytes(op.num_computed),
        num_extend_rows=op.num_extend_rows,
        input_lens=to_bytes(op.input_lens),
        input_ids=to_bytes(op.input_ids),
        sample=to_bytes(op.sample, _UINT8),
        released_rows=to_bytes(op.released_rows),
        lease_starts=[_lease_start(start) for start in op.lease_starts],
    )
    if op.num_digests:
        message.row_digests = to_bytes(op.row_digests, _UINT64)
        message.verify_rows = to_bytes(op.verify_rows)
        message.verify_digests = to_bytes(op.verify_digests, _UINT64)
    return message


def _lease_start(start: LeaseStart) -> forward_pb2.LeaseStart:
    return forward_pb2.LeaseStart(
        req_pool_index=start.req_pool_index,
        request_id=start.request_id,
        sampling=_sampling(start.sampling),
        stop_ids=to_bytes(np.array(start.stop_ids, dtype=np.int32)),
        prompt_len=start.prompt_len,
        traceparent=start.traceparent,
        history=start.history,
    )


def _sampling(sampling: SamplingParams) -> forward_pb2.SamplingParams:
    return forward_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        min_new_tokens=sampling.min_new_tokens,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=[forward_pb2.LogitBias(token=token, bias=bias) for token, bias in sampling.logit_bias],
        num_logprobs=sampling.num_logprobs,
    )


def result_from_proto(message: forward_pb2.StepResult) -> StepResult:
    """The result that a message states; its arrays view the message's bytes."""
    tokens = int32_column(message.tokens, "tokens")
    status = np.frombuffer(message.row_status, np.uint8) if message.row_status else np.zeros(len(tokens), np.uint8)
    result = StepResult(message.session_no, message.step, tokens, status)
    if message.logprobs:
        result.logprobs = np.frombuffer(message.logprobs, _FLOAT32)
    if message.num_top:
        shape = (len(tokens), message.num_top)
        result.top_tokens = int32_column(message.top_tokens, "top_tokens").reshape(shape)
        result.top_logprobs = np.frombuffer(message.top_logprobs, _FLOAT32).reshape(shape)
    if message.digests:
        result.digests = uint64_column(message.digests, "digests")
    return result
