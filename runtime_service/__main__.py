"""`python -m runtime_service`: the command line of one runtime process."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from runtime_service.errors import RuntimeServiceError, SettingsError
from runtime_service.settings import DEFAULT_LISTEN, ENV_PREFIX, RuntimeSettings, load_settings, prepare_environment

HELP = f"""\
The runtime of pagemirror: the process that owns the model, its KV cache and the mirror of the scheduler's page rows.

It decides nothing about pages. A scheduler (`pagemirror scheduler --runtime ADDRESS`) connects to it and streams one op a step.
`pagemirror up` starts both.

\b
    python -m runtime_service --model fingerprint
    python -m runtime_service --model models/smollm2-135m-instruct --listen unix:/tmp/pagemirror-runtime.sock

It listens on this machine only, unless it has certificates for mutual TLS, or is told that the network is trusted:

\b
    python -m runtime_service --listen 0.0.0.0:50061 --tls-cert runtime.pem --tls-key runtime.key --tls-ca ca.pem
    python -m runtime_service --listen 0.0.0.0:50061 --insecure

When it serves, it prints one line on stdout: `pagemirror runtime ready on ADDRESS (…)`. Logs go to stderr. SIGTERM ends it.
Every option can also be given as an environment variable: --page-size is {ENV_PREFIX}PAGE_SIZE.
"""

cli = typer.Typer(add_completion=False, rich_markup_mode=None)


@cli.command(help=HELP, no_args_is_help=False)
def runtime(
    listen: Annotated[
        str | None, typer.Option(help=f"Address to serve on: HOST:PORT or unix:/PATH. Default: {DEFAULT_LISTEN}.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate in PEM: serve TLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Key of --tls-cert.")] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="Serve only schedulers with a certificate from this authority.")] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Listen without TLS where other machines can connect.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="'fingerprint' (exact test model), 'tiny' (seeded small Llama) or a Hugging Face directory."
            " Default: fingerprint."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda. Default: auto.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of weights and KV: auto, float32, bfloat16 or float16. auto is float32 on a CPU.")
    ] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens in a KV page, 1 to 256. Default: 16.")] = None,
    num_pages: Annotated[int | None, typer.Option(help="Pages of the KV cache. Default: from the memory settings.")] = None,
    max_rows: Annotated[int | None, typer.Option(help="Requests that can run at once. Default: 256.")] = None,
    max_pages_per_row: Annotated[
        int | None, typer.Option(help="Width of the mirror: pages one request can have. Default: from --max-context.")
    ] = None,
    max_context: Annotated[
        int | None, typer.Option(help="Longest sequence in tokens, prompt and output. Default: the model's own.")
    ] = None,
    kv_memory_fraction: Annotated[
        float | None, typer.Option(help="Share of the GPU memory that is left for KV pages. Default: 0.9.")
    ] = None,
    kv_cache_gib: Annotated[float | None, typer.Option(help="Size of the KV cache on a CPU, in GiB. Default: 1.")] = None,
    max_step_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of the largest step to keep memory for: the scheduler's token budget. Default: 2048."),
    ] = None,
    attention_backend: Annotated[
        str | None, typer.Option(help="auto, triton or torch. Default: auto, which is triton on a GPU.")
    ] = None,
    graphs: Annotated[
        bool | None, typer.Option("--graphs/--no-graphs", help="Decode steps as CUDA graphs. Default: graphs, on a GPU.")
    ] = None,
    graph_buckets: Annotated[
        str | None, typer.Option(help="Numbers of rows to capture graphs for: 1,2,4,8. Default: steps up to --max-rows.")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Place among the runtimes that receive the same ops. Default: 0.")] = None,
    world_size: Annotated[int | None, typer.Option(help="Runtimes that receive the same ops. Default: 1.")] = None,
    heartbeat_interval_s: Annotated[float | None, typer.Option(help="Seconds between heartbeats. Default: 1.")] = None,
    keepalive_s: Annotated[
        float | None, typer.Option(help="Seconds of silence until a scheduler is asked whether it is there. Default: 10.")
    ] = None,
    stuck_timeout_s: Annotated[
        float | None, typer.Option(help="Seconds without the end of a step until health says NOT_SERVING. Default: 30.")
    ] = None,
    reflection: Annotated[bool | None, typer.Option("--reflection", help="Serve gRPC reflection.")] = None,
    otlp_endpoint: Annotated[str | None, typer.Option(help="Send traces to this collector: http://HOST:4317.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Serve Prometheus metrics on this port.")] = None,
    metrics_host: Annotated[str | None, typer.Option(help="And on this address. Default: 127.0.0.1.")] = None,
    grace_s: Annotated[float | None, typer.Option(help="Seconds that calls may take to end at shutdown. Default: 5.")] = None,
    exit_with_parent: Annotated[
        int | None, typer.Option(metavar="PID", help="End when the process PID ends, however it ends.")
    ] = None,
    demonstrate_tail_only: Annotated[bool | None, typer.Option("--demonstrate-tail-only", hidden=True)] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error. Default: info.")] = None,
    log_format: Annotated[str | None, typer.Option(help="console or json. Default: console.")] = None,
    print_plan: Annotated[
        bool, typer.Option("--print-plan", help="Say what memory goes where, load nothing, and exit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --print-plan: as one JSON object.")] = False,
) -> None:
    """Collect the options that were given; `HELP` is what people read."""
    given = {name: value for name, value in locals().items() if name not in {"print_plan", "as_json"}}
    if as_json and not print_plan:
        sys.stderr.write("error: --json goes with --print-plan\n")
        raise typer.Exit(2)
    try:
        settings = load_settings(**given)
    except SettingsError as error:
        for problem in error.problems:
            sys.stderr.write(f"error: {problem}\n")
        raise typer.Exit(2) from None
    raise typer.Exit(show_plan(settings, as_json=as_json) if print_plan else start(settings))


def start(settings: RuntimeSettings) -> int:
    """Set the environment, then load torch and everything above it, then serve."""
    prepare_environment(settings)
    if os.getpid() == 1:
        # In a container: process 1 is not ended by a signal that it has no handler for, and loading torch takes seconds.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    from runtime_service.app import run

    return run(settings)


def show_plan(settings: RuntimeSettings, *, as_json: bool) -> int:
    """Print the memory plan on stdout; the exit status, 1 where the settings leave too little memory."""
    prepare_environment(settings)
    from runtime_service.memory_plan import plan_memory, write_plan

    try:
        plan = plan_memory(settings)
    except RuntimeServiceError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    write_plan(plan, sys.stdout, as_json=as_json)
    return 0


def main() -> None:
    """Entry point of `python -m runtime_service`."""
    cli()


if __name__ == "__main__":
    main()
