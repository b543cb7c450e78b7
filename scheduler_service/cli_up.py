"""The command `up`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from scheduler_service.cli_options import (
    Api,
    AttentionBackend,
    Check,
    ChunkSize,
    DumpDir,
    GatewayListen,
    GatewayTokenizer,
    Grace,
    GraphBuckets,
    Graphs,
    HeartbeatTimeout,
    Http,
    Insecure,
    Keepalive,
    KvMemoryFraction,
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
    Workers,
    WriteTimeout,
    fail,
    need_runtime,
)

OF_THE_PORT = {"tls_cert", "tls_key", "tls_ca", "token_file", "gateway_listen", "api", "gateway_tokenizer"}
"""Options of `up` that go to whichever process has the public port."""
OF_THE_FRONT_END = OF_THE_PORT | {
    *("max_streams", "max_connections", "max_message_mib", "max_unread_tokens", "write_timeout", "keepalive"),
    *("insecure", "reflection", "page_events", "otlp_endpoint", "grace", "log_level", "log_json"),
}
"""Options of `up` that go to the front end, where there is one; those that are not of the port to the scheduler as well."""


def up(
    model: Annotated[str, typer.Option(help="fingerprint, tiny, or a Hugging Face directory.")],
    port: Annotated[int, typer.Option(help="Port to serve on; 0: any free one.", min=0, max=65535)] = 50051,
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    http: Http = None,
    gateway_listen: GatewayListen = None,
    api: Api = None,
    gateway_tokenizer: GatewayTokenizer = None,
    workers: Workers = 0,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.  [default: auto]")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16.  [default: float32 on CPU, else the model's]")
    ] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens in a KV page.  [default: 16]")] = None,
    num_pages: Annotated[int | None, typer.Option(help="Pages in the pool.  [default: as many as fit]")] = None,
    max_rows: Annotated[int | None, typer.Option(help="Requests that can run at once.  [default: 256]")] = None,
    max_pages_per_row: Annotated[int | None, typer.Option(help="Longest request, in pages.")] = None,
    max_context: Annotated[int | None, typer.Option(help="Longest request, in tokens.  [default: the model's]")] = None,
    kv_cache_gib: Annotated[float | None, typer.Option(help="Size of the KV cache on a CPU, in GiB.  [default: 1]")] = None,
    kv_memory_fraction: KvMemoryFraction = None,
    attention_backend: AttentionBackend = None,
    graphs: Graphs = None,
    graph_buckets: GraphBuckets = None,
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
    max_streams: MaxStreams = None,
    max_connections: MaxConnections = None,
    max_message_mib: MaxMessageMib = None,
    session_window: SessionWindow = None,
    max_unread_tokens: MaxUnreadTokens = None,
    write_timeout: WriteTimeout = None,
    keepalive: Keepalive = None,
    grace: Grace = None,
    runtime_timeout: RuntimeTimeout = None,
    heartbeat_timeout: HeartbeatTimeout = None,
    step_timeout: StepTimeout = None,
    stuck_timeout: StuckTimeout = None,
    log_level: LogLevel = None,
    log_json: LogJson = None,
) -> None:
    """Start a scheduler and a local runtime, and with --http a gateway; end all with Ctrl-C or SIGTERM."""
    from scheduler_service.core.errors import PagemirrorError
    from scheduler_service.http_settings import load_http_settings
    from scheduler_service.public_settings import SettingsError
    from scheduler_service.up import UpOptions, run_up

    need_runtime("up")
    runtime = {
        "model": model,
        "device": device,
        "dtype": dtype,
        "page_size": page_size,
        "num_pages": num_pages,
        "max_rows": max_rows,
        "max_pages_per_row": max_pages_per_row,
        "max_context": max_context,
        "kv_cache_gib": kv_cache_gib,
        "kv_memory_fraction": kv_memory_fraction,
        "attention_backend": attention_backend,
        "graphs": graphs,
        "graph_buckets": graph_buckets,
        "max_step_tokens": token_budget,
        "otlp_endpoint": otlp_endpoint,
        "log_level": log_level,
    }
    scheduler = {
        "token_budget": token_budget,
        "chunk_size": chunk_size,
        "refresh_policy": refresh_policy,
        "overlap_depth": overlap_depth,
        "mixed": mixed,
        "prefix_cache": prefix_cache,
        "max_waiting": max_waiting,
        "check": check,
        "dump_dir": dump_dir,
        "verify": verify,
        "verify_interval": verify_interval,
        "verify_window": verify_window,
        "otlp_endpoint": otlp_endpoint,
        "metrics_port": metrics_port,
        "metrics_host": metrics_host,
        "vllm_metrics": vllm_metrics,
        "gateway_listen": gateway_listen,
        "api": api,
        "gateway_tokenizer": gateway_tokenizer,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "tls_ca": tls_ca,
        "token_file": token_file,
        "insecure": insecure,
        "reflection": reflection,
        "page_events": page_events,
        "max_streams": max_streams,
        "max_connections": max_connections,
        "max_message_mib": max_message_mib,
        "session_window": session_window,
        "max_unread_tokens": max_unread_tokens,
        "write_timeout": write_timeout,
        "keepalive": keepalive,
        "grace": grace,
        "runtime_timeout": runtime_timeout,
        "heartbeat_timeout": heartbeat_timeout,
        "step_timeout": step_timeout,
        "stuck_timeout": stuck_timeout,
        "log_level": log_level,
        "log_json": log_json,
    }
    gateway = None
    if http is not None:
        try:
            gateway = load_http_settings(http=http, model=model, **scheduler)
        except SettingsError as error:
            fail(str(error), 2)
        except PagemirrorError as error:
            fail(str(error), 1)
        scheduler["gateway_listen"] = gateway.gateway_listen
    front = {name: value for name, value in scheduler.items() if name in OF_THE_FRONT_END}
    if metrics_port:
        front |= {"metrics_port": metrics_port + 1, "metrics_host": metrics_host}
    bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
    options = UpOptions(
        listen=f"{bracketed}:{port}",
        runtime_args=_arguments(runtime),
        scheduler_args=_arguments({name: value for name, value in scheduler.items() if not workers or name not in OF_THE_PORT}),
        device=device,
        workers=workers,
        frontend_args=_arguments(front),
        http=gateway,
    )
    try:
        status = run_up(options)
    except PagemirrorError as error:
        fail(str(error), 1)
    raise typer.Exit(status)


def _arguments(options: dict[str, Any]) -> list[str]:
    """Options as command-line arguments; None: not given."""
    arguments: list[str] = []
    for name, value in options.items():
        option = name.replace("_", "-")
        if value is True:
            arguments.append(f"--{option}")
        elif value is False:
            arguments.append(f"--no-{option}")
        elif value is not None:
            arguments += [f"--{option}", str(value)]
    return arguments
