"""Which rows run in a step: what the planner answers, and what an op is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from scheduler_service.core.ops import Cause, Int32Array
from scheduler_service.core.steady import SteadyRows

NO_ROWS: Int32Array = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class Extend:
    """A row that computes known tokens in this step."""

    row: int
    input_len: int
    cause: Cause
    known: Int32Array | None = None  # all known tokens, where they have been copied already


@dataclass(slots=True)
class Choice:
    """Rows of one step; their pages are granted, nothing else of them is advanced yet."""

    extends: list[Extend] = field(default_factory=list)
    decodes: Int32Array = field(default_factory=lambda: NO_ROWS)
    steady: SteadyRows | None = None  # what is known of `decodes` beforehand

    @property
    def is_empty(self) -> bool:
        return not self.extends and not len(self.decodes)
