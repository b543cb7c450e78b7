"""The trace context of the call that is being served, as W3C writes it."""

from __future__ import annotations

from contextvars import ContextVar

TRACEPARENT: ContextVar[str] = ContextVar("traceparent", default="")
"""Of the span of the present RPC, where calls are traced; empty otherwise."""
