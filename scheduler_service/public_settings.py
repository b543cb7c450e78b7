"""Settings of a public port, whichever process serves it, and how settings are read and refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pagemirror.addresses import is_local
from scheduler_service.channels import KEEPALIVE_S
from scheduler_service.core.errors import PagemirrorError
from scheduler_service.tls import ServerTls

_S = TypeVar("_S", bound=BaseSettings)


class SettingsError(PagemirrorError):
    """A setting is missing or out of range; one line for each."""


class PublicSettings(BaseSettings):
    """Where to serve, to whom, and within which limits. Times are in seconds."""

    model_config = SettingsConfigDict(env_prefix="PAGEMIRROR_", extra="ignore")

    listen: str = "127.0.0.1:50051"
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    token_file: Path | None = None
    insecure: bool = False
    reflection: bool = False
    page_events: bool | None = None
    """Serve SubscribePageEvents. None: where only this machine can reach `listen`."""

    gateway_listen: str | None = None
    """Where a gateway is served, if any is."""
    api: Literal["tokenspeed", "vllm"] = "tokenspeed"
    """Whose worker the gateway finds there."""
    gateway_tokenizer: Path | None = None
    """Folder of the tokenizer's files on this machine; None: the one that the runtime names."""

    max_streams: int = Field(default=1024, ge=1, le=1_000_000)
    max_connections: int = Field(default=512, ge=1, le=1_000_000)
    max_message_mib: int = Field(default=16, ge=1, le=1024)
    max_unread_tokens: int = Field(default=65_536, ge=1, le=2**31 - 1)
    write_timeout: float = Field(default=60.0, gt=0)
    keepalive: float = Field(default=KEEPALIVE_S, ge=0.1, le=86_400)

    grace: float = Field(default=30.0, ge=0)

    otlp_endpoint: str | None = None
    """Where traces are sent: the URL of a collector that speaks OTLP over gRPC."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    metrics_host: str | None = None

    log_level: str = "info"
    log_json: bool = False

    @field_validator("listen")
    @classmethod
    def _is_address(cls, value: str) -> str:
        check_address(value)
        return value

    @field_validator("gateway_listen")
    @classmethod
    def _is_gateway_address(cls, value: str | None) -> str | None:
        if value is not None:
            check_address(value)
        return value

    @field_validator("gateway_tokenizer")
    @classmethod
    def _has_tokenizer(cls, value: Path | None) -> Path | None:
        if value is not None and not (value / "tokenizer.json").is_file():
            raise ValueError("must be a folder with a tokenizer.json")
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("must be http://HOST:PORT or https://HOST:PORT")
        return value

    @field_validator("log_level")
    @classmethod
    def _is_level(cls, value: str) -> str:
        if value.lower() not in {"debug", "info", "warning", "error"}:
            raise ValueError("must be debug, info, warning or error")
        return value.lower()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        check_pair("tls", self.tls_cert, self.tls_key)
        if self.tls_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-ca needs --tls-cert and --tls-key: it is for checking clients over TLS")
        if self.tls_cert is None and not self.insecure and not is_local(self.listen):
            raise ValueError(
                f"--listen {self.listen} can be reached from other machines, and without TLS they would read and change"
                " everything; give --tls-cert and --tls-key, listen on 127.0.0.1 or unix:/PATH, or say --insecure"
            )
        if self.gateway_listen is not None and not self.insecure and not is_local(self.gateway_listen):
            raise ValueError(
                f"--gateway-listen {self.gateway_listen} can be reached from other machines, and a gateway speaks to its"
                " workers without TLS and without a token; listen on 127.0.0.1 or unix:/PATH, or say --insecure"
            )
        if self.metrics_host is not None and not self.insecure and not is_local(f"{self.metrics_host}:0"):
            raise ValueError(
                f"--metrics-host {self.metrics_host} can be reached from other machines, and metrics are plain HTTP;"
                " listen on 127.0.0.1 or say --insecure"
            )
        return self

    @property
    def serves_page_events(self) -> bool:
        """Whether callers may read which prompts are cached."""
        return is_local(self.listen) if self.page_events is None else self.page_events

    @property
    def tls(self) -> ServerTls | None:
        """Of the public port; None: plaintext."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return ServerTls(self.tls_cert, self.tls_key, self.tls_ca)

    @property
    def metrics_address(self) -> str:
        """Host for the metrics: that of the public port where plaintext may be spoken on it."""
        if self.metrics_host is not None:
            return self.metrics_host
        if self.listen.startswith("unix:") or not (self.insecure or is_local(self.listen)):
            return "127.0.0.1"
        return self.listen.rpartition(":")[0].strip("[]")


def load(kind: type[_S], given: Mapping[str, object]) -> _S:
    """Settings from the values given (None: not given), then the environment, then the defaults.

    Raises:
        SettingsError: names each wrong setting, its value and what it must be.
    """
    try:
        return kind(**{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        raise SettingsError("\n".join(_line(dict(entry)) for entry in error.errors())) from error


def check_address(value: str) -> None:
    """Raises ValueError when `value` is neither host:port nor unix:/path."""
    if value.startswith("unix:"):
        path = value.removeprefix("unix:")
        if not path:
            raise ValueError("needs a path after 'unix:'")
        if len(path.encode()) > 100:
            raise ValueError(f"the socket's path has {len(path.encode())} bytes, but at most 100 work everywhere")
        return
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("must be HOST:PORT or unix:/PATH")


def check_pair(name: str, cert: Path | None, key: Path | None) -> None:
    """Raises ValueError when one of a certificate and its key is given without the other."""
    if (cert is None) is not (key is None):
        given, missing = ("cert", "key") if key is None else ("key", "cert")
        raise ValueError(f"--{name}-{given} needs --{name}-{missing}")


def _line(entry: dict[str, object]) -> str:
    location = entry.get("loc", ())
    key = ".".join(str(part) for part in location) if isinstance(location, tuple) else str(location)
    option = "--" + key.replace("_", "-")
    message = str(entry.get("msg", "is wrong")).removeprefix("Value error, ")
    if not location:
        return message  # about several settings, which it names
    if entry.get("type") == "missing":
        return f"{option} is missing (or PAGEMIRROR_{key.upper()} in the environment)"
    return f"{option} is {entry.get('input')!r}: {message}"
