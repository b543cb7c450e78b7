"""deploy/kubernetes: manifests fit the published schemas, and what they name in each other and in our programs is there.

No cluster is asked. The schemas are kubernetes-validate's; LeaderWorkerSet is no part of Kubernetes, so its own fields are
held against a list, and its pods against the schema.
"""

from __future__ import annotations

import os
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer

from kustomize import Manifest, build, find, load
from runtime_service.__main__ import cli as runtime_app
from runtime_service.settings import RuntimeSettings
from runtime_service.settings import load_settings as load_runtime
from scheduler_service.cli import app as scheduler_app
from scheduler_service.settings import SchedulerSettings
from scheduler_service.settings import load_settings as load_scheduler

FOLDERS = ("models", "overlays/single", "overlays/replicas", "overlays/multi-host")
VERSIONS = ("1.29", kubernetes_validate.latest_version())
"""The first with sidecars, and the newest that there is a schema of."""
LABELS = {"$(POD_NAME)": "pagemirror-ranks-0", "$(RANK)": "1", "$(POD_NAMESPACE)": "default"}


@pytest.fixture(scope="module", params=FOLDERS)
def manifests(request: pytest.FixtureRequest, project_root: Path) -> list[Manifest]:
    """Each of what a person can apply."""
    return build(project_root / "deploy/kubernetes" / request.param)


@pytest.fixture
def top(project_root: Path) -> Path:
    return project_root / "deploy/kubernetes"


def _templates(manifest: Manifest) -> list[Manifest]:
    """Its pods."""
    spec = manifest.get("spec", {})
    if manifest["kind"] == "LeaderWorkerSet":
        return [spec["leaderWorkerTemplate"]["leaderTemplate"], spec["leaderWorkerTemplate"]["workerTemplate"]]
    return [spec["template"]] if "template" in spec else []


def _pods(manifests: list[Manifest]) -> list[Manifest]:
    return [template for manifest in manifests for template in _templates(manifest)]


def _containers(pod: Manifest) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def _words(container: dict[str, Any]) -> list[str]:
    """Its arguments, with what the cluster fills in."""
    return [re.sub(r"\$\(\w+\)", lambda match: LABELS[match[0]], word) for word in container["args"]]


def _parsed(command: Any, words: list[str]) -> dict[str, Any]:
    """What a typer command would be called with."""
    with command.make_context("test", list(words)) as context:
        found: dict[str, Any] = context.params
        return found


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, top: Path) -> None:
    """Nothing of ours but what the ConfigMap has."""
    for name in [name for name in os.environ if name.startswith("PAGEMIRROR_")]:
        monkeypatch.delenv(name)
    (settings,) = load(top / "common/settings.yaml")
    for name, value in settings["data"].items():
        monkeypatch.setenv(name, value)


def _scheduler(container: dict[str, Any]) -> SchedulerSettings:
    commands: Any = typer.main.get_command(scheduler_app)
    given = _parsed(commands.commands["scheduler"], _words(container))
    return load_scheduler(**{name: value for name, value in given.items() if name in SchedulerSettings.model_fields})


def _runtime(container: dict[str, Any]) -> RuntimeSettings:
    given = _parsed(typer.main.get_command(runtime_app), _words(container))
    return load_runtime(**{name: value for name, value in given.items() if name in RuntimeSettings.model_fields})


def _ports(container: dict[str, Any]) -> set[int]:
    """Those that the program in it listens on for other pods, by its own reading of its arguments."""
    image = container["image"].partition(":")[0]
    if image == "pagemirror-runtime":
        host, _, port = _runtime(container).listen.rpartition(":")
        return set() if host == "127.0.0.1" else {int(port)}
    if image == "pagemirror-fetch":
        return set()
    if "run_gateway.py" in " ".join(container.get("command", [])):
        arguments = _smg(container)
        return {arguments.port, arguments.prometheus_port}
    settings = _scheduler(container)
    assert settings.gateway_listen is not None
    assert settings.metrics_port is not None
    return {int(address.rpartition(":")[2]) for address in (settings.listen, settings.gateway_listen)} | {settings.metrics_port}


def _smg(container: dict[str, Any]) -> Any:
    from smg.launch_router import parse_router_args

    return parse_router_args(_words(container))


def test_manifests_fit_the_schema(manifests: list[Manifest]) -> None:
    """Strictly, for the oldest and the newest version; a pod of a LeaderWorkerSet is looked at as a pod."""
    for version in VERSIONS:
        for manifest in manifests:
            if manifest["kind"] != "LeaderWorkerSet":
                kubernetes_validate.validate(manifest, version, strict=True)
            for template in _templates(manifest):
                metadata = {"name": "pod"} | template.get("metadata", {})
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
                kubernetes_validate.validate(pod, version, strict=True)


def test_schema_refuses_what_it_should(top: Path) -> None:
    """A misspelt field of a probe does not pass: the check above looks deep enough."""
    engine = find(build(top / "overlays/single"), "Deployment", "pagemirror")
    engine["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["periodSecond"] = 5
    with pytest.raises(kubernetes_validate.ValidationError, match="periodSecond"):
        kubernetes_validate.validate(engine, VERSIONS[-1], strict=True)


def test_every_file_is_part_of_something(top: Path) -> None:
    """What a kustomization lists exists, and no manifest lies beside one that does not list it."""
    for path in top.rglob("kustomization.yaml"):
        (told,) = load(path)
        listed = {*told["resources"], *(entry["path"] for entry in told.get("patches", []))}
        beside = {file.name for file in path.parent.glob("*.yaml")} - {"kustomization.yaml"}
        assert {name for name in listed if not name.startswith("..")} == beside, path
        assert all((path.parent / name).exists() for name in listed), path


def test_pods_are_confined(manifests: list[Manifest]) -> None:
    """No root, no writable root file system, no capabilities, no token of the cluster but where pods are watched."""
    for pod in _pods(manifests):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 10001
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is ("serviceAccountName" in spec)
        # Variables of services would look like settings of ours.
        assert spec["enableServiceLinks"] is False
        for container in _containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_images_are_those_of_this_version(manifests: list[Manifest], project_root: Path) -> None:
    """Each image is a target of the Dockerfile, with the project's version."""
    version = tomllib.loads((project_root / "pyproject.toml").read_text())["project"]["version"]
    targets = re.findall(r"^FROM \S+ AS (\S+)$", (project_root / "Dockerfile").read_text(), re.MULTILINE)
    for pod in _pods(manifests):
        for container in _containers(pod):
            name, _, tag = container["image"].partition(":")
            assert name.removeprefix("pagemirror-") in targets
            assert tag == version


@pytest.mark.usefixtures("environment")
def test_programs_take_their_arguments(manifests: list[Manifest], project_root: Path) -> None:
    """Each container's arguments are accepted by the program's own reader, and its ports are those that it would serve."""
    for pod in _pods(manifests):
        for container in _containers(pod):
            served = _ports(container)
            assert {port["containerPort"] for port in container.get("ports", [])} == served, container["name"]
            if container["name"] == "fetch":
                reader = runpy.run_path(str(project_root / "tools/make_model.py"))
                assert callable(reader["make_model"])
                (folder,) = container["args"]
                assert folder == os.environ["PAGEMIRROR_RUNTIME_MODEL"]


@pytest.mark.usefixtures("environment")
def test_probes_ask_where_somebody_answers(manifests: list[Manifest]) -> None:
    """By gRPC or HTTP at a port that the container serves; inside where the port is not for others."""
    for pod in _pods(manifests):
        for container in _containers(pod):
            names = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
            probes = {key: probe for key, probe in container.items() if key.endswith("Probe")}
            assert probes or container["name"] == "fetch"
            for probe in probes.values():
                if "grpc" in probe:
                    assert probe["grpc"]["port"] in _ports(container)
                elif "httpGet" in probe:
                    assert names[probe["httpGet"]["port"]] == _smg(container).port
                else:
                    assert probe["exec"]["command"][-1] == _runtime(container).listen


def _matches(selector: dict[str, str], pod: Manifest) -> bool:
    return selector.items() <= pod["metadata"]["labels"].items()


def test_selectors_find_pods(manifests: list[Manifest]) -> None:
    """Deployments their own pods, Services and policies the pods whose ports they name."""
    pods = [pod for pod in _pods(manifests) if "metadata" in pod]
    for manifest in manifests:
        spec = manifest.get("spec", {})
        if manifest["kind"] == "Deployment":
            assert _matches(spec["selector"]["matchLabels"], spec["template"])
        elif manifest["kind"] == "Service":
            (pod,) = [pod for pod in pods if _matches(spec["selector"], pod)]
            names = {port["name"] for container in _containers(pod) for port in container.get("ports", [])}
            assert {port["targetPort"] for port in spec["ports"]} == names
        elif manifest["kind"] == "NetworkPolicy":
            (pod,) = [pod for pod in pods if _matches(spec["podSelector"]["matchLabels"], pod)]
            served = {port["containerPort"] for container in _containers(pod) for port in container.get("ports", [])}
            assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} == served


def test_names_are_of_things_that_are_there(manifests: list[Manifest], top: Path) -> None:
    """Settings, volumes, accounts and roles that a manifest refers to are in the same overlay, or are the models'."""
    there = {(entry["kind"], entry["metadata"]["name"]) for entry in [*manifests, *build(top / "models")]}
    for pod in _pods(manifests):
        spec = pod["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for volume in volumes.values():
            if claim := volume.get("persistentVolumeClaim"):
                assert ("PersistentVolumeClaim", claim["claimName"]) in there
        if account := spec.get("serviceAccountName"):
            assert ("ServiceAccount", account) in there
        for container in _containers(pod):
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
            for source in container.get("envFrom", []):
                assert ("ConfigMap", source["configMapRef"]["name"]) in there
    for manifest in manifests:
        if manifest["kind"] == "RoleBinding":
            assert ("Role", manifest["roleRef"]["name"]) in there
            assert all((subject["kind"], subject["name"]) in there for subject in manifest["subjects"])


def test_settings_are_settings(top: Path) -> None:
    """Each key of the ConfigMap is read by one of the two programs."""
    (settings,) = load(top / "common/settings.yaml")
    for name in settings["data"]:
        runtime = name.removeprefix("PAGEMIRROR_RUNTIME_").lower() in RuntimeSettings.model_fields
        assert runtime or name.removeprefix("PAGEMIRROR_").lower() in SchedulerSettings.model_fields, name


@pytest.mark.usefixtures("environment")
def test_gateway_of_replicas_finds_their_pods(top: Path) -> None:
    """It selects the engine's labels in its own namespace, at the gateway port, and may read pods and nothing else."""
    found = build(top / "overlays/replicas")
    engine = find(found, "Deployment", "pagemirror")
    assert engine["spec"]["replicas"] > 1
    pod = engine["spec"]["template"]
    (gateway,) = find(found, "Deployment", "pagemirror-gateway")["spec"]["template"]["spec"]["containers"]
    arguments = _smg(gateway)
    assert arguments.service_discovery is True
    assert arguments.selector == pod["metadata"]["labels"]
    assert arguments.service_discovery_port in _ports(pod["spec"]["containers"][0])
    assert not arguments.worker_urls
    assert {entry["name"] for entry in gateway["env"]} == {"HF_ENDPOINT", "POD_NAMESPACE"}
    assert find(found, "Role", "pagemirror-gateway")["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    ]


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("overlay", ["single", "multi-host"])
def test_gateway_of_one_engine_dials_its_service(overlay: str, top: Path) -> None:
    """The worker's address is the Service's name with its gateway port."""
    found = build(top / "overlays" / overlay)
    (gateway,) = find(found, "Deployment", "pagemirror-gateway")["spec"]["template"]["spec"]["containers"]
    service = find(found, "Service", "pagemirror")
    (port,) = [entry["port"] for entry in service["spec"]["ports"] if entry["name"] == "gateway"]
    assert _smg(gateway).worker_urls == [f"grpc://{service['metadata']['name']}:{port}"]


@pytest.mark.usefixtures("environment")
def test_leader_dials_its_ranks(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group has a pod for each rank; the scheduler's addresses are theirs, in order, by the controller's names."""
    group = find(build(top / "overlays/multi-host"), "LeaderWorkerSet", "pagemirror-ranks")
    assert group["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert set(group["spec"]) <= {"replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy", "networkConfig"}
    template = group["spec"]["leaderWorkerTemplate"]
    assert set(template) <= {"leaderTemplate", "workerTemplate", "size", "restartPolicy", "subGroupPolicy"}
    assert template["restartPolicy"] in {"None", "RecreateGroupOnPodRestart"}
    size, name = template["size"], group["metadata"]["name"]
    (first,) = template["leaderTemplate"]["spec"]["initContainers"]
    (scheduler,) = template["leaderTemplate"]["spec"]["containers"]
    addresses = [_runtime(first).listen, *(f"{name}-0-{rank}.{name}:50061" for rank in range(1, size))]
    assert _scheduler(scheduler).runtimes == tuple(addresses)
    assert (_runtime(first).rank, _runtime(first).world_size) == (0, size)
    (worker,) = template["workerTemplate"]["spec"]["containers"]
    ranks = []
    for rank in range(1, size):
        monkeypatch.setitem(LABELS, "$(RANK)", str(rank))
        settings = _runtime(worker)
        assert settings.listen.endswith(":50061")
        assert settings.world_size == size
        ranks.append(settings.rank)
    assert ranks == list(range(1, size))
    (source,) = [entry["valueFrom"]["fieldRef"]["fieldPath"] for entry in worker["env"] if entry["name"] == "RANK"]
    assert source == "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"
