"""Settings of the scheduler process: command line over environment (`PAGEMIRROR_…`) over defaults."""

from __future__ import annotations

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from scheduler_service.core.config import MAX_OVERLAP_DEPTH, RefreshPolicy, SchedulerConfig
from scheduler_service.core.errors import PagemirrorError
from scheduler_service.runtime_client import ExpectedShape, LinkLimits
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
    listen: str = "127.0.0.1:50051"
    metrics_port: int | None = Field(default=None, ge=0, le=65535)

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

    startup_timeout: float = Field(default=600.0, gt=0)
    runtime_timeout: float = Field(default=60.0, gt=0)
    heartbeat_timeout: float = Field(default=5.0, gt=0)
    step_timeout: float = Field(default=120.0, gt=0)
    grace: float = Field(default=30.0, ge=0)

    log_level: str = "info"
    log_json: bool = False

    @field_validator("listen", "runtime")
    @classmethod
    def _is_address(cls, value: str) -> str:
        check_address(value)
        return value

    @field_validator("refresh_policy")
    @classmethod
    def _is_served(cls, value: RefreshPolicy) -> RefreshPolicy:
        if value is RefreshPolicy.TAIL_ONLY:
            raise ValueError(
                f"tail_only is wrong on purpose and is for `simulate` and `demo` alone; choose {', '.join(SERVED_POLICIES)}"
            )
        return value

    @field_validator("log_level")
    @classmethod
    def _is_level(cls, value: str) -> str:
        if value.lower() not in {"debug", "info", "warning", "error"}:
            raise ValueError("must be debug, info, warning or error")
        return value.lower()

    @property
    def expected(self) -> ExpectedShape:
        """What the runtime must say."""
        return ExpectedShape(self.page_size, self.num_pages, self.max_rows, self.max_pages_per_row)

    @property
    def limits(self) -> LinkLimits:
        """Time limits of the link to the runtime."""
        return LinkLimits(heartbeat_timeout_s=self.heartbeat_timeout, step_timeout_s=self.step_timeout)

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


def _line(entry: dict[str, object]) -> str:
    location = entry.get("loc", ())
    key = ".".join(str(part) for part in location) if isinstance(location, tuple) else str(location)
    option = "--" + key.replace("_", "-")
    message = str(entry.get("msg", "is wrong")).removeprefix("Value error, ")
    if entry.get("type") == "missing":
        return f"{option} is missing (or PAGEMIRROR_{key.upper()} in the environment)"
    return f"{option} is {entry.get('input')!r}: {message}"
