"""How a client of the public port shows who it is, and makes sure of whom it talks to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc

from pagemirror.addresses import is_local
from scheduler_service.channels import open_channel
from scheduler_service.errors import StartError
from scheduler_service.tls import ClientTls
from scheduler_service.tokens import TokenFile

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """Certificates (None: plaintext) and the token to show (None: none).

    Raises:
        TokenFileError: the token file cannot be used.
    """

    tls: ClientTls | None = None
    tokens: TokenFile | None = None
    insecure: bool = False
    """Show the token without TLS, too, where it travels to another machine."""

    @classmethod
    def of(
        cls,
        *,
        tls_ca: Path | None = None,
        tls_cert: Path | None = None,
        tls_key: Path | None = None,
        tls_name: str = "",
        token_file: Path | None = None,
        insecure: bool = False,
    ) -> Self:
        """From options, as a command line has them. Raises StartError when they do not go together."""
        if (tls_cert is None) is not (tls_key is None):
            raise StartError("--tls-cert and --tls-key go together")
        if tls_ca is None and (tls_cert is not None or tls_name):
            raise StartError("--tls-cert, --tls-key and --tls-name need --tls-ca: the authority of the server's certificate")
        tls = None if tls_ca is None else ClientTls(tls_ca, tls_cert, tls_key, tls_name)
        return cls(tls, None if token_file is None else TokenFile(token_file), insecure)

    def channel(self, target: str) -> grpc.aio.Channel:
        """A channel to `target`.

        Raises:
            TlsFileError: a certificate cannot be used.
            StartError: the token would travel to another machine without TLS.
        """
        if self.tokens is not None and self.tls is None and not self.insecure and not is_local(target):
            raise StartError(
                f"the token would travel to {target} in the clear; give --tls-ca, or say --insecure if the network is trusted"
            )
        return open_channel(target, self.tls)

    def metadata(self) -> Metadata:
        """What goes with a call that begins now."""
        return () if self.tokens is None else self.tokens.metadata()
