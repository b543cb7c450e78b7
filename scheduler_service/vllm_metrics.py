"""The same counts under the names that vLLM's servers use, for dashboards and load balancers that know these.

Only families that mean here what they mean there are shown.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from pagemirror.histograms import BulkHistogram
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.request import FinishReason
from scheduler_service.metrics import Metrics
from scheduler_service.tally import VLLM_BETWEEN_TOKENS_BOUNDS, VLLM_FIRST_TOKEN_BOUNDS, VLLM_REQUEST_BOUNDS

ENGINE = "0"
FINISHED_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CAPACITY: "length",
    FinishReason.ABORT: "abort",
    FinishReason.DEADLINE: "abort",
    FinishReason.FAILED: "error",
}


class VllmCollector:
    """Reads the metrics at each scrape. The registry adds the label `model_name`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        """The families."""
        return list(self.collect())

    def collect(self) -> Iterator[Metric]:
        """The families, with their samples."""
        tally, fill = self._metrics.tally, self._metrics.fill
        yield _gauge("num_requests_running", "Number of requests that hold a row.", fill.running)
        waiting = fill.waiting + fill.retracted
        yield _gauge("num_requests_waiting", "Number of requests that wait, retracted ones included.", waiting)
        yield _gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", fill.kv_usage)
        yield _counter("prefix_cache_queries", "Prefix cache queries, in tokens.", tally.query_tokens)
        yield _counter("prefix_cache_hits", "Prefix cache hits, in tokens.", tally.hit_tokens)
        yield _counter("num_preemptions", "Cumulative number of retractions.", fill.retractions)
        yield _counter("prompt_tokens", "Number of prefill tokens processed.", tally.prefilled_tokens)
        yield _counter("generation_tokens", "Number of generation tokens processed.", tally.tokens)
        yield self._finished()
        for name, histogram, bounds in (
            ("time_to_first_token_seconds", tally.first_token, VLLM_FIRST_TOKEN_BOUNDS),
            ("inter_token_latency_seconds", tally.between_tokens, VLLM_BETWEEN_TOKENS_BOUNDS),
            ("request_queue_time_seconds", tally.queued, VLLM_REQUEST_BOUNDS),
            ("e2e_request_latency_seconds", tally.end_to_end, VLLM_REQUEST_BOUNDS),
        ):
            yield _histogram(name, histogram, bounds)
        if self._metrics.config is not None:
            yield self._cache_config(self._metrics.config)

    def _finished(self) -> Metric:
        counts = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        for reason, count in self._metrics.tally.finished.items():
            counts[FINISHED_REASONS[reason]] += count
        family = CounterMetricFamily(
            "vllm:request_success", "Count of finished requests.", labels=["engine", "finished_reason"]
        )
        for word, count in counts.items():
            family.add_metric([ENGINE, word], count)
        return family

    @staticmethod
    def _cache_config(config: SchedulerConfig) -> Metric:
        values = {
            "engine": ENGINE,
            "block_size": str(config.page_size),
            "num_gpu_blocks": str(config.num_pages),
            "enable_prefix_caching": str(config.prefix_cache),
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "Information of the KV cache.", labels=list(values))
        family.add_metric(list(values.values()), 1)
        return family


def _counter(name: str, text: str, value: float) -> Metric:
    family = CounterMetricFamily(f"vllm:{name}", text, labels=["engine"])
    family.add_metric([ENGINE], value)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(f"vllm:{name}", text, labels=["engine"])
    family.add_metric([ENGINE], value)
    return family


def _histogram(name: str, histogram: BulkHistogram, bounds: tuple[float, ...]) -> Metric:
    text = f"Histogram of {name.removesuffix('_seconds').replace('_', ' ')} in seconds."
    family = HistogramMetricFamily(f"vllm:{name}", text, labels=["engine"])
    family.add_metric([ENGINE], *histogram.read(bounds))
    return family
