"""The gateway's port in front of both services in this process, and its clients with the gateway's own stubs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import (
    common_pb2,
    tokenspeed_scheduler_pb2,
    tokenspeed_scheduler_pb2_grpc,
    vllm_engine_pb2,
    vllm_engine_pb2_grpc,
)
from tokenizers import Tokenizer, models
from tokenizers.decoders import Fuse, Replace
from tokenizers.decoders import Sequence as Decoders
from tokenizers.pre_tokenizers import Split

from runtime_service import app as runtime_app
from runtime_service.executors.base import Capacity
from runtime_service.executors.fingerprint import FingerprintExecutor
from runtime_service.settings import RuntimeSettings
from scheduler_service.client_security import ClientSecurity
from scheduler_service.engine_loop import EngineLoop
from scheduler_service.frontend_link import SchedulerLink
from scheduler_service.gateway.linked_engine import LinkedEngine
from scheduler_service.gateway.local_engine import LocalEngine
from scheduler_service.gateway.server import GatewayServer
from scheduler_service.public_server import HealthBoard
from scheduler_service.settings import SchedulerSettings

LIMIT_S = 30.0
VOCAB_SIZE = 997


class Api:
    """One of the two services, in the words of a test: what they call the same thing is one name here."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pb2 = {"tokenspeed": tokenspeed_scheduler_pb2, "vllm": vllm_engine_pb2}[name]
        self.common = common_pb2
        self.max_tokens = {"tokenspeed": "max_new_tokens", "vllm": "max_tokens"}[name]
        self.seed = {"tokenspeed": "sampling_seed", "vllm": "seed"}[name]
        self.min_tokens = {"tokenspeed": "min_new_tokens", "vllm": "min_tokens"}[name]

    def stub(self, channel: grpc.aio.Channel) -> Any:
        """Of the service."""
        if self.name == "vllm":
            return vllm_engine_pb2_grpc.VllmEngineStub(channel)
        return tokenspeed_scheduler_pb2_grpc.TokenSpeedSchedulerStub(channel)

    def request(
        self,
        prompt: list[int],
        max_tokens: int | None = 8,
        *,
        request_id: str = "",
        stream: bool = False,
        logprobs: int | None = None,
        seed: int | None = None,
        min_tokens: int = 0,
        **sampling: Any,
    ) -> Any:
        """A GenerateRequest; greedy unless it says otherwise."""
        params = self.pb2.SamplingParams(**({"temperature": 0.0} | sampling))
        if max_tokens is not None:
            setattr(params, self.max_tokens, max_tokens)
        if seed is not None:
            setattr(params, self.seed, seed)
        setattr(params, self.min_tokens, min_tokens)
        request = self.pb2.GenerateRequest(
            request_id=request_id,
            tokenized=self.pb2.TokenizedInput(input_ids=prompt),
            sampling_params=params,
            stream=stream,
        )
        if logprobs is not None and self.name == "vllm":
            request.sampling_params.logprobs = logprobs
        elif logprobs is not None:
            request.return_logprob, request.top_logprobs_num = True, logprobs
        return request

    def abort(self, request_id: str) -> Any:
        """An AbortRequest."""
        if self.name == "vllm":
            return self.pb2.AbortRequest(request_ids=[request_id])
        return self.pb2.AbortRequest(request_id=request_id, reason="test")


@dataclasses.dataclass
class Gateway:
    """The port, served, and the engine behind it."""

    api: Api
    stub: Any
    channel: grpc.aio.Channel
    engine: EngineLoop
    address: str
    linked: LinkedEngine | None = None
    """Where it is the port of a front end."""

    @property
    def num_tokens(self) -> float:
        """Tokens that the engine has put out so far, for anybody."""
        return self.engine.metrics.registry.get_sample_value("pagemirror_generated_tokens_total") or 0.0

    def drain(self) -> None:
        """Take nothing new from now on, as the process does whose port it is."""
        (self.linked or self.engine).draining = True

    async def run(self, *args: Any, **options: Any) -> tuple[list[list[int]], Any]:
        """One request of one completion: the tokens of each chunk, and its end."""
        chunks, completes = await self.run_all(*args, **options)
        assert set(completes) == {0}
        return chunks.get(0, []), completes[0]

    async def run_all(self, *args: Any, **options: Any) -> tuple[dict[int, list[list[int]]], dict[int, Any]]:
        """Chunks and ends of all completions, by index."""
        chunks: dict[int, list[list[int]]] = {}
        completes: dict[int, Any] = {}
        async for message in self.stub.Generate(self.api.request(*args, **options)):
            if message.HasField("chunk"):
                assert message.chunk.index not in completes
                chunks.setdefault(message.chunk.index, []).append(list(message.chunk.token_ids))
            else:
                assert message.complete.index not in completes
                completes[message.complete.index] = message.complete
        return chunks, completes

    async def refused(self, request: Any) -> tuple[grpc.StatusCode, str]:
        """The status with which a request is refused."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.stub.Generate(request).read()
        return caught.value.code(), caught.value.details() or ""

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the event loop turn until the condition holds."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def gateway_of(
    both_services: Callable[..., Any],
    api: str,
    through: str,
    *,
    num_pages: int = 64,
    max_rows: int = 8,
    max_context: int | None = None,
    stop_ids: tuple[int, ...] = (),
    **settings: Any,
) -> AsyncIterator[Gateway]:
    """Both services with the fingerprint model, and the gateway's port, of the scheduler or of a front end's worker."""
    executor = FingerprintExecutor(num_pages=num_pages, page_size=4)
    executor._info = dataclasses.replace(executor.info, default_stop_ids=stop_ids)
    runtime_settings = RuntimeSettings(
        model="fingerprint", page_size=4, num_pages=num_pages, max_rows=max_rows, max_context=max_context
    )
    create = lambda _: (executor, Capacity(num_pages=num_pages, max_pages_per_row=32))  # noqa: E731
    values = {"check": True, "chunk_size": 8, "token_budget": 32} | settings
    if through == "front end":
        values.pop("max_streams", None)  # is its own; the session and what is passed on are calls of the scheduler's
    load = functools.partial(runtime_app.load, runtime_settings, create)
    async with both_services(load, limit_s=LIMIT_S, **values) as (engine, client, _):
        behind = linked(client.target) if through == "front end" else contextlib.nullcontext()
        async with behind as link, serve(engine, api, link, **settings) as gateway:
            yield gateway
    assert executor.violations == []


@contextlib.asynccontextmanager
async def linked(target: str) -> AsyncIterator[SchedulerLink]:
    """A front end's session with a scheduler."""
    link = SchedulerLink(target, ClientSecurity(), max_unread=65_536)
    task = asyncio.create_task(link.run())
    try:
        async with asyncio.timeout(LIMIT_S):
            while not link.serving:
                await asyncio.sleep(0.005)
        yield link
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def serve(engine: EngineLoop, api: str, link: SchedulerLink | None = None, **settings: Any) -> AsyncIterator[Gateway]:
    """The gateway's port over an engine, or over a link to it, and a channel to it."""
    given = SchedulerSettings(runtime="unused:1", listen="127.0.0.1:0", gateway_listen="127.0.0.1:0", api=api, **settings)
    board = HealthBoard()
    server = GatewayServer(given, engine.metrics, board)
    behind = None if link is None else LinkedEngine(link)
    server.add(behind or LocalEngine(engine))
    await server.server.start()
    board.show(True)
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            names = Api(api)
            yield Gateway(names, names.stub(channel), channel, engine, server.address, behind)
    finally:
        await server.server.stop(0)


@pytest.fixture(params=["tokenspeed", "vllm"])
def api(request: pytest.FixtureRequest) -> str:
    """Both services, one after the other."""
    return str(request.param)


@pytest.fixture(params=["scheduler", "front end"])
def through(request: pytest.FixtureRequest) -> str:
    """Whose port it is."""
    return str(request.param)


@pytest.fixture
def gateway(both_services: Callable[..., Any], api: str, through: str) -> Callable[..., AbstractAsyncContextManager[Gateway]]:
    """The port of one of the services; keyword arguments are the runtime's shape and the scheduler's settings."""
    return functools.partial(gateway_of, both_services, api, through)


@pytest.fixture(scope="session")
def serve_port() -> Callable[..., AbstractAsyncContextManager[Gateway]]:
    """The gateway's port over an engine that runs already."""
    return serve


@pytest.fixture(scope="session")
def word_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer for the fingerprint model: a prompt has n as "w<n>_", an answer as "w<n> "."""
    folder = tmp_path_factory.mktemp("words")
    tokenizer = Tokenizer(models.WordLevel({f"w{n}_": n for n in range(VOCAB_SIZE)}, unk_token="w0_"))
    tokenizer.pre_tokenizer = Split("_", "merged_with_previous")
    tokenizer.decoder = Decoders([Replace("_", " "), Fuse()])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "weights.bin").write_bytes(b"not for a gateway")
    return folder
