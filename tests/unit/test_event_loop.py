"""scheduler_service.event_loop: uvloop where it can be imported, never required."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from scheduler_service import event_loop


async def kind_of_loop() -> str:
    """The class of the loop that runs."""
    return type(asyncio.get_running_loop()).__name__


def test_a_faster_loop_is_used_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the module `uvloop` makes runs the coroutine, and its result is returned."""
    (tmp_path / "uvloop.py").write_text(
        "import asyncio\nclass FasterLoop(asyncio.SelectorEventLoop): pass\nnew_event_loop = FasterLoop\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "uvloop", raising=False)
    assert event_loop.run(kind_of_loop()) == "FasterLoop"
    monkeypatch.delitem(sys.modules, "uvloop", raising=False)


def test_the_plain_loop_does_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without uvloop the coroutine runs all the same."""
    monkeypatch.setattr(event_loop.importlib.util, "find_spec", lambda name: None)
    assert event_loop.run(kind_of_loop()) != "FasterLoop"
