"""Cases B60, B65 and B66: ports, proxies, and versions of the generated code."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import runtime_version
from grpc import aio
from grpc._utilities import first_version_is_lower
from packaging.requirements import Requirement
from packaging.version import Version

from pagemirror.v1 import runtime_pb2, runtime_pb2_grpc
from runtime_service import listen as runtime_listen
from runtime_service.errors import AddressInUseError
from scheduler_service import channels
from scheduler_service.channels import open_channel
from scheduler_service.client import Client
from scheduler_service.errors import StartError

Continuation = Callable[[Sequence[int], int], list[int]]


async def test_b60_second_server_on_a_port(harness: Any, pair: Any, spawner: Any, continuation: Continuation) -> None:
    """Two servers share one port in silence (grpc/grpc#16920, grpc/grpc#19773, grpc/grpc#10755)."""
    seconds = [
        spawner.start("runtime_service", "--listen", pair.runtime.address),
        spawner.start(
            "scheduler_service.cli", "scheduler", "--listen", pair.scheduler.address, "--runtime", pair.runtime.address
        ),
    ]
    async with Client(pair.scheduler.address) as client:
        for second in seconds:
            assert await second.end() == 1
            assert "in use" in second.log()
            assert "Traceback" not in second.log()
            assert await harness.generate(client, [1, 2, 3], 9) == continuation([1, 2, 3], 9)

    class SilentServer:
        """What a version of gRPC does that returns 0 instead of raising."""

        def add_insecure_port(self, address: str) -> int:
            return 0

    server: Any = SilentServer()
    with pytest.raises(StartError, match="in use"):
        channels.bind(server, "127.0.0.1:1")
    with pytest.raises(AddressInUseError, match="in use"):
        runtime_listen.bind(server, "127.0.0.1:1")


async def test_b65_proxy_variables(harness: Any, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the environment takes the connection to localhost (grpc/grpc#29718, grpc/grpc#11751)."""
    for process in (pair.runtime, pair.scheduler):
        environment = Path(f"/proc/{process.pid}/environ").read_text().split("\0")
        assert f"http_proxy={harness.dead_proxy}" in environment
        assert "no_proxy=" in environment
    assert await harness.health(pair.scheduler.address) == "SERVING", "the scheduler has found its runtime over TCP"
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, harness.dead_proxy)
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    async with Client(pair.scheduler.address) as client, open_channel(pair.runtime.address) as channel:
        assert await harness.generate(client, [1, 2, 3], 2) == [20, 104]
        info = await runtime_pb2_grpc.RuntimeServiceStub(channel).GetInfo(runtime_pb2.GetRuntimeInfoRequest(), timeout=30)
        assert info.page_size == 4
    async with aio.insecure_channel(pair.runtime.address) as channel:  # as a client is that forgot the option
        with pytest.raises(aio.AioRpcError) as caught:
            await runtime_pb2_grpc.RuntimeServiceStub(channel).GetInfo(runtime_pb2.GetRuntimeInfoRequest(), timeout=30)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_b66_generated_code_and_allowed_versions(
    harness: Any, pair: Any, project_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generated code is newer than a version of protobuf that the metadata allows (grpc/grpc#39912)."""
    project = tomllib.loads((project_root / "pyproject.toml").read_text())["project"]
    allowed = {requirement.name: requirement.specifier for requirement in map(Requirement, project["dependencies"])}
    floors = {
        name: Version(next(part.version for part in allowed[name] if part.operator == ">=")) for name in ("protobuf", "grpcio")
    }
    folder = project_root / "proto" / "pagemirror" / "v1"
    messages, services = sorted(folder.glob("*_pb2.py")), sorted(folder.glob("*_pb2_grpc.py"))
    assert len(messages) == len(services) == len(list(folder.glob("*.proto"))) == 3
    for path in messages:
        match = re.search(r"Domain\.PUBLIC,\s+(\d+),\s+(\d+),\s+(\d+),", path.read_text())
        assert match, path.name
        made_by = tuple(map(int, match.groups()))
        # The guard in the generated code, asked with each version that the metadata allows at its ends.
        for version in (floors["protobuf"].release, (made_by[0] + 1, 99, 9)):
            assert Version(".".join(map(str, version))) in allowed["protobuf"]
            for name, number in zip(("MAJOR", "MINOR", "PATCH"), version, strict=True):
                monkeypatch.setattr(runtime_version, name, number)
            runtime_version.ValidateProtobufRuntimeVersion(runtime_version.Domain.PUBLIC, *made_by, "", path.name)
        # protobuf promises that generated code runs on the next major version, and no longer than that.
        assert Version(f"{made_by[0] + 2}.0.0") not in allowed["protobuf"]
        for name, number in zip(("MAJOR", "MINOR", "PATCH"), (made_by[0], made_by[1] - 1, 99), strict=True):
            monkeypatch.setattr(runtime_version, name, number)
        with pytest.raises(runtime_version.VersionError):
            runtime_version.ValidateProtobufRuntimeVersion(runtime_version.Domain.PUBLIC, *made_by, "", path.name)
        assert Version(f"{made_by[0]}.{made_by[1] - 1}.99") not in allowed["protobuf"]
    for path in services:
        match = re.search(r"^GRPC_GENERATED_VERSION = '(\S+)'$", path.read_text(), re.MULTILINE)
        assert match, path.name
        lowest = ".".join(map(str, (*floors["grpcio"].release, 0, 0)[:3]))
        assert not first_version_is_lower(lowest, match[1])
    for name, specifier in allowed.items():
        assert metadata.version(name) in specifier, name
    async with Client(pair.scheduler.address) as client:
        assert await harness.generate(client, [1, 2, 3], 2) == [20, 104]
