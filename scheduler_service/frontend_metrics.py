"""Prometheus metrics of one worker of a front end. `docs/metrics.md` lists them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from scheduler_service.frontend_servicer import FrontendServicer
from scheduler_service.metrics import CallMetrics


class FrontendMetrics(CallMetrics):
    """Every sample has the worker's number and, once a scheduler has said it, the model's name."""

    def __init__(self, worker: int) -> None:
        super().__init__()
        self.registry.labels.update(worker=str(worker), model_name="")
        self.servicer: FrontendServicer | None = None
        """What is counted, once there is one."""
        self.connected = False
        self.registry.register(_Collector(self))

    def set_connected(self, connected: bool) -> None:
        """Whether there is a scheduler that serves."""
        self.connected = connected

    def set_model(self, model: str) -> None:
        """What the scheduler's runtime serves."""
        self.registry.labels["model_name"] = model


class _Collector:
    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return list(self.collect())

    def collect(self) -> Iterator[Metric]:
        requests = tokens = live = 0
        if (servicer := self._metrics.servicer) is not None:
            requests, tokens, live = servicer.num_requests, servicer.num_tokens, servicer.num_live
        yield CounterMetricFamily("pagemirror_frontend_requests", "Calls of Generate, refused ones included.", requests)
        yield CounterMetricFamily("pagemirror_frontend_tokens", "Tokens written to clients.", tokens)
        yield GaugeMetricFamily("pagemirror_frontend_requests_live", "Calls of Generate that are being served.", live)
        connected = int(self._metrics.connected)
        yield GaugeMetricFamily("pagemirror_frontend_connected", "1 while a scheduler serves this worker.", connected)
