"""What the commands share: types of options, and how a command fails."""

from __future__ import annotations

import importlib.util
from enum import StrEnum
from typing import Annotated, NoReturn

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
MetricsPort = Annotated[int | None, typer.Option(help="Serve Prometheus metrics on this port.")]
Grace = Annotated[float | None, typer.Option(help="Seconds for live requests after SIGTERM.  [default: 30]")]
RuntimeTimeout = Annotated[
    float | None, typer.Option(help="Seconds without a runtime until clients are told UNAVAILABLE.  [default: 60]")
]
HeartbeatTimeout = Annotated[
    float | None, typer.Option(help="Seconds of silence until the runtime counts as gone.  [default: 5]")
]
StepTimeout = Annotated[float | None, typer.Option(help="Longest time of one step, in seconds.  [default: 120]")]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error.  [default: info]")]
LogJson = Annotated[bool | None, typer.Option("--log-json", help="One JSON object a log line.")]
Target = Annotated[str, typer.Option(envvar=_TARGET_VARIABLE, help="Where the scheduler listens.", show_default=True)]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
ExitWithParent = Annotated[int | None, typer.Option(hidden=True)]


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
