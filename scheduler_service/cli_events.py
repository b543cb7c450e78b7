"""The command `events`: which pages are cached, as they come and go."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

import typer

from scheduler_service.cli_options import (
    DEFAULT_TARGET,
    AsJson,
    ClientInsecure,
    ClientTlsCa,
    ClientTlsCert,
    ClientTlsKey,
    ClientTlsName,
    ClientTokens,
    Target,
    fail,
    security_options,
)

if TYPE_CHECKING:
    from scheduler_service.page_events import PageBatch, PageEvent

_MAX_SHOWN = 4


def events(
    context: typer.Context,
    target: Target = DEFAULT_TARGET,
    tls_ca: ClientTlsCa = None,
    tls_cert: ClientTlsCert = None,
    tls_key: ClientTlsKey = None,
    tls_name: ClientTlsName = "",
    token_file: ClientTokens = None,
    insecure: ClientInsecure = False,
    as_json: AsJson = False,
) -> None:
    """Show which pages are cached, and then every page that comes or goes, until Ctrl-C."""
    from scheduler_service.client import RpcFailedError
    from scheduler_service.client_security import ClientSecurity
    from scheduler_service.errors import ProtocolError, StartError

    try:
        asyncio.run(_show(target, ClientSecurity.of(**security_options(context)), as_json))
    except (RpcFailedError, ProtocolError, StartError) as error:
        fail(str(error), 1)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


async def _show(target: str, security: Any, as_json: bool) -> None:
    from scheduler_service.client import Client

    async with Client(target, security) as client:
        async for batch in client.page_events():
            lines = [json.dumps(_plain(batch))] if as_json else map(_line, batch.events)
            sys.stdout.write("".join(f"{line}\n" for line in lines))
            sys.stdout.flush()


def _line(event: PageEvent) -> str:
    from scheduler_service.page_events import PagesCleared, PagesStored

    if isinstance(event, PagesCleared):
        return "cleared"
    hashes = event.hashes.tolist()
    shown = " ".join(f"{value:016x}" for value in hashes[:_MAX_SHOWN]) + (" …" if len(hashes) > _MAX_SHOWN else "")
    count = f"{len(hashes)} page{'s' if len(hashes) > 1 else ''}"
    if not isinstance(event, PagesStored):
        return f"removed {count}: {shown}"
    after = "" if event.parent is None else f" after {event.parent:016x}"
    return f"stored  {count}{after}{f' of {event.namespace!r}' if event.namespace else ''}: {shown}"


def _plain(batch: PageBatch) -> dict[str, Any]:
    from scheduler_service.page_events import PagesCleared, PagesStored

    found: list[dict[str, Any]] = []
    for event in batch.events:
        if isinstance(event, PagesCleared):
            found.append({"type": "cleared"})
            continue
        hashes = [f"{value:016x}" for value in event.hashes.tolist()]
        if isinstance(event, PagesStored):
            parent = None if event.parent is None else f"{event.parent:016x}"
            rest = {"tokens": event.tokens.tolist(), "page_size": event.page_size, "cache_namespace": event.namespace}
            found.append({"type": "stored", "hashes": hashes, "parent": parent} | rest)
        else:
            found.append({"type": "removed", "hashes": hashes})
    part = batch.snapshot
    state = None if part is None else {"index": part.index, "count": part.count, "num_pages": part.num_pages}
    return {"sequence": batch.sequence, "timestamp": batch.timestamp, "state": state, "events": found}
