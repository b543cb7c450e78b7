"""What a runtime can be told: options of the command line, or environment variables `PAGEMIRROR_RUNTIME_<NAME>`.

Nothing here imports torch: `--help` and a refused value must be quick, and the entry point has to set torch's environment
before torch is loaded.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from pagemirror.addresses import is_local
from runtime_service.errors import SettingsError
from runtime_service.tls import TlsFiles

ENV_PREFIX = "PAGEMIRROR_RUNTIME_"
DEFAULT_LISTEN = "127.0.0.1:50061"
MAX_INT32 = 2**31 - 1
# Longest path that fits into sockaddr_un.sun_path with its closing zero byte.
MAX_UNIX_PATH_BYTES = 107

_HOST_PORT = re.compile(r"(?P<host>\[[0-9a-fA-F:.%]+\]|[^:/\s\[\]]+):(?P<port>\d{1,5})")


class RuntimeSettings(BaseSettings):
    """Settings of one runtime process. `None` means: derived when the model is loaded."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, protected_namespaces=())

    listen: str = DEFAULT_LISTEN
    """`host:port` (port 0: any free one), `[ipv6]:port` or `unix:/path`."""
    tls_cert: Path | None = None
    """The certificate shown to schedulers, in PEM; with its chain, if it has one."""
    tls_key: Path | None = None
    tls_ca: Path | None = None
    """Schedulers must show a certificate that descends from one in this file. None: they need none."""
    insecure: bool = False
    """Listen without TLS where other machines can connect."""
    model: Annotated[str, Field(min_length=1)] = "fingerprint"
    """`fingerprint`, `tiny`, or the path of a Hugging Face directory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    page_size: Annotated[int, Field(ge=1, le=256)] = 16
    """Tokens in a page."""
    num_pages: Annotated[int, Field(ge=1, lt=MAX_INT32)] | None = None
    max_rows: Annotated[int, Field(ge=1, le=65_535)] = 256
    max_pages_per_row: Annotated[int, Field(ge=1, lt=MAX_INT32)] | None = None
    """Width of the mirror; a longer row is clamped."""
    max_context: Annotated[int, Field(ge=1, lt=MAX_INT32)] | None = None
    """Longest sequence in tokens; None: the model's own."""
    kv_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share for the KV cache of what the weights, the largest step and the graphs leave of a GPU's free memory."""
    kv_cache_gib: Annotated[float, Field(gt=0, le=65_536)] = 1.0
    """Size of the KV cache on a CPU, in GiB."""
    max_step_tokens: Annotated[int, Field(ge=1, le=2**24)] = 2048
    """Tokens of the largest step that memory is set aside for: the scheduler's token budget."""
    attention_backend: Literal["auto", "triton", "torch"] = "auto"
    """`auto`: triton on a GPU, torch on a CPU."""
    graphs: bool = True
    """Run decode steps as CUDA graphs where the model can."""
    graph_buckets: Annotated[tuple[int, ...] | None, NoDecode] = None
    """Numbers of rows that graphs are captured for, ascending; a step takes the next larger one. None: `default_buckets`."""
    rank: Annotated[int, Field(ge=0)] = 0
    """This runtime's place among those that receive the same ops."""
    world_size: Annotated[int, Field(ge=1, le=1024)] = 1
    """How many runtimes receive the same ops; 1: this one knows of no others."""
    heartbeat_interval_s: Annotated[float, Field(ge=0.01, le=60)] = 1.0
    keepalive_s: Annotated[float, Field(ge=0.1, le=86_400)] = 10.0
    """A scheduler that is silent for so long is asked whether it is there, and has half as long to answer."""
    stuck_timeout_s: Annotated[float, Field(ge=0.01, le=86_400)] = 30.0
    """Time without the end of a step that was begun, in seconds, after which health says NOT_SERVING."""
    reflection: bool = False
    """Serve gRPC reflection."""
    otlp_endpoint: Annotated[str, Field(pattern="^https?://")] | None = None
    """Where traces are sent: the URL of a collector that speaks OTLP over gRPC."""
    metrics_port: Annotated[int, Field(ge=0, le=65_535)] | None = None
    """Where metrics are served, over plain HTTP."""
    metrics_host: str = "127.0.0.1"
    grace_s: Annotated[float, Field(ge=0, le=3600)] = 5.0
    """How long calls may take to end at shutdown, in seconds."""
    exit_with_parent: Annotated[int, Field(ge=1)] | None = None
    """Process id whose end ends this process, too."""
    demonstrate_tail_only: bool = False
    """Serve the broken `tail_only` policy of `pagemirror demo`: the checks that would refuse it are off, and so is the mirror's
    zero-fill. Never for real use."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"

    @property
    def tls(self) -> TlsFiles | None:
        return None if self.tls_cert is None or self.tls_key is None else TlsFiles(self.tls_cert, self.tls_key, self.tls_ca)

    @property
    def model_path(self) -> Path:
        return Path(self.model).expanduser()

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, value: str) -> str:
        if value.startswith("unix:"):
            size = len(os.fsencode(value.removeprefix("unix:")))
            if not 0 < size <= MAX_UNIX_PATH_BYTES:
                raise ValueError(f"the path of a unix socket has 1 to {MAX_UNIX_PATH_BYTES} bytes, this one has {size}")
            return value
        match = _HOST_PORT.fullmatch(value)
        if match is None:
            raise ValueError("write HOST:PORT, [IPV6]:PORT or unix:/PATH")
        if int(match["port"]) > 65_535:
            raise ValueError(f"port {match['port']} is above 65535")
        return value

    @field_validator("graph_buckets", mode="before")
    @classmethod
    def _split_buckets(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError:
            raise ValueError("write numbers of rows with commas between them, such as 1,2,4,8") from None

    @field_validator("graph_buckets")
    @classmethod
    def _check_buckets(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and (not value or list(value) != sorted(set(value)) or value[0] < 1):
            raise ValueError("numbers of rows must be at least 1 and ascend")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> RuntimeSettings:
        if self.rank >= self.world_size:
            raise ValueError(f"--rank {self.rank} is not below --world-size {self.world_size}; ranks count from 0")
        width = self.max_pages_per_row
        if width is not None and width * self.page_size > MAX_INT32:
            raise ValueError(
                f"--max-pages-per-row {width} times --page-size {self.page_size} is above {MAX_INT32}, the last token position"
            )
        if (self.tls_cert is None) is not (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together")
        if self.tls_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-ca needs --tls-cert and --tls-key: it is for checking schedulers over TLS")
        if not (self.insecure or self.tls_ca is not None or is_local(self.listen)):
            raise ValueError(
                f"--listen {self.listen} can be reached from other machines, and without mutual TLS any of them could drive"
                " this runtime; give --tls-cert, --tls-key and --tls-ca, listen on 127.0.0.1 or unix:/PATH, or say --insecure"
            )
        if self.metrics_port is not None and not self.insecure and not is_local(f"{self.metrics_host}:0"):
            raise ValueError(
                f"--metrics-host {self.metrics_host} can be reached from other machines, and metrics are plain HTTP;"
                " listen on 127.0.0.1 or say --insecure"
            )
        if self.graph_buckets is not None and self.graph_buckets[-1] > self.max_rows:
            raise ValueError(f"--graph-buckets has {self.graph_buckets[-1]}, above --max-rows {self.max_rows}")
        return self


def load_settings(**given: object) -> RuntimeSettings:
    """Settings from what was given, then the environment, then the defaults; None counts as not given.

    Raises SettingsError, one line per problem.
    """
    known = {name: value for name, value in given.items() if value is not None}
    try:
        return RuntimeSettings(**known)  # type: ignore[arg-type]
    except ValidationError as error:
        problems = []
        for item in error.errors(include_url=False):
            message = item["msg"].removeprefix("Value error, ")
            if not item["loc"]:
                problems.append(message)
                continue
            name = str(item["loc"][0])
            source = "--" + name.replace("_", "-")
            if name not in known:
                source += f" (from {ENV_PREFIX}{name.upper()})"
            problems.append(f"{source}: {item['input']!r}: {message[:1].lower()}{message[1:]}")
        raise SettingsError(problems) from None


def uses_gpu(settings: RuntimeSettings) -> bool:
    """Whether this process is going to compute on a GPU, as far as that can be told without loading torch."""
    if settings.device != "auto":
        return settings.device == "cuda"
    if settings.model == "fingerprint" or os.environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}:
        return False
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg"))


def prepare_environment(settings: RuntimeSettings) -> None:
    """Set what torch reads once, when it is loaded; call it before that. What is set already stays."""
    if not uses_gpu(settings):
        # Otherwise OpenMP's threads spin between two steps, against every other busy process of the machine.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
