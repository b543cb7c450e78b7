"""The runtime's certificates: PEM files, checked before they are used, and read again at the first handshake after a change.

Connections that are open keep what they were opened with.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import grpc
import structlog

from runtime_service.errors import SettingError

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """With `ca`, schedulers must show a certificate that descends from it; without, whoever connects is served."""

    cert: Path
    key: Path
    ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port`. They follow the files; a file that cannot be used any more leaves the last good ones in place.

        Raises SettingError when a file cannot be used now.
        """
        first = self.read()
        credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            first,
            _Reloader(self),  # type: ignore[arg-type]  # the stubs forget that None means: as before
            require_client_authentication=self.ca is not None,
        )
        return credentials

    def read(self) -> grpc.ServerCertificateConfiguration:
        """What the files say now. Raises SettingError, which never shows what is in them."""
        cert, key = _read("--tls-cert", self.cert), _read("--tls-key", self.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise SettingError("--tls-cert", self.cert, f"and --tls-key {self.key} cannot be used: {_reason(error)}") from None
        if (cert, key) != (_read("--tls-cert", self.cert), _read("--tls-key", self.key)):
            raise SettingError("--tls-cert", self.cert, "changed while it was being read")
        ca = None
        if self.ca is not None:
            ca = _read("--tls-ca", self.ca)
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=ca.decode("ascii", "replace"))
            except (OSError, ValueError) as error:
                reason = f"holds no certificates of an authority: {_reason(error)}"
                raise SettingError("--tls-ca", self.ca, reason) from None
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)

    def stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Differs when a file was changed or replaced, also behind a link."""
        return tuple(None if path is None else _look(path) for path in (self.cert, self.key, self.ca))


class _Reloader:
    """What gRPC calls at every handshake, in threads of its own."""

    def __init__(self, files: TlsFiles) -> None:
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
            except SettingError as error:
                # Half of a rotation, as a rule: the certificate is new, the key not yet.
                if str(error) != self._said:
                    self._said = str(error)
                    log.error("certificate not reloaded", reason=self._said)
                return None
            self._stamp, self._said = stamp, ""
        log.info("certificate reloaded", cert=str(self._files.cert))
        return configuration


def _look(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingError(option, path, f"cannot be read: {error.strerror or error}") from None


def _no_password() -> str:
    # Without it OpenSSL would ask on the terminal.
    raise ValueError("the key is encrypted, and there is nobody to ask for its password")


def _reason(error: Exception) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    return (reason or "").replace("_", " ").lower() or str(error) or type(error).__name__
