"""A registry of Prometheus metrics whose samples all carry the same labels, and its HTTP port."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Thread
from typing import ClassVar
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.metrics_core import Metric
from typing_extensions import override


class LabelledRegistry(CollectorRegistry):
    """Adds `labels` to every sample that has no label of that name; families of the process itself are left as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: dict[str, str] = {}

    @override
    def collect(self) -> Iterable[Metric]:
        """All families."""
        for family in super().collect():
            if not family.name.startswith("process_"):
                family.samples = [sample._replace(labels=self.labels | sample.labels) for sample in family.samples]
            yield family

    @override
    def get_sample_value(self, name: str, labels: dict[str, str] | None = None) -> float | None:
        """The value of a sample; the labels that all have need not be given."""
        return super().get_sample_value(name, self.labels | (labels or {}))

    @override
    def restricted_registry(self, names: Iterable[str]) -> _Some:  # type: ignore[override]  # it needs collect() only
        """For a scrape that names the series it wants."""
        return _Some(self, set(names))


class _Some:
    def __init__(self, registry: LabelledRegistry, names: set[str]) -> None:
        self._registry, self._names = registry, names

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if sample.name in self._names or family.name in self._names]
            if family.samples:
                yield family


class MetricServer:
    """The registry of one process, with the process's own families in it, and the thread that answers scrapes."""

    fail: ClassVar[Callable[[str], Exception]] = OSError

    def __init__(self) -> None:
        self.registry = LabelledRegistry()
        ProcessCollector(registry=self.registry)  # open files, memory, CPU time
        self._server: WSGIServer | None = None
        self._thread: Thread | None = None

    def serve(self, host: str, port: int) -> int:
        """Answer `GET /metrics` from a thread until `close`; returns the port. Raises what `fail` makes when it is in use."""
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise self.fail(f"cannot serve metrics on {host}:{port}: {error.strerror or error}") from error
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop answering. Harmless when nothing is served."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = self._thread = None
