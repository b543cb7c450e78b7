"""The engine of a scheduler process, for the gateway's servicers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from importlib.metadata import version

from scheduler_service.core.errors import CacheInUseError, InternalError, UnknownRequestError
from scheduler_service.core.ops import Int32Array
from scheduler_service.engine_loop import EngineLoop, SubmitOptions
from scheduler_service.gateway.engine import EngineInfo, Finish, Piece
from scheduler_service.page_events import PageBatch
from scheduler_service.subscription import Subscription


class LocalEngine:
    """See GatewayEngine. Calls are calls of the loop, so nothing waits but what must."""

    def __init__(self, engine: EngineLoop) -> None:
        self._engine = engine

    @property
    def connected(self) -> bool:
        engine = self._engine
        return engine.connection.connected and not (engine.stuck or engine.draining or engine.failed.is_set())

    async def info(self) -> EngineInfo:
        """See GatewayEngine."""
        engine = self._engine
        facts, config, core, pages = engine.facts, engine.config, engine.core, engine.core.stats()
        return EngineInfo(
            version=version("pagemirror"),
            model=facts.model,
            architecture=facts.architecture,
            tokenizer_path=facts.tokenizer_path,
            vocab_size=facts.vocab_size,
            max_context=min(config.room, config.max_context) if config.max_context else config.room,
            max_prompt_len=min(config.room, config.max_context - 1) if config.max_context else config.room,
            default_stop_ids=facts.default_stop_ids,
            page_size=config.page_size,
            num_pages=config.num_pages,
            max_rows=config.max_rows,
            num_waiting=core.num_waiting,
            num_running=core.num_running,
            num_retracted=core.num_retracted,
            free_pages=pages.free,
            cached_pages=pages.cached,
            num_steps=engine.num_steps,
        )

    async def submit(self, request_id: str, prompt: Int32Array, options: SubmitOptions) -> LocalOutput:
        """See GatewayEngine."""
        return LocalOutput(self._engine, self._engine.submit(request_id, prompt, options))

    async def abort(self, request_id: str) -> bool:
        """See GatewayEngine."""
        try:
            self._engine.abort(request_id)
        except UnknownRequestError:
            return False
        return True

    async def flush_cache(self, timeout_s: float = 0.0) -> int:
        """See GatewayEngine."""

        async def flush() -> int:
            while True:
                try:
                    return self._engine.reset_prefix_cache(force=False)
                except CacheInUseError:
                    await self._engine.progressed()

        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                return await flush()
        except TimeoutError:
            return self._engine.reset_prefix_cache(force=False)  # raises, or has become possible just now

    def page_events(self, after: int | None) -> AsyncGenerator[PageBatch, None]:
        """See GatewayEngine."""
        return self._engine.page_events.follow(after).batches()


class LocalOutput:
    """See GatewayOutput."""

    __slots__ = ("_engine", "_subscription")

    def __init__(self, engine: EngineLoop, subscription: Subscription) -> None:
        self._engine = engine
        self._subscription = subscription

    async def take(self) -> Piece:
        """See GatewayOutput."""
        subscription = self._subscription
        tokens = await subscription.take()
        piece = Piece(tokens, subscription.take_logprobs())
        if subscription.exhausted:
            if subscription.error is None:
                piece.finished = self._finish()
            elif not tokens:
                raise subscription.error
        return piece

    def abort(self) -> None:
        """See GatewayOutput."""
        self._engine.release(self._subscription)

    def stop(self) -> None:
        """See GatewayOutput."""
        if not self._subscription.finished:
            self._engine.stop_request(self._subscription.request.request_id)

    def _finish(self) -> Finish:
        request = self._subscription.request
        if request.finish_reason is None:
            raise InternalError(f"request {request.request_id!r} ended without a reason")
        return Finish(request.finish_reason, request.prompt_len, request.num_output, request.cached_tokens)
