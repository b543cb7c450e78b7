"""Settings of the HTTP port of `pagemirror up --http`: command line over environment (`PAGEMIRROR_…`) over defaults."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pagemirror.addresses import is_local
from scheduler_service.errors import StartError
from scheduler_service.public_settings import check_address, check_pair, load
from scheduler_service.text import is_byte_level
from scheduler_service.tokens import TokenFile


class HttpSettings(BaseSettings):
    """Where smg listens, and what it is told. Certificate, tokens and grace are those of the gRPC port."""

    model_config = SettingsConfigDict(env_prefix="PAGEMIRROR_", extra="ignore")

    http: str
    """A port of 127.0.0.1, or HOST:PORT."""
    model: str
    """As the runtime is told."""
    gateway_tokenizer: Path | None = None
    """Folder of the tokenizer's files; None: the model's."""
    gateway_listen: str = "127.0.0.1:0"
    """The worker's port, between the two of us."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    token_file: Path | None = None
    insecure: bool = False
    grace: float = Field(default=30.0, ge=0)
    log_level: str = "info"
    log_json: bool = False

    @field_validator("http")
    @classmethod
    def _is_address(cls, value: str) -> str:
        value = f"127.0.0.1:{value}" if value.isdecimal() else value
        if value.startswith("unix:"):
            raise ValueError("must be PORT or HOST:PORT")
        try:
            check_address(value)
        except ValueError as error:
            raise ValueError("must be PORT or HOST:PORT") from error
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        folder = Path(self.model) if self.gateway_tokenizer is None else self.gateway_tokenizer
        if not is_byte_level(self.model, "") and not (folder / "tokenizer.json").is_file():
            raise ValueError(
                f"--http needs a tokenizer, and there is no tokenizer.json in {folder}; name a folder that has one with"
                " --gateway-tokenizer"
            )
        if self.gateway_listen.startswith("unix:"):
            raise ValueError("--gateway-listen must be HOST:PORT with --http: smg reaches its workers by TCP only")
        check_pair("tls", self.tls_cert, self.tls_key)
        if self.tls_ca is not None:
            raise ValueError(
                "--tls-ca has gRPC clients show a certificate, which the gateway cannot ask of HTTP clients; start it apart"
                " (docs/serving.md), or use --token-file instead"
            )
        if self.tls_cert is None and not self.insecure and not is_local(self.http):
            raise ValueError(
                f"--http {self.http} can be reached from other machines, and without TLS they would read and change"
                " everything; give --tls-cert and --tls-key, listen on 127.0.0.1, or say --insecure"
            )
        return self

    def tokens(self) -> list[str]:
        """What clients must show as API key; empty: nothing. Raises TokenFileError."""
        return [] if self.token_file is None else TokenFile(self.token_file).texts()

    @property
    def url(self) -> str:
        """What an OpenAI client is given as its base address."""
        return f"{'http' if self.tls_cert is None else 'https'}://{self.http}/v1"


def load_http_settings(**given: object) -> HttpSettings:
    """Settings from the values given (None: not given), then the environment, then the defaults.

    Raises:
        SettingsError: names each wrong setting, its value and what it must be.
        StartError: the gateway is not installed.
    """
    settings = load(HttpSettings, given)
    missing = [name for name in ("smg", "smg_grpc_proto") if importlib.util.find_spec(name) is None]
    if missing:
        raise StartError(f"--http needs {' and '.join(missing)}, not installed here: pip install 'pagemirror[gateway]'")
    return settings
