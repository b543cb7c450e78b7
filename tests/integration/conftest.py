"""What the folders below share: the tokens that the fingerprint model returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

VOCAB_SIZE = 997


@pytest.fixture(scope="session")
def continuation() -> Callable[[Sequence[int], int], list[int]]:
    """The fingerprint model by its definition."""

    def tokens(prompt: Sequence[int], count: int) -> list[int]:
        known = list(prompt)
        for _ in range(count):
            known.append(sum((i + 1) * (token + 1) for i, token in enumerate(known)) % VOCAB_SIZE)
        return known[len(prompt) :]

    return tokens
