"""What tests of several folders share: both services in one process, and the tokens that the fingerprint model returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import pytest

import two_services
from scheduler_driver import alone

Services = two_services.Services


@pytest.fixture(scope="session")
def continuation() -> Callable[[Sequence[int], int], list[int]]:
    """The fingerprint model by its definition."""
    return alone


@pytest.fixture(scope="session")
def both_services() -> Callable[..., AbstractAsyncContextManager[Services]]:
    """A runtime of what `load` makes, a scheduler with these settings, and a client of it, over loopback servers."""
    return two_services.both_services
