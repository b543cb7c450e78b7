"""`pagemirror doctor`: what is installed here, in a form fit for a bug report."""

from __future__ import annotations

import asyncio
import json
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from typing import Any

from scheduler_service.client import Client, RpcFailedError
from scheduler_service.client_security import ClientSecurity
from scheduler_service.errors import StartError

_PACKAGES = ("pagemirror", "numpy", "grpcio", "protobuf", "pydantic", "typer", "tokenizers", "jinja2", "safetensors")

# Runs in a process of its own: importing torch takes seconds and memory, and may fail in ways that end the process.
_PROBE = """
import json
found = {}
try:
    import torch
    found["torch"] = torch.__version__
    found["cuda"] = torch.version.cuda or "not built in"
    found["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
except Exception as error:
    found["torch"] = f"no: {error}"
try:
    import triton
    found["triton"] = triton.__version__
except Exception as error:
    found["triton"] = f"no: {error}"
print(json.dumps(found))
"""
_PROBE_TIMEOUT_S = 120


def examine() -> dict[str, str]:
    """Facts about this installation, in the order in which they are shown."""
    facts = {"python": f"{platform.python_version()} ({sys.executable})", "platform": platform.platform()}
    facts |= {package: _version(package) for package in _PACKAGES}
    facts |= _probe_runtime()
    facts["C compiler"] = shutil.which("cc") or shutil.which("gcc") or "none (Triton needs one on a GPU host)"
    return facts


def doctor(target: str | None = None, *, security: dict[str, Any] | None = None, as_json: bool = False) -> int:
    """Print the facts; the exit status, which is 0 whatever they are unless there is a `target` that does not serve us."""
    facts = examine()
    status = 0
    if target is not None:
        try:
            facts["scheduler"] = asyncio.run(_ask(target, ClientSecurity.of(**security or {})))
        except (RpcFailedError, StartError) as error:
            facts["scheduler"] = f"no: {error}"
            status = 1
    if as_json:
        print(json.dumps(facts))
        return status
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")
    if facts["torch"].startswith("no"):
        print("\nThe scheduler and the client commands work; `up`, `runtime`, `simulate` and `demo` need pagemirror[runtime].")
    return status


async def _ask(target: str, security: ClientSecurity) -> str:
    """What the scheduler at `target` says of itself."""
    async with Client(target, security) as client:
        raw = (await client.info()).raw
    link = "TLS" if security.tls is not None else "plaintext"
    return f"{raw.version} at {target} by {link}: model {raw.model}, {raw.num_running} running, {raw.num_waiting} waiting"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _probe_runtime() -> dict[str, str]:
    try:
        output = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE], capture_output=True, text=True, check=True, timeout=_PROBE_TIMEOUT_S
        ).stdout
        found = json.loads(output.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        return {"torch": f"no: the probe failed: {error}"}
    devices = found.pop("devices", [])
    facts = {name: str(value) for name, value in found.items()}
    facts["GPU"] = ", ".join(devices) or "none"
    return facts
