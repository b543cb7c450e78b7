"""`pagemirror doctor`: each check, where it finds nothing wrong and where it finds what people get wrong."""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from scheduler_service import cli_doctor, doctor_checks, doctor_toolchain
from scheduler_service.cli import app
from scheduler_service.doctor_checks import check_gateway, check_port, check_runtime
from scheduler_service.doctor_findings import Finding, State
from scheduler_service.doctor_model import check_model
from scheduler_service.doctor_toolchain import check_compiler, triton_cache

CUDA_13 = {"torch": "2.13.0", "cuda": "13.0", "devices": ["H100"], "triton": "3.7.1"}


def _by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


# ---------------------------------------------------------------------------------------------------- the command


def _shown(monkeypatch: pytest.MonkeyPatch, *options: str, findings: list[Finding]) -> tuple[int, str]:
    monkeypatch.setattr(cli_doctor, "examine", lambda model: findings)
    result = CliRunner().invoke(app, ["doctor", *options])
    return result.exit_code, result.stdout


def test_each_line_is_ok_or_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes do not count; one thing to fix makes the status 1; columns stand under each other."""
    findings = [Finding("python", "3.11"), Finding("GPU", "none", State.NOTE, "models run on the CPU")]
    status, text = _shown(monkeypatch, findings=findings)
    assert status == 0
    assert text.splitlines() == ["ok    python  3.11", "note  GPU     none -> models run on the CPU"]
    status, text = _shown(monkeypatch, findings=[*findings, Finding("model", "no config.json", State.FIX, "fetch it again")])
    assert status == 1
    assert text.splitlines()[-1] == "fix   model   no config.json -> fetch it again"


def test_json_has_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """One object, a key for each line, and the same status."""
    findings = [Finding("python", "3.11"), Finding("driver", "550", State.FIX, "update it")]
    status, text = _shown(monkeypatch, "--json", findings=findings)
    assert status == 1
    assert json.loads(text) == {
        "python": {"state": "ok", "found": "3.11"},
        "driver": {"state": "fix", "found": "550", "advice": "update it"},
    }


def test_everything_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The report of an installation has a line for each thing that the command promises."""
    monkeypatch.setattr(doctor_checks, "probe_runtime", lambda: {"torch": "no: absent", "triton": "no: absent"})
    names = set(_by_name(doctor_checks.examine(tmp_path)))
    assert names >= {"python", "pagemirror", "torch", "triton", "C compiler", "Python.h", "Triton's cache", "gateway", "model"}
    assert {f"port {port}" for port in doctor_checks.PORTS} <= names


# ------------------------------------------------------------------------------------------------- GPU and driver


@pytest.mark.parametrize(
    ("cuda", "driver", "state", "word"),
    [
        ("13.0", "580.65.06", State.OK, ""),
        ("13.0", "570.124.06", State.FIX, "which needs 580.65 or newer"),
        ("12.8", "525.60.13", State.OK, ""),
        ("12.8", "470.82", State.FIX, "which needs 525.60 or newer"),
        ("14.0", "400.0", State.OK, ""),  # a version that this table does not know yet
        ("", "580.65.06", State.NOTE, "install a torch that is built with CUDA"),
        ("13.0", None, State.NOTE, "install NVIDIA's driver to use a GPU"),
    ],
)
def test_driver_is_held_against_the_build_of_torch(cuda: str, driver: str | None, state: State, word: str) -> None:
    """A driver older than torch's CUDA is a fault that names what is needed."""
    found = _by_name(check_runtime(CUDA_13 | {"cuda": cuda}, driver))["driver"]
    assert found.state is state
    assert word in found.advice


def test_without_torch_the_rest_is_not_guessed() -> None:
    """Only torch and Triton are named, as notes: a scheduler needs neither."""
    found = check_runtime({"torch": "no: No module named 'torch'", "triton": "no: absent"}, "580.65.06")
    assert [(finding.name, finding.state) for finding in found] == [("torch", State.NOTE), ("triton", State.NOTE)]
    assert "pagemirror[runtime]" in found[0].advice


# ------------------------------------------------------------------------------------- compiler, headers, cache folder


def test_shared_object_is_compiled_and_loaded(tmp_path: Path) -> None:
    """With a compiler and headers the cache is tried for real, also one that does not exist yet, and nothing stays in it."""
    found = _by_name(check_compiler(tmp_path / "new" / "cache", needed=True))
    assert {finding.state for finding in found.values()} == {State.OK}, found
    assert found["Triton's cache"].found.endswith("a shared object was compiled and loaded")
    assert list(tmp_path.iterdir()) == []


def test_compiler_that_cannot_link_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler said last is shown, and what to install."""
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'cannot find crti.o' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    found = _by_name(check_compiler(tmp_path, needed=True))["Triton's cache"]
    assert found.state is State.FIX
    assert "cannot find crti.o" in found.found
    assert "libc6-dev" in found.advice


def test_object_that_cannot_be_loaded_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that lets nothing be mapped for execution looks like this; so does a compiler for another machine."""
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho nonsense > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    found = _by_name(check_compiler(tmp_path, needed=False))["Triton's cache"]
    assert found.state is State.NOTE
    assert "cannot be loaded" in found.found
    assert "TRITON_CACHE_DIR" in found.advice


def test_noexec_is_seen_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache on a file system that is mounted noexec is named before anything is compiled."""
    real = os.statvfs(tmp_path)
    noexec = os.statvfs_result([*real[:8], real.f_flag | os.ST_NOEXEC, real.f_namemax])
    monkeypatch.setattr(doctor_toolchain.os, "statvfs", lambda path: noexec)
    monkeypatch.setattr(doctor_toolchain.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    found = _by_name(check_compiler(tmp_path, needed=True))
    assert found["Triton's cache"].state is State.FIX
    assert "mounted noexec" in found["Triton's cache"].found
    assert found["C compiler"].state is State.FIX


def test_folder_of_another_user_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that cannot be written to says which folder stands in the way."""
    monkeypatch.setattr(doctor_toolchain.os, "access", lambda path, mode: False)
    found = _by_name(check_compiler(tmp_path / "deep" / "er", needed=True))["Triton's cache"]
    assert found.found == f"{tmp_path / 'deep' / 'er'}: {tmp_path} cannot be written to"


def test_missing_headers_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Python.h there is nothing to compile, and the package that has it is named."""
    monkeypatch.setattr(doctor_toolchain.sysconfig, "get_path", lambda name: str(tmp_path))
    found = _by_name(check_compiler(tmp_path, needed=True))
    assert found["Python.h"].state is State.FIX
    assert "python3-dev" in found["Python.h"].advice
    assert found["Triton's cache"].state is State.NOTE


def test_cache_folder_is_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is where Triton itself will put things."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    assert triton_cache() == Path("/somewhere")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("HOME", "/nobody")
    assert triton_cache() == Path("/nobody/.triton/cache")


# ---------------------------------------------------------------------------------------------- gateway, ports, model


def test_gateway_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both packages are there in this environment; where they are not, the extra is named."""
    assert check_gateway().state is State.OK
    monkeypatch.setitem(sys.modules, "smg", None)
    monkeypatch.setattr(doctor_checks, "_there", lambda module: module != "smg")
    found = check_gateway()
    assert (found.state, found.found) == (State.NOTE, "smg not installed")
    assert "pagemirror[gateway]" in found.advice


def test_port_in_use_is_told() -> None:
    """A port that somebody listens on cannot be had; a free one can."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert check_port(port, "scheduler").state is State.NOTE
    assert check_port(port, "scheduler").state is State.OK


def _safetensors(path: Path, *, cut: int = 0) -> None:
    """A file with one tensor of 64 bytes, the last `cut` of which are missing."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}, "__metadata__": {"format": "pt"}})
    data = struct.pack("<Q", len(header)) + header.encode() + bytes(64)
    path.write_bytes(data[: len(data) - cut])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small complete model."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    _safetensors(tmp_path / "model.safetensors")
    return tmp_path


def test_complete_model_is_ok(folder: Path) -> None:
    """One file of weights, or as many as the index names."""
    assert check_model(folder).state is State.OK
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    assert check_model(folder).state is State.OK


def _without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _cut(folder: Path) -> None:
    _safetensors(folder / "model.safetensors", cut=1)


def _pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def _one_shard_of_two(folder: Path) -> None:
    index: dict[str, Any] = {"weight_map": {"w": "model.safetensors", "v": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _half_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": ')


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (_without_config, "no config.json"),
        (_cut, "model.safetensors has"),
        (_pointer, "model.safetensors is no safetensors file"),
        (_one_shard_of_two, "no two.safetensors"),
        (_half_a_tokenizer, "tokenizer.json is no JSON"),
    ],
)
def test_incomplete_model_is_told(folder: Path, damage: Any, word: str) -> None:
    """What is missing or cut is named."""
    damage(folder)
    found = check_model(folder)
    assert found.state is State.FIX
    assert word in found.found


def test_model_of_another_user_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that this user may not read is named with the reason, not shown as a traceback."""
    (folder / "config.json").chmod(stat.S_IWUSR)
    if os.geteuid() == 0:  # whom no mode keeps out

        def refuse(path: Path, *args: Any, **options: Any) -> str:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "read_text", refuse)
    found = check_model(folder)
    assert found.state is State.FIX
    assert "config.json: Permission denied" in found.found
