"""scheduler_service.metrics: served over HTTP, from a registry of its own."""

from __future__ import annotations

import asyncio
import contextlib
import re
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
        loop = asyncio.new_event_loop()
        first.watch_tasks(loop)
        task = loop.create_task(asyncio.Event().wait())
        with build_opener(ProxyHandler({})).open(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            text = response.read().decode()
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.close()
        assert "pagemirror_generated_tokens_total 3.0" in text
        assert "pagemirror_asyncio_tasks 1.0" in text
        assert re.search(r"^process_open_fds [1-9]", text, re.MULTILINE)
        assert re.search(r"^process_resident_memory_bytes [1-9]", text, re.MULTILINE)
        assert 'pagemirror_requests_live{state="retracted"} 3.0' in text
        assert 'pagemirror_pages{use="cached"} 20.0' in text
        with pytest.raises(StartError, match=f"cannot serve metrics on 127.0.0.1:{port}"):
            second.serve("127.0.0.1", port)
