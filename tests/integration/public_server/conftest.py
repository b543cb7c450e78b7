"""A runtime and a scheduler as they are served, with certificates of a small authority, and clients of all kinds."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trustme
from grpc import aio

from runtime_service import app as runtime_app
from runtime_service.execution import ExecutionThread
from runtime_service.settings import load_settings as runtime_settings
from scheduler_service.client import Client
from scheduler_service.client_security import ClientSecurity
from scheduler_service.engine_loop import EngineLoop
from scheduler_service.public_server import HealthBoard, PublicServer
from scheduler_service.settings import load_settings

LIMIT_S = 60.0
TINY_WINDOW = (("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1))
"""Channel options of a client that lets hardly anything be sent to it beyond what it reads."""
YEAR = 365 * 24 * 3600

T = TypeVar("T")


class Certificates:
    """An authority and the files of certificates that it issues."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self.authority.cert_pem.write_to_path(self.ca)

    def issue(self, name: str, *, expired: bool = False, identity: str = "127.0.0.1") -> dict[str, Path]:
        """Write `name`.pem and `name`.key, over those that there are; the options that name them."""
        past = datetime.now(UTC).replace(year=2020)
        validity = {"not_before": past.replace(year=2019), "not_after": past} if expired else {}
        issued = self.authority.issue_cert(identity, "localhost", **validity)
        cert, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        issued.cert_chain_pems[0].write_to_path(cert)
        issued.private_key_pem.write_to_path(key)
        return {"tls_cert": cert, "tls_key": key}


@dataclasses.dataclass
class Served:
    """Both services in this process."""

    engine: EngineLoop
    front: PublicServer
    runtime_address: str

    def client(self, **security: Any) -> Client:
        """A client with these options of the command line."""
        return Client(self.front.address, ClientSecurity.of(**security))


@contextlib.asynccontextmanager
async def serving_runtime(**options: Any) -> AsyncIterator[str]:
    """The exact test model behind an address."""
    thread = ExecutionThread()
    stop = asyncio.Event()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    given = {"listen": "127.0.0.1:0", "page_size": 4, "num_pages": 256, "max_rows": 32, "max_pages_per_row": 128} | options
    serving = asyncio.ensure_future(runtime_app.serve(runtime_settings(**given), thread, stop=stop, announce=ready.set_result))
    try:
        await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED, timeout=LIMIT_S)
        yield ready.result().split()[4] if ready.done() else serving.result()  # type: ignore[func-returns-value]
    finally:
        stop.set()
        with contextlib.suppress(Exception):
            await within(serving)
        assert await asyncio.to_thread(thread.join, LIMIT_S)


@contextlib.asynccontextmanager
async def _serving(runtime_options: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[Served]:
    async with serving_runtime(**runtime_options or {}) as address:
        given = {"runtime": address, "listen": "127.0.0.1:0", "heartbeat_timeout": 30.0, "startup_timeout": LIMIT_S}
        values = load_settings(**given | settings)
        board = HealthBoard()
        engine = EngineLoop(values, on_connected=board.show)
        front = PublicServer(values, engine.metrics, board)
        front.add(engine)
        await within(engine.start())
        await front.server.start()
        try:
            yield Served(engine, front, address)
            assert not engine.failed.is_set()
        finally:
            await front.server.stop(0)
            await engine.stop()


async def within(what: Awaitable[T]) -> T:
    """The value of `what`, or a failure when it takes too long."""
    async with asyncio.timeout(LIMIT_S):
        return await what


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop turn until it is so."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture(scope="session")
def serving() -> Callable[..., AbstractAsyncContextManager[Served]]:
    """Start both services; keyword arguments are the scheduler's settings, `runtime_options` those of the runtime."""
    return _serving


@pytest.fixture(scope="session")
def a_runtime() -> Callable[..., AbstractAsyncContextManager[str]]:
    """Start a runtime alone, with these options; its address."""
    return serving_runtime


@pytest.fixture(scope="session", name="until")
def until_it_is_so() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Wait for a condition."""
    return until


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    """A fresh authority."""
    return Certificates(tmp_path)


@pytest.fixture
def strangers(tmp_path: Path) -> Certificates:
    """Another authority, whom nobody trusts."""
    folder = tmp_path / "strangers"
    folder.mkdir()
    return Certificates(folder)


@pytest.fixture
async def narrow() -> AsyncIterator[Callable[[str], aio.Channel]]:
    """Channels that let hardly anything be sent to them beyond what is read."""
    channels: list[aio.Channel] = []

    def open_channel(target: str) -> aio.Channel:
        channels.append(aio.insecure_channel(target, options=TINY_WINDOW))
        return channels[-1]

    yield open_channel
    for channel in channels:
        await channel.close()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """A file with one token."""
    path = tmp_path / "tokens"
    path.write_text("# of the tests\n0123456789abcdef-first\n")
    return path
