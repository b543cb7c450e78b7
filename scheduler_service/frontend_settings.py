"""Settings of `pagemirror frontend`: command line over environment (`PAGEMIRROR_…`) over defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from scheduler_service.client_security import ClientSecurity
from scheduler_service.errors import StartError
from scheduler_service.public_settings import PublicSettings, check_address, load


class FrontendSettings(PublicSettings):
    """Everything `pagemirror frontend` can be told. Limits are those of each worker."""

    scheduler: str
    """Its address."""
    workers: int = Field(default=1, ge=1, le=256)
    worker: int = Field(default=0, ge=0)
    """Number of the worker that reads these."""
    scheduler_tls_ca: Path | None = None
    scheduler_tls_cert: Path | None = None
    scheduler_tls_key: Path | None = None
    scheduler_tls_name: str = ""
    scheduler_token_file: Path | None = None

    @field_validator("scheduler")
    @classmethod
    def _is_scheduler(cls, value: str) -> str:
        check_address(value)
        return value

    @model_validator(mode="after")
    def _can_be_shared(self) -> Self:
        if self.metrics_port and self.metrics_port + self.workers > 65536:
            raise ValueError(f"--metrics-port {self.metrics_port} leaves no port each for {self.workers} workers")
        for option, address in (("--listen", self.listen), ("--gateway-listen", self.gateway_listen or "")):
            if self.workers > 1 and address.startswith("unix:"):
                raise ValueError(f"--workers above 1 needs {option} HOST:PORT: processes cannot share a unix socket")
        return self

    def of_worker(self, n: int) -> FrontendSettings:
        """What worker `n`, from 0, is told: its metrics have the port `n` above the given one."""
        port = self.metrics_port + n if self.metrics_port else self.metrics_port
        return self.model_copy(update={"worker": n, "metrics_port": port})

    def security(self) -> ClientSecurity:
        """Towards the scheduler. Raises StartError for files that cannot be used."""
        try:
            return ClientSecurity.of(
                tls_ca=self.scheduler_tls_ca,
                tls_cert=self.scheduler_tls_cert,
                tls_key=self.scheduler_tls_key,
                tls_name=self.scheduler_tls_name,
                token_file=self.scheduler_token_file,
                insecure=self.insecure,
            )
        except StartError as error:
            raise StartError(f"towards the scheduler: {error}") from error


def load_frontend_settings(**given: object) -> FrontendSettings:
    """Settings from the values given (None: not given), then the environment, then the defaults. Raises SettingsError."""
    return load(FrontendSettings, given)
