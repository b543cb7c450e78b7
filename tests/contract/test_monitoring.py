"""deploy/prometheus and deploy/grafana: what they name is what is served and mounted."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from scheduler_service.metrics import Metrics

# Of PromQL, or of Prometheus itself.
NAME = re.compile(r"\bpagemirror_[a-z_]+")


@pytest.fixture(scope="module")
def samples() -> set[str]:
    """Names of samples that a scrape of a scheduler can find."""
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
    found: set[str] = set()
    for family in Metrics().registry.collect():
        found |= {family.name + suffix for suffix in suffixes.get(family.type, [])}
    return found


@pytest.fixture(scope="module")
def dashboard(project_root: Path) -> dict[str, Any]:
    """Grafana's."""
    found: dict[str, Any] = json.loads((project_root / "deploy/grafana/dashboards/pagemirror.json").read_text())
    return found


def _yaml(project_root: Path, name: str) -> Any:
    return yaml.safe_load((project_root / "deploy" / name).read_text())


def test_dashboard_is_what_its_script_writes(project_root: Path) -> None:
    """Nobody edits ten thousand characters of JSON by hand."""
    script = runpy.run_path(str(project_root / "tools/draw_dashboard.py"))
    assert (project_root / "deploy/grafana/dashboards/pagemirror.json").read_text() == script["text"]()


def test_dashboard_names_served_metrics(dashboard: dict[str, Any], samples: set[str]) -> None:
    """Every metric of a panel or of the choice of instances is in the registry, as counter, gauge or histogram."""
    texts = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    texts += [variable["definition"] for variable in dashboard["templating"]["list"]]
    named = {name for text in texts for name in NAME.findall(text)}
    assert len(named) >= 30
    assert named - samples == set()


def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    """Each cell of the grid belongs to one panel, and ids are unique."""
    cells = [
        (x, y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_rules_name_served_metrics(project_root: Path, samples: set[str]) -> None:
    """Every alert is about metrics that exist."""
    (group,) = _yaml(project_root, "prometheus/rules.yml")["groups"]
    for rule in group["rules"]:
        assert set(NAME.findall(rule["expr"])) <= samples, rule["alert"]
        assert rule["annotations"]["summary"].endswith(".")
    assert len(group["rules"]) >= 5


def test_prometheus_scrapes_what_compose_serves(project_root: Path) -> None:
    """Names and ports are those of services on the network that Prometheus is on."""
    services = yaml.safe_load((project_root / "docker-compose.yml").read_text())["services"]
    targets = {}
    for job in _yaml(project_root, "prometheus/prometheus.yml")["scrape_configs"]:
        for entry in job["dns_sd_configs"]:
            targets |= dict.fromkeys(entry["names"], str(entry["port"]))
    assert set(targets) == {"scheduler", "scheduler-2", "gateway"}
    for name, port in targets.items():
        assert port in services[name]["expose"]
        assert set(services[name]["networks"]) & set(services["prometheus"]["networks"])
    assert services["scheduler"]["environment"]["PAGEMIRROR_METRICS_PORT"] == targets["scheduler"]
    assert f"--prometheus-port {targets['gateway']}" in services["gateway"]["command"]


def test_grafana_finds_what_is_provisioned(project_root: Path, dashboard: dict[str, Any]) -> None:
    """The data source that panels name exists, asks the service, and dashboards lie where the provider looks."""
    services = yaml.safe_load((project_root / "docker-compose.yml").read_text())["services"]
    mounts = dict(entry.split(":")[1::-1] for entry in services["grafana"]["volumes"])
    (source,) = _yaml(project_root, "grafana/provisioning/datasources/prometheus.yml")["datasources"]
    (provider,) = _yaml(project_root, "grafana/provisioning/dashboards/pagemirror.yml")["providers"]
    assert {target["datasource"]["uid"] for panel in dashboard["panels"] for target in panel.get("targets", [])} == {
        source["uid"]
    }
    assert source["url"] == "http://prometheus:9090"
    folder = provider["options"]["path"]
    assert (project_root / mounts[folder] / "pagemirror.json").is_file()
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{folder}/pagemirror.json"
    assert (project_root / mounts["/etc/grafana/provisioning"] / "datasources").is_dir()
