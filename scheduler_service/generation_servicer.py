"""GenerationService: the public messages in, the engine's calls out, and back."""

from __future__ import annotations

import asyncio
import secrets
from importlib.metadata import version
from typing import Any

import grpc
from typing_extensions import override

from pagemirror.v1 import generation_pb2, generation_pb2_grpc
from scheduler_service.columns import float32_to_bytes, int32_from_bytes, int32_to_bytes
from scheduler_service.core.ops import TokenLogprobs
from scheduler_service.core.states import State
from scheduler_service.engine_loop import EngineLoop
from scheduler_service.errors import EventsOffError, ListingTooLargeError
from scheduler_service.generate_messages import finished_message, submit_options
from scheduler_service.grpc_status import errors_as_status
from scheduler_service.page_event_messages import batch_message
from scheduler_service.row_report import RequestSnapshot, RowReport, report_rows, snapshot
from scheduler_service.session_servicer import serve_session
from scheduler_service.trace_context import TRACEPARENT
from scheduler_service.wire_facts import MAX_MESSAGE_BYTES

_LIST_ROWS_TIMEOUT_S = 60.0
_PAIR_BYTES = 2048  # of a row in a listing, other than its pages: its request's id above all

_STATES = {
    State.SUBMITTED: generation_pb2.REQUEST_STATE_SUBMITTED,
    State.PREFILLING: generation_pb2.REQUEST_STATE_PREFILLING,
    State.PREFILL_DONE: generation_pb2.REQUEST_STATE_PREFILL_DONE,
    State.DECODING: generation_pb2.REQUEST_STATE_DECODING,
    State.RETRACTED: generation_pb2.REQUEST_STATE_RETRACTED,
    State.FINISHED: generation_pb2.REQUEST_STATE_FINISHED,
}

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves one engine. Methods are coroutines of grpc.aio; their statuses are those in generation.proto."""

    def __init__(self, engine: EngineLoop) -> None:
        self._engine = engine
        self._listing = asyncio.Lock()

    @override
    async def Generate(self, request: generation_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Stream one request's tokens; whatever ends the call ends the request."""
        async with errors_as_status(context, "Generate"):
            request_id = request.request_id or f"req-{secrets.token_hex(8)}"
            prompt = int32_from_bytes(request.prompt, "prompt")
            subscription = self._engine.submit(request_id, prompt, submit_options(request_id, request, traceparent_of(context)))
            try:
                # At once, so that the client can name the request before its first token.
                await context.write(generation_pb2.GenerateResponse(request_id=request_id))
                while True:
                    tokens = await subscription.take()
                    response = _piece(tokens, subscription.take_logprobs())
                    if not subscription.exhausted:
                        await context.write(response)
                        continue
                    if subscription.error is not None:
                        if tokens:
                            await context.write(response)
                        raise subscription.error
                    response.finished.CopyFrom(finished_message(subscription.request))
                    await context.write(response)
                    return
            finally:
                self._engine.release(subscription)

    @override
    async def Session(self, requests: Any, context: Context) -> None:  # type: ignore[override]
        """Any number of requests over one stream."""
        await serve_session(self._engine, requests, context)

    @override
    async def Abort(self, request: generation_pb2.AbortRequest, context: Context) -> generation_pb2.AbortResponse:
        """End a live request."""
        async with errors_as_status(context, "Abort"):
            self._engine.abort(request.request_id)
        return generation_pb2.AbortResponse()

    @override
    async def Retract(self, request: generation_pb2.RetractRequest, context: Context) -> generation_pb2.RetractResponse:
        """Take a running request's row away."""
        async with errors_as_status(context, "Retract"):
            self._engine.retract(request.request_id)
        return generation_pb2.RetractResponse()

    @override
    async def GetState(self, request: generation_pb2.GetStateRequest, context: Context) -> generation_pb2.RequestInfo:
        """Where a live request stands."""
        async with errors_as_status(context, "GetState"):
            return _request_info(snapshot(self._engine, self._engine.get(request.request_id)))

    @override
    async def ListRows(self, request: generation_pb2.ListRowsRequest, context: Context) -> generation_pb2.ListRowsResponse:
        """All rows in use, from both sides."""
        response = generation_pb2.ListRowsResponse()
        async with errors_as_status(context, "ListRows"):
            limit_s = min(context.time_remaining() or _LIST_ROWS_TIMEOUT_S, _LIST_ROWS_TIMEOUT_S)
            # One at a time: it is held as a whole in memory, and steps are planned in between.
            async with self._listing:
                report = await report_rows(self._engine, limit_s)
            _check_size(report)
            response.session_no, response.step = report.session_no, report.step
            for pair in report.rows:
                response.rows.append(
                    generation_pb2.RowPair(
                        request=_request_info(pair.request),
                        scheduler_pages=int32_to_bytes(pair.scheduler_pages),
                        mirror_pages=int32_to_bytes(pair.mirror_pages),
                        equal=pair.equal,
                        rank=pair.rank,
                    )
                )
        return response

    @override
    async def ResetPrefixCache(
        self, request: generation_pb2.ResetPrefixCacheRequest, context: Context
    ) -> generation_pb2.ResetPrefixCacheResponse:
        """Empty the prefix cache."""
        freed = 0
        async with errors_as_status(context, "ResetPrefixCache"):
            freed = self._engine.reset_prefix_cache(request.force)
        return generation_pb2.ResetPrefixCacheResponse(freed_pages=freed)

    @override
    async def GetInfo(self, request: generation_pb2.GetInfoRequest, context: Context) -> generation_pb2.ServerInfo:
        """What is served, its limits, and how full it is."""
        engine = self._engine
        facts, config, core, pages = engine.facts, engine.config, engine.core, engine.core.stats()
        return generation_pb2.ServerInfo(
            version=version("pagemirror"),
            model=facts.model,
            architecture=facts.architecture,
            tokenizer_path=facts.tokenizer_path,
            vocab_size=facts.vocab_size,
            max_context=facts.max_context,
            default_stop_ids=int32_to_bytes(facts.default_stop_ids),
            page_size=config.page_size,
            num_pages=config.num_pages,
            max_rows=config.max_rows,
            max_pages_per_row=config.max_pages_per_row,
            token_budget=config.token_budget,
            chunk_size=config.effective_chunk_size,
            overlap_depth=config.overlap_depth,
            refresh_policy=config.refresh_policy.value,
            num_waiting=core.num_waiting,
            num_running=core.num_running,
            num_retracted=core.num_retracted,
            free_pages=pages.free,
            cached_pages=pages.cached,
            max_prompt_len=min(config.room, config.max_context - 1) if config.max_context else config.room,
            num_steps=engine.num_steps,
            num_ranks=engine.link.num_ranks,
        )

    @override
    async def SubscribePageEvents(  # type: ignore[override]
        self, request: generation_pb2.SubscribePageEventsRequest, context: Context
    ) -> None:
        """Stream the cache's present state and what happens to it."""
        async with errors_as_status(context, "SubscribePageEvents"):
            if not self._engine.settings.serves_page_events:
                raise EventsOffError
            follower = self._engine.page_events.follow(request.after or None)
            try:
                await context.send_initial_metadata(())
                while True:
                    await context.write(batch_message(await follower.take()))
            finally:
                follower.close()


def _check_size(report: RowReport) -> None:
    """Raises ListingTooLargeError."""
    size = sum(_PAIR_BYTES + 4 * (len(pair.scheduler_pages) + len(pair.mirror_pages)) for pair in report.rows)
    if size > MAX_MESSAGE_BYTES:
        raise ListingTooLargeError(size, MAX_MESSAGE_BYTES)


def _piece(tokens: list[int], logprobs: list[TokenLogprobs]) -> generation_pb2.GenerateResponse:
    response = generation_pb2.GenerateResponse(tokens=int32_to_bytes(tokens))
    if logprobs:
        response.logprobs = float32_to_bytes([entry.logprob for entry in logprobs])
        response.top_tokens = int32_to_bytes([token for entry in logprobs for token in entry.top_tokens])
        response.top_logprobs = float32_to_bytes([value for entry in logprobs for value in entry.top_logprobs])
    return response


def traceparent_of(context: Context) -> str:
    """The W3C trace context of the call's span, or else of the call; empty when it has none."""
    if (ours := TRACEPARENT.get()) != "":
        return ours
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent":
            return value if isinstance(value, str) else value.decode("ascii", "replace")
    return ""


def _request_info(request: RequestSnapshot) -> generation_pb2.RequestInfo:
    return generation_pb2.RequestInfo(
        request_id=request.request_id,
        state=_STATES[request.state],
        row=request.row,
        prompt_tokens=request.prompt_len,
        completion_tokens=request.num_output,
        cached_tokens=request.cached_tokens,
        num_retractions=request.num_retractions,
        num_computed=request.num_computed,
        priority=request.priority,
    )
