"""What the two sides, and several runtimes among themselves, must agree on before a session can begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_service.errors import RuntimeMismatchError
from scheduler_service.wire_facts import RuntimeFacts

_OF_ALL_RANKS = (
    "page_size",
    "num_pages",
    "max_rows",
    "max_pages_per_row",
    "vocab_size",
    "max_context",
    "default_stop_ids",
    "model",
    "architecture",
    "dtype",
    "world_size",
)
"""What every rank must say alike: whatever decides about pages or tokens. Device, epoch and paths are each one's own."""


@dataclass(frozen=True, slots=True)
class ExpectedShape:
    """Values the scheduler's own configuration states; None: it takes what the runtime says."""

    page_size: int | None = None
    num_pages: int | None = None
    max_rows: int | None = None
    max_pages_per_row: int | None = None
    vocab_size: int | None = None
    max_context: int | None = None
    model: str | None = None
    architecture: str | None = None
    dtype: str | None = None

    @classmethod
    def of(cls, facts: RuntimeFacts) -> ExpectedShape:
        """What a later runtime must say so that a core configured from `facts`, and outputs begun with it, can go on."""
        return cls(**{key: getattr(facts, key) for key in cls.__slots__})

    def check(self, facts: RuntimeFacts) -> None:
        """Raises RuntimeMismatchError, with both values, for the first value that disagrees."""
        for key in self.__slots__:
            configured, actual = getattr(self, key), getattr(facts, key)
            if configured is not None and configured != actual:
                raise RuntimeMismatchError(key, configured, actual)


def order_of_ranks(targets: Sequence[str], facts: Sequence[RuntimeFacts]) -> list[int]:
    """Positions in `targets` by rank, after all are found to be one world.

    Runtimes that state a world size of 1 know of no others; any number of them are replicas, with ranks in the order given.

    Raises:
        RuntimeMismatchError: a value differs between two of them, or the ranks are not 0 ... n - 1, each once.
    """
    for position, (target, other) in enumerate(zip(targets, facts, strict=True)):
        for key in _OF_ALL_RANKS:
            first, value = getattr(facts[0], key), getattr(other, key)
            if first != value:
                why = f"the former is what {targets[0]} stated, the latter is of {target}; all ranks must be alike"
                raise RuntimeMismatchError(key, first, value, why)
        if other.world_size > 1 and other.world_size != len(targets):
            why = f"so {target} stated, and --runtime names {len(targets)} of them"
            raise RuntimeMismatchError("world_size", len(targets), other.world_size, why)
        if other.world_size > 1 and other.rank in [before.rank for before in facts[:position]]:
            twin = targets[[before.rank for before in facts].index(other.rank)]
            raise RuntimeMismatchError("rank", "each rank once", other.rank, f"so stated both {twin} and {target}")
    if facts[0].world_size <= 1:
        return list(range(len(targets)))
    order = sorted(range(len(targets)), key=lambda position: facts[position].rank)
    if [facts[position].rank for position in order] != list(range(len(targets))):
        stated = [facts[position].rank for position in order]
        raise RuntimeMismatchError("rank", f"ranks 0 to {len(targets) - 1}", stated)
    return order
