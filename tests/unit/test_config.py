"""SchedulerConfig: ranges, and what is derived from the values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from scheduler_service.core.config import RefreshPolicy, SchedulerConfig
from scheduler_service.core.errors import ConfigError

MakeConfig = Callable[..., SchedulerConfig]

_REQUIRED = {"page_size": 16, "num_pages": 64, "max_rows": 8, "max_pages_per_row": 32, "vocab_size": 997}
_AT_LEAST_ONE = [*_REQUIRED, "token_budget", "chunk_size"]


def test_defaults() -> None:
    """What is not said is as the documentation says."""
    config = SchedulerConfig(**_REQUIRED)
    assert (config.max_context, config.token_budget, config.chunk_size, config.max_waiting) == (0, 2048, 512, 0)
    assert (config.refresh_policy, config.overlap_depth) == (RefreshPolicy.TRANSITION, 1)
    assert (config.mixed, config.prefix_cache) == (True, True)


def test_config_is_frozen() -> None:
    """Nobody changes limits under a running scheduler."""
    config = SchedulerConfig(**_REQUIRED)
    with pytest.raises(FrozenInstanceError):
        config.page_size = 2  # type: ignore[misc]


@pytest.mark.parametrize("key", _AT_LEAST_ONE)
@pytest.mark.parametrize("value", [0, -1, 2**31, 1.0, "1", True, None])
def test_positive_integers(key: str, value: Any) -> None:
    """Counts are integers from 1 to 2^31 - 1; the error carries key, value and range."""
    with pytest.raises(ConfigError, match=f"{key} is .*, but must be an integer from 1 to 2147483647") as caught:
        SchedulerConfig(**{**_REQUIRED, key: value})
    assert (caught.value.key, caught.value.value) == (key, value)


@pytest.mark.parametrize(
    ("key", "low", "high"), [("max_context", 0, 2**31 - 1), ("max_waiting", 0, 2**31 - 1), ("overlap_depth", 0, 2)]
)
def test_ranges_that_begin_at_zero(key: str, low: int, high: int) -> None:
    """Both ends are allowed, both neighbours are not."""
    for value in (low, high):
        assert getattr(SchedulerConfig(**_REQUIRED, **{key: value}), key) == value
    for value in (low - 1, high + 1):
        with pytest.raises(ConfigError, match=f"{key} is {value}, but must be an integer from {low} to {high}"):
            SchedulerConfig(**_REQUIRED, **{key: value})


def test_pool_of_too_many_tokens_is_refused() -> None:
    """A pool so large that a cell's number overflows is a mistake in the settings."""
    with pytest.raises(ConfigError, match="num_pages is 1048577, but must be at most 1048576 with page_size 1048576"):
        SchedulerConfig(**{**_REQUIRED, "page_size": 2**20, "num_pages": 2**20 + 1})


@pytest.mark.parametrize(("chunk_size", "token_budget", "expected"), [(8, 16, 8), (16, 16, 16), (64, 16, 16)])
def test_chunk_is_cut_to_the_budget(make_config: MakeConfig, chunk_size: int, token_budget: int, expected: int) -> None:
    """A chunk never exceeds what a step may compute; the setting itself is kept."""
    config = make_config(chunk_size=chunk_size, token_budget=token_budget)
    assert config.effective_chunk_size == expected
    assert config.chunk_size == chunk_size


@pytest.mark.parametrize(("num_pages", "max_pages_per_row", "expected"), [(8, 3, 12), (3, 8, 12), (5, 5, 20)])
def test_room_is_the_smaller_of_row_and_pool(
    make_config: MakeConfig, num_pages: int, max_pages_per_row: int, expected: int
) -> None:
    """The longest row, in tokens, is bounded by its width and by the pool."""
    assert make_config(num_pages=num_pages, max_pages_per_row=max_pages_per_row).room == expected


def test_policies_by_name() -> None:
    """The four policies are texts, as they stand in files and options."""
    assert [str(policy) for policy in RefreshPolicy] == ["transition", "diff", "always", "tail_only"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("refresh_policy", "sometimes"), ("refresh_policy", None), ("mixed", "false"), ("mixed", 1), ("prefix_cache", "off")],
)
def test_choices_are_checked(key: str, value: Any) -> None:
    """A policy that is none, or a text in place of a truth value, is refused and not silently taken for another choice."""
    with pytest.raises(ConfigError, match=f"{key} is {value!r}, but must be"):
        SchedulerConfig(**_REQUIRED, **{key: value})


@pytest.mark.parametrize("policy", RefreshPolicy)
def test_policy_given_as_its_text(policy: RefreshPolicy) -> None:
    """The text of a policy is either refused or is that policy; it never runs as another one."""
    try:
        config = SchedulerConfig(**_REQUIRED, refresh_policy=policy.value)  # type: ignore[arg-type]
    except ConfigError:
        return
    assert config.refresh_policy is policy
