"""The command `frontend`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from scheduler_service.cli_options import (
    Api,
    ExitWithParent,
    GatewayListen,
    GatewayTokenizer,
    Grace,
    Insecure,
    Keepalive,
    LogJson,
    LogLevel,
    MaxConnections,
    MaxMessageMib,
    MaxStreams,
    MaxUnreadTokens,
    MetricsHost,
    MetricsPort,
    OtlpEndpoint,
    PageEvents,
    Reflection,
    ServerTokens,
    TlsCa,
    TlsCert,
    TlsKey,
    WriteTimeout,
    fail,
)


def frontend(
    context: typer.Context,
    scheduler: Annotated[
        str | None,
        typer.Option(help="Where the scheduler listens: HOST:PORT or unix:/PATH.  [env var: PAGEMIRROR_SCHEDULER]"),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that serve.  [default: 1]")] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT or unix:/PATH to serve on.  [default: 127.0.0.1:50051]")] = None,
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
    max_unread_tokens: MaxUnreadTokens = None,
    write_timeout: WriteTimeout = None,
    keepalive: Keepalive = None,
    gateway_listen: GatewayListen = None,
    api: Api = None,
    gateway_tokenizer: GatewayTokenizer = None,
    scheduler_tls_ca: Annotated[
        Path | None, typer.Option(help="Reach the scheduler by TLS; its certificate is from this authority.")
    ] = None,
    scheduler_tls_cert: Annotated[Path | None, typer.Option(help="Certificate to show to the scheduler.")] = None,
    scheduler_tls_key: Annotated[Path | None, typer.Option(help="Key of --scheduler-tls-cert.")] = None,
    scheduler_tls_name: Annotated[
        str | None, typer.Option(help="Name in the scheduler's certificate.  [default: the host in --scheduler]")
    ] = None,
    scheduler_token_file: Annotated[
        Path | None, typer.Option(help="Show the first token of this file to the scheduler.")
    ] = None,
    otlp_endpoint: OtlpEndpoint = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = None,
    grace: Grace = None,
    log_level: LogLevel = None,
    log_json: LogJson = None,
    exit_with_parent: ExitWithParent = None,
) -> None:
    """Serve GenerationService from processes of their own, each of which reaches the scheduler over one stream.

    Limits are those of each worker, and each serves metrics: the first on --metrics-port, the next one on the port above. Every
    option can also be given in the environment, as PAGEMIRROR_WORKERS and so on.
    """
    import asyncio

    from scheduler_service.core.errors import PagemirrorError
    from scheduler_service.frontend import run_frontend
    from scheduler_service.frontend_settings import load_frontend_settings
    from scheduler_service.logs import configure_logs
    from scheduler_service.public_settings import SettingsError

    given = {name: value for name, value in context.params.items() if name != "exit_with_parent"}
    try:
        settings = load_frontend_settings(**given)
    except SettingsError as error:
        fail(str(error), 2)
    configure_logs(settings.log_level, as_json=settings.log_json)
    try:
        status = asyncio.run(run_frontend(settings, _announce, exit_with_parent))
    except PagemirrorError as error:
        fail(str(error), 1)
    raise typer.Exit(status)


def _announce(line: str) -> None:
    typer.echo(line)
    sys.stdout.flush()
