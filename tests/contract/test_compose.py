"""The compose files and the Dockerfile say what docs/deployment.md promises: rights, order of starting, networks, versions.

Only the engine can say whether they run; these tests say that nothing of what matters was lost on the way.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from runtime_service.settings import RuntimeSettings
from scheduler_service.settings import SchedulerSettings

Service = dict[str, Any]
OURS = {"scheduler", "runtime", "fetch"}
TMP = "/tmp:rw,exec,mode=1777"


class _Loader(yaml.SafeLoader):
    """Compose's YAML, in which `!reset` takes out what another file has."""


_Loader.add_constructor("!reset", lambda loader, node: None)


def _load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.load(path.read_text(), _Loader)  # noqa: S506  (a safe loader with one tag more)
    return found


def _filled(text: str, env: dict[str, str] | None = None) -> str:
    """Compose's interpolation of `${NAME:-default}`."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: (env or {}).get(match[1]) or match[2], text)


def _environment(service: Service) -> dict[str, str]:
    return {name: _filled(str(value)) for name, value in service["environment"].items()}


@pytest.fixture(scope="module")
def gpu(project_root: Path) -> dict[str, Any]:
    """docker-compose.yml."""
    return _load(project_root / "docker-compose.yml")


@pytest.fixture(scope="module")
def cpu(project_root: Path) -> dict[str, Any]:
    """docker-compose.cpu.yml, which lies on top of it."""
    return _load(project_root / "docker-compose.cpu.yml")


@pytest.fixture(scope="module")
def services(gpu: dict[str, Any], cpu: dict[str, Any]) -> dict[str, Service]:
    """Every service in the file that defines it."""
    added = {name: service for name, service in cpu["services"].items() if name not in gpu["services"]}
    return gpu["services"] | added


def test_services_are_those_that_the_page_tells_of(gpu: dict[str, Any], cpu: dict[str, Any]) -> None:
    """Three services by themselves, the others by profile; the file for CPUs adds two that run once."""
    profiles = {name: service.get("profiles", []) for name, service in gpu["services"].items()}
    assert [name for name, wanted in profiles.items() if not wanted] == ["runtime", "scheduler", "gateway"]
    assert [name for name, wanted in profiles.items() if wanted == ["replicas"]] == ["runtime-2", "scheduler-2", "join-2"]
    assert [name for name, wanted in profiles.items() if wanted == ["monitoring"]] == ["prometheus", "grafana"]
    assert set(cpu["services"]) - set(gpu["services"]) == {"fetch", "smoke"}


def test_no_service_can_write_but_to_its_volumes(services: dict[str, Service]) -> None:
    """Root file systems are read-only, users have no rights, /tmp is writable and not noexec, and every stop has its time."""
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["tmpfs"] == [TMP], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert int(service["user"].partition(":")[0]) > 0, name
        assert re.fullmatch(r"\d+s", service["stop_grace_period"]), name


def test_one_user_writes_and_reads_models(services: dict[str, Service], project_root: Path) -> None:
    """The fetched files belong to the user that the image makes and that the runtime runs as."""
    dockerfile = (project_root / "Dockerfile").read_text()
    (uid,) = re.findall(r"useradd .*--uid (\d+)", dockerfile)
    for name in ("fetch", "runtime", "runtime-2", "scheduler", "scheduler-2", "gateway"):
        assert services[name]["user"] == f"{uid}:{uid}", name


def test_images_have_versions(services: dict[str, Service], project_root: Path) -> None:
    """Ours have the project's, the others a full one; nothing is `latest`."""
    version = tomllib.loads((project_root / "pyproject.toml").read_text())["project"]["version"]
    built = {service["build"]["target"] for service in services.values() if "build" in service}
    for name, service in services.items():
        image, _, tag = _filled(service["image"]).rpartition(":")
        if image.startswith("pagemirror-"):
            target = image.removeprefix("pagemirror-")
            assert target in OURS
            assert tag == version, name
            assert target in built, name
            assert service.get("build", {"target": target})["target"] == target, name
        else:
            assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag), name


def test_each_waits_for_what_it_needs(services: dict[str, Service], cpu: dict[str, Any]) -> None:
    """Runtime, scheduler, gateway, the question: each starts when the one before it serves, and models are there before all."""
    needs = {name: service.get("depends_on", {}) for name, service in services.items()}
    healthy = {"condition": "service_healthy"}
    assert needs["scheduler"] == {"runtime": healthy}
    assert needs["scheduler-2"] == {"runtime-2": healthy}
    assert needs["gateway"] == {"scheduler": healthy}
    assert needs["join-2"] == {"scheduler-2": healthy, "gateway": healthy}
    assert needs["smoke"] == {"gateway": healthy}
    assert needs["grafana"] == {"prometheus": healthy}
    for name in ("runtime", "runtime-2"):
        assert cpu["services"][name]["depends_on"] == {"fetch": {"condition": "service_completed_successfully"}}


def test_health_is_asked_where_it_is_served(services: dict[str, Service], project_root: Path) -> None:
    """Whatever others wait for has a check, at the port it listens on, with a script that the image has."""
    dockerfile = (project_root / "Dockerfile").read_text()
    for name, variable in (("runtime", "PAGEMIRROR_RUNTIME_LISTEN"), ("scheduler", "PAGEMIRROR_LISTEN")):
        for replica in (name, f"{name}-2"):
            *_, script, address = services[replica]["healthcheck"]["test"]
            assert Path(script).name == "grpc_health_probe.py"
            assert address.rpartition(":")[2] == services[replica]["environment"][variable].rpartition(":")[2]
    command = shlex.split(_filled(services["gateway"]["command"]))
    *_, script, url = services["gateway"]["healthcheck"]["test"]
    assert Path(script).name == "http_probe.py"
    assert url == f"http://127.0.0.1:{command[command.index('--port') + 1]}/readiness"
    for service in services.values():
        for word in [*service.get("healthcheck", {}).get("test", []), *service.get("entrypoint", [])]:
            if word.startswith("/opt/pagemirror/"):
                (source,) = [path for path in (project_root / "deploy").glob("*.py") if path.name == Path(word).name]
                assert f"deploy/{source.name}" in dockerfile


def test_settings_of_the_services_are_settings(services: dict[str, Service], monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of each service is what its program reads, and is accepted by it."""
    for name, kind, prefix in (
        ("runtime", RuntimeSettings, "PAGEMIRROR_RUNTIME_"),
        ("runtime-2", RuntimeSettings, "PAGEMIRROR_RUNTIME_"),
        ("scheduler", SchedulerSettings, "PAGEMIRROR_"),
        ("scheduler-2", SchedulerSettings, "PAGEMIRROR_"),
    ):
        environment = {key: value for key, value in _environment(services[name]).items() if key.startswith(prefix)}
        with monkeypatch.context() as patch:
            for key in [key for key in os.environ if key.startswith("PAGEMIRROR_")]:
                patch.delenv(key)
            for key, value in environment.items():
                patch.setenv(key, value)
            assert services[name]["command"] == ["--insecure"]
            settings = kind(insecure=True)
        unknown = {key.removeprefix(prefix).lower() for key in environment} - set(kind.model_fields)
        assert not unknown, name
        assert settings.listen.startswith("0.0.0.0:")


def test_scheduler_dials_its_runtime(services: dict[str, Service]) -> None:
    """Each scheduler's runtime is the service beside it, on a network of these two alone that leads nowhere else."""
    for suffix in ("", "-2"):
        runtime, scheduler = services[f"runtime{suffix}"], services[f"scheduler{suffix}"]
        assert scheduler["environment"]["PAGEMIRROR_RUNTIME"] == f"runtime{suffix}:50061"
        (network,) = runtime["networks"]
        assert {name for name, service in services.items() if network in service.get("networks", [])} == {
            f"runtime{suffix}",
            f"scheduler{suffix}",
        }


def test_only_one_network_has_a_way_out(gpu: dict[str, Any], services: dict[str, Service]) -> None:
    """What is not published is on internal networks, and what is published is on the loopback address by default."""
    ways = {name for name, network in gpu["networks"].items() if not network.get("internal")}
    assert ways == {"public"}
    for name, service in services.items():
        for port in service.get("ports", []):
            assert _filled(port).startswith("127.0.0.1:"), name
            assert "public" in service["networks"], name


def test_gateway_reaches_every_scheduler(services: dict[str, Service]) -> None:
    """The gateway's worker and the one that joins later are the schedulers' gateway ports, on a network of theirs."""
    command = shlex.split(_filled(services["gateway"]["command"]))
    workers = [command[command.index("--worker-urls") + 1], services["join-2"]["command"][1]]
    for url, name in zip(workers, ("scheduler", "scheduler-2"), strict=True):
        port = services[name]["environment"]["PAGEMIRROR_GATEWAY_LISTEN"].rpartition(":")[2]
        assert url == f"grpc://{name}:{port}"
        assert "backend" in services[name]["networks"]
    assert "backend" in services["gateway"]["networks"]
    keys = {services[name]["environment"]["GATEWAY_ADMIN_KEY_FILE"] for name in ("gateway", "join-2")}
    volumes = [services[name]["volumes"][-1].split(":") for name in ("gateway", "join-2")]
    assert [volume[2:] for volume in volumes] == [[], ["ro"]]
    assert {str(Path(key).parent) for key in keys} == {volume[1] for volume in volumes}


def test_triton_can_load_what_it_compiles(gpu: dict[str, Any], services: dict[str, Service], project_root: Path) -> None:
    """Its cache is a volume of each runtime's own, without options such as noexec, on a folder of the image's user."""
    dockerfile = (project_root / "Dockerfile").read_text()
    seen = set()
    for name in ("runtime", "runtime-2"):
        folder = services[name]["environment"]["TRITON_CACHE_DIR"]
        (volume,) = [entry for entry in services[name]["volumes"] if isinstance(entry, str)]
        source, target = volume.split(":")
        assert target == folder
        assert source in gpu["volumes"]
        assert re.search(rf"install -d -o pagemirror .*{folder}", dockerfile)
        seen.add(source)
    assert len(seen) == 2
    assert f"TRITON_CACHE_DIR={folder}" in dockerfile
    assert re.search(r"install -y --no-install-recommends gcc libc6-dev", dockerfile)


def test_gpu_is_reserved_and_given_back_without_one(gpu: dict[str, Any], project_root: Path) -> None:
    """Each runtime has a GPU of its own; the file for CPUs takes the reservation out and names the device."""
    devices = []
    text = (project_root / "docker-compose.cpu.yml").read_text()
    for name in ("runtime", "runtime-2"):
        (device,) = gpu["services"][name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        devices += [_filled(entry) for entry in device["device_ids"]]
        assert re.search(rf"^  {name}:\n    <<: \*cpu-runtime\n    deploy: !reset null$", text, re.MULTILINE)
        assert (
            _load(project_root / "docker-compose.cpu.yml")["services"][name]["environment"]["PAGEMIRROR_RUNTIME_DEVICE"]
            == "cpu"
        )
    assert devices == ["0", "1"]


def test_fetched_model_is_the_one_that_is_served(services: dict[str, Service], cpu: dict[str, Any]) -> None:
    """What the one-shot service writes, and where, is what the runtime opens; everybody else can only read."""
    (volume,) = services["fetch"]["volumes"]
    source, folder = volume.split(":")
    assert services["fetch"]["command"] == [_environment(services["runtime"])["PAGEMIRROR_RUNTIME_MODEL"]]
    assert services["fetch"]["attach"] is False
    assert services["fetch"]["restart"] == services["smoke"]["restart"] == "no"
    for name in ("runtime", "scheduler", "gateway", "runtime-2", "scheduler-2"):
        (mount,) = cpu["services"][name]["volumes"]
        assert (mount["source"], mount["target"], mount["read_only"]) == (source, folder, True)


def test_example_of_settings_is_complete_and_right(project_root: Path) -> None:
    """Each variable of the compose files is in .env.example with its default, and each one there means something."""
    stated = dict(re.findall(r"^#(\w+)=(.*)$", (project_root / ".env.example").read_text(), re.MULTILINE))
    used: dict[str, str] = {}
    for name in ("docker-compose.yml", "docker-compose.cpu.yml"):
        used |= dict(re.findall(r"\$\{(\w+):-([^}]*)\}", (project_root / name).read_text()))
    used.pop("PIP_EXTRA_INDEX_URL")  # pip's, told of where it is needed
    cpu_only = {"PAGEMIRROR_RUNTIME_KV_CACHE_GIB"}
    assert set(used) - cpu_only <= set(stated)
    for name, default in stated.items():
        if name in used:
            assert default == used[name], name
        elif name.startswith("PAGEMIRROR_RUNTIME_"):
            field = RuntimeSettings.model_fields[name.removeprefix("PAGEMIRROR_RUNTIME_").lower()]
            assert default == f"{field.default}".removesuffix(".0"), name
        else:
            field = SchedulerSettings.model_fields[name.removeprefix("PAGEMIRROR_").lower()]
            assert default == f"{field.default}".removesuffix(".0"), name


def test_dockerfile_has_one_base_and_three_targets(project_root: Path) -> None:
    """One pinned public image, no frontend to fetch, the three targets, the last of which is the default."""
    lines = (project_root / "Dockerfile").read_text().splitlines()
    assert not [line for line in lines if line.startswith("# syntax=")]
    stages = [line.split() for line in lines if line.startswith("FROM ")]
    names = [words[3] for words in stages]
    assert {words[1] for words in stages} - set(names) == {"python:3.11-slim-bookworm"}
    assert set(names) >= OURS
    assert names[-1] == "scheduler"


def test_images_install_what_the_constraints_pin(project_root: Path, tmp_path: Path) -> None:
    """Every pip command that resolves anything does so with constraints.txt, and the scheduler's brings no torch."""
    shutil.copy(project_root / "pyproject.toml", tmp_path)
    text = re.sub(r"\\\n", " ", (project_root / "Dockerfile").read_text())
    commands = re.findall(r"pip install [^&\n]*", text)
    assert len(commands) >= 5
    for command in commands:
        assert re.search(r"-c (/src/)?constraints\.txt", command) or "--no-deps" in command, command
    (lists,) = re.findall(r"RUN (python -c .*)", text)
    done = subprocess.run(
        ["sh", "-c", lists.replace("python", sys.executable, 1)], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    wanted = {path.stem: path.read_text() for path in tmp_path.glob("*.txt")}
    assert set(wanted) == OURS
    assert "smg-grpc-proto" in wanted["scheduler"]
    assert "torch" not in wanted["scheduler"]
    assert "torch" in wanted["runtime"]
    for name in OURS:
        assert f"-r {name}.txt" in text or f"-r /src/{name}.txt" in text


def test_builder_is_sent_what_the_dockerfile_copies(project_root: Path) -> None:
    """Each source of a COPY exists and is let through by .dockerignore."""
    text = re.sub(r"\\\n", " ", (project_root / "Dockerfile").read_text())
    rules = [line for line in (project_root / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = 0
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (project_root / source).exists(), source
            assert any(fnmatch.fnmatch(source, rule[1:].rstrip("/")) for rule in rules), source
            copied += 1
    assert copied >= 10
