"""Certificates: PEM files, checked before they are used, and read again when they change.

A server asks for its files at every handshake, a client when it connects. Connections that are open keep what they were opened
with: a new certificate costs nobody a stream.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import grpc
import structlog

from scheduler_service.errors import StartError

log = structlog.get_logger("pagemirror.tls")

Stamp = tuple[tuple[int, int, int] | None, ...]


class TlsFileError(StartError):
    """A certificate or key cannot be used; the message names the file and never shows what is in it."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: {reason}")


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Files of a server. With `ca`, clients must show a certificate that descends from it; without, any client may connect."""

    cert: Path
    key: Path
    ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port`. They follow the files: a handshake uses what the files say then.

        Raises:
            TlsFileError: a file cannot be used now. Later on the last good ones are kept, and the log says so.
        """
        first = _configuration(self)
        credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            first,
            _Reloader(self),  # type: ignore[arg-type]  # the stubs forget that None means: as before
            require_client_authentication=self.ca is not None,
        )
        return credentials


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Files of a client. The server's certificate must descend from `ca` and be valid for `name`, or else for the host in the
    target. `cert` and `key`: what the client shows, where the server asks for it.
    """

    ca: Path
    cert: Path | None = None
    key: Path | None = None
    name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """For `secure_channel`, from what the files say now. Raises TlsFileError."""
        ca = _read_ca(self.ca)
        if self.cert is None or self.key is None:
            return grpc.ssl_channel_credentials(ca)
        cert, key = _read_pair(self.cert, self.key)
        return grpc.ssl_channel_credentials(ca, key, cert)


class _Reloader:
    """What gRPC calls at every handshake, in threads of its own."""

    def __init__(self, files: ServerTls) -> None:
        self._files = files
        self._stamp = _stamp(files)
        self._said = ""
        self._lock = Lock()

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        """The new configuration; None: as before."""
        with self._lock:
            stamp = _stamp(self._files)
            if stamp == self._stamp:
                return None
            try:
                configuration = _configuration(self._files)
            except TlsFileError as error:
                # Half of a rotation, as a rule: the certificate is new, the key not yet.
                if str(error) != self._said:
                    self._said = str(error)
                    log.error("certificate_not_reloaded", reason=self._said)
                return None
            self._stamp, self._said = stamp, ""
        log.info("certificate_reloaded", cert=str(self._files.cert))
        return configuration


def _configuration(files: ServerTls) -> grpc.ServerCertificateConfiguration:
    cert, key = _read_pair(files.cert, files.key)
    ca = None if files.ca is None else _read_ca(files.ca)
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)


def _stamp(files: ServerTls) -> Stamp:
    """Tells whether a file was changed or replaced, also through a link."""
    found: list[tuple[int, int, int] | None] = []
    for path in (files.cert, files.key, files.ca):
        try:
            status = os.stat(path) if path is not None else None
        except OSError:
            status = None
        found.append(None if status is None else (status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)


def _read_pair(cert_path: Path, key_path: Path) -> tuple[bytes, bytes]:
    cert, key = _read(cert_path), _read(key_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert_path, key_path, password=_no_password)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise TlsFileError(cert_path, f"this certificate and the key {key_path} cannot be used: {_reason(error)}") from None
    if (cert, key) != (_read(cert_path), _read(key_path)):
        raise TlsFileError(cert_path, "changed while it was being read")
    return cert, key


def _read_ca(path: Path) -> bytes:
    data = _read(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii", "replace"))
    except (OSError, ValueError) as error:
        raise TlsFileError(path, f"holds no certificates of an authority: {_reason(error)}") from None
    return data


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsFileError(path, error.strerror or "cannot be read") from None


def _no_password() -> str:
    # Without it OpenSSL would ask on the terminal.
    raise ValueError("the key is encrypted, and there is nobody to ask for its password")


def _reason(error: Exception) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    return (reason or "").replace("_", " ").lower() or str(error) or type(error).__name__
