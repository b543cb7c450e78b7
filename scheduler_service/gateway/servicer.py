"""What the gateway's two services have in common: everything but the wording of requests, answers and information."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2

from scheduler_service.core.errors import CacheInUseError
from scheduler_service.errors import NoTokenizerError, shorten
from scheduler_service.gateway.byte_tokenizer import byte_tokenizer
from scheduler_service.gateway.engine import GatewayEngine
from scheduler_service.gateway.fields import UnsupportedFieldError
from scheduler_service.gateway.generation import Calls
from scheduler_service.gateway.kv_events import kv_event_batch
from scheduler_service.gateway.model_facts import ModelFacts, read_facts
from scheduler_service.gateway.stops import Decode
from scheduler_service.gateway.tokenizer_files import TokenizerFiles
from scheduler_service.grpc_status import errors_as_status
from scheduler_service.session_output import SessionCallError
from scheduler_service.text import is_byte_level

Context = grpc.aio.ServicerContext[Any, Any]

MAX_FLUSH_WAIT_S = 600.0


class GatewayServicer:
    """Serves one engine. Methods are coroutines of grpc.aio."""

    def __init__(self, engine: GatewayEngine, files: TokenizerFiles, *, serves_events: bool = True) -> None:
        self.engine = engine
        self.files = files
        self.calls = Calls(engine)
        self._serves_events = serves_events
        self.started_at = time.time()
        self._facts: ModelFacts | None = None

    @property
    def uptime_s(self) -> float:
        return time.time() - self.started_at

    @staticmethod
    def now() -> str:
        """ISO 8601."""
        return datetime.now(UTC).isoformat()

    async def facts(self) -> ModelFacts:
        """Of the model; read once. Raises PagemirrorError where the engine cannot be asked."""
        if self._facts is None:
            info = await self.engine.info()
            if not self.files.path(info.tokenizer_path) and is_byte_level(info.model, info.architecture):
                self.files.generate(byte_tokenizer(info.vocab_size, info.default_stop_ids))
            self._facts = await read_facts(info, self.files)
        return self._facts

    async def decoder(self, request_id: str, field: str, *, skip_special: bool) -> Decode:
        """How tokens are written as text. Raises UnsupportedFieldError, about `field`, where there is no tokenizer."""
        try:
            return await self.files.decoder((await self.facts()).tokenizer_path, skip_special=skip_special)
        except NoTokenizerError as error:
            raise UnsupportedFieldError(request_id, field, f"text is needed for it, and {error}") from error

    # --- methods of both services, with messages that they share ----------------------------------------------------------

    async def FlushCache(self, request: Any, context: Context) -> Any:
        """Empty the prefix cache, when the requests that use it have ended, or not at all."""
        async with statuses(context, "FlushCache"):
            try:
                freed = await self.engine.flush_cache(min(max(request.timeout_s, 0.0), MAX_FLUSH_WAIT_S))
            except CacheInUseError as error:
                return common_pb2.FlushCacheResponse(success=False, message=str(error))
            return common_pb2.FlushCacheResponse(success=True, message=f"{freed} pages are free again")

    async def StartProfile(self, request: Any, context: Context) -> Any:
        """Not here."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no profiler to start from here")

    async def StopProfile(self, request: Any, context: Context) -> Any:
        """Not here."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no profiler to start from here")

    async def GetTokenizer(self, request: Any, context: Context) -> None:
        """The tokenizer's files as a zip in parts, the last with its SHA-256."""
        async with statuses(context, "GetTokenizer"):
            archive = await self.files.archive((await self.facts()).tokenizer_path)
            chunks = archive.chunks()
            for chunk in chunks[:-1]:
                await context.write(common_pb2.GetTokenizerChunk(data=chunk))
            await context.write(common_pb2.GetTokenizerChunk(data=chunks[-1], sha256=archive.sha256))

    async def SubscribeKvEvents(self, request: Any, context: Context) -> None:
        """Events of cached pages, for as long as the gateway listens."""
        if not self._serves_events:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "page events are not served here (--no-page-events)")
        # At once: a gateway that sees nothing of an answer subscribes again and again.
        await context.send_initial_metadata(())
        async with (
            statuses(context, "SubscribeKvEvents"),
            contextlib.aclosing(self.engine.page_events(request.start_sequence_number or None)) as batches,
        ):
            async for batch in batches:
                await context.write(kv_event_batch(batch))


@contextlib.asynccontextmanager
async def statuses(context: Context, method: str) -> AsyncIterator[None]:
    """End the call with the status of whatever error leaves the block, one that another process gave included."""
    async with errors_as_status(context, method):
        try:
            yield
        except SessionCallError as error:
            await context.abort(error.code, shorten(error.details))
