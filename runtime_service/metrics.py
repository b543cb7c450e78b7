"""Prometheus metrics of one runtime process. `docs/metrics.md` lists them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from threading import Lock

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from pagemirror.histograms import BulkHistogram
from pagemirror.metric_server import MetricServer
from runtime_service.errors import Refusal, SettingError
from runtime_service.ops import NO_TOKEN, RefusalCode, RowStatus, StepResult

_STEP_BOUNDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0)
_MOST_UNFOLDED = 4096


def _fail(sentence: str) -> Exception:
    return SettingError("--metrics-port", "", sentence)


class RuntimeMetrics(MetricServer):
    """The execution thread notes its answers; scrapes come from another thread."""

    fail = _fail

    def __init__(self) -> None:
        super().__init__()
        self.registry.labels["model_name"] = ""
        self.serving = False
        """The model is loaded and warm."""
        self.steps = self.rows = self.tokens = self.clamped = self.not_finite = 0
        self.refusals: Counter[RefusalCode] = Counter()
        self.apply, self.step = BulkHistogram(_STEP_BOUNDS), BulkHistogram(_STEP_BOUNDS)
        self._lock = Lock()
        self.registry.register(_Collector(self))

    def set_ready(self, model: str) -> None:
        """The model is loaded."""
        self.registry.labels["model_name"] = model
        self.serving = True

    def note(self, answer: StepResult | Refusal) -> None:
        """One op was answered."""
        if isinstance(answer, Refusal):
            self.refusals[answer.code] += 1
            return
        self.steps += 1
        self.rows += len(answer.tokens)
        self.tokens += int(np.count_nonzero(answer.tokens != NO_TOKEN))
        if answer.row_status.any():
            self.clamped += int(np.count_nonzero(answer.row_status == RowStatus.CLAMPED))
            self.not_finite += int(np.count_nonzero(answer.row_status == RowStatus.NON_FINITE))
        with self._lock:
            self.apply.values.append(answer.apply_us * 1e-6)
            self.step.values.append(answer.step_us * 1e-6)
            if len(self.apply.values) > _MOST_UNFOLDED:
                self._fold()

    def fold(self) -> None:
        """Sort what was noted into buckets."""
        with self._lock:
            self._fold()

    def _fold(self) -> None:
        self.apply.fold()
        self.step.fold()


class _Collector:
    def __init__(self, metrics: RuntimeMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return list(self.collect())

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        metrics.fold()
        yield _counter("steps", "Ops executed.", metrics.steps)
        yield _counter("rows", "Rows in them.", metrics.rows)
        yield _counter("tokens", "Tokens sampled.", metrics.tokens)
        yield _counter("rows_clamped", "Rows that reached the mirror's width.", metrics.clamped)
        yield _counter("rows_not_finite", "Rows whose logits were not finite.", metrics.not_finite)
        refusals = CounterMetricFamily("pagemirror_runtime_refusals", "Ops that were refused or failed.", labels=["code"])
        for code in RefusalCode:
            refusals.add_metric([code.name.lower()], metrics.refusals[code])
        yield refusals
        yield _histogram("apply_seconds", "Time to check an op and apply it to the mirror, on the host.", metrics.apply)
        yield _histogram("step_seconds", "Time from beginning with an op to its result.", metrics.step)
        text = "1 when the model is loaded and its warm-up step has run."
        yield GaugeMetricFamily("pagemirror_runtime_ready", text, int(metrics.serving))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"pagemirror_runtime_{name}", text, value)


def _histogram(name: str, text: str, histogram: BulkHistogram) -> Metric:
    return HistogramMetricFamily(f"pagemirror_runtime_{name}", text, *histogram.read())
