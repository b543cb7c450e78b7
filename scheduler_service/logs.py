"""Logging of the scheduler process: structlog to stderr, so that stdout stays for readiness lines and output."""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logs(level: str, *, as_json: bool) -> None:
    """`level` is debug, info, warning or error. JSON lines for machines, otherwise one readable line an event."""
    renderer: list[structlog.typing.Processor]
    if as_json:
        renderer = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        renderer = [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
            )
        ]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
