"""TLS between scheduler and runtime, who may call the runtime at all, and how often."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from pagemirror.v1 import runtime_pb2, runtime_pb2_grpc
from runtime_service.errors import SettingsError as RuntimeSettingsError
from runtime_service.servicer import MAX_CONCURRENT_READS
from runtime_service.settings import load_settings as runtime_settings
from scheduler_service.channels import open_channel
from scheduler_service.errors import LinkBrokenError, StartError
from scheduler_service.settings import load_settings
from scheduler_service.tls import ClientTls, TlsFileError

TOKENS = [20, 104, 629, 421, 384, 473]


def link_options(certificates: Any, name: str = "scheduler") -> dict[str, Any]:
    """Settings of a scheduler that shows a certificate to its runtime."""
    issued = certificates.issue(name)
    return {
        "runtime_tls_ca": certificates.ca,
        "runtime_tls_cert": issued["tls_cert"],
        "runtime_tls_key": issued["tls_key"],
    }


async def test_both_sides_show_certificates(serving: Callable[..., Any], certificates: Any) -> None:
    """The link works with certificates of one authority on both sides; the rows of both sides are equal over it."""
    options = certificates.issue("runtime") | {"tls_ca": certificates.ca}
    async with serving(options, **link_options(certificates)) as served, served.client() as client:
        stream = client.generate([1, 2, 3], max_tokens=300)
        tokens = (await anext(stream)).tokens
        rows = await client.rows()
        assert [row.equal for row in rows.rows] == [True] * len(rows.rows)
        tokens += sum([piece.tokens async for piece in stream], [])
        assert (len(tokens), tokens[:6]) == (300, TOKENS)


async def test_stranger_is_not_served_by_the_runtime(a_runtime: Callable[..., Any], certificates: Any, strangers: Any) -> None:
    """Without a certificate of the authority neither a session nor a reading of rows is to be had; with one a reading is."""
    options = certificates.issue("runtime") | {"tls_ca": certificates.ca}
    async with a_runtime(**options) as address:
        theirs = strangers.issue("x")
        for tls in (None, ClientTls(certificates.ca), ClientTls(certificates.ca, theirs["tls_cert"], theirs["tls_key"])):
            channel = open_channel(address, tls)
            stub = runtime_pb2_grpc.RuntimeServiceStub(channel)
            assert await stub.ReadRows(runtime_pb2.ReadRowsRequest()).code() is grpc.StatusCode.UNAVAILABLE
            assert await stub.GetInfo(runtime_pb2.GetRuntimeInfoRequest()).code() is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await stub.Execute().read()
            await channel.close()
        mine = certificates.issue("y")
        channel = open_channel(address, ClientTls(certificates.ca, mine["tls_cert"], mine["tls_key"]))
        stub = runtime_pb2_grpc.RuntimeServiceStub(channel)
        assert await stub.ReadRows(runtime_pb2.ReadRowsRequest()).code() is grpc.StatusCode.OK
        await channel.close()


async def test_scheduler_makes_sure_of_the_runtime(serving: Callable[..., Any], certificates: Any, strangers: Any) -> None:
    """A runtime of another authority is never given an op; the reason is in the message."""
    options = strangers.issue("runtime")
    with pytest.raises(StartError, match="CERTIFICATE_VERIFY_FAILED"):
        async with serving(options, **link_options(certificates), startup_timeout=0.2):
            pass


async def test_new_certificates_are_used_at_the_next_connect(
    serving: Callable[..., Any], certificates: Any, strangers: Any, until: Callable[..., Any]
) -> None:
    """Both sides change their authority while a stream is open: it goes on, and so does the session after a broken link."""
    runtime_options = certificates.issue("runtime") | {"tls_ca": certificates.ca}
    async with serving(runtime_options, **link_options(certificates)) as served, served.client() as client:
        stream = client.generate([1, 2, 3], max_tokens=400)
        tokens = (await anext(stream)).tokens
        session_no = served.engine.connection.session_no
        for name in ("runtime", "scheduler"):
            new = strangers.issue(name)
            new["tls_cert"].replace(certificates.folder / f"{name}.pem")
            new["tls_key"].replace(certificates.folder / f"{name}.key")
        certificates.ca.write_bytes(strangers.ca.read_bytes())
        served.engine.link._links[0]._break(LinkBrokenError("cut by the test"))
        await until(lambda: served.engine.connection.connected and served.engine.connection.session_no > session_no)
        tokens += sum([piece.tokens async for piece in stream], [])
        assert (len(tokens), tokens[:6]) == (400, TOKENS)


async def test_readings_of_rows_are_limited(a_runtime: Callable[..., Any]) -> None:
    """So many readings as the limit says may wait for their turn, one more is refused, and they are answered in the end."""
    async with a_runtime() as address:
        channel = open_channel(address)
        stub = runtime_pb2_grpc.RuntimeServiceStub(channel)
        assert await stub.ReadRows(runtime_pb2.ReadRowsRequest()).code() is grpc.StatusCode.OK
        gate, entered = threading.Event(), threading.Event()
        from runtime_service.step_runner import StepRunner

        original = StepRunner.read_rows

        def held(self: StepRunner, rows: Any) -> Any:
            entered.set()
            assert gate.wait(60)
            return original(self, rows)

        StepRunner.read_rows = held  # type: ignore[method-assign]
        try:
            waiting = [stub.ReadRows(runtime_pb2.ReadRowsRequest()) for _ in range(MAX_CONCURRENT_READS)]
            codes = [asyncio.ensure_future(call.code()) for call in waiting]
            assert await asyncio.to_thread(entered.wait, 60)
            # Calls of one channel arrive in order, so this one is the next.
            refused = stub.ReadRows(runtime_pb2.ReadRowsRequest())
            assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await refused.details() == "4 readings of rows are going on, which is the limit; try again later"
            gate.set()
            assert await asyncio.gather(*codes) == [grpc.StatusCode.OK] * MAX_CONCURRENT_READS
        finally:
            gate.set()
            StepRunner.read_rows = original  # type: ignore[method-assign]
        assert await stub.ReadRows(runtime_pb2.ReadRowsRequest()).code() is grpc.StatusCode.OK
        await channel.close()


def test_files_are_checked_before_anything_listens(certificates: Any, strangers: Any) -> None:
    """A missing file, a key of another certificate, an encrypted key and a file without certificates: named, never shown."""
    from cryptography.hazmat.primitives import serialization

    good = certificates.issue("good")
    other = strangers.issue("other")
    key = serialization.load_pem_private_key(good["tls_key"].read_bytes(), None)
    locked = certificates.folder / "locked.key"
    encryption = serialization.BestAvailableEncryption(b"secret")
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked.write_bytes(key.private_bytes(pem, form, encryption))
    junk = certificates.folder / "junk.pem"
    junk.write_text("no certificates here")
    cases = [
        ({"tls_cert": certificates.folder / "none.pem"}, "none.pem.*No such file"),
        ({"tls_key": other["tls_key"]}, "key values mismatch"),
        ({"tls_key": locked}, "the key is encrypted"),
        ({"tls_ca": junk}, "junk.pem.*holds no certificates of an authority"),
    ]
    for changed, words in cases:
        values = good | changed
        scheduler = load_settings(runtime="127.0.0.1:1", **values)
        runtime = runtime_settings(**values)
        assert scheduler.tls is not None and runtime.tls is not None  # noqa: PT018
        with pytest.raises(TlsFileError, match=words):
            scheduler.tls.credentials()
        with pytest.raises(RuntimeSettingsError, match=words) as caught:
            runtime.tls.credentials()
        assert "PRIVATE" not in str(caught.value)
    with pytest.raises(TlsFileError, match=r"junk\.pem"):
        ClientTls(junk).credentials()


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:5", "example.org:5"])
def test_runtime_refuses_a_public_address_without_tls(listen: str) -> None:
    """As the scheduler does; and since certificates are all that it knows its callers by, TLS must be mutual."""
    with pytest.raises(RuntimeSettingsError, match=r"give --tls-cert, --tls-key and --tls-ca, listen on 127.0.0.1"):
        runtime_settings(listen=listen)
    assert runtime_settings(listen=listen, insecure=True).listen == listen
    with pytest.raises(RuntimeSettingsError, match="without mutual TLS any of them could drive this runtime"):
        runtime_settings(listen=listen, tls_cert="a", tls_key="b")
    assert runtime_settings(listen=listen, tls_cert="a", tls_key="b", tls_ca="c").listen == listen
    for incomplete, words in (({"tls_cert": "a"}, "go together"), ({"tls_ca": "a"}, "--tls-ca needs --tls-cert")):
        with pytest.raises(RuntimeSettingsError, match=words):
            runtime_settings(**incomplete)
