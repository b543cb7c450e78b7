"""Settings of the scheduler process: command line over environment (`PAGEMIRROR_…`) over defaults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from pagemirror.addresses import is_local
from scheduler_service.agreement import ExpectedShape
from scheduler_service.core.config import MAX_OVERLAP_DEPTH, RefreshPolicy, SchedulerConfig, Verify
from scheduler_service.public_settings import PublicSettings, SettingsError, check_address, check_pair, load
from scheduler_service.runtime_client import LinkLimits
from scheduler_service.tls import ClientTls
from scheduler_service.wire_facts import RuntimeFacts, max_lease_bytes

__all__ = ["SERVED_POLICIES", "SchedulerSettings", "SettingsError", "check_address", "load_settings", "split_addresses"]

GREEDY_ONLY_ARCHITECTURE = "fingerprint"
"""What the runtime's hello calls the model that has no logits."""

SERVED_POLICIES = tuple(policy.value for policy in RefreshPolicy if policy is not RefreshPolicy.TAIL_ONLY)


class SchedulerSettings(PublicSettings):
    """Everything `pagemirror scheduler` can be told. Times are in seconds.

    `page_size`, `num_pages`, `max_rows` and `max_pages_per_row` are the runtime's to state; a value here is a check of it.
    """

    runtime: str
    """Its address, or with commas between them those of several that receive the same ops."""
    vllm_metrics: bool = False

    kv_events_endpoint: str | None = None
    """Where page events are published over ZeroMQ, if anywhere: tcp://HOST:PORT or ipc://PATH."""
    kv_events_replay_endpoint: str | None = None
    kv_events_id: str = ""
    """What the topic calls this scheduler; empty: `listen`."""

    runtime_tls_ca: Path | None = None
    runtime_tls_cert: Path | None = None
    runtime_tls_key: Path | None = None
    runtime_tls_name: str = ""

    session_window: int = Field(default=1024, ge=1, le=1_000_000)

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
    stuck_timeout: float = Field(default=30.0, gt=0)

    @field_validator("runtime")
    @classmethod
    def _are_addresses(cls, value: str) -> str:
        parts = split_addresses(value)
        for part in parts:
            check_address(part)
            if parts.count(part) > 1:
                raise ValueError(f"names {part} twice; each rank has an address of its own")
        return ",".join(parts)

    @field_validator("kv_events_endpoint", "kv_events_replay_endpoint")
    @classmethod
    def _is_endpoint(cls, value: str | None) -> str | None:
        if value is not None:
            check_endpoint(value)
        return value

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

    @model_validator(mode="after")
    def _fits_with_the_runtime(self) -> Self:
        check_pair("runtime-tls", self.runtime_tls_cert, self.runtime_tls_key)
        if self.runtime_tls_ca is None and (self.runtime_tls_cert is not None or self.runtime_tls_name):
            raise ValueError("--runtime-tls-cert, --runtime-tls-key and --runtime-tls-name need --runtime-tls-ca")
        if self.kv_events_endpoint is None and (self.kv_events_replay_endpoint is not None or self.kv_events_id):
            raise ValueError("--kv-events-replay-endpoint and --kv-events-id need --kv-events-endpoint")
        if self.insecure:
            return self
        for endpoint in (self.kv_events_endpoint, self.kv_events_replay_endpoint):
            if endpoint is not None and endpoint.startswith("tcp://") and not is_local(endpoint.removeprefix("tcp://")):
                raise ValueError(
                    f"{endpoint} can be reached from other machines, and whoever connects reads cached prompts;"
                    " publish on 127.0.0.1 or ipc://PATH, or say --insecure"
                )
        return self

    @property
    def runtime_tls(self) -> ClientTls | None:
        """Of the links to runtimes; None: plaintext."""
        if self.runtime_tls_ca is None:
            return None
        return ClientTls(self.runtime_tls_ca, self.runtime_tls_cert, self.runtime_tls_key, self.runtime_tls_name)

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
    """Settings from the values given (None: not given), then the environment, then the defaults. Raises SettingsError."""
    return load(SchedulerSettings, given)


def split_addresses(value: str) -> tuple[str, ...]:
    """The parts of a list with commas."""
    return tuple(part.strip() for part in value.split(","))


def check_endpoint(value: str) -> None:
    """Raises ValueError when `value` is neither tcp://host:port nor ipc://path."""
    scheme, separator, rest = value.partition("://")
    if not separator or scheme not in {"tcp", "ipc"}:
        raise ValueError("must be tcp://HOST:PORT or ipc://PATH")
    check_address(rest if scheme == "tcp" else f"unix:{rest}")
