"""Settings of the scheduler process: command line over environment (`PAGEMIRROR_…`) over defaults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from scheduler_service.agreement import ExpectedShape
from scheduler_service.channels import KEEPALIVE_S, is_local
from scheduler_service.core.config import MAX_OVERLAP_DEPTH, RefreshPolicy, SchedulerConfig, Verify
from scheduler_service.core.errors import PagemirrorError
from scheduler_service.runtime_client import LinkLimits
from scheduler_service.tls import ClientTls, ServerTls
from scheduler_service.wire import RuntimeFacts, max_lease_bytes

GREEDY_ONLY_ARCHITECTURE = "fingerprint"
"""What the runtime's hello calls the model that has no logits."""

SERVED_POLICIES = tuple(policy.value for policy in RefreshPolicy if policy is not RefreshPolicy.TAIL_ONLY)


class SettingsError(PagemirrorError):
    """A setting is missing or out of range; one line for each."""


class SchedulerSettings(BaseSettings):
    """Everything `pagemirror scheduler` can be told. Times are in seconds.

    `page_size`, `num_pages`, `max_rows` and `max_pages_per_row` are the runtime's to state; a value here is a check of it.
    """

    model_config = SettingsConfigDict(env_prefix="PAGEMIRROR_", extra="ignore")

    runtime: str
    """Its address, or with commas between them those of several that receive the same ops."""
    listen: str = "127.0.0.1:50051"
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    metrics_host: str | None = None

    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    token_file: Path | None = None
    insecure: bool = False
    runtime_tls_ca: Path | None = None
    runtime_tls_cert: Path | None = None
    runtime_tls_key: Path | None = None
    runtime_tls_name: str = ""

    max_streams: int = Field(default=1024, ge=1, le=1_000_000)
    max_connections: int = Field(default=512, ge=1, le=1_000_000)
    max_message_mib: int = Field(default=16, ge=1, le=1024)
    session_window: int = Field(default=1024, ge=1, le=1_000_000)
    max_unread_tokens: int = Field(default=65_536, ge=1, le=2**31 - 1)
    write_timeout: float = Field(default=60.0, gt=0)
    keepalive: float = Field(default=KEEPALIVE_S, ge=0.1, le=86_400)

    page_size: int | None = Field(default=None, ge=1)
    num_pages: int | None = Field(default=None, ge=1)
    max_rows: int | None = Field(default=None, ge=1)
    max_pages_per_row: int | None = Field(default=None, ge=1)

    token_budget: int = Field(default=2048, ge=1, le=2**24)
    chunk_size: int = Field(default=512, ge=1, le=2**24)
    refresh_policy: RefreshPolicy = RefreshPolicy.TRANSITION
    overlap_depth: int = Field(default=1, ge=0, le=MAX_OVERLAP_DEPTH)
    mixed: bool = True
    prefix_cache: bool = True
    max_waiting: int = Field(default=1024, ge=0)
    check: bool = False
    dump_dir: Path = Field(default=Path(), validate_default=True)
    verify: Verify = Verify.OFF
    verify_interval: int = Field(default=64, ge=1, le=2**31 - 1)
    verify_window: float = Field(default=600.0, ge=0)

    startup_timeout: float = Field(default=600.0, gt=0)
    runtime_timeout: float = Field(default=60.0, gt=0)
    heartbeat_timeout: float = Field(default=5.0, gt=0)
    step_timeout: float = Field(default=120.0, gt=0)
    grace: float = Field(default=30.0, ge=0)

    log_level: str = "info"
    log_json: bool = False

    @field_validator("listen")
    @classmethod
    def _is_address(cls, value: str) -> str:
        check_address(value)
        return value

    @field_validator("runtime")
    @classmethod
    def _are_addresses(cls, value: str) -> str:
        parts = split_addresses(value)
        for part in parts:
            check_address(part)
            if parts.count(part) > 1:
                raise ValueError(f"names {part} twice; each rank has an address of its own")
        return ",".join(parts)

    @field_validator("refresh_policy")
    @classmethod
    def _is_served(cls, value: RefreshPolicy) -> RefreshPolicy:
        if value is RefreshPolicy.TAIL_ONLY:
            raise ValueError(
                f"tail_only is wrong on purpose and is for `simulate` and `demo` alone; choose {', '.join(SERVED_POLICIES)}"
            )
        return value

    @field_validator("dump_dir")
    @classmethod
    def _is_folder(cls, value: Path, info: ValidationInfo) -> Path:
        # Looked at before anything fails, and only where it is wanted; `check` was validated before.
        if info.data.get("check") and not (value.is_dir() and os.access(value, os.W_OK)):
            raise ValueError("must be a folder that can be written to, since --check is on")
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
        check_pair("runtime-tls", self.runtime_tls_cert, self.runtime_tls_key)
        if self.tls_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-ca needs --tls-cert and --tls-key: it is for checking clients over TLS")
        if self.runtime_tls_ca is None and (self.runtime_tls_cert is not None or self.runtime_tls_name):
            raise ValueError("--runtime-tls-cert, --runtime-tls-key and --runtime-tls-name need --runtime-tls-ca")
        if self.insecure:
            return self
        if self.tls_cert is None and not is_local(self.listen):
            raise ValueError(
                f"--listen {self.listen} can be reached from other machines, and without TLS they would read and change"
                " everything; give --tls-cert and --tls-key, listen on 127.0.0.1 or unix:/PATH, or say --insecure"
            )
        if self.metrics_host is not None and not is_local(f"{self.metrics_host}:0"):
            raise ValueError(
                f"--metrics-host {self.metrics_host} can be reached from other machines, and metrics are plain HTTP;"
                " listen on 127.0.0.1 or say --insecure"
            )
        return self

    @property
    def tls(self) -> ServerTls | None:
        """Of the public port; None: plaintext."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return ServerTls(self.tls_cert, self.tls_key, self.tls_ca)

    @property
    def runtime_tls(self) -> ClientTls | None:
        """Of the links to runtimes; None: plaintext."""
        if self.runtime_tls_ca is None:
            return None
        return ClientTls(self.runtime_tls_ca, self.runtime_tls_cert, self.runtime_tls_key, self.runtime_tls_name)

    @property
    def metrics_address(self) -> str:
        """Host for the metrics: that of the public port where plaintext may be spoken on it."""
        if self.metrics_host is not None:
            return self.metrics_host
        if self.listen.startswith("unix:") or not (self.insecure or is_local(self.listen)):
            return "127.0.0.1"
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def runtimes(self) -> tuple[str, ...]:
        """Addresses of the runtimes that receive the same ops, at least one."""
        return split_addresses(self.runtime)

    @property
    def expected(self) -> ExpectedShape:
        """What the runtime must say."""
        return ExpectedShape(self.page_size, self.num_pages, self.max_rows, self.max_pages_per_row)

    @property
    def limits(self) -> LinkLimits:
        """Time limits and certificates of a link to a runtime."""
        return LinkLimits(heartbeat_timeout_s=self.heartbeat_timeout, step_timeout_s=self.step_timeout, tls=self.runtime_tls)

    def core_config(self, facts: RuntimeFacts) -> SchedulerConfig:
        """The core's configuration: limits of the runtime, policy of these settings. Raises ConfigError."""
        return SchedulerConfig(
            page_size=facts.page_size,
            num_pages=facts.num_pages,
            max_rows=facts.max_rows,
            max_pages_per_row=facts.max_pages_per_row,
            vocab_size=facts.vocab_size,
            max_context=facts.max_context,
            token_budget=self.token_budget,
            chunk_size=self.chunk_size,
            refresh_policy=self.refresh_policy,
            overlap_depth=self.overlap_depth,
            mixed=self.mixed,
            prefix_cache=self.prefix_cache,
            max_waiting=self.max_waiting,
            greedy_only=facts.architecture == GREEDY_ONLY_ARCHITECTURE,
            max_lease_bytes=max_lease_bytes(facts, self.token_budget),
            verify=self.verify,
            verify_interval=self.verify_interval,
        )


def load_settings(**given: object) -> SchedulerSettings:
    """Settings from the values given (None: not given), then the environment, then the defaults.

    Raises:
        SettingsError: names each wrong setting, its value and what it must be.
    """
    try:
        return SchedulerSettings(**{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        raise SettingsError("\n".join(_line(dict(entry)) for entry in error.errors())) from error


def split_addresses(value: str) -> tuple[str, ...]:
    """The parts of a list with commas."""
    return tuple(part.strip() for part in value.split(","))


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
