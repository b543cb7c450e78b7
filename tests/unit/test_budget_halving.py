"""The token budget lowered while requests run: what is planned, what is refused, and that everybody still ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler_service.core.errors import ConfigError

Drive = Callable[..., Any]


def test_lower_budget_bounds_the_next_plan(drive: Drive) -> None:
    """A chunk takes no more than the new budget, whatever chunk_size says; the configuration stays what it was."""
    driver = drive(num_pages=64, chunk_size=16, token_budget=16)
    driver.submit("long", range(40), 2)
    assert driver.step()["long"].input_len == 16
    driver.scheduler.set_token_budget(5)
    assert driver.step()["long"].input_len == 5
    assert (driver.scheduler.token_budget, driver.scheduler.config.token_budget) == (5, 16)


def test_budget_below_the_number_of_rows(drive: Drive, definition: Callable[..., list[int]]) -> None:
    """With one token a step, four rows take their turns in order and all end with the tokens they have alone."""
    driver = drive(num_pages=64, token_budget=16)
    prompts = {name: [number, 2, 3] for number, name in enumerate("abcd", start=1)}
    for name, prompt in prompts.items():
        driver.submit(name, prompt, 4)
    driver.step()
    driver.scheduler.set_token_budget(1)
    for _ in range(100):
        if not driver.scheduler.has_work:
            break
        assert sum(row.input_len for row in driver.step().values()) <= 1
    assert driver.outputs == {name: definition(prompt, 4) for name, prompt in prompts.items()}


@pytest.mark.parametrize("value", [0, -1, 17])
def test_values_that_are_no_budget(value: int, drive: Drive) -> None:
    """Below one nothing could ever run, and above the configured value the runtime was promised less; nothing changes."""
    driver = drive(token_budget=16)
    with pytest.raises(ConfigError, match=rf"token_budget.* {value}\b.*from 1 to 16"):
        driver.scheduler.set_token_budget(value)
    assert driver.scheduler.token_budget == 16


def test_lowered_budget_survives_a_reset(drive: Drive) -> None:
    """The new session plans with the budget that the old one ended with."""
    driver = drive(token_budget=16, chunk_size=16)
    driver.submit("a", range(12), 2)
    driver.scheduler.set_token_budget(4)
    driver.scheduler.reset(2)
    op = driver.scheduler.plan() or driver.scheduler.plan()
    assert op is not None
    assert op.input_lens.tolist() == [4]
