"""Scenario texts, run as the command runs files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from scheduler_service.simulate import main

Line = dict[str, Any]
Simulate = Callable[..., tuple[int, list[Line], Line]]


@pytest.fixture
def worked_example() -> str:
    """The scenario that the design works out by hand."""
    return dedent("""
        page_size: 4
        events:
          - {step: 0, submit: A, prompt: [1, 2, 3, 4, 5, 6, 7], max_tokens: 3}
          - {step: 0, submit: B, prompt: [1, 2, 3, 4, 9], max_tokens: 1}
          - {step: 1, retract: A}
        """)


@pytest.fixture
def simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Simulate:
    """Run one scenario text with --json; returns the exit status, the step lines without `file`, and the summary."""

    def run(text: str, policy: str | None = None) -> tuple[int, list[Line], Line]:
        path = tmp_path / "case.yaml"
        path.write_text(dedent(text), encoding="utf-8")
        status = main([path], policy, json_output=True)
        captured = capsys.readouterr()
        assert captured.err == ""
        lines = [json.loads(line) for line in captured.out.splitlines()]
        assert {line.pop("file") for line in lines} == {str(path)}
        return status, lines[:-1], lines[-1]["summary"]

    return run
