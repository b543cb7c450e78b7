"""What the commands share: types of options, and how a command fails."""

from __future__ import annotations

import importlib.util
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

DEFAULT_TARGET = "127.0.0.1:50051"
_TARGET_VARIABLE = "PAGEMIRROR_TARGET"


class ServedPolicy(StrEnum):
    """Refresh policies that a server may use."""

    TRANSITION = "transition"
    DIFF = "diff"
    ALWAYS = "always"


class AnyPolicy(StrEnum):
    """Refresh policies, the broken one included."""

    TRANSITION = "transition"
    DIFF = "diff"
    ALWAYS = "always"
    TAIL_ONLY = "tail_only"


class GatewayApi(StrEnum):
    """Workers that a gateway knows how to drive."""

    TOKENSPEED = "tokenspeed"
    VLLM = "vllm"


class VerifyMode(StrEnum):
    """How often the runtime's mirror is compared."""

    OFF = "off"
    SAMPLE = "sample"
    EVERY = "every"


# Of the runtime, which checks them.
KvMemoryFraction = Annotated[
    float | None, typer.Option(help="Share of the GPU memory that is left for KV pages.  [default: 0.9]")
]
AttentionBackend = Annotated[str | None, typer.Option(help="auto, triton or torch.  [default: auto]")]
Graphs = Annotated[bool | None, typer.Option("--graphs/--no-graphs", help="Decode steps as CUDA graphs.  [default: graphs]")]
GraphBuckets = Annotated[str | None, typer.Option(help="Numbers of rows to capture graphs for: 1,2,4,8.")]

TokenBudget = Annotated[int | None, typer.Option(help="Tokens computed in one step.  [default: 2048]")]
ChunkSize = Annotated[int | None, typer.Option(help="Prefill tokens of one request in one step.  [default: 512]")]
Policy = Annotated[ServedPolicy | None, typer.Option(help="When a page row is sent whole.  [default: transition]")]
OverlapDepth = Annotated[int | None, typer.Option(help="Steps planned ahead of the awaited result, 0 to 2.  [default: 1]")]
Mixed = Annotated[bool | None, typer.Option("--mixed/--no-mixed", help="Prefill and decode in one step.  [default: mixed]")]
PrefixCache = Annotated[
    bool | None,
    typer.Option("--prefix-cache/--no-prefix-cache", help="Share pages of equal prefixes.  [default: prefix-cache]"),
]
MaxWaiting = Annotated[
    int | None, typer.Option(help="Longest queue; a request beyond it is refused; 0: no limit.  [default: 1024]")
]
Check = Annotated[bool | None, typer.Option("--check", help="Audit every invariant after every step (slow).")]
DumpDir = Annotated[
    str | None, typer.Option(help="Folder for the scenario file that --check writes when an invariant fails.  [default: .]")
]
Verify = Annotated[
    VerifyMode | None,
    typer.Option(
        help="Compare the page rows on the device with the scheduler's: never, in samples, in every step.  [default: off]"
    ),
]
VerifyInterval = Annotated[int | None, typer.Option(help="Steps from one sample to the next.  [default: 64]")]
VerifyWindow = Annotated[
    float | None,
    typer.Option(help="Seconds in which a second difference ends live requests with DATA_LOSS; 0: never.  [default: 600]"),
]
OtlpEndpoint = Annotated[
    str | None, typer.Option(help="Send traces to this OpenTelemetry collector: http://HOST:4317.  [default: no traces]")
]
MetricsPort = Annotated[int | None, typer.Option(help="Serve Prometheus metrics on this port.")]
Grace = Annotated[float | None, typer.Option(help="Seconds for live requests after SIGTERM.  [default: 30]")]
RuntimeTimeout = Annotated[
    float | None, typer.Option(help="Seconds without a runtime until clients are told UNAVAILABLE.  [default: 60]")
]
HeartbeatTimeout = Annotated[
    float | None, typer.Option(help="Seconds of silence until the runtime counts as gone.  [default: 5]")
]
StepTimeout = Annotated[float | None, typer.Option(help="Longest time of one step, in seconds.  [default: 120]")]
StuckTimeout = Annotated[
    float | None, typer.Option(help="Seconds without a result that is awaited until health says NOT_SERVING.  [default: 30]")
]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error.  [default: info]")]
LogJson = Annotated[bool | None, typer.Option("--log-json", help="One JSON object a log line.")]
MetricsHost = Annotated[str | None, typer.Option(help="Serve them on this address.  [default: that of the port, or loopback]")]
VllmMetrics = Annotated[bool | None, typer.Option("--vllm-metrics", help="Serve metrics under vLLM's names, too.")]
TlsCert = Annotated[Path | None, typer.Option(help="Certificate in PEM, with its chain: serve TLS.")]
TlsKey = Annotated[Path | None, typer.Option(help="Key of --tls-cert.")]
TlsCa = Annotated[Path | None, typer.Option(help="Serve only clients with a certificate from this authority.")]
ServerTokens = Annotated[
    Path | None, typer.Option(help="Serve only clients that show a token of this file, which has one a line.")
]
Insecure = Annotated[bool | None, typer.Option("--insecure", help="Listen without TLS where other machines can connect.")]
GatewayListen = Annotated[
    str | None, typer.Option(help="HOST:PORT or unix:/PATH to serve a gateway (smg) on, in plaintext.  [default: none]")
]
Api = Annotated[GatewayApi | None, typer.Option(help="What the gateway finds there.  [default: tokenspeed]")]
GatewayTokenizer = Annotated[
    Path | None, typer.Option(help="Folder of the tokenizer's files, for the gateway.  [default: as the runtime says]")
]
Reflection = Annotated[
    bool | None, typer.Option("--reflection", help="Serve gRPC reflection, for tools such as grpcurl that ask what there is.")
]
PageEvents = Annotated[
    bool | None,
    typer.Option(help="Tell callers which prompts are cached.  [default: where only this machine can call]"),
]
KvEventsEndpoint = Annotated[
    str | None, typer.Option(help="tcp://HOST:PORT or ipc://PATH to publish page events on, by ZeroMQ.  [default: none]")
]
KvEventsReplay = Annotated[str | None, typer.Option(help="Likewise, to answer requests for earlier ones.  [default: none]")]
KvEventsId = Annotated[str | None, typer.Option(help="What the topic calls this scheduler: kv@ID@MODEL.  [default: --listen]")]
Http = Annotated[
    str | None,
    typer.Option(
        help="Serve OpenAI's HTTP endpoints on PORT of 127.0.0.1, or on HOST:PORT, by the gateway smg; 0: any free port."
    ),
]
RuntimeTlsCa = Annotated[Path | None, typer.Option(help="Reach the runtime by TLS; its certificate is from this authority.")]
RuntimeTlsCert = Annotated[Path | None, typer.Option(help="Certificate to show to the runtime.")]
RuntimeTlsKey = Annotated[Path | None, typer.Option(help="Key of --runtime-tls-cert.")]
RuntimeTlsName = Annotated[
    str | None, typer.Option(help="Name in the runtime's certificate.  [default: the host in --runtime]")
]
MaxStreams = Annotated[int | None, typer.Option(help="Calls at a time; one beyond is refused.  [default: 1024]")]
MaxConnections = Annotated[int | None, typer.Option(help="Connections at a time; one beyond is closed.  [default: 512]")]
MaxMessageMib = Annotated[int | None, typer.Option(help="Largest request, in MiB: a token takes 4 bytes.  [default: 16]")]
Workers = Annotated[
    int, typer.Option(help="Processes that serve the public port in the scheduler's place; 0: none.", min=0, max=256)
]
SessionWindow = Annotated[int | None, typer.Option(help="Requests of one session at a time; more wait.  [default: 1024]")]
MaxUnreadTokens = Annotated[
    int | None, typer.Option(help="Output kept for a client that does not read; beyond, its request ends.  [default: 65536]")
]
WriteTimeout = Annotated[
    float | None, typer.Option(help="Seconds in which a client must read something that waits for it.  [default: 60]")
]
Keepalive = Annotated[
    float | None, typer.Option(help="Seconds of silence until a client is asked whether it is there.  [default: 20]")
]
Target = Annotated[str, typer.Option(envvar=_TARGET_VARIABLE, help="Where the scheduler listens.", show_default=True)]
# Of clients. Their variables have names of their own: a server on the same machine reads PAGEMIRROR_TLS_….
ClientTlsCa = Annotated[
    Path | None,
    typer.Option(envvar="PAGEMIRROR_CLIENT_TLS_CA", help="Use TLS; the scheduler's certificate is from this authority."),
]
ClientTlsCert = Annotated[
    Path | None, typer.Option(envvar="PAGEMIRROR_CLIENT_TLS_CERT", help="Certificate to show to the scheduler.")
]
ClientTlsKey = Annotated[Path | None, typer.Option(envvar="PAGEMIRROR_CLIENT_TLS_KEY", help="Key of --tls-cert.")]
ClientTlsName = Annotated[
    str, typer.Option(envvar="PAGEMIRROR_CLIENT_TLS_NAME", help="Name in its certificate.  [default: the host in --target]")
]
ClientTokens = Annotated[Path | None, typer.Option(envvar="PAGEMIRROR_TOKEN_FILE", help="Show the first token of this file.")]
ClientInsecure = Annotated[bool, typer.Option("--insecure", help="Show the token to another machine without TLS, too.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
ExitWithParent = Annotated[int | None, typer.Option(hidden=True)]


def security_options(context: typer.Context) -> dict[str, Any]:
    """What the command was told about certificates and tokens, by the names of `ClientSecurity.of`."""
    return {name: context.params[name] for name in ("tls_ca", "tls_cert", "tls_key", "tls_name", "token_file", "insecure")}


def examples(*lines: str) -> str:
    r"""Command lines for the foot of a help text; `\b` is click's mark for lines that it must not join."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def need_runtime(command: str) -> None:
    """End the command where torch is not installed; does not import it."""
    if importlib.util.find_spec("torch") is None:
        fail(f"`pagemirror {command}` needs torch, which the plain install leaves out: pip install 'pagemirror[runtime]'", 1)


def fail(message: str, status: int) -> NoReturn:
    """End the command with a message on stderr, one line for each of the message's."""
    for line in message.splitlines():
        typer.echo(f"error: {line}", err=True)
    raise typer.Exit(status)
