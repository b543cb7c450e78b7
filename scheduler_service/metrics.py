"""Prometheus metrics of one scheduler process, in a registry of their own. `docs/metrics.md` lists them.

What happens in every step is counted in a `Tally` and read from it at each scrape; what happens rarely has a counter of
prometheus_client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from pagemirror.histograms import BulkHistogram
from pagemirror.metric_server import MetricServer
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.errors import StartError
from scheduler_service.tally import STEP_BOUNDS, Tally


@dataclass(slots=True)
class Fill:
    """Requests and pages at one moment."""

    waiting: int = 0
    running: int = 0
    retracted: int = 0
    free: int = 0
    cached: int = 0
    private: int = 0
    locked: int = 0  # of the cached pages: those that running requests use
    retractions: int = 0  # since the start

    @property
    def kv_usage(self) -> float:
        """Share of the pages that running requests hold, shared ones counted once."""
        total = self.free + self.cached + self.private
        return (self.private + self.locked) / total if total else 0.0


def fill_of(core: Scheduler) -> Fill:
    """The present one."""
    pages, live = core.stats(), (core.num_waiting, core.num_running, core.num_retracted)
    return Fill(*live, pages.free, pages.cached, pages.private, core.placement.cache.num_locked, core.num_retractions)


class CallMetrics(MetricServer):
    """What any process with a public port counts."""

    fail = StartError

    def __init__(self) -> None:
        super().__init__()
        self.calls_refused = Counter(
            "pagemirror_calls_refused", "Calls that the public port refused or cut off.", ["reason"], registry=self.registry
        )
        self.tasks = Gauge(
            "pagemirror_asyncio_tasks", "Tasks of the event loop: a few, and some a live call.", registry=self.registry
        )

    def watch_tasks(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have each scrape count the tasks of this loop."""
        self.tasks.set_function(lambda: len(asyncio.all_tasks(loop)))


class Metrics(CallMetrics):
    """What the engine loop counts. Names follow Prometheus conventions: base units, counters end in `_total`."""

    def __init__(self) -> None:
        super().__init__()
        self.registry.labels["model_name"] = ""
        registry = self.registry
        self.tally = Tally()
        self.fill = Fill()
        self.config: SchedulerConfig | None = None
        """Limits of the runtime, once they are known."""
        self.refused = Counter("pagemirror_requests_refused", "Requests refused at submit.", ["error"], registry=registry)
        self.resets = Counter("pagemirror_resets", "Sessions given up for a new one.", ["cause"], registry=registry)
        self.reconnects = Counter("pagemirror_reconnects", "Sessions begun on a new stream after one broke.", registry=registry)
        self.digests = Counter("pagemirror_digests", "Digests of mirror rows that were compared.", registry=registry)
        self.digest_mismatches = Counter(
            "pagemirror_digest_mismatches", "Steps in which the digest of a mirror row differed.", registry=registry
        )
        self.connected = Gauge("pagemirror_runtime_connected", "1 while a runtime serves this scheduler.", registry=registry)
        registry.register(_TallyCollector(self))

    def set_runtime(self, model: str, config: SchedulerConfig) -> None:
        """What the runtime said of itself: its model becomes a label of every sample."""
        self.registry.labels["model_name"] = model
        self.config = config
        self.tally.set_rows(config.max_rows)

    def set_fill(self, fill: Fill) -> None:
        """Present numbers, and what was noted since the last call."""
        self.fill = fill
        self.tally.fold()


class _TallyCollector:
    """Reads tally and fill at each scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return list(self.collect())

    def collect(self) -> Iterator[Metric]:
        tally, fill = self._metrics.tally, self._metrics.fill
        yield _counter("requests", "Requests accepted at submit.", tally.requests)
        finished = CounterMetricFamily("pagemirror_requests_finished", "Requests that ended.", labels=["reason"])
        for reason, count in tally.finished.items():
            finished.add_metric([reason.value], count)
        yield finished
        yield _counter("prompt_tokens", "Prompt tokens of accepted requests.", tally.prompt_tokens)
        yield _counter("generated_tokens", "Tokens handed to clients.", tally.tokens)
        yield _counter("prefix_cache_query_tokens", "Prompt tokens looked for in the prefix cache.", tally.query_tokens)
        yield _counter("cached_prompt_tokens", "Prompt tokens taken from the prefix cache.", tally.hit_tokens)
        yield _counter("retractions", "Times a request lost its row, to resume later.", fill.retractions)
        live = GaugeMetricFamily("pagemirror_requests_live", "Live requests by state.", labels=["state"])
        for state in ("waiting", "running", "retracted"):
            live.add_metric([state], getattr(fill, state))
        yield live
        pages = GaugeMetricFamily("pagemirror_pages", "Pages of the pool by use.", labels=["use"])
        for use in ("free", "cached", "private"):
            pages.add_metric([use], getattr(fill, use))
        yield pages
        yield _gauge("kv_usage_ratio", "Share of the pages that running requests hold.", fill.kv_usage)
        yield from self._steps(tally)
        yield _histogram("time_to_first_token_seconds", "From submit to a request's first token.", tally.first_token)
        yield _histogram("inter_token_seconds", "From a request's token to its next.", tally.between_tokens)
        yield _histogram("queue_seconds", "From submit to a request's first step; told when it ends.", tally.queued)
        yield _histogram("request_seconds", "From submit to the end, of requests not aborted.", tally.end_to_end)

    @staticmethod
    def _steps(tally: Tally) -> Iterator[Metric]:
        yield _counter("steps", "Steps executed by the runtime, over all sessions.", tally.steps)
        stages = HistogramMetricFamily("pagemirror_step_stage_seconds", "Parts of a step's time.", labels=["stage"])
        for stage, histogram in tally.stages.items():
            stages.add_metric([stage], *histogram.read())
        yield stages
        yield _histogram("step_seconds", "From sending an op to its result.", tally.stages["wait"], STEP_BOUNDS)
        yield _histogram("runtime_apply_seconds", "The runtime's time to apply an op to its mirror.", tally.apply)
        yield _histogram("runtime_step_seconds", "The runtime's time from an op to its result.", tally.runtime_step)
        yield _counter("op_bytes", "Bytes of ops sent, per rank.", tally.op_bytes)
        yield _counter("pages_sent", "Page ids sent to the runtime.", tally.pages_sent)
        yield _counter("rows", "Rows computed, over all steps.", tally.rows)
        yield _counter("rows_refreshed", "Rows sent with full_refresh.", tally.refreshed_rows)
        sent = CounterMetricFamily(
            "pagemirror_rows_sent", "Rows sent, by the transition that put them into the op.", labels=["cause", "kind"]
        )
        for cause, counts in tally.rows_sent.items():
            for kind, count in zip(("tail", "full"), counts, strict=True):
                sent.add_metric([cause.value, kind], count)
        yield sent
        ratio = tally.refreshed_rows / tally.rows if tally.rows else 0.0
        yield _gauge("refresh_ratio", "Share of the rows that were sent with full_refresh, since the start.", ratio)
        yield _counter("rows_clamped", "Rows that reached the mirror's width.", tally.clamped_rows)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"pagemirror_{name}", text, value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"pagemirror_{name}", text, value)


def _histogram(name: str, text: str, histogram: BulkHistogram, bounds: tuple[float, ...] | None = None) -> Metric:
    buckets, total = histogram.read(bounds)
    return HistogramMetricFamily(f"pagemirror_{name}", text, buckets, total)
