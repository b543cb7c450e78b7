"""runtime_service.app: what the log of a runtime shows of an exception."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from runtime_service.app import configure_logging
from runtime_service.settings import load_settings


@pytest.fixture
def _own_logging() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("_own_logging")
@pytest.mark.parametrize("log_format", ["console", "json"])
def test_tracebacks_show_no_local_variables(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A failed step is logged with its traceback, and without what its variables hold: prompts are in them."""
    configure_logging(load_settings(log_format=log_format))
    prompt = ["word", "of", "a", "client"]
    try:
        raise FloatingPointError(f"{len(prompt)} words")
    except FloatingPointError:
        structlog.get_logger("test").exception("step failed", step=7)
    printed = capsys.readouterr().err
    assert "FloatingPointError: 4 words" in printed
    assert "Traceback" in printed
    assert "client" not in printed
