"""A front end's own port is as closed as a scheduler's, and it shows the scheduler what that asks for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from scheduler_service import frontend_worker
from scheduler_service.client import Client, RpcFailedError
from scheduler_service.client_security import ClientSecurity
from scheduler_service.frontend_settings import load_frontend_settings

Code = grpc.StatusCode
LIMIT_S = 30.0


@contextlib.asynccontextmanager
async def front_of(scheduler: str, **settings: Any) -> AsyncIterator[str]:
    """One worker in this process; its address."""
    given = load_frontend_settings(scheduler=scheduler, listen="127.0.0.1:0", **settings)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.ensure_future(frontend_worker.serve(given, ready.set_result))
    try:
        async with asyncio.timeout(LIMIT_S):
            yield await ready
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def answer(target: str, **security: Any) -> Any:
    """Tokens, or the code with which a call ends."""
    async with Client(target, ClientSecurity.of(**security)) as client:
        try:
            return sum([piece.tokens async for piece in client.generate([1, 2], max_tokens=4)], [])
        except RpcFailedError as error:
            return error.code


async def until_it_answers(target: str, wanted: Any, **security: Any) -> None:
    """Ask again while it has no session yet."""
    async with asyncio.timeout(LIMIT_S):
        while (found := await answer(target, **security)) != wanted:
            assert found is Code.UNAVAILABLE
            await asyncio.sleep(0.02)


async def test_certificates_and_tokens_on_both_sides(
    serving: Callable[..., Any], certificates: Any, token_file: Path, tmp_path: Path, continuation: Any
) -> None:
    """With TLS and tokens at the scheduler and others at the front end, only clients with the front end's token are served."""
    theirs = tmp_path / "front-tokens"
    theirs.write_text("fedcba9876543210-front\n")
    async with serving(**certificates.issue("scheduler"), token_file=token_file) as served:
        towards = {"scheduler_tls_ca": certificates.ca, "scheduler_token_file": token_file}
        own = certificates.issue("front") | {"token_file": theirs}
        async with front_of(served.front.address, **towards, **own) as target:
            good = {"tls_ca": certificates.ca, "token_file": theirs}
            await until_it_answers(target, continuation([1, 2], 4), **good)
            assert await answer(target, tls_ca=certificates.ca) is Code.UNAUTHENTICATED
            assert await answer(target, tls_ca=certificates.ca, token_file=token_file) is Code.UNAUTHENTICATED
            assert await answer(target) is Code.UNAVAILABLE  # plaintext


async def test_front_end_that_the_scheduler_does_not_admit(serving: Callable[..., Any], token_file: Path) -> None:
    """Without the scheduler's token it has no session; its clients are told that, and not that their own token is bad."""
    async with serving(token_file=token_file) as served, front_of(served.front.address) as target, Client(target) as client:
        async with asyncio.timeout(LIMIT_S):
            while True:
                with pytest.raises(RpcFailedError) as caught:
                    await client.info()
                assert caught.value.code is Code.UNAVAILABLE
                if "a valid bearer token is needed" in caught.value.details:
                    break
                await asyncio.sleep(0.02)


async def test_limits_of_a_front_end(serving: Callable[..., Any], until: Callable[..., Any]) -> None:
    """It has the scheduler's limits of calls at a time for itself."""
    async with serving() as served, front_of(served.front.address, max_streams=2) as target, Client(target) as client:
        await until_it_answers(target, await answer(served.front.address))
        running = [client.generate([n], max_tokens=400) for n in range(2)]
        for call in running:
            await anext(call)
        with pytest.raises(RpcFailedError, match="2 calls are open already, which is the limit"):
            await anext(client.generate([3], max_tokens=3))
        for call in running:
            await call.aclose()
        await until(lambda: not served.engine.core.requests)


async def test_token_in_the_clear_is_refused_at_the_start(token_file: Path) -> None:
    """A front end that would show its token to another machine without TLS does not start."""
    given = load_frontend_settings(scheduler="10.9.8.7:1", listen="127.0.0.1:0", scheduler_token_file=token_file)
    with pytest.raises(Exception, match=r"the token would travel to 10\.9\.8\.7:1 in the clear"):
        await frontend_worker.serve(given, lambda line: None)
