"""Metrics of runtimes, and of the workers of a front end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from prometheus_client import generate_latest

from runtime_service.errors import Refusal, SettingsError
from runtime_service.metrics import RuntimeMetrics
from runtime_service.ops import NO_TOKEN, RefusalCode, RowStatus, StepResult
from runtime_service.settings import load_settings
from scheduler_service.frontend_metrics import FrontendMetrics
from scheduler_service.frontend_servicer import FrontendServicer
from scheduler_service.frontend_settings import load_frontend_settings
from scheduler_service.public_settings import SettingsError as SchedulerSettingsError


def test_runtime_counts_its_answers() -> None:
    """Results by rows, tokens and states of rows, refusals by code, and the times that go back with each result."""
    metrics = RuntimeMetrics()
    metrics.set_ready("tiny")
    status = np.array([RowStatus.OK, RowStatus.CLAMPED, RowStatus.NON_FINITE], dtype=np.uint8)
    metrics.note(StepResult(1, 1, np.array([5, NO_TOKEN, 7], np.int32), status, apply_us=100, step_us=3000))
    metrics.note(Refusal(RefusalCode.GAP))
    value = metrics.registry.get_sample_value
    prefix = "pagemirror_runtime_"
    found = {name: value(f"{prefix}{name}_total") for name in ("steps", "rows", "tokens", "rows_clamped", "rows_not_finite")}
    assert list(found.values()) == [1, 3, 2, 1, 1]
    assert value(f"{prefix}refusals_total", {"code": "gap"}) == 1
    assert value(f"{prefix}apply_seconds_bucket", {"le": "0.0001"}) == 1
    assert value(f"{prefix}step_seconds_sum") == pytest.approx(0.003)
    assert b'pagemirror_runtime_ready{model_name="tiny"} 1.0' in generate_latest(metrics.registry)


def test_workers_have_ports_one_above_the_other() -> None:
    """Their settings say which; a range that does not fit, and an address for strangers, are refused."""
    given: dict[str, Any] = {"scheduler": "127.0.0.1:1", "workers": 3}
    settings = load_frontend_settings(**given, metrics_port=9100)
    assert [settings.of_worker(n).metrics_port for n in range(3)] == [9100, 9101, 9102]
    assert load_frontend_settings(**given, metrics_port=0).of_worker(2).metrics_port == 0
    with pytest.raises(SchedulerSettingsError, match="--metrics-port 65534 leaves no port"):
        load_frontend_settings(**given, metrics_port=65534)
    with pytest.raises(SettingsError, match=r"--metrics-host 0\.0\.0\.0 can be reached"):
        load_settings(metrics_port=1, metrics_host="0.0.0.0")


def test_worker_tells_who_it_is() -> None:
    """Its number and the model are labels, and what it shows is what its servicer has counted."""
    metrics = FrontendMetrics(4)
    metrics.set_model("tiny")
    metrics.set_connected(True)
    metrics.servicer = FrontendServicer(None)  # type: ignore[arg-type]
    metrics.servicer.num_tokens = 9
    page = generate_latest(metrics.registry).decode()
    assert 'pagemirror_frontend_tokens_total{model_name="tiny",worker="4"} 9.0' in page
    assert 'pagemirror_frontend_connected{model_name="tiny",worker="4"} 1.0' in page
