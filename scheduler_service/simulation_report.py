"""What a simulation tells: one line a step, and a summary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from scheduler_service.core.ops import Cause


@dataclass(slots=True)
class OpLine:
    """One row of one step, as the scheduler planned it."""

    request: str
    cause: Cause
    row: int
    begin: int
    size: int
    full_refresh: bool
    occupied_pages: list[int]
    num_computed: int
    input_len: int


@dataclass(slots=True)
class StepLine:
    """What one step was and how things stand after it."""

    step: int
    ops: list[OpLine] = field(default_factory=list)
    applied: dict[str, list[int]] = field(default_factory=dict)  # mirror rows of `ops`, right after the step ran
    mirror: dict[str, list[int]] = field(default_factory=dict)
    rows: dict[str, list[int]] = field(default_factory=dict)
    sampled: dict[str, int] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    free: int = 0
    cached: int = 0
    private: int = 0
    refused: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Summary:
    """A whole run."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    cached_tokens: dict[str, int] = field(default_factory=dict)
    finish: dict[str, str] = field(default_factory=dict)
    retractions: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    lines: int = 0
    pages_sent: int = 0
    violations: list[str] = field(default_factory=list)


def as_json(line: StepLine, file: str) -> dict[str, Any]:
    """A step's line in the form that `--json` prints."""
    shown: dict[str, Any] = {
        "file": file,
        "step": line.step,
        "ops": [{name: getattr(op, name) for name in OpLine.__slots__} for op in line.ops],
        "mirror": line.mirror,
        "rows": line.rows,
        "sampled": line.sampled,
        "ended": line.ended,
        "free": line.free,
        "cached": line.cached,
        "private": line.private,
    }
    if line.refused:
        shown["refused"] = line.refused
    return shown
