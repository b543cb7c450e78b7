"""The event loop of the processes that serve: uvloop where it is installed (extra `fast`), else that of asyncio."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=importlib.import_module("uvloop").new_event_loop) as runner:
        return runner.run(main)
