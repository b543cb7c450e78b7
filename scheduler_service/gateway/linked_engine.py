"""The engine behind a front end's session, for the gateway's servicers: `GatewayEngine` over a `SchedulerLink`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

import grpc
from typing_extensions import override

from pagemirror.v1 import generation_pb2
from scheduler_service.client import RpcFailedError
from scheduler_service.columns import int32_from_bytes, int32_to_bytes
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import CacheInUseError, InvalidRequestError
from scheduler_service.core.ops import GREEDY, Int32Array, TokenLogprobs
from scheduler_service.core.parameters import check_parameters
from scheduler_service.core.request import FinishReason
from scheduler_service.engine_loop import SubmitOptions
from scheduler_service.errors import DrainingError
from scheduler_service.frontend_link import SchedulerLink
from scheduler_service.gateway.engine import EngineInfo, Finish, GatewayEngine, GatewayOutput, Piece
from scheduler_service.page_events import PageBatch
from scheduler_service.session_client import Session
from scheduler_service.session_output import OutputPiece, SessionCallError, SessionOutput
from scheduler_service.wire import sampling_to_proto

_T = TypeVar("_T")

_REASONS = {
    generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    generation_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
    generation_pb2.FINISH_REASON_CAPACITY: FinishReason.CAPACITY,
}
_FLUSH_EVERY_S = 0.05
_ANY_MODEL = SchedulerConfig(page_size=1, num_pages=1, max_rows=1, max_pages_per_row=1, vocab_size=2**31 - 1)


class StillInUseError(CacheInUseError):
    """The scheduler says that its cache is in use."""

    def __init__(self, details: str) -> None:
        super().__init__(0)
        self.args = (details,)


class LinkedEngine(GatewayEngine):
    """Every error of a call is a SessionCallError: the status is the scheduler's, or UNAVAILABLE while there is no session."""

    def __init__(self, link: SchedulerLink) -> None:
        self._link = link
        self.draining = False
        self.num_live = 0
        """Requests that are not over."""
        self.idle = asyncio.Event()
        """There are none."""
        self.idle.set()

    @property
    @override
    def connected(self) -> bool:
        return self._link.serving and not self.draining

    @override
    async def info(self) -> EngineInfo:
        client = self._link.client
        raw = (await _passed_on(client.info())).raw
        room = min(raw.max_pages_per_row, raw.num_pages) * raw.page_size
        return EngineInfo(
            version=raw.version,
            model=raw.model,
            architecture=raw.architecture,
            tokenizer_path=raw.tokenizer_path,
            vocab_size=raw.vocab_size,
            max_context=min(raw.max_context or room, room),
            max_prompt_len=raw.max_prompt_len,
            default_stop_ids=tuple(int32_from_bytes(raw.default_stop_ids, "default_stop_ids").tolist()),
            page_size=raw.page_size,
            num_pages=raw.num_pages,
            max_rows=raw.max_rows,
            num_waiting=raw.num_waiting,
            num_running=raw.num_running,
            num_retracted=raw.num_retracted,
            free_pages=raw.free_pages,
            cached_pages=raw.cached_pages,
            num_steps=raw.num_steps,
        )

    @override
    async def submit(self, request_id: str, prompt: Int32Array, options: SubmitOptions) -> LinkedOutput:
        if self.draining:
            raise DrainingError
        session = self._link.session
        self.num_live += 1
        self.idle.clear()
        try:
            output = await session.submit(_request(request_id, prompt, options), options.traceparent)
            try:
                await output.accepted()
            except asyncio.CancelledError:
                session.abort(output)
                raise
        except BaseException:
            self._one_less()
            raise
        return LinkedOutput(session, output, self._one_less)

    def _one_less(self) -> None:
        self.num_live -= 1
        if not self.num_live:
            self.idle.set()

    @override
    async def abort(self, request_id: str) -> bool:
        # By its id, and by the scheduler: it may have come through another worker of the front end.
        try:
            await _passed_on(self._link.client.abort(request_id))
        except SessionCallError as error:
            if error.code is grpc.StatusCode.NOT_FOUND:
                return False
            raise
        return True

    @override
    async def flush_cache(self, timeout_s: float = 0.0) -> int:
        end = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                return await _passed_on(self._link.client.reset_prefix_cache())
            except SessionCallError as error:
                if error.code is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise
                if asyncio.get_running_loop().time() >= end:
                    raise StillInUseError(error.details) from error
            await asyncio.sleep(_FLUSH_EVERY_S)

    @override
    async def page_events(self, after: int | None) -> AsyncGenerator[PageBatch, None]:
        try:
            async with contextlib.aclosing(self._link.client.page_events(after)) as batches:
                async for batch in batches:
                    yield batch
        except RpcFailedError as error:
            raise SessionCallError(error.code, error.details) from error


class LinkedOutput(GatewayOutput):
    """One request of the session. `on_over` is called once, when nothing more comes of it."""

    __slots__ = ("_on_over", "_output", "_over", "_session")

    def __init__(self, session: Session, output: SessionOutput, on_over: Callable[[], None]) -> None:
        self._session = session
        self._output = output
        self._on_over = on_over
        self._over = False

    @override
    async def take(self) -> Piece:
        try:
            piece = await self._output.take()
        except SessionCallError:
            self._end()
            raise
        finished = None
        if (told := piece.finished) is not None:
            finished = Finish(_REASONS[told.reason], told.prompt_tokens, told.completion_tokens, told.cached_tokens)
            self._end()
        return Piece(piece.tokens.tolist(), _logprobs(piece), finished)

    @override
    def abort(self) -> None:
        self._session.abort(self._output)
        self._end()

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._on_over()


def _request(request_id: str, prompt: Int32Array, options: SubmitOptions) -> generation_pb2.GenerateRequest:
    try:
        return generation_pb2.GenerateRequest(
            request_id=request_id,
            prompt=int32_to_bytes(prompt),
            max_tokens=options.max_tokens,
            sampling=None if options.sampling == GREEDY else sampling_to_proto(options.sampling),
            stop_token_ids=int32_to_bytes(options.stop_ids),
            ignore_default_stop_ids=options.ignore_default_stop_ids,
            priority=options.priority,
            # Unset is the scheduler's own setting, which True is no answer to.
            prefix_cache=None if options.prefix_cache else False,
            cache_namespace=options.cache_namespace,
            max_queue_wait_ms=options.queue_wait_ms,
        )
    except (ValueError, OverflowError) as error:
        # A number that no message can hold: the scheduler cannot be asked what it thinks of it, its rules can.
        check_parameters(request_id, options.max_tokens, options.priority, options.stop_ids, options.sampling, _ANY_MODEL)
        raise InvalidRequestError(f"request {request_id!r} has a number that no message can hold: {error}") from error


def _logprobs(piece: OutputPiece) -> list[TokenLogprobs]:
    if not piece.logprobs:
        return []
    top_tokens, top_logprobs = piece.top_tokens.tolist(), piece.top_logprobs.tolist()
    count = len(top_tokens) // len(piece.logprobs)
    starts = range(0, count * len(piece.logprobs), count) if count else [0] * len(piece.logprobs)
    return [
        TokenLogprobs(logprob, top_tokens[start : start + count], top_logprobs[start : start + count])
        for logprob, start in zip(piece.logprobs, starts, strict=True)
    ]


async def _passed_on(call: Awaitable[_T]) -> _T:
    try:
        return await call
    except RpcFailedError as error:
        raise SessionCallError(error.code, error.details) from error
