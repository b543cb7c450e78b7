"""What the cases of the scheduler run on: the core, the wire and the real mirror and fingerprint model, all in this process.

The case's invariants are asserted after every step by the driver: the core's audit (each page in one place, locks, queues), the
runtime's whole memory against a plain twin, each token against the definition of the model, one end a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

Drive = Callable[..., Any]


@pytest.fixture
def drive() -> Iterator[Drive]:
    """Makes drivers. When the test is over, what still runs is run to its end and everything must be free again."""
    # Imported here, since cases that drive processes need no torch in this one.
    from both_runtimes import new_driver

    drivers = []

    def make(**options: Any) -> Any:
        drivers.append(new_driver(**options))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.run()
        num_pages = driver.config.num_pages
        driver.expect_clean(num_pages)
        driver.scheduler.reset_prefix_cache()
        assert driver.stats.free == num_pages
        assert sorted(driver.free) == list(range(1, num_pages + 1))
        driver.audit()
