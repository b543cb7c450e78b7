"""docs/metrics.md lists the families that the processes serve, with type and labels."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from runtime_service.metrics import RuntimeMetrics
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.frontend_metrics import FrontendMetrics
from scheduler_service.metrics import Metrics
from scheduler_service.vllm_metrics import VllmCollector

Families = dict[str, tuple[str, set[str]]]


def listed(root: Path, heading: str) -> Families:
    """Name → type and labels, of the table under a heading."""
    _, _, part = (root / "docs/metrics.md").read_text().partition(f"## {heading}\n")
    rows = re.findall(r"^\| `([a-z_:0-9]+)` \| (\w+) \| (.*?) ?\|", part.partition("\n## ")[0], re.MULTILINE)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def served(registry: CollectorRegistry) -> Families:
    """The same of what a scrape would find, without the labels that every sample has."""
    found: Families = {}
    for family in registry.collect():
        labels: set[str] = set().union(*(sample.labels for sample in family.samples)) - {"le", "model_name", "worker"}
        found[family.name] = (family.type, labels)
    for collector in registry._collector_to_names:
        if isinstance(collector, MetricWrapperBase):  # its samples come with their first labels
            found[collector._name] = (collector._type, set(collector._labelnames))
    return {name: value for name, value in found.items() if not name.startswith("process_")}


def test_families_of_the_scheduler(project_root: Path) -> None:
    """Ours, and those under vLLM's names."""
    plain, both = Metrics(), Metrics()
    assert listed(project_root, "The scheduler") == served(plain.registry)
    both.registry.register(VllmCollector(both))
    both.set_runtime("m", SchedulerConfig(page_size=4, num_pages=8, max_rows=2, max_pages_per_row=4, vocab_size=9))
    ours = listed(project_root, "The scheduler")
    assert listed(project_root, "vLLM's names") == {k: v for k, v in served(both.registry).items() if k not in ours}


def test_families_of_the_other_processes(project_root: Path) -> None:
    """A front end's worker, and a runtime."""
    assert listed(project_root, "A front end") == served(FrontendMetrics(0).registry)
    assert listed(project_root, "The runtime") == served(RuntimeMetrics().registry)
