"""Prometheus metrics of one scheduler process, in a registry of their own."""

from __future__ import annotations

import asyncio
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, start_http_server

from scheduler_service.errors import StartError

_STEP_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0, 120.0)


class Metrics:
    """What the engine loop counts. Names follow Prometheus conventions: base units, counters end in `_total`."""

    def __init__(self) -> None:
        self._server: WSGIServer | None = None
        self._thread: Thread | None = None
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter("pagemirror_requests", "Requests accepted at submit.", registry=registry)
        self.refused = Counter("pagemirror_requests_refused", "Requests refused at submit.", ["error"], registry=registry)
        self.calls_refused = Counter(
            "pagemirror_calls_refused", "Calls that the public port refused or cut off.", ["reason"], registry=registry
        )
        self.finished = Counter("pagemirror_requests_finished", "Requests that ended.", ["reason"], registry=registry)
        self.prompt_tokens = Counter("pagemirror_prompt_tokens", "Prompt tokens of accepted requests.", registry=registry)
        self.cached_tokens = Counter(
            "pagemirror_cached_prompt_tokens",
            "Prompt tokens taken from the prefix cache, by ended requests.",
            registry=registry,
        )
        self.tokens = Counter("pagemirror_generated_tokens", "Tokens handed to clients.", registry=registry)
        self.retractions = Counter(
            "pagemirror_retractions", "Times a request lost its row and resumed, by ended requests.", registry=registry
        )
        self.steps = Counter("pagemirror_steps", "Steps executed by the runtime, over all sessions.", registry=registry)
        self.step_seconds = Histogram(
            "pagemirror_step_seconds", "From sending an op to its result.", buckets=_STEP_BUCKETS, registry=registry
        )
        self.rows = Counter("pagemirror_rows", "Rows computed, over all steps.", registry=registry)
        self.refreshed_rows = Counter("pagemirror_rows_refreshed", "Rows sent with full_refresh.", registry=registry)
        self.pages_sent = Counter("pagemirror_pages_sent", "Page ids sent to the runtime.", registry=registry)
        self.resets = Counter("pagemirror_resets", "Sessions given up for a new one.", ["cause"], registry=registry)
        self.digests = Counter("pagemirror_digests", "Digests of mirror rows that were compared.", registry=registry)
        self.digest_mismatches = Counter(
            "pagemirror_digest_mismatches", "Steps in which the digest of a mirror row differed.", registry=registry
        )
        self.connected = Gauge("pagemirror_runtime_connected", "1 while a runtime serves this scheduler.", registry=registry)
        self.live = Gauge("pagemirror_requests_live", "Live requests by state.", ["state"], registry=registry)
        self.pages = Gauge("pagemirror_pages", "Pages of the pool by use.", ["use"], registry=registry)
        self.tasks = Gauge(
            "pagemirror_asyncio_tasks", "Tasks of the event loop: a few, and some a live call.", registry=registry
        )
        ProcessCollector(registry=registry)  # open files, memory, CPU time
        # Label lookups cost a lock and a dict each: done once, since the fill is written many times a second.
        self._live = tuple(self.live.labels(state) for state in ("waiting", "running", "retracted"))
        self._pages = tuple(self.pages.labels(use) for use in ("free", "cached", "private"))

    def watch_tasks(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have each scrape count the tasks of this loop."""
        self.tasks.set_function(lambda: len(asyncio.all_tasks(loop)))

    def set_fill(self, live: tuple[int, int, int], pages: tuple[int, int, int]) -> None:
        """Present numbers of (waiting, running, retracted) requests and of (free, cached, private) pages."""
        for gauge, value in zip(self._live + self._pages, live + pages, strict=True):
            gauge.set(value)

    def serve(self, host: str, port: int) -> int:
        """Answer `GET /metrics` from a thread until `close`; returns the port. Raises StartError when it is in use."""
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise StartError(f"cannot serve metrics on {host}:{port}: {error.strerror or error}") from error
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop answering. Harmless when nothing is served."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = self._thread = None
