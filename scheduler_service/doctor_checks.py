"""What `pagemirror doctor` looks at: each check says what it found, and what to do where that is not enough.

Nothing here imports torch or the gateway: torch is asked in a process of its own, since importing it takes seconds and can fail
in ways that end the process.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from scheduler_service.doctor_findings import Finding, State
from scheduler_service.doctor_model import check_model
from scheduler_service.doctor_toolchain import check_compiler, triton_cache

PACKAGES = ("pagemirror", "numpy", "grpcio", "protobuf", "pydantic", "typer", "tokenizers", "jinja2", "safetensors")
PORTS = {50051: "scheduler", 8080: "OpenAI's endpoints", 9400: "metrics"}
"""Usual ports that are looked at, by who serves there."""
DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""Oldest driver for each major version of CUDA, by NVIDIA's table of minor version compatibility."""
_PROBE_TIMEOUT_S = 120

_PROBE = """
import json
found = {}
try:
    import torch
    found["torch"] = torch.__version__
    found["cuda"] = torch.version.cuda or ""
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


def examine(model: Path | None = None) -> list[Finding]:
    """All findings about this installation and machine, in the order in which they are shown."""
    findings = [
        Finding("python", f"{platform.python_version()} ({sys.executable})"),
        Finding("platform", platform.platform()),
        *(_package(package) for package in PACKAGES),
    ]
    runtime = probe_runtime()
    findings += check_runtime(runtime, driver_version())
    serves_gpu = bool(runtime.get("devices"))
    findings += check_compiler(triton_cache(), needed=serves_gpu)
    findings.append(check_gateway())
    findings += [check_port(port, who) for port, who in PORTS.items()]
    if model is not None:
        findings.append(check_model(model))
    return findings


def _package(name: str) -> Finding:
    version = _version(name)
    if version is not None:
        return Finding(name, version)
    extra = {"tokenizers": "text", "jinja2": "text", "safetensors": "runtime"}.get(name)
    if extra is None:
        return Finding(name, "not installed", State.FIX, "pip install pagemirror")
    return Finding(name, "not installed", State.NOTE, f"pip install 'pagemirror[{extra}]' where it is wanted")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# ------------------------------------------------------------------------------------------------- torch, GPU, driver


def probe_runtime() -> dict[str, Any]:
    """What torch and Triton say: `torch`, `cuda`, `devices`, `triton`; a version that begins with "no" is a reason."""
    try:
        output = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE], capture_output=True, text=True, check=True, timeout=_PROBE_TIMEOUT_S
        ).stdout
        found: dict[str, Any] = json.loads(output.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        return {"torch": f"no: the probe failed: {error}", "triton": "no: not asked"}
    return found


def driver_version() -> str | None:
    """The NVIDIA driver's version; None: no driver, or none that tells."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    command = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (subprocess.SubprocessError, OSError):
        return None
    lines = done.stdout.split()
    return lines[0] if lines else None


def check_runtime(found: dict[str, Any], driver: str | None) -> list[Finding]:
    """torch, Triton, the GPU and its driver, from what `probe_runtime` and `driver_version` returned."""
    torch, triton, cuda = str(found["torch"]), str(found["triton"]), str(found.get("cuda", ""))
    devices = found.get("devices", [])
    advice = "the scheduler and the client commands work; `up`, `runtime`, `simulate` and `demo` need pagemirror[runtime]"
    findings = [_of_module("torch", torch, advice), _of_module("triton", triton, "GPU kernels need pagemirror[runtime]")]
    if torch.startswith("no"):
        return findings
    findings.append(Finding("cuda", cuda or "not built in"))
    findings.append(_driver(cuda, driver))
    if devices:
        findings.append(Finding("GPU", ", ".join(devices)))
    else:
        findings.append(Finding("GPU", "none that torch can use", State.NOTE, "models run on the CPU, slowly"))
    return findings


def _of_module(name: str, version: str, advice: str) -> Finding:
    return Finding(name, version, State.NOTE, advice) if version.startswith("no") else Finding(name, version)


def _driver(cuda: str, driver: str | None) -> Finding:
    if driver is None:
        found = "none that nvidia-smi tells of"
        return Finding("driver", found, State.NOTE, "install NVIDIA's driver to use a GPU" if cuda else "none is needed")
    if not cuda:
        return Finding("driver", driver, State.NOTE, "this torch cannot use it: install a torch that is built with CUDA")
    needed = DRIVERS.get(int(cuda.split(".", maxsplit=1)[0]))
    if needed is not None and _numbers(driver)[:2] < needed:
        least = ".".join(map(str, needed))
        advice = f"torch is built with CUDA {cuda}, which needs {least} or newer: update the driver, or take an older build"
        return Finding("driver", driver, State.FIX, advice)
    return Finding("driver", driver)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


# --------------------------------------------------------------------------------------------- gateway, ports, the model


def check_gateway() -> Finding:
    """Smg and its stubs, which `--http` and `--gateway-listen` need."""
    stubs = _version("smg-grpc-proto")
    smg = _version("smg")
    missing = [name for name, module in (("smg", "smg"), ("smg-grpc-proto", "smg_grpc_proto")) if not _there(module)]
    if missing:
        advice = "pip install 'pagemirror[gateway]' for OpenAI's endpoints"
        return Finding("gateway", f"{' and '.join(missing)} not installed", State.NOTE, advice)
    return Finding("gateway", f"smg {smg}, smg-grpc-proto {stubs}")


def _there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def check_port(port: int, who: str) -> Finding:
    """Whether a server of ours could listen on a port of the loopback address."""
    name = f"port {port}"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            advice = f"the usual one for {who}: end what listens there, or choose another"
            return Finding(name, f"{error.strerror or error}", State.NOTE, advice)
    return Finding(name, f"free ({who})")
