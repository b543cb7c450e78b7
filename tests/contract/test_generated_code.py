"""The checked-in protobuf code is what the pinned compiler makes of the .proto files, and runs on all allowed versions."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def generator(project_root: Path) -> ModuleType:
    """tools/generate_protos.py as a module; tools/ is no package."""
    spec = importlib.util.spec_from_file_location("generate_protos", project_root / "tools" / "generate_protos.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
