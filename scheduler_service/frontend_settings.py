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
        if self.workers > 1 and self.listen.startswith("unix:"):
            raise ValueError("--workers above 1 needs --listen HOST:PORT: processes cannot share a unix socket")
        return self

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
