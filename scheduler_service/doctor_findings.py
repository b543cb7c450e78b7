"""What a check of `pagemirror doctor` says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How a check ended."""

    OK = "ok"
    NOTE = "note"
    """Something that is not needed is not there."""
    FIX = "fix"
    """What is needed for what was asked is missing or wrong."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    found: str
    state: State = State.OK
    advice: str = ""
