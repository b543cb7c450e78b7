"""The checked-in protobuf code is what the pinned compiler makes of the .proto files, and runs on all allowed versions."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version


@pytest.fixture(scope="module")
def generator(project_root: Path) -> ModuleType:
    """tools/generate_protos.py as a module; tools/ is no package."""
    spec = importlib.util.spec_from_file_location("generate_protos", project_root / "tools" / "generate_protos.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _floor(project_root: Path, package: str) -> Version:
    """The lowest version of a dependency that pyproject.toml accepts."""
    project = tomllib.loads((project_root / "pyproject.toml").read_text())["project"]
    requirement = next(r for r in map(Requirement, project["dependencies"]) if r.name == package)
    return Version(next(part.version for part in requirement.specifier if part.operator == ">="))


def test_checked_in_code_is_fresh(generator: ModuleType, tmp_path: Path) -> None:
    """Generating again gives exactly the files that are checked in, no more and no fewer."""
    assert generator.stale(tmp_path) == []


def test_every_proto_has_all_four_files(project_root: Path) -> None:
    """Messages, message stubs, services and service stubs exist for every .proto."""
    folder = project_root / "proto" / "pagemirror" / "v1"
    protos = sorted(folder.glob("*.proto"))
    assert [path.name for path in protos] == ["forward.proto", "generation.proto", "runtime.proto"]
    for proto in protos:
        for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi"):
            assert (folder / f"{proto.stem}{suffix}").is_file()


def test_generated_messages_run_on_the_oldest_accepted_protobuf(project_root: Path) -> None:
    """Generated code refuses older runtimes, so its own version may not be above the lower bound of the dependency."""
    floor = _floor(project_root, "protobuf")
    for path in project_root.glob("proto/pagemirror/v1/*_pb2.py"):
        match = re.search(r"^# Protobuf Python Version: (\S+)$", path.read_text(), re.MULTILINE)
        assert match, path.name
        assert Version(match[1]) <= floor


def test_generated_services_run_on_the_oldest_accepted_grpcio(project_root: Path) -> None:
    """The same for the service code and grpcio."""
    floor = _floor(project_root, "grpcio")
    for path in project_root.glob("proto/pagemirror/v1/*_pb2_grpc.py"):
        match = re.search(r"^GRPC_GENERATED_VERSION = '(\S+)'$", path.read_text(), re.MULTILINE)
        assert match, path.name
        assert Version(match[1]) <= floor
