"""A client of GenerationService for programs and for the command line.

    async with Client("127.0.0.1:50051") as client:
        async for piece in client.generate([1, 2, 3], max_tokens=6):
            print(piece.tokens)

Every call raises `RpcFailedError`, which keeps the status, when the server refuses or is not there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagemirror.v1 import forward_pb2, generation_pb2, generation_pb2_grpc
from scheduler_service.channels import handshake_trouble
from scheduler_service.client_security import ClientSecurity, Metadata
from scheduler_service.columns import float32_from_bytes, int32_from_bytes, int32_to_bytes
from scheduler_service.core.errors import PagemirrorError
from scheduler_service.page_event_messages import batch_of
from scheduler_service.page_events import PageBatch

_T = TypeVar("_T")

_NOBODY = "nothing answers at {}; is `pagemirror up` running there?"


class RpcFailedError(PagemirrorError):
    """A call ended with a status other than OK."""

    def __init__(self, target: str, code: grpc.StatusCode, details: str) -> None:
        self.target, self.code, self.details = target, code, details
        super().__init__(f"{code.name}: {details}")


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended: `reason` is stop, length, abort or capacity; the others count tokens and retractions."""

    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_retractions: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of output. `request_id` is set in the first piece, `ending` in the last; both may come without tokens.

    Where `num_logprobs` was given, `logprobs` has one entry per token and `top_logprobs` as many pairs (token, log probability)
    per token as were asked for, most probable first; otherwise both are empty.
    """

    tokens: list[int]
    request_id: str = ""
    ending: Ending | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the server says of itself; `raw` has the rest."""

    model: str
    architecture: str
    tokenizer_path: str
    vocab_size: int
    default_stop_ids: tuple[int, ...]
    raw: generation_pb2.ServerInfo = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClientRow:
    """One row as both sides have it."""

    row: int
    request_id: str
    state: str
    scheduler_pages: list[int]
    mirror_pages: list[int]
    equal: bool
    rank: int


@dataclass(frozen=True, slots=True)
class ClientRows:
    """All rows in use at one step."""

    session_no: int
    step: int
    rows: list[ClientRow]


class Client:
    """One channel to one scheduler. Use as an async context manager."""

    def __init__(self, target: str, security: ClientSecurity | None = None) -> None:
        """Without `security`: plaintext and no token. Raises StartError for files that cannot be used."""
        self.target = target
        self._security = security or ClientSecurity()
        self._channel = self._security.channel(target)
        self.stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        """The generated stub, for calls that have no method here; give them `metadata()`."""

    def metadata(self) -> Metadata:
        """Of a call that begins now: the token, where there is one."""
        return self._security.metadata()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what runs and close the channel."""
        await self._channel.close()

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int | None = None,
        request_id: str = "",
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        min_new_tokens: int | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        num_logprobs: int | None = None,
        stop_token_ids: Sequence[int] = (),
        ignore_default_stop_ids: bool = False,
        priority: int = 0,
        prefix_cache: bool | None = None,
        cache_namespace: str = "",
        max_queue_wait_ms: int | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """Run one request; None leaves a parameter to the server's default. Closing the iterator aborts the request."""
        try:
            request = generation_pb2.GenerateRequest(
                request_id=request_id,
                prompt=int32_to_bytes(prompt),
                max_tokens=max_tokens,
                sampling=forward_pb2.SamplingParams(
                    temperature=temperature,
                    top_k=top_k,
                    top_p=top_p,
                    min_p=min_p,
                    seed=seed,
                    min_new_tokens=min_new_tokens,
                    repetition_penalty=repetition_penalty,
                    presence_penalty=presence_penalty,
                    frequency_penalty=frequency_penalty,
                    logit_bias=[forward_pb2.LogitBias(token=token, bias=bias) for token, bias in (logit_bias or {}).items()],
                    num_logprobs=num_logprobs,
                ),
                stop_token_ids=int32_to_bytes(stop_token_ids),
                ignore_default_stop_ids=ignore_default_stop_ids,
                priority=priority,
                prefix_cache=prefix_cache,
                cache_namespace=cache_namespace,
                max_queue_wait_ms=max_queue_wait_ms,
            )
        except (ValueError, OverflowError) as error:
            # It does not even fit into the message's fields, so no server could accept it.
            raise RpcFailedError(self.target, grpc.StatusCode.INVALID_ARGUMENT, f"out of range: {error}") from error
        call = self.stub.Generate(request, metadata=self.metadata())
        try:
            async for response in call:
                yield _piece(response)
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from error
        finally:
            call.cancel()

    async def info(self) -> ServedModel:
        """What is served."""
        raw = await self._call(self.stub.GetInfo(generation_pb2.GetInfoRequest(), metadata=self.metadata()))
        stop_ids = tuple(int32_from_bytes(raw.default_stop_ids, "default_stop_ids").tolist())
        return ServedModel(raw.model, raw.architecture, raw.tokenizer_path, raw.vocab_size, stop_ids, raw)

    async def rows(self) -> ClientRows:
        """Every row in use, from both sides."""
        response = await self._call(self.stub.ListRows(generation_pb2.ListRowsRequest(), metadata=self.metadata()))
        rows = [
            ClientRow(
                pair.request.row,
                pair.request.request_id,
                generation_pb2.RequestState.Name(pair.request.state).removeprefix("REQUEST_STATE_").lower(),
                int32_from_bytes(pair.scheduler_pages, "scheduler_pages").tolist(),
                int32_from_bytes(pair.mirror_pages, "mirror_pages").tolist(),
                pair.equal,
                pair.rank,
            )
            for pair in response.rows
        ]
        return ClientRows(response.session_no, response.step, rows)

    async def abort(self, request_id: str) -> None:
        """End a live request."""
        await self._call(self.stub.Abort(generation_pb2.AbortRequest(request_id=request_id), metadata=self.metadata()))

    async def retract(self, request_id: str) -> None:
        """Take a running request's row away; it resumes by itself."""
        await self._call(self.stub.Retract(generation_pb2.RetractRequest(request_id=request_id), metadata=self.metadata()))

    async def state(self, request_id: str) -> generation_pb2.RequestInfo:
        """Where a live request stands."""
        return await self._call(
            self.stub.GetState(generation_pb2.GetStateRequest(request_id=request_id), metadata=self.metadata())
        )

    async def reset_prefix_cache(self, *, force: bool = False) -> int:
        """Empty the prefix cache; returns the pages freed."""
        request = generation_pb2.ResetPrefixCacheRequest(force=force)
        return (await self._call(self.stub.ResetPrefixCache(request, metadata=self.metadata()))).freed_pages

    async def watch_health(self) -> AsyncGenerator[bool, None]:
        """Whether the health service says SERVING: now, and whenever that changes, as long as the connection lasts. True, and
        no more, of a server that has no such service or no room for watchers.
        """
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        try:
            async for answer in stub.Watch(health_pb2.HealthCheckRequest(), metadata=self.metadata()):
                yield answer.status == health_pb2.HealthCheckResponse.SERVING
        except grpc.aio.AioRpcError as error:
            if error.code() in {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED}:
                yield True

    async def page_events(self, after: int | None = None) -> AsyncGenerator[PageBatch, None]:
        """The cached pages: the present state and every change, or what came after batch `after`. See docs/kv-events.md."""
        call = self.stub.SubscribePageEvents(
            generation_pb2.SubscribePageEventsRequest(after=after or 0), metadata=self.metadata()
        )
        try:
            async for message in call:
                yield batch_of(message)
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from error
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise RpcFailedError(self.target, grpc.StatusCode.UNAVAILABLE, "the connection was closed here") from None
        finally:
            call.cancel()

    async def _call(self, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from error

    def _failed(self, error: grpc.aio.AioRpcError) -> RpcFailedError:
        return RpcFailedError(self.target, error.code(), self.explain(error.code(), error.details() or ""))

    def explain(self, code: grpc.StatusCode, details: str) -> str:
        """A status's details for people. gRPC's own words are a dump of addresses and errno; its servers never say them."""
        if code is grpc.StatusCode.UNAVAILABLE and (
            "failed to connect" in details.lower() or "no such file" in details.lower()
        ):
            reason = handshake_trouble(details)
            return f"no connection to {self.target}: {reason}" if reason else _NOBODY.format(self.target)
        return details


def _piece(response: Any) -> Piece:
    tokens: list[int] = int32_from_bytes(response.tokens, "tokens").tolist()
    logprobs = float32_from_bytes(response.logprobs)
    pairs = list(
        zip(
            int32_from_bytes(response.top_tokens, "top_tokens").tolist(),
            float32_from_bytes(response.top_logprobs),
            strict=True,
        )
    )
    count = len(pairs) // len(tokens) if tokens else 0
    return Piece(
        tokens,
        response.request_id,
        _ending(response.finished) if response.HasField("finished") else None,
        logprobs,
        [pairs[start * count : (start + 1) * count] for start in range(len(logprobs))],
    )


def _ending(finished: Any) -> Ending:
    return Ending(
        generation_pb2.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower(),
        finished.prompt_tokens,
        finished.completion_tokens,
        finished.cached_tokens,
        finished.num_retractions,
    )
