"""Certificates: PEM files, checked before they are used, and read again when they change. For both sides of the wire, each of
which says in its own words, and with its own exception, what is wrong with a file.

A server asks for its files at every handshake. Connections that are open keep what they were opened with: a new certificate
costs nobody a stream.
"""

from __future__ import annotations

import os
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    import grpc

log = structlog.get_logger("pagemirror.tls")

Fail = Callable[[str, Path, str], Exception]
"""Makes the exception: which file it is ("cert", "key" or "ca"), its path, and what is wrong with it."""


@dataclass(frozen=True)
class ServerCertificates(ABC):
    """Files of a server. With `ca`, clients must show a certificate that descends from it; without, any client may connect."""

    cert: Path
    key: Path
    ca: Path | None = None

    @staticmethod
    @abstractmethod
    def fail(role: str, path: Path, reason: str) -> Exception:
        """The exception for a file that cannot be used; see `Fail`."""

    def credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port`. They follow the files: a handshake uses what the files say then.

        Raises what `fail` makes when a file cannot be used now. Later on the last good ones are kept, and the log says so.
        """
        import grpc  # settings name such files also where nothing is served

        credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            self.read(),
            _Reloader(self),  # type: ignore[arg-type]  # the stubs forget that None means: as before
            require_client_authentication=self.ca is not None,
        )
        return credentials

    def read(self) -> grpc.ServerCertificateConfiguration:
        """What the files say now. Raises what `fail` makes; it never shows what is in them."""
        cert, key = read_pair(self.cert, self.key, self.fail)
        ca = None if self.ca is None else read_ca(self.ca, self.fail)
        import grpc

        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)

    def stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Differs when a file was changed or replaced, also behind a link."""
        return tuple(None if path is None else _look(path) for path in (self.cert, self.key, self.ca))


class _Reloader:
    """What gRPC calls at every handshake, in threads of its own."""

    def __init__(self, files: ServerCertificates) -> None:
        self._files = files
        self._stamp = files.stamp()
        self._said = ""
        self._lock = Lock()

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        """The new configuration; None: as before."""
        with self._lock:
            stamp = self._files.stamp()
            if stamp == self._stamp:
                return None
            try:
                configuration = self._files.read()
            except Exception as error:
                # Half of a rotation, as a rule: the certificate is new, the key not yet.
                if str(error) != self._said:
                    self._said = str(error)
                    log.error("certificate_not_reloaded", reason=self._said)
                return None
            self._stamp, self._said = stamp, ""
        log.info("certificate_reloaded", cert=str(self._files.cert))
        return configuration


def read_pair(cert_path: Path, key_path: Path, fail: Fail) -> tuple[bytes, bytes]:
    """A certificate and its key, which fit together. Raises what `fail` makes."""
    cert, key = _read("cert", cert_path, fail), _read("key", key_path, fail)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert_path, key_path, password=_no_password)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise fail("cert", cert_path, f"cannot be used with the key {key_path}: {_reason(error)}") from None
    if (cert, key) != (_read("cert", cert_path, fail), _read("key", key_path, fail)):
        raise fail("cert", cert_path, "changed while it was being read")
    return cert, key


def read_ca(path: Path, fail: Fail) -> bytes:
    """Certificates of an authority. Raises what `fail` makes."""
    data = _read("ca", path, fail)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii", "replace"))
    except (OSError, ValueError) as error:
        raise fail("ca", path, f"holds no certificates of an authority: {_reason(error)}") from None
    return data


def _look(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(role: str, path: Path, fail: Fail) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise fail(role, path, f"cannot be read: {error.strerror or error}") from None


def _no_password() -> str:
    # Without it OpenSSL would ask on the terminal.
    raise ValueError("the key is encrypted, and there is nobody to ask for its password")


def _reason(error: Exception) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    return (reason or "").replace("_", " ").lower() or str(error) or type(error).__name__
