"""Taking the address to listen on, and saying plainly when somebody else has it."""

from __future__ import annotations

import os
import re
import socket
import stat
from pathlib import Path

from grpc import aio

from runtime_service.errors import AddressInUseError
from runtime_service.tls import TlsFiles

UNIX_PREFIX = "unix:"
PROBE_TIMEOUT_S = 1.0


def claim_unix_path(listen: str) -> None:
    """Refuse a unix socket that somebody serves, remove one that nobody does; does nothing for `host:port`.

    gRPC unlinks whatever lies at the path before it binds, so that without this a second runtime would silently take the
    address away from the first. Raises AddressInUseError.
    """
    if not listen.startswith(UNIX_PREFIX):
        return
    path = Path(listen.removeprefix(UNIX_PREFIX))
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise AddressInUseError(listen, "there is a file that is no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(PROBE_TIMEOUT_S)
            probe.connect(str(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
        return
    except OSError as error:
        raise AddressInUseError(listen, f"what lies there cannot be asked: {error}") from None
    raise AddressInUseError(listen, "another process serves this socket")


def bind(server: aio.Server, listen: str, tls: TlsFiles | None = None) -> str:
    """Bind the server; returns the address with the port that was really taken.

    Raises AddressInUseError, and SettingError for certificates that cannot be used.
    """
    if listen.startswith(UNIX_PREFIX):
        folder = Path(listen.removeprefix(UNIX_PREFIX)).absolute().parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise AddressInUseError(listen, f"{folder} is no folder that this process may write to")
    credentials = None if tls is None else tls.credentials()
    try:
        if credentials is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise AddressInUseError(listen, _reason(error)) from None
    if port == 0:  # what some versions return instead of raising
        raise AddressInUseError(listen, "address already in use, or not one of this machine")
    return listen if listen.startswith(UNIX_PREFIX) else f"{listen.rpartition(':')[0]}:{port}"


def _reason(error: RuntimeError) -> str:
    if re.search(r"in use|EADDRINUSE", str(error), re.IGNORECASE):
        return "address already in use"
    return "address already in use, or not one of this machine"
