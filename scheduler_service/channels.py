"""Options of gRPC channels and servers, and binding a port so that a mistake is noticed."""

from __future__ import annotations

import socket

import grpc

from scheduler_service.errors import StartError
from scheduler_service.wire import MAX_MESSAGE_BYTES

ChannelOptions = list[tuple[str, int]]

_KEEPALIVE_MS = 20_000

CLIENT_OPTIONS: ChannelOptions = [
    # A proxy from the environment must never see traffic between processes of one machine or cluster.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer whose machine vanished sends no FIN: only a ping tells.
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
    # A request may wait for minutes without a message either way.
    ("grpc.http2.max_pings_without_data", 0),
    # A new channel is a new connection: a reconnect must not wait for the backoff of an older channel.
    ("grpc.use_local_subchannel_pool", 1),
]

SERVER_OPTIONS: ChannelOptions = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
    # Clients that ping a quiet stream more often than every 5 minutes would otherwise be sent away (ENHANCE_YOUR_CALM).
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    ("grpc.http2.max_pings_without_data", 0),
    # Two servers on one port would share its connections by chance.
    ("grpc.so_reuseport", 0),
]


def bind(server: grpc.aio.Server, address: str) -> str:
    """Bind `host:port` (port 0: any free one) or `unix:/path`; returns the address with the port in it.

    Raises:
        StartError: the address is in use or cannot be bound.
    """
    if address.startswith("unix:"):
        _check_socket_is_free(address.removeprefix("unix:"))
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise StartError(f"cannot listen on {address}: in use, or no address of this machine") from error
    if port == 0:
        raise StartError(f"cannot listen on {address}: in use, or no address of this machine")
    if address.startswith("unix:"):
        return address
    return f"{address.rpartition(':')[0]}:{port}"


def _check_socket_is_free(path: str) -> None:
    """Look first: gRPC takes the path of a unix socket away from whoever listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except TimeoutError:
            pass  # somebody, with a full backlog
        except OSError:
            return  # nothing there, or a file that a dead server left
    raise StartError(f"cannot listen on unix:{path}: in use")
