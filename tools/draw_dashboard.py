"""Write deploy/grafana/dashboards/pagemirror.json: the panels are listed here, and Grafana's many fields are filled in."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards" / "pagemirror.json"
CHOSEN = 'instance=~"$instance"'
SOURCE = {"type": "prometheus", "uid": "prometheus"}
WIDTH, HEIGHT = 8, 8

Queries = list[tuple[str, str]]
"""PromQL and legend."""


def rate(name: str, by: str = "") -> str:
    """Sum of the counters' rates, split by a label where one is given."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate(pagemirror_{name}_total{{{CHOSEN}}}[$__rate_interval]))"


def gauge(name: str, by: str, extra: str = "") -> str:
    """Sum of gauges, split by a label."""
    return f"sum by ({by}) (pagemirror_{name}{{{CHOSEN}{extra}}})"


def quantiles(name: str) -> Queries:
    """Median, 90th and 99th percentile of a histogram."""
    buckets = f"sum by (le) (rate(pagemirror_{name}_bucket{{{CHOSEN}}}[$__rate_interval]))"
    return [(f"histogram_quantile({share}, {buckets})", f"p{share * 100:g}") for share in (0.5, 0.9, 0.99)]


def mean(name: str, by: str = "") -> str:
    """Mean of a histogram's values."""
    grouped = f" by ({by})" if by else ""
    chosen = f"{{{CHOSEN}}}[$__rate_interval]"
    return f"sum{grouped} (rate(pagemirror_{name}_sum{chosen})) / sum{grouped} (rate(pagemirror_{name}_count{chosen}))"


ROWS: list[tuple[str, list[tuple[str, str, Queries]]]] = [
    (
        "What clients see",
        [
            ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
            ("Between tokens", "s", quantiles("inter_token_seconds")),
            ("Whole request", "s", quantiles("request_seconds")),
            ("Tokens", "short", [(rate("generated_tokens"), "generated/s"), (rate("prompt_tokens"), "prompt/s")]),
            ("Ended requests by reason", "reqps", [(rate("requests_finished", "reason"), "{{reason}}")]),
            (
                "Refused",
                "reqps",
                [(rate("requests_refused", "error"), "{{error}}"), (rate("calls_refused", "reason"), "call: {{reason}}")],
            ),
        ],
    ),
    (
        "Capacity",
        [
            ("Live requests", "short", [(gauge("requests_live", "state"), "{{state}}")]),
            ("Time in the queue", "s", quantiles("queue_seconds")),
            ("Pages by use", "short", [(gauge("pages", "use"), "{{use}}")]),
            (
                "KV cache in use",
                "percentunit",
                [(f"max by (instance) (pagemirror_kv_usage_ratio{{{CHOSEN}}})", "{{instance}}")],
            ),
            (
                "Prompt tokens from the prefix cache",
                "percentunit",
                [(f"{rate('cached_prompt_tokens')} / {rate('prefix_cache_query_tokens')}", "share")],
            ),
            ("Retractions", "ops", [(rate("retractions"), "requests/s")]),
        ],
    ),
    (
        "Where a step's time goes",
        [
            ("Steps", "ops", [(rate("steps"), "steps/s")]),
            ("Mean time of each stage", "s", [(mean("step_stage_seconds", "stage"), "{{stage}}")]),
            (
                "In the runtime, mean",
                "s",
                [(mean("runtime_step_seconds"), "step"), (mean("runtime_apply_seconds"), "apply the op")],
            ),
            ("Rows of a step", "short", [(f"{rate('rows')} / {rate('steps')}", "rows")]),
            ("Rows sent whole, by cause", "short", [(rate("rows_sent", "cause, kind"), "{{cause}} {{kind}}")]),
            (
                "Rows sent whole, share",
                "percentunit",
                [(f"{rate('rows_refreshed')} / {rate('rows')}", "share")],
            ),
        ],
    ),
    (
        "The link and the mirror",
        [
            ("Runtime connected", "short", [(gauge("runtime_connected", "instance"), "{{instance}}")]),
            ("Sessions given up", "short", [(rate("resets", "cause"), "{{cause}}"), (rate("reconnects"), "reconnects")]),
            (
                "Rows verified and clamped",
                "short",
                [
                    (rate("digests"), "digests compared/s"),
                    (rate("digest_mismatches"), "differed/s"),
                    (rate("rows_clamped"), "clamped/s"),
                ],
            ),
            ("Ops sent", "Bps", [(rate("op_bytes"), "bytes/s per rank")]),
            ("Page ids sent", "short", [(rate("pages_sent"), "pages/s")]),
            ("Tasks of the event loop", "short", [(gauge("asyncio_tasks", "instance"), "{{instance}}")]),
        ],
    ),
]


def panel(number: int, title: str, unit: str, queries: Queries, x: int, y: int) -> dict[str, Any]:
    """One time series."""
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": x, "y": y},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for index, (expr, legend) in enumerate(queries)
        ],
    }


def dashboard() -> dict[str, Any]:
    """The whole of it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for heading, entries in ROWS:
        row = {"id": len(panels) + 1, "type": "row", "title": heading, "collapsed": False, "panels": []}
        panels.append(row | {"gridPos": {"h": 1, "w": 24, "x": 0, "y": y}})
        y += 1
        for index, (title, unit, queries) in enumerate(entries):
            across, down = index % 3, index // 3
            panels.append(panel(len(panels) + 1, title, unit, queries, across * WIDTH, y + down * HEIGHT))
        y += HEIGHT * -(-len(entries) // 3)
    variable = {
        "name": "instance",
        "label": "scheduler",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": "label_values(pagemirror_runtime_connected, instance)", "refId": "instances"},
        "definition": "label_values(pagemirror_runtime_connected, instance)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "uid": "pagemirror",
        "title": "pagemirror",
        "tags": ["pagemirror"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [variable]},
        "annotations": {"list": []},
        "panels": panels,
    }


def text() -> str:
    """As it lies in the file."""
    return json.dumps(dashboard(), indent=2) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write Grafana's dashboard.")
    parser.add_argument("--out", type=Path, default=OUTPUT, help="file to write (default: %(default)s)")
    parser.parse_args().out.write_text(text())


if __name__ == "__main__":
    main()
