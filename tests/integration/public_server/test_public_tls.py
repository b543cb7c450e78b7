"""TLS on the public port: whom it serves, whom it does not, and certificates that change while it serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from scheduler_service.client import Client, RpcFailedError
from scheduler_service.settings import SettingsError

TOKENS = [20, 104, 629, 421, 384, 473]


async def six_tokens(client: Client) -> list[int]:
    """Of one small request."""
    return sum([piece.tokens async for piece in client.generate([1, 2, 3], max_tokens=6)], [])


async def refusal(client: Client) -> str:
    """What a client is told that cannot connect."""
    async with client:
        with pytest.raises(RpcFailedError) as caught:
            await client.info()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    return caught.value.details


async def test_only_certificates_of_the_authority_connect(
    serving: Callable[..., Any], certificates: Any, strangers: Any
) -> None:
    """With an authority for clients, one of its certificates is served; none, a stranger's and an expired one are not."""
    ca = certificates.ca
    async with serving(**certificates.issue("server"), tls_ca=ca) as served:
        async with served.client(tls_ca=ca, **certificates.issue("client")) as client:
            assert await six_tokens(client) == TOKENS
        closed = f"no connection to {served.front.address}: it closes the connection"
        assert (await refusal(served.client(tls_ca=ca))).startswith(closed)
        assert (await refusal(served.client(tls_ca=ca, **strangers.issue("client")))).startswith(closed)
        assert (await refusal(served.client(tls_ca=ca, **certificates.issue("old", expired=True)))).startswith(closed)
        assert (await refusal(served.client())).startswith(closed)
        assert served.front.gate.num_open == 0


async def test_client_makes_sure_of_the_server(serving: Callable[..., Any], certificates: Any, strangers: Any) -> None:
    """A server of another authority and one of another name are refused by the client, in words that say what to do."""
    async with serving(**certificates.issue("server", identity="llm.example")) as served:
        # The certificate is for localhost, too, but not for 127.0.0.1, which is what the client dials.
        assert "is for another host name (--tls-name)" in await refusal(served.client(tls_ca=certificates.ca))
        assert "does not come from the authority of --tls-ca" in await refusal(served.client(tls_ca=strangers.ca))
        async with served.client(tls_ca=certificates.ca, tls_name="llm.example") as client:
            assert await six_tokens(client) == TOKENS


async def test_expired_server_is_refused_by_its_clients(serving: Callable[..., Any], certificates: Any) -> None:
    """An expired certificate is named as what it is, and a plaintext server is, too."""
    async with serving(**certificates.issue("server", expired=True)) as served:
        assert "its certificate has expired" in await refusal(served.client(tls_ca=certificates.ca))
    async with serving() as served:
        assert "it does not speak TLS" in await refusal(served.client(tls_ca=certificates.ca))


async def test_rotation_while_serving(serving: Callable[..., Any], certificates: Any, strangers: Any) -> None:
    """New connections get the new certificate at once; a stream that is open goes on to its end; half a rotation is nothing."""
    async with serving(**certificates.issue("server")) as served, served.client(tls_ca=certificates.ca) as before:
        stream = before.generate([1, 2, 3], max_tokens=400)
        tokens = (await anext(stream)).tokens

        (certificates.folder / "server.key").write_text("half of a rotation")
        async with served.client(tls_ca=certificates.ca) as meanwhile:
            assert await six_tokens(meanwhile) == TOKENS

        new = strangers.issue("server")
        new["tls_cert"].replace(certificates.folder / "server.pem")
        new["tls_key"].replace(certificates.folder / "server.key")
        async with served.client(tls_ca=strangers.ca) as after:
            assert await six_tokens(after) == TOKENS
        assert "does not come from the authority" in await refusal(served.client(tls_ca=certificates.ca))

        tokens += sum([piece.tokens async for piece in stream], [])
        assert len(tokens) == 400
        assert tokens[:6] == TOKENS


async def test_authority_of_clients_rotates_too(serving: Callable[..., Any], certificates: Any, strangers: Any) -> None:
    """A client whose authority is taken out of the file is not served on a new connection, one put in is."""
    ca, mine, theirs = certificates.ca, certificates.issue("client"), strangers.issue("client")
    async with serving(**certificates.issue("server"), tls_ca=strangers.ca) as served:
        async with served.client(tls_ca=ca, **theirs) as client:
            assert await six_tokens(client) == TOKENS
        strangers.ca.write_bytes(ca.read_bytes())
        assert "it closes the connection" in await refusal(served.client(tls_ca=ca, **theirs))
        async with served.client(tls_ca=ca, **mine) as client:
            assert await six_tokens(client) == TOKENS


async def test_health_and_reflection_need_a_certificate_as_well(serving: Callable[..., Any], certificates: Any) -> None:
    """Nothing at all is answered before the handshake."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with serving(**certificates.issue("server"), tls_ca=certificates.ca) as served:
        for options, code in ((certificates.issue("probe"), grpc.StatusCode.OK), ({}, grpc.StatusCode.UNAVAILABLE)):
            async with served.client(tls_ca=certificates.ca, **options) as client:
                call = health_pb2_grpc.HealthStub(client._channel).Check(health_pb2.HealthCheckRequest())
                assert await call.code() is code


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:5", "example.org:5"])
def test_public_address_without_tls_is_refused(listen: str) -> None:
    """Before anything is bound, in words that say what to do; --insecure is one of them."""
    from scheduler_service.settings import load_settings

    with pytest.raises(
        SettingsError, match=r"give --tls-cert and --tls-key, listen on 127.0.0.1 or unix:/PATH, or say --insecure"
    ):
        load_settings(runtime="127.0.0.1:1", listen=listen)
    assert load_settings(runtime="127.0.0.1:1", listen=listen, insecure=True).listen == listen
    assert load_settings(runtime="127.0.0.1:1", listen=listen, tls_cert="a", tls_key="b").listen == listen
