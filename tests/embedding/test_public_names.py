"""What is promised to those who embed the runtime: names, and that importing them costs no wire."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

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


def test_every_name_is_its_own_whatever_was_imported_before() -> None:
    """`import *` gives what each module has under that name, also where a module of the package was loaded in between."""
    code = """
import runtime_service.servicer, runtime_service.app
from runtime_service import *
import runtime_service, sys
homes = {name: sys.modules["runtime_service." + home] for name, home in runtime_service._HOME_OF.items()}
print([name for name, home in homes.items() if globals()[name] is not getattr(home, name)])
"""
    done = _python(code)
    assert done.stdout == "[]\n", done.stderr


ERRORS = (
    runtime_service.Refusal(runtime_service.RefusalCode.GAP, 3, "a", "row 3", session_no=2, step=4),
    runtime_service.MissingAttributeError("a plan", "rows", 1),
    runtime_service.UnsupportedPlanError("a plan", "drafts"),
    runtime_service.SettingsError(["one", "two"]),
    runtime_service.ColumnTypeError("begins", np.dtype(np.float64), "int32 is needed"),
    runtime_service.ColumnValueError("begins", 4, "[0, 3]"),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_a_process_boundary(error: Exception) -> None:
    """Pickled or copied, an error has its kind, its text and its fields."""
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


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
