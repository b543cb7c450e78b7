"""Histograms that take their values in bulk.

The loop that serves steps appends numbers to plain lists; what they add to the buckets is found out a few times a second, in
numpy, for all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Buckets = list[tuple[str, float]]
"""(upper bound as text, values at or below it), ascending, `+Inf` last: as prometheus_client takes them."""


class BulkHistogram:
    """Counts of values by bucket. One thread appends and folds; any other may read."""

    def __init__(self, bounds: Iterable[float]) -> None:
        """`bounds`: ascending upper bounds, without infinity."""
        self._bounds = np.array(sorted(set(bounds)))
        self._places = {float(bound): place for place, bound in enumerate(self._bounds)}
        self._state = (np.zeros(len(self._bounds) + 1, dtype=np.int64), 0.0)  # replaced as a whole: a reader sees one moment
        self.values: list[float] = []
        """Single values that are not counted yet; to be appended to."""
        self.weighted: list[tuple[float, int]] = []
        """Values that count several times, likewise."""
        self.arrays: list[tuple[float, npt.NDArray[np.float64]]] = []
        """Times, and arrays of earlier ones: how long ago these were, likewise. Infinity and what is no number do not count."""

    @property
    def num_unfolded(self) -> int:
        """Entries of the lists."""
        return len(self.values) + len(self.weighted) + len(self.arrays)

    def fold(self) -> None:
        """Count what was appended."""
        if self.values:
            self._add(np.array(self.values), None)
            self.values.clear()
        if self.weighted:
            single, weights = zip(*self.weighted, strict=True)
            self._add(np.array(single), np.array(weights))
            self.weighted.clear()
        if self.arrays:
            values = np.concatenate([now - times for now, times in self.arrays])
            self._add(values[values >= 0], None)
            self.arrays.clear()

    def _add(self, values: npt.NDArray[np.float64], weights: npt.NDArray[np.int64] | None) -> None:
        counts, total = self._state
        places = np.searchsorted(self._bounds, values)
        added = np.bincount(places, weights, len(counts)).astype(np.int64)
        self._state = (counts + added, total + float(values.sum() if weights is None else values @ weights))

    @property
    def total(self) -> float:
        """Sum of the counted values."""
        return self._state[1]

    @property
    def count(self) -> int:
        """How many values were counted."""
        return int(self._state[0].sum())

    def read(self, bounds: Sequence[float] | None = None) -> tuple[Buckets, float]:
        """Buckets, and the sum of the values. `bounds`: some of the histogram's own; None: all."""
        counts, total = self._state
        below = counts.cumsum().tolist()
        chosen = self._places if bounds is None else bounds
        buckets = [(repr(float(bound)), float(below[self._places[float(bound)]])) for bound in chosen]
        return [*buckets, ("+Inf", float(below[-1]))], total
