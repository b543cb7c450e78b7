"""`pagemirror doctor`: what is installed here, whether it fits together, and what to do where it does not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from scheduler_service.client import Client, RpcFailedError
from scheduler_service.client_security import ClientSecurity
from scheduler_service.doctor_checks import examine
from scheduler_service.doctor_findings import Finding, State
from scheduler_service.errors import StartError


def doctor(
    target: str | None = None,
    *,
    model: Path | None = None,
    security: dict[str, Any] | None = None,
    as_json: bool = False,
) -> int:
    """Print the findings, each with `ok` or with what to do; the exit status, which is 1 if any of them is to be fixed.

    What is merely not there (a GPU, an extra) is a note and does not count. A `target` that does not serve us does.
    """
    findings = examine(model)
    if target is not None:
        findings.append(_scheduler(target, security or {}))
    if as_json:
        print(json.dumps({entry.name: _fields(entry) for entry in findings}))
    else:
        width = max(len(entry.name) for entry in findings)
        for entry in findings:
            advice = f" -> {entry.advice}" if entry.advice else ""
            print(f"{entry.state:<4}  {entry.name:<{width}}  {entry.found}{advice}")
    return int(any(entry.state is State.FIX for entry in findings))


def _fields(entry: Finding) -> dict[str, str]:
    return {"state": entry.state.value, "found": entry.found} | ({"advice": entry.advice} if entry.advice else {})


def _scheduler(target: str, security: dict[str, Any]) -> Finding:
    try:
        return Finding("scheduler", asyncio.run(_ask(target, ClientSecurity.of(**security))))
    except (RpcFailedError, StartError) as error:
        return Finding("scheduler", f"no: {error}", State.FIX)


async def _ask(target: str, security: ClientSecurity) -> str:
    """What the scheduler at `target` says of itself."""
    async with Client(target, security) as client:
        raw = (await client.info()).raw
    link = "TLS" if security.tls is not None else "plaintext"
    return f"{raw.version} at {target} by {link}: model {raw.model}, {raw.num_running} running, {raw.num_waiting} waiting"
