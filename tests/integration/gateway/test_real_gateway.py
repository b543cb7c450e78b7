"""The real gateway, smg, in front of the port: OpenAI's endpoints over HTTP, for both of its engines' services."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

GatewayOf = Callable[..., AbstractAsyncContextManager[Any]]
Continuation = Callable[[Any, int], list[int]]

LIMIT_S = 60.0


class Http:
    """A client of a few lines, since some of its connections are to be cut."""

    def __init__(self, port: int, metrics_port: int = 0) -> None:
        self._port = port
        self._metrics_port = metrics_port

    async def metric(self, name: str) -> float:
        """Sum of all samples of the gateway's own metric; 0 where it has none yet."""
        _, text = await Http(self._metrics_port).call("/metrics")
        lines = [line for line in text.decode().splitlines() if line.partition(" ")[0].partition("{")[0] == name]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    @contextlib.asynccontextmanager
    async def open(self, path: str, body: dict[str, Any] | None = None) -> AsyncIterator[asyncio.StreamReader]:
        """A call whose request is sent; leaving the block drops the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        data = b"" if body is None else json.dumps({"model": "fingerprint"} | body).encode()
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        try:
            yield reader
        finally:
            writer.close()

    async def call(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and body of an answer."""
        async with asyncio.timeout(LIMIT_S), self.open(path, body) as reader:
            head = await reader.readuntil(b"\r\n\r\n")
            data = await reader.read()
        if b"transfer-encoding: chunked" in head.lower():
            data = b"".join(_chunks(data))
        return int(head.split()[1]), data

    async def ask(self, path: str, body: dict[str, Any]) -> Any:
        """A good answer's JSON."""
        status, data = await self.call(path, body)
        assert status == 200, data
        return json.loads(data)


def _chunks(data: bytes) -> list[bytes]:
    found = []
    while data:
        size, _, data = data.partition(b"\r\n")
        found.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]
    return found


def free_port() -> int:
    """A port that nobody has; smg cannot be told to choose one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def smg(worker: str, log: Path, env: dict[str, str]) -> AsyncIterator[Http]:
    """The gateway in front of one worker, from the moment at which it serves the worker's model."""
    port, metrics_port = free_port(), free_port()
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", f"grpc://{worker}", "--disable-retries"]
    metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "smg", "launch", *arguments, *metrics), env=env, stdout=output, stderr=output
        )
    http = Http(port, metrics_port)
    try:
        async with asyncio.timeout(LIMIT_S):
            while not await _serves(http):
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.05)
        yield http
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _serves(http: Http) -> bool:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        return (await http.call("/v1/completions", {"prompt": "w1_", "max_tokens": 1}))[0] == 200
    return False


def words(tokens: list[int]) -> str:
    """Tokens as the word tokenizer writes them."""
    return "".join(f"w{token} " for token in tokens)


@pytest.mark.timeout(180)
async def test_openai_endpoints_by_the_real_gateway(
    gateway: GatewayOf, continuation: Continuation, word_tokenizer: Path, tmp_path: Path, child_env: dict[str, str]
) -> None:
    """Completions and chats, plain and streamed, several at a time, stop strings, refusals, a full queue, dropped clients."""
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(word_tokenizer, elsewhere)
    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(gateway(max_rows=4, max_waiting=3, gateway_tokenizer=elsewhere))
        # As on another machine: the folder that the gateway is told is not there, so it asks for the files.
        await served.run([1], 1, stop=["loads the tokenizer"])
        sent = [chunk async for chunk in served.stub.GetTokenizer(served.api.common.GetTokenizerRequest())]
        assert sent[-1].sha256
        shutil.rmtree(elsewhere)
        http = await stack.enter_async_context(smg(served.address, tmp_path / "smg.log", child_env))
        core, prompt = served.engine.core, "w5_w6_w7_"
        tokens = continuation([5, 6, 7], 40)

        # The model's default temperature, 0, reaches requests that name none.
        answer = await http.ask("/v1/completions", {"prompt": prompt, "max_tokens": 6})
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (words(tokens[:6]), "length")
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 6)

        answer = await http.ask("/v1/completions", {"prompt": prompt, "max_tokens": 5, "n": 3})
        assert [choice["text"] for choice in answer["choices"]] == [words(tokens[:5])] * 3

        messages = [{"role": "user", "content": prompt}]
        stop = f" w{tokens[3]}"
        for stream in (False, True):
            before = served.num_tokens
            status, data = await http.call(
                "/v1/chat/completions", {"messages": messages, "stop": [stop], "max_tokens": 30, "stream": stream}
            )
            assert status == 200, data
            text, reason = _said(data, stream)
            assert (text, reason) == (words(tokens[:3])[:-1], "stop")
            if served.linked is None:
                # The scheduler ended it, not the gateway after 30 tokens. A front end's word is a few fast steps on the way.
                assert served.num_tokens - before <= 4 + served.engine.config.overlap_depth
                assert not core.requests
            await served.until(lambda: not core.requests)

        status, data = await http.call(
            "/v1/chat/completions", {"messages": messages, "response_format": {"type": "json_object"}}
        )
        assert (status, b"json_schema cannot be honoured" in data) == (400, True)

        # Both kinds of dropped clients: one reads a stream, one waits for a whole answer.
        for stream in (True, False):
            body = {"prompt": prompt, "max_tokens": 100, "stream": stream, "n": 2}
            served.engine.pause()
            async with asyncio.timeout(LIMIT_S), http.open("/v1/completions", body) as reader:
                await served.until(lambda: len(core.requests) == 2)
                if stream:
                    served.engine.resume()
                    await reader.readuntil(b"data:")
                    served.engine.pause()
            await served.until(lambda: not core.requests)
            served.engine.resume()

        # Three wait while nothing is planned: the fourth is refused.
        served.engine.pause()
        calls = [asyncio.create_task(http.call("/v1/completions", {"prompt": prompt, "max_tokens": 2})) for _ in range(3)]
        await served.until(lambda: len(core.requests) == 3)
        status, data = await http.call("/v1/completions", {"prompt": prompt, "max_tokens": 2})
        assert (status, b"queue is full" in data) == (429, True)
        served.engine.resume()
        assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 3


def _said(data: bytes, stream: bool) -> tuple[str, str]:
    """Text and finish reason of a chat's answer."""
    if not stream:
        choice = json.loads(data)["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]
    lines = [line.removeprefix("data: ") for line in data.decode().splitlines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, next(choice["finish_reason"] for choice in choices if choice["finish_reason"])


@pytest.mark.timeout(120)
async def test_index_of_the_real_gateway_has_the_cached_pages(
    gateway: GatewayOf, word_tokenizer: Path, tmp_path: Path, child_env: dict[str, str]
) -> None:
    """What smg knows of the cache is as large as it, through evictions, a reset, and a stream that has to begin anew."""
    async with (
        gateway(num_pages=48, gateway_tokenizer=word_tokenizer) as served,
        smg(served.address, tmp_path / "smg.log", child_env) as http,
    ):
        cache, events = served.engine.core.placement.cache, served.engine.page_events

        async def agree() -> None:
            async with asyncio.timeout(LIMIT_S):
                while await http.metric("smg_kv_index_blocks") != cache.num_pages:
                    await asyncio.sleep(0.05)

        for start in range(12):
            await http.ask("/v1/completions", {"prompt": "".join(f"w{start}_w{i}_" for i in range(20)), "max_tokens": 1})
        assert cache.num_pages > 40
        await agree()
        (follower,) = events._followers
        follower._sequence -= 1000  # as if it had been too slow
        await http.ask("/v1/completions", {"prompt": "w1_" * 12, "max_tokens": 1})
        await agree()
        served.engine.reset_prefix_cache(force=True)
        await http.ask("/v1/completions", {"prompt": "w2_" * 12, "max_tokens": 1})
        await agree()
        assert cache.num_pages < 10
        assert await http.metric("smg_kv_event_gaps_total") == 0
        assert await http.metric("smg_kv_event_parentless_stores_total") == 0
        assert await http.metric("smg_kv_event_subscriptions_total") == 2
