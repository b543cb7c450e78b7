"""scheduler_service.metrics: served over HTTP, from a registry of its own."""

from __future__ import annotations

import contextlib
from urllib.request import ProxyHandler, build_opener

import pytest

from scheduler_service.errors import StartError
from scheduler_service.metrics import Metrics


def test_metrics_are_served_and_a_port_in_use_is_refused() -> None:
    """A scrape sees what was counted; two schedulers of one process share nothing; a taken port is named."""
    first, second = Metrics(), Metrics()
    with contextlib.closing(first), contextlib.closing(second):
        port = first.serve("127.0.0.1", 0)
        first.tokens.inc(3)
        first.set_fill((1, 2, 3), (10, 20, 30))
        second.tokens.inc(100)
        with build_opener(ProxyHandler({})).open(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            text = response.read().decode()
        assert "pagemirror_generated_tokens_total 3.0" in text
        assert 'pagemirror_requests_live{state="retracted"} 3.0' in text
        assert 'pagemirror_pages{use="cached"} 20.0' in text
        with pytest.raises(StartError, match=f"cannot serve metrics on 127.0.0.1:{port}"):
            second.serve("127.0.0.1", port)
