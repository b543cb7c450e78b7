"""Schedulers driven by hand, for all tests of the core."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from scheduler_driver import DEFAULTS, Driver, alone
from scheduler_service.core.config import SchedulerConfig


@pytest.fixture
def make_config() -> Callable[..., SchedulerConfig]:
    """A small configuration; keyword arguments replace its values."""
    return lambda **options: SchedulerConfig(**{**DEFAULTS, **options})


@pytest.fixture
def drive(make_config: Callable[..., SchedulerConfig]) -> Callable[..., Driver]:
    """A scheduler of that configuration with a plain runtime."""
    return lambda **options: Driver(make_config(**options))


@pytest.fixture(scope="session")
def definition() -> Callable[[Sequence[int], int], list[int]]:
    """The tokens that the fingerprint model returns for a prompt, by its definition."""
    return alone
