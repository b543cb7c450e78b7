"""The commands that serve alone: `scheduler` and `runtime`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from scheduler_service.cli_options import (
    Api,
    Check,
    ChunkSize,
    DumpDir,
    ExitWithParent,
    GatewayListen,
    GatewayTokenizer,
    Grace,
    HeartbeatTimeout,
    Insecure,
    Keepalive,
    KvEventsEndpoint,
    KvEventsId,
    KvEventsReplay,
    LogJson,
    LogLevel,
    MaxConnections,
    MaxMessageMib,
    MaxStreams,
    MaxUnreadTokens,
    MaxWaiting,
    MetricsHost,
    MetricsPort,
    Mixed,
    OtlpEndpoint,
    OverlapDepth,
    PageEvents,
    Policy,
    PrefixCache,
    Reflection,
    RuntimeTimeout,
    RuntimeTlsCa,
    RuntimeTlsCert,
    RuntimeTlsKey,
    RuntimeTlsName,
    ServerTokens,
    SessionWindow,
    StepTimeout,
    StuckTimeout,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenBudget,
    Verify,
    VerifyInterval,
    VerifyWindow,
    VllmMetrics,
    WriteTimeout,
    fail,
    need_runtime,
)


def scheduler(
    context: typer.Context,
    runtime: Annotated[
        str | None,
        typer.Option(
            help="Where the runtime listens: HOST:PORT or unix:/PATH; several ranks with commas between them."
            "  [env var: PAGEMIRROR_RUNTIME]"
        ),
    ] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT or unix:/PATH to serve on.  [default: 127.0.0.1:50051]")] = None,
    page_size: Annotated[int | None, typer.Option(help="Refuse a runtime whose page_size differs.")] = None,
    num_pages: Annotated[int | None, typer.Option(help="Refuse a runtime whose num_pages differs.")] = None,
    max_rows: Annotated[int | None, typer.Option(help="Refuse a runtime whose max_rows differs.")] = None,
    max_pages_per_row: Annotated[int | None, typer.Option(help="Refuse a runtime whose max_pages_per_row differs.")] = None,
    token_budget: TokenBudget = None,
    chunk_size: ChunkSize = None,
    refresh_policy: Policy = None,
    overlap_depth: OverlapDepth = None,
    mixed: Mixed = None,
    prefix_cache: PrefixCache = None,
    max_waiting: MaxWaiting = None,
    check: Check = None,
    dump_dir: DumpDir = None,
    verify: Verify = None,
    verify_interval: VerifyInterval = None,
    verify_window: VerifyWindow = None,
    otlp_endpoint: OtlpEndpoint = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = None,
    vllm_metrics: VllmMetrics = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    token_file: ServerTokens = None,
    insecure: Insecure = None,
    reflection: Reflection = None,
    page_events: PageEvents = None,
    kv_events_endpoint: KvEventsEndpoint = None,
    kv_events_replay_endpoint: KvEventsReplay = None,
    kv_events_id: KvEventsId = None,
    max_streams: MaxStreams = None,
    max_connections: MaxConnections = None,
    max_message_mib: MaxMessageMib = None,
    session_window: SessionWindow = None,
    max_unread_tokens: MaxUnreadTokens = None,
    write_timeout: WriteTimeout = None,
    keepalive: Keepalive = None,
    gateway_listen: GatewayListen = None,
    api: Api = None,
    gateway_tokenizer: GatewayTokenizer = None,
    runtime_tls_ca: RuntimeTlsCa = None,
    runtime_tls_cert: RuntimeTlsCert = None,
    runtime_tls_key: RuntimeTlsKey = None,
    runtime_tls_name: RuntimeTlsName = None,
    grace: Grace = None,
    startup_timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait for a runtime at the start.  [default: 600]")
    ] = None,
    runtime_timeout: RuntimeTimeout = None,
    heartbeat_timeout: HeartbeatTimeout = None,
    step_timeout: StepTimeout = None,
    stuck_timeout: StuckTimeout = None,
    log_level: LogLevel = None,
    log_json: LogJson = None,
    exit_with_parent: ExitWithParent = None,
) -> None:
    """Serve GenerationService, driving a runtime, or several ranks of one. It needs no GPU and no torch.

    Every option can also be given in the environment, as PAGEMIRROR_TOKEN_BUDGET and so on.
    """
    from scheduler_service import event_loop
    from scheduler_service.app import serve
    from scheduler_service.core.errors import PagemirrorError
    from scheduler_service.logs import configure_logs
    from scheduler_service.settings import SettingsError, load_settings

    given = {name: value for name, value in context.params.items() if name != "exit_with_parent"}
    try:
        settings = load_settings(**given)
    except SettingsError as error:
        fail(str(error), 2)
    configure_logs(settings.log_level, as_json=settings.log_json)
    try:
        status = event_loop.run(serve(settings, _announce, exit_with_parent))
    except PagemirrorError as error:
        fail(str(error), 1)
    raise typer.Exit(status)


def runtime(context: typer.Context) -> None:
    """Run the model behind the mirror: everything after `runtime` goes to `python -m runtime_service`."""
    need_runtime("runtime")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "runtime_service", *context.args])


def _announce(line: str) -> None:
    typer.echo(line)
    sys.stdout.flush()
