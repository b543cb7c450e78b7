"""A fault at any line of the scheduler core."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from scheduler_service.core import journal
from scheduler_service.core.lives import Lives

_CORE = str(Path(journal.__file__).parent)
_CHANGES = {journal.Journal.run.__code__, Lives.begin.__code__}  # whole or not at all

MAX_VISITS = 2


class Fault(Exception):
    """Not an error of the product."""


@contextlib.contextmanager
def fault_at_line(number: int) -> Iterator[list[str]]:
    """Within, the `number`-th line that the core runs inside of a change raises Fault instead, counted from 1.

    Each line counts the first two times it is reached. The list yielded names the one at fault, and stays empty when there
    were fewer. Lines of `journal.py`, which begins and ends a change, do not count.
    """
    seen: list[str] = []
    count, is_changing = 0, False
    visits: Counter[tuple[CodeType, int]] = Counter()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "line" and not seen:
            visits[frame.f_code, frame.f_lineno] += 1
            count += visits[frame.f_code, frame.f_lineno] <= MAX_VISITS
            if count == number:
                seen.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
                raise Fault(seen[0])
        return trace

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal is_changing
        file = frame.f_code.co_filename
        is_changing = is_changing or frame.f_code in _CHANGES
        counts = is_changing and not seen and file.startswith(_CORE) and file != journal.__file__
        return trace if counts else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield seen
    finally:
        sys.settrace(before)
