"""Bearer tokens on the public port: who is let in, what needs none, and tokens that change while it serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pagemirror.v1 import generation_pb2
from scheduler_service.client import Client, RpcFailedError
from scheduler_service.errors import StartError

FIRST = "0123456789abcdef-first"
SECOND = "0123456789abcdef-second"
TOKENS = [20, 104, 629, 421, 384, 473]
Code = grpc.StatusCode


async def outcome(client: Client) -> Any:
    """Tokens of a small request, or the status it ends with."""
    try:
        return sum([piece.tokens async for piece in client.generate([1, 2, 3], max_tokens=6)], [])
    except RpcFailedError as error:
        return error.code


async def test_right_token_none_and_a_wrong_one(serving: Callable[..., Any], token_file: Path, tmp_path: Path) -> None:
    """Every method wants a token of the file; the answer to any other is the same and says nothing about it."""
    wrong = tmp_path / "wrong"
    wrong.write_text(FIRST[:-1] + "x")
    async with serving(token_file=token_file) as served:
        async with served.client(token_file=token_file) as client:
            assert await outcome(client) == TOKENS
            assert (await client.rows()).rows == []
        for options in ({}, {"token_file": wrong}):
            async with served.client(**options) as client:
                assert await outcome(client) is Code.UNAUTHENTICATED
                with pytest.raises(RpcFailedError, match=r"^UNAUTHENTICATED: a valid bearer token is needed$"):
                    await client.info()
                with pytest.raises(RpcFailedError, match="UNAUTHENTICATED"):
                    await client.abort("a")
        assert served.engine.metrics.calls_refused.labels("token")._value.get() == 6
        assert served.engine.core.requests == {}


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        ((("authorization", f"Bearer {FIRST}"),), Code.OK),
        ((("authorization", f"bearer {FIRST}"),), Code.OK),
        ((("authorization", FIRST),), Code.UNAUTHENTICATED),
        ((("authorization", f"Basic {FIRST}"),), Code.UNAUTHENTICATED),
        ((("authorization", "Bearer "),), Code.UNAUTHENTICATED),
        ((("authorization", f"Bearer {FIRST} {FIRST}"),), Code.UNAUTHENTICATED),
        ((("authorization", f"Bearer {FIRST}"), ("authorization", f"Bearer {FIRST}")), Code.UNAUTHENTICATED),
        ((("token", FIRST),), Code.UNAUTHENTICATED),
    ],
    ids=["right", "small letters", "no scheme", "another scheme", "empty", "twice in one", "two headers", "another header"],
)
async def test_forms_of_the_header(serving: Callable[..., Any], token_file: Path, metadata: Any, code: grpc.StatusCode) -> None:
    """One header, the scheme in any letters, one token."""
    async with serving(token_file=token_file) as served, served.client() as client:
        call = client.stub.GetInfo(generation_pb2.GetInfoRequest(), metadata=metadata)
        assert await call.code() is code


async def test_health_needs_no_token_and_reflection_does(serving: Callable[..., Any], token_file: Path) -> None:
    """Probes have no secrets; what the server can do is for those who may use it."""
    async with serving(token_file=token_file, reflection=True) as served, served.client(token_file=token_file) as client:
        stub = health_pb2_grpc.HealthStub(client._channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(client._channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        assert await reflection.ServerReflectionInfo(iter([question])).code() is Code.UNAUTHENTICATED
        answers = reflection.ServerReflectionInfo(iter([question]), metadata=client.metadata())
        names = [service.name async for answer in answers for service in answer.list_services_response.service]
        assert "pagemirror.v1.GenerationService" in names


async def test_tokens_rotate_while_serving(serving: Callable[..., Any], token_file: Path, tmp_path: Path) -> None:
    """Two tokens overlap, the old one goes, and a stream that began with it goes on; an empty file changes nothing."""
    new = tmp_path / "new"
    new.write_text(SECOND)
    old = tmp_path / "old"
    old.write_text(FIRST)
    async with (
        serving(token_file=token_file) as served,
        served.client(token_file=old) as before,
        served.client(token_file=new) as after,
    ):
        assert await outcome(after) is Code.UNAUTHENTICATED
        token_file.write_text(f"{FIRST}\n{SECOND}\n")
        assert await outcome(after) == TOKENS
        stream = before.generate([1, 2, 3], max_tokens=400)
        tokens = (await anext(stream)).tokens
        token_file.write_text(SECOND)
        assert await outcome(before) is Code.UNAUTHENTICATED
        assert await outcome(after) == TOKENS
        token_file.write_text("")
        assert await outcome(before) is Code.UNAUTHENTICATED
        assert await outcome(after) == TOKENS
        assert len(tokens + sum([piece.tokens async for piece in stream], [])) == 400
        # The client's own file changed: the next call shows what it says now.
        old.write_text(SECOND)
        assert await outcome(before) == TOKENS


async def test_token_is_not_sent_in_the_clear(token_file: Path) -> None:
    """To another machine it goes over TLS, or by a clear word."""
    from scheduler_service.client_security import ClientSecurity

    with pytest.raises(StartError, match=r"the token would travel to llm.example:5 in the clear; give --tls-ca"):
        Client("llm.example:5", ClientSecurity.of(token_file=token_file))
    await Client("llm.example:5", ClientSecurity.of(token_file=token_file, insecure=True)).close()
    await Client("unix:/tmp/pm.sock", ClientSecurity.of(token_file=token_file)).close()
