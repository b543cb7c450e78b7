"""What is promised to those who embed the runtime: names, and that importing them costs no wire."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import runtime_service


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)


def test_package_imports_neither_grpc_nor_torch() -> None:
    """Importing the package alone brings none of the heavy modules, and no gRPC."""
    done = _python("import runtime_service, sys; print([m for m in ('grpc', 'torch', 'numpy', 'asyncio') if m in sys.modules])")
    assert done.stdout == "[]\n", done.stderr


def test_everything_but_the_client_does_without_grpc() -> None:
    """Every public name but the client's can be used in a process that has no gRPC at all, also to open a whole runtime."""
    code = """
import sys
sys.modules["grpc"] = sys.modules["grpc_health"] = None
import runtime_service
for name in runtime_service.__all__:
    if name not in {"RuntimeClient", "RuntimeUnavailableError"}:
        getattr(runtime_service, name)
settings = runtime_service.RuntimeSettings(model="fingerprint", page_size=4, num_pages=8, max_rows=2)
print(runtime_service.open_runner(settings).session.limits.num_pages)
"""
    done = _python(code)
    assert done.stdout == "8\n", done.stderr


def test_names_are_documented_once(project_root: Path) -> None:
    """The table of docs/embedding.md lists exactly the public names."""
    page = (project_root / "docs/embedding.md").read_text()
    table = page.split("<!-- names -->")[1]
    listed = [name for cell in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == runtime_service.__all__


def test_unknown_name_is_an_attribute_error() -> None:
    """A name that is not there is told by name, and `dir` lists those that are."""
    assert set(runtime_service.__all__) <= set(dir(runtime_service))
    done = _python("import runtime_service; runtime_service.ReqToPages")
    assert "module 'runtime_service' has no attribute 'ReqToPages'" in done.stderr
