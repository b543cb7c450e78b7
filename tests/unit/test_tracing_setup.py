"""Tracing where its packages are missing, and where it was not asked for."""

from __future__ import annotations

import sys

import pytest

from pagemirror import tracing
from runtime_service.app import _open_traces as open_runtime_traces
from runtime_service.errors import SettingError
from runtime_service.settings import load_settings as runtime_settings
from scheduler_service.errors import StartError
from scheduler_service.public_settings import SettingsError
from scheduler_service.settings import load_settings
from scheduler_service.tracing_setup import call_tracing, open_traces


def test_missing_packages_are_named_by_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both services say what to install, and without an endpoint nothing is imported."""
    monkeypatch.delitem(sys.modules, "pagemirror.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(StartError, match=r"pip install 'pagemirror\[tracing\]'"):
        open_traces("http://127.0.0.1:4317", "x")
    with pytest.raises(SettingError, match=r"pip install 'pagemirror\[tracing\]'"):
        open_runtime_traces("http://127.0.0.1:4317", None)  # type: ignore[arg-type]
    assert open_traces(None, "x") is None
    assert call_tracing(None) == []
    assert "pagemirror.tracing" not in sys.modules


def test_an_endpoint_is_a_url() -> None:
    """What is no URL is refused by both services, by the option's name."""
    with pytest.raises(SettingsError, match="--otlp-endpoint is 'collector:4317': must be http://HOST:PORT"):
        load_settings(runtime="127.0.0.1:1", otlp_endpoint="collector:4317")
    with pytest.raises(Exception, match="--otlp-endpoint: 'collector:4317'"):
        runtime_settings(otlp_endpoint="collector:4317")


def test_a_collector_that_is_away_costs_the_spans_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a process does not wait for it longer than one attempt takes, and raises nothing."""
    monkeypatch.setattr(tracing, "_EXPORT_TIMEOUT_S", 0.2)
    traces = open_traces("http://127.0.0.1:9", "x")
    assert traces is not None
    traces.tracer.start_span("lost").end()
    traces.close()
    traces.tracer.start_span("late").end()
