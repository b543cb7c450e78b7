"""gRPC channels and servers: their options, with or without TLS, and binding a port so that a mistake is noticed."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import grpc

from scheduler_service.errors import StartError
from scheduler_service.tls import ClientTls, ServerTls
from scheduler_service.wire_facts import MAX_MESSAGE_BYTES

ChannelOptions = list[tuple[str, int | str]]

KEEPALIVE_S = 20.0
"""A peer that is silent for so long is asked whether it is there, and has as long to answer."""

MAX_METADATA_BYTES = 16 * 1024
"""Headers of one call, all together; a call with more ends with RESOURCE_EXHAUSTED."""

_HANDSHAKE_TIMEOUT_MS = 10_000
_HANDSHAKE_TROUBLES = (
    ("certificate has expired", "its certificate has expired"),
    ("certificate is not yet valid", "its certificate is not valid yet"),
    ("Hostname Verification Check failed", "its certificate is for another host name (--tls-name)"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate does not come from the authority of --tls-ca"),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS, leave --tls-ca out"),
    ("Socket closed", "it closes the connection: it wants TLS (--tls-ca) or a client certificate (--tls-cert), or is full"),
)
_SPARE_STREAMS = 128  # of health and reflection


def client_options(keepalive_s: float = KEEPALIVE_S) -> ChannelOptions:
    """Of a channel, to a runtime or to a scheduler."""
    return [
        # A proxy from the environment must never see traffic between processes of one machine or cluster.
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # A peer whose machine vanished sends no FIN: only a ping tells.
        ("grpc.keepalive_time_ms", round(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(keepalive_s * 1000)),
        # While a ping is out that measures the bandwidth none is sent for keepalive, and gRPC gives that one a minute.
        ("grpc.http2.ping_timeout_ms", round(keepalive_s * 2000)),
        # A request may wait for minutes without a message either way.
        ("grpc.http2.max_pings_without_data", 0),
        # A new channel is a new connection: a reconnect must not wait for the backoff of an older channel.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(
    *,
    keepalive_s: float = KEEPALIVE_S,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_streams: int = 1024,
    max_connections: int = 512,
    share_port: bool = False,
) -> ChannelOptions:
    """Of the public server. `max_message_bytes`: of one request; `max_streams`: on one connection; `share_port`: with other
    processes, which then get a part of the connections each.
    """
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        # The next stream of the connection waits at the client.
        ("grpc.max_concurrent_streams", max_streams + _SPARE_STREAMS),
        # The next connection is closed.
        ("grpc.max_allowed_incoming_connections", max_connections),
        # Of a peer that connects and says nothing.
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),
        ("grpc.keepalive_time_ms", round(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(keepalive_s * 1000)),
        # While a ping is out that measures the bandwidth none is sent for keepalive, and gRPC gives that one a minute.
        ("grpc.http2.ping_timeout_ms", round(keepalive_s * 2000)),
        # Clients that ping a quiet stream more often than every 5 minutes would otherwise be sent away (ENHANCE_YOUR_CALM). One
        # ping a second is permitted, and half of that is asked for because pings arrive a little early or late.
        ("grpc.http2.min_ping_interval_without_data_ms", min(500, round(keepalive_s * 500))),
        ("grpc.http2.max_pings_without_data", 0),
        # Two servers on one port would share its connections by chance.
        ("grpc.so_reuseport", int(share_port)),
    ]


CLIENT_OPTIONS = client_options()
SERVER_OPTIONS = server_options()


def open_channel(target: str, tls: ClientTls | None = None, keepalive_s: float = KEEPALIVE_S) -> grpc.aio.Channel:
    """A channel that connects when it is first used. Certificates are read now.

    Raises:
        TlsFileError: one of them cannot be used.
    """
    options = client_options(keepalive_s)
    if tls is None:
        return grpc.aio.insecure_channel(target, options=options)
    if tls.name:
        options.append(("grpc.ssl_target_name_override", tls.name))
    return grpc.aio.secure_channel(target, tls.credentials(), options=options)


def handshake_trouble(details: str) -> str:
    """Why a connection could not be made, in few words, where gRPC's text says that somebody was there; otherwise empty."""
    return next((reason for sign, reason in _HANDSHAKE_TROUBLES if sign in details), "")


def bind(server: grpc.aio.Server, address: str, tls: ServerTls | None = None) -> str:
    """Bind `host:port` (port 0: any free one) or `unix:/path`; returns the address with the port in it.

    Raises:
        StartError: the address is in use or cannot be bound.
        TlsFileError: a certificate cannot be used.
    """
    if address.startswith("unix:"):
        _check_socket_is_free(address.removeprefix("unix:"))
    credentials = None if tls is None else tls.credentials()
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
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


@contextlib.contextmanager
def reserve(address: str, shared: bool = True) -> Iterator[str]:
    """Keep `address` for processes that share it; yields it, with the port in it. Where only one process serves, it binds by
    itself, and nothing is kept.

    Raises:
        StartError: it is in use, cannot be bound, or cannot be shared here.
    """
    if not shared:
        yield address
        return
    if not hasattr(socket, "SO_REUSEPORT"):
        raise StartError("processes cannot share a port on this system: use --workers 1")
    host, _, port = address.rpartition(":")
    try:
        kept = _bind_for_all(host.strip("[]"), int(port))
    except OSError as error:
        raise StartError(f"cannot listen on {address}: {error.strerror or error}") from error
    with kept:
        yield f"{host}:{kept.getsockname()[1]}"


@contextlib.contextmanager
def hold(address: str) -> Iterator[str]:
    """Keep `address` for a server that is still to be started and then binds it alone; yields it, with the port in it. Whoever
    connects meanwhile is refused.

    Raises:
        StartError: it is in use, or cannot be bound.
    """
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        kept = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartError(f"cannot listen on {address}: {error.strerror or error}") from error
    with kept:
        if int(port):  # connections of a server that was there before may still be closing; a port of our choice has none
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            kept.bind(place)
        except OSError as error:
            raise StartError(f"cannot listen on {address}: {error.strerror or error}") from error
        yield f"{host}:{kept.getsockname()[1]}"


def _bind_for_all(host: str, port: int) -> socket.socket:
    """A socket that holds the address and lets others of this user share it. It does not listen: no connection is for it."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Alone first: with sharing switched on, another front end on this port would go unnoticed.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(place)
        place = (place[0], probe.getsockname()[1], *place[2:])
    kept = socket.socket(family, kind, protocol)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    kept.bind(place)
    return kept
