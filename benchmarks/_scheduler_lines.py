"""What every party of the scheduler benchmark is given: the lines of the table, and seeded prompts.

Only numpy is needed: this file is imported in the peers' own environments, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PAGE_SIZE = 16
VOCAB_SIZE = 32_000
PROMPT_TOKENS = 1024
"""Of the lines that admit one prompt."""
WARM_UP = 8
"""Steps or admissions that are done before the first that is timed, in every process and line."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table."""

    name: str
    rows: int = 0
    """Decode rows; 0: the line admits a prompt."""
    context: int = 0
    """Tokens of each row when the first step is timed; see `prompt_of_row`."""
    cached: bool = False
    """The prompt that is admitted is in the prefix cache."""
    pool_prompts: int = 320
    """Of a line that admits a prompt: how many of them the pool holds. A pool for a few is full after the warm-up."""


LINES = (
    Line("64 x 1k", 64, 1024),
    Line("256 x 1k", 256, 1024),
    Line("256 x 8k", 256, 8192),
    Line("1024 x 1k", 1024, 1024),
    Line("admit cold 1k"),
    Line("admit cold 1k, evict", pool_prompts=12),
    Line("admit cached 1k", cached=True),
)
QUICK_LINES = ("64 x 1k", "256 x 1k", "admit cold 1k", "admit cold 1k, evict", "admit cached 1k")


def line_named(name: str) -> Line:
    """Raises KeyError."""
    return {line.name: line for line in LINES}[name]


def prompt_of_row(row: int, context: int, vocab_size: int = VOCAB_SIZE) -> npt.NDArray[np.int32]:
    """The prompt of one decode row, the same in every process.

    Lengths differ by up to a page, so that a sixteenth of the rows needs a page in each step: with equal lengths all would in
    every sixteenth step, and a median would never show it.
    """
    rng = np.random.default_rng([1, row, context])  # noqa: TID251  (seeded data, not the product)
    return rng.integers(0, vocab_size, context - row % PAGE_SIZE, dtype=np.int32)


def prompt_to_admit(number: int) -> npt.NDArray[np.int32]:
    """The prompt of one admission; two numbers share no prefix."""
    rng = np.random.default_rng([2, number])  # noqa: TID251  (seeded data, not the product)
    return rng.integers(0, VOCAB_SIZE, PROMPT_TOKENS, dtype=np.int32)


def pages_for_prompts(prompts: int) -> int:
    """Pages that so many prompts of an admission need, with what they are given beyond."""
    return prompts * (PROMPT_TOKENS // PAGE_SIZE + 4)


def num_pages(rows: int, context: int, steps: int) -> int:
    """Pages that so many rows of that context need for so many more tokens each, and a few to spare."""
    return rows * -(-(context + steps + PAGE_SIZE) // PAGE_SIZE) + 64
