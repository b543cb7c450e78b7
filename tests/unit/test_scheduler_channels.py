"""scheduler_service.channels: an address is taken by one server at a time."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import grpc
import pytest

from scheduler_service.channels import CLIENT_OPTIONS, SERVER_OPTIONS, bind
from scheduler_service.errors import StartError


async def test_port_zero_becomes_a_real_one_and_is_then_taken() -> None:
    """The bound address has the port in it, and a second server is refused instead of sharing it."""
    first, second = grpc.aio.server(options=SERVER_OPTIONS), grpc.aio.server(options=SERVER_OPTIONS)
    address = bind(first, "127.0.0.1:0")
    assert int(address.removeprefix("127.0.0.1:")) > 0
    await first.start()
    with pytest.raises(StartError, match=f"cannot listen on {address}"):
        bind(second, address)
    await first.stop(0)
    await second.stop(0)


async def test_socket_of_a_living_server_is_not_taken_away() -> None:
    """A unix path where somebody listens is refused; one that a dead server left is used."""
    with tempfile.TemporaryDirectory(prefix="pm-", dir="/tmp") as folder:
        path = Path(folder) / "s"
        with socket.socket(socket.AF_UNIX) as living:
            living.bind(str(path))
            living.listen()
            server = grpc.aio.server(options=SERVER_OPTIONS)
            with pytest.raises(StartError, match="in use"):
                bind(server, f"unix:{path}")
        assert path.exists()
        assert bind(server, f"unix:{path}") == f"unix:{path}"
        await server.stop(0)


def test_no_proxy_and_the_same_limit_both_ways() -> None:
    """A proxy in the environment is never asked, and a message of 64 MiB passes in both directions."""
    assert ("grpc.enable_http_proxy", 0) in CLIENT_OPTIONS
    for options in (CLIENT_OPTIONS, SERVER_OPTIONS):
        assert {("grpc.max_send_message_length", 2**26), ("grpc.max_receive_message_length", 2**26)} <= set(options)
