"""Certificates of the public port and of the links, and what is said of one that cannot be used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc
from typing_extensions import override

from pagemirror.certificates import ServerCertificates, read_ca, read_pair
from scheduler_service.errors import StartError


class TlsFileError(StartError):
    """A certificate or key cannot be used; the message names the file and never shows what is in it."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: {reason}")


class ServerTls(ServerCertificates):
    """Files of a public server. What uses them raises TlsFileError."""

    @staticmethod
    @override
    def fail(role: str, path: Path, reason: str) -> TlsFileError:
        return TlsFileError(path, reason.removeprefix("cannot be read: "))


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Files of a client, read when it connects. The server's certificate must descend from `ca` and be valid for `name`, or
    else for the host in the target. `cert` and `key`: what the client shows, where the server asks for it.
    """

    ca: Path
    cert: Path | None = None
    key: Path | None = None
    name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """For `secure_channel`, from what the files say now. Raises TlsFileError."""
        ca = read_ca(self.ca, ServerTls.fail)
        if self.cert is None or self.key is None:
            return grpc.ssl_channel_credentials(ca)
        cert, key = read_pair(self.cert, self.key, ServerTls.fail)
        return grpc.ssl_channel_credentials(ca, key, cert)
