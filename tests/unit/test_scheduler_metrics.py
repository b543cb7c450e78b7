"""scheduler_service.metrics: served over HTTP, from a registry of its own."""

from __future__ import annotations

import asyncio
import contextlib
import re
from urllib.request import ProxyHandler, build_opener

import pytest

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.request import FinishReason
from scheduler_service.errors import StartError
from scheduler_service.metrics import Fill, Metrics
from scheduler_service.vllm_metrics import VllmCollector

CONFIG = SchedulerConfig(page_size=16, num_pages=100, max_rows=8, max_pages_per_row=8, vocab_size=997)


def scrape(port: int, query: str = "") -> str:
    """The page."""
    with build_opener(ProxyHandler({})).open(f"http://127.0.0.1:{port}/metrics{query}", timeout=10) as response:
        text: str = response.read().decode()
    return text


def test_metrics_are_served_and_a_port_in_use_is_refused() -> None:
    """A scrape sees what was counted; two schedulers of one process share nothing; a taken port is named."""
    first, second = Metrics(), Metrics()
    with contextlib.closing(first), contextlib.closing(second):
        port = first.serve("127.0.0.1", 0)
        first.set_runtime("fingerprint", CONFIG)
        first.tally.tokens += 3
        first.set_fill(Fill(1, 2, 3, 10, 20, 30, locked=15))
        second.tally.tokens += 100
        loop = asyncio.new_event_loop()
        first.watch_tasks(loop)
        task = loop.create_task(asyncio.Event().wait())
        text = scrape(port)
        chosen = scrape(port, "?name[]=pagemirror_generated_tokens_total")
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.close()
        assert 'pagemirror_generated_tokens_total{model_name="fingerprint"} 3.0' in text
        assert 'pagemirror_generated_tokens_total{model_name="fingerprint"} 3.0' in chosen
        assert len(chosen.splitlines()) == 3  # HELP, TYPE and the sample
        assert 'pagemirror_asyncio_tasks{model_name="fingerprint"} 1.0' in text
        assert 'pagemirror_kv_usage_ratio{model_name="fingerprint"} 0.75' in text
        assert re.search(r"^process_open_fds [1-9]", text, re.MULTILINE)
        assert re.search(r"^process_resident_memory_bytes [1-9]", text, re.MULTILINE)
        assert 'pagemirror_requests_live{model_name="fingerprint",state="retracted"} 3.0' in text
        assert 'pagemirror_pages{model_name="fingerprint",use="cached"} 20.0' in text
        with pytest.raises(StartError, match=f"cannot serve metrics on 127.0.0.1:{port}"):
            second.serve("127.0.0.1", port)


def test_vllm_names_have_vllms_meaning() -> None:
    """What waits includes what was retracted, usage counts pages in use alone, ends have vLLM's reasons, bounds are vLLM's."""
    metrics = Metrics()
    metrics.registry.register(VllmCollector(metrics))
    value = metrics.registry.get_sample_value
    assert value("vllm:cache_config_info", {"engine": "0"}) is None  # no runtime has said yet
    metrics.set_runtime("tiny", CONFIG)
    tally = metrics.tally
    tally.query_tokens, tally.hit_tokens, tally.prefilled_tokens, tally.prompt_tokens, tally.tokens = 70, 32, 50, 90, 9
    tally.finished[FinishReason.CAPACITY] = 2
    tally.finished[FinishReason.LENGTH] = 3
    tally.finished[FinishReason.DEADLINE] = 1
    tally.first_token.values += [0.001, 0.0015, 0.3]
    metrics.set_fill(Fill(waiting=2, running=5, retracted=1, free=40, cached=40, private=20, locked=10, retractions=7))
    labels = {"model_name": "tiny", "engine": "0"}
    found = {
        name: value(f"vllm:{name}", labels)
        for name in (
            *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
            *("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total"),
        )
    }
    assert list(found.values()) == [5, 3, 0.3, 7, 70, 32, 50, 9]
    ends = {
        reason: value("vllm:request_success_total", {**labels, "finished_reason": reason}) for reason in ("length", "abort")
    }
    assert ends == {"length": 5, "abort": 1}
    info = {"block_size": "16", "num_gpu_blocks": "100", "enable_prefix_caching": "True"}
    assert value("vllm:cache_config_info", labels | info) == 1
    name = "vllm:time_to_first_token_seconds_bucket"
    assert [value(name, {**labels, "le": bound}) for bound in ("0.001", "0.005", "0.25", "0.5", "+Inf")] == [1, 2, 2, 3, 3]
    assert value(name, {**labels, "le": "0.002"}) is None  # a bound of ours
