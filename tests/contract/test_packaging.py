"""The wheel: what is in it, that the scheduler runs from it without torch, and that it brings no package called `proto`.

Nothing is downloaded. A fresh environment gets the wheel by pip, and the distributions that the wheel's own metadata asks for
as links to those of the running environment: a dependency that is used and not declared is then missing, as it would be for a
user.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = {"runtime", "text", "gateway", "events", "tracing", "convert", "bench", "fast", "dev"}


def _run(command: list[str | Path], cwd: Path, env: dict[str, str]) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"{command} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def env(child_env: dict[str, str]) -> dict[str, str]:
    """A child environment in which no variable adds to the import path."""
    return {name: value for name, value in child_env.items() if not name.startswith("PYTHON")}


@pytest.fixture(scope="module")
def wheel(project_root: Path, tmp_path_factory: pytest.TempPathFactory, env: dict[str, str]) -> Path:
    """The project's wheel, built from the tree with the installed build backend."""
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", out]
    _run([*pip, project_root], out, env)
    (built,) = out.glob("*.whl")
    return built


def _fresh_venv(folder: Path, wheel: Path, env: dict[str, str]) -> Path:
    """A new virtual environment with nothing but the wheel in it; returns its python."""
    _run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent, env)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--no-compile", "-q"]
    _run([*pip, wheel], folder.parent, env)
    return python


def _site_packages(python: Path, env: dict[str, str]) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(_run([python, "-I", "-c", code], python.parent, env).strip())


def _closure(requirements: list[str], extras: set[str]) -> set[str]:
    """Names of the installed distributions that these requirements lead to, markers evaluated here."""
    found: set[str] = set()
    todo = [(Requirement(text), extras) for text in requirements]
    while todo:
        requirement, asked = todo.pop()
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in asked | {""}):
            continue
        name = canonicalize_name(requirement.name)
        if name in found and not requirement.extras:
            continue
        found.add(name)
        todo += [(Requirement(text), set(requirement.extras)) for text in metadata.requires(name) or []]
    return found


def _link_distributions(names: set[str], site: Path) -> None:
    """Put links to the top-level files and folders of installed distributions into another site-packages."""
    here = Path(sysconfig.get_path("purelib"))
    for name in names:
        files = metadata.files(name)
        assert files, name
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(here / top)


@pytest.fixture(scope="module")
def scheduler_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory, env: dict[str, str]) -> Path:
    """An environment with the wheel and what its plain install asks for."""
    python = _fresh_venv(tmp_path_factory.mktemp("scheduler") / "venv", wheel, env)
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(path).decode())
    _link_distributions(_closure(headers.get_all("Requires-Dist") or [], set()), _site_packages(python, env))
    return python


def test_wheel_has_the_three_packages_and_nothing_else(wheel: Path, project_root: Path) -> None:
    """Two services, and the wire with types marker, .proto sources and generated code; no tests, tools or `proto` folder."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    (info,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {"scheduler_service", "runtime_service", "pagemirror", info}
    assert {"scheduler_service/py.typed", "runtime_service/py.typed", "pagemirror/py.typed"} <= set(names)
    assert f"{info}/licenses/LICENSE" in names
    wire = {path.name for path in (project_root / "proto/pagemirror/v1").iterdir() if path.suffix in {".proto", ".py", ".pyi"}}
    assert {name.removeprefix("pagemirror/v1/") for name in names if name.startswith("pagemirror/v1/")} == wire
    assert not [name for name in names if "__pycache__" in name]


def test_metadata_keeps_torch_in_an_extra(wheel: Path) -> None:
    """The plain install asks for no torch; the extras are those that the documentation names."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(path).decode())
    assert set(headers.get_all("Provides-Extra") or []) == EXTRAS
    requirements = headers.get_all("Requires-Dist") or []
    heavy = {"torch", "triton", "safetensors", "transformers", "gguf", "accelerate"}
    assert not _closure(requirements, set()) & heavy
    assert {"torch", "triton", "safetensors"} <= _closure(requirements, {"runtime"})
    assert headers["License-Expression"] == "Apache-2.0"


def test_scheduler_imports_without_torch(scheduler_python: Path, tmp_path: Path, env: dict[str, str]) -> None:
    """Every module of the scheduler imports in an environment that has no torch and no extra, but those that are for one."""
    code = """
import importlib, importlib.util, json, pkgutil
import scheduler_service
found = pkgutil.walk_packages(scheduler_service.__path__, "scheduler_service.")
names = [module.name for module in found if not module.name.endswith("__main__")]
need_extras = []
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in {"smg_grpc_proto", "msgpack", "zmq", "opentelemetry"}:
            raise
        need_extras.append(name.removeprefix("scheduler_service.").removeprefix("gateway."))
print(json.dumps({"names": names, "need_extras": need_extras, "torch": importlib.util.find_spec("torch") is not None}))
"""
    told = json.loads(_run([scheduler_python, "-I", "-c", code], tmp_path, env))
    assert told["torch"] is False
    assert set(told["need_extras"]) <= {"servicer", "tokenspeed", "vllm", "kv_events", "zmq_events", "tracing"}
    assert {"scheduler_service.cli", "scheduler_service.core.scheduler"} <= set(told["names"])


def test_command_line_works_without_torch(scheduler_python: Path, tmp_path: Path, env: dict[str, str]) -> None:
    """The installed command shows its help."""
    text = _run([scheduler_python.with_name("pagemirror"), "--help"], tmp_path, env | {"COLUMNS": "120", "NO_COLOR": "1"})
    for command in ("scheduler", "runtime", "up", "generate", "rows", "simulate", "demo"):
        assert command in text


def test_gateway_without_its_extra_says_what_to_install(scheduler_python: Path, tmp_path: Path, env: dict[str, str]) -> None:
    """The plain install has no stubs of the gateway: the option that needs them names the extra, at once."""
    command = [scheduler_python.with_name("pagemirror"), "scheduler", "--runtime", "127.0.0.1:1", "--listen", "127.0.0.1:0"]
    done = subprocess.run(
        [*command, "--gateway-listen", "127.0.0.1:0"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: --gateway-listen needs packages")
    assert "pagemirror[gateway]" in done.stderr


def test_simulate_without_torch_says_what_to_install(
    scheduler_python: Path, project_root: Path, tmp_path: Path, env: dict[str, str]
) -> None:
    """The one command that needs the runtime in its own process names the extra, and shows no traceback."""
    command = [scheduler_python.with_name("pagemirror"), "simulate", project_root / "examples/worked_example.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "pagemirror[runtime]" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr + done.stdout


def test_wheel_brings_no_package_called_proto(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory, env: dict[str, str]
) -> None:
    """`import proto` is proto-plus: with only our wheel, from an empty folder, it fails, and `import pagemirror` works."""
    folder = tmp_path_factory.mktemp("alone")
    python = _fresh_venv(folder / "venv", wheel, env)
    empty = folder / "empty"
    empty.mkdir()
    done = subprocess.run([python, "-I", "-c", "import proto"], cwd=empty, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'proto'" in done.stderr
    _run([python, "-I", "-c", "import pagemirror, pagemirror.v1"], empty, env)
