"""scheduler_service.settings: command line over environment over defaults, and messages that name value and limit."""

from __future__ import annotations

import pytest

from scheduler_service.core.config import RefreshPolicy
from scheduler_service.settings import SettingsError, check_address, load_settings


def test_defaults() -> None:
    """Only the runtime's address has no default."""
    settings = load_settings(runtime="unix:/tmp/r.sock")
    assert (settings.listen, settings.token_budget, settings.chunk_size) == ("127.0.0.1:50051", 2048, 512)
    assert (settings.overlap_depth, settings.refresh_policy) == (1, RefreshPolicy.TRANSITION)
    assert (settings.limits.heartbeat_timeout_s, settings.limits.step_timeout_s) == (5, 120)


def test_given_wins_over_environment_over_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """None counts as not given."""
    monkeypatch.setenv("PAGEMIRROR_TOKEN_BUDGET", "77")
    monkeypatch.setenv("PAGEMIRROR_MIXED", "false")
    monkeypatch.setenv("PAGEMIRROR_RUNTIME", "env:1")
    settings = load_settings(token_budget=None, chunk_size=5, runtime="given:2")
    assert (settings.token_budget, settings.chunk_size, settings.mixed, settings.runtime) == (77, 5, False, "given:2")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"token_budget": 0}, "--token-budget is 0: Input should be greater than or equal to 1"),
        ({"overlap_depth": 3}, "--overlap-depth is 3: Input should be less than or equal to 2"),
        ({"refresh_policy": "tail_only"}, "tail_only is wrong on purpose"),
        ({"refresh_policy": "never"}, "--refresh-policy is 'never'"),
        ({"listen": "nonsense"}, "--listen is 'nonsense': must be HOST:PORT or unix:/PATH"),
        ({"listen": "host:99999"}, "--listen is 'host:99999'"),
        ({"runtime": "unix:/" + "x" * 120}, "the socket's path has 121 bytes, but at most 100"),
        ({"log_level": "loud"}, "must be debug, info, warning or error"),
        ({"heartbeat_timeout": 0}, "--heartbeat-timeout is 0"),
    ],
    ids=str,
)
def test_bad_values_are_named(given: dict[str, object], words: str) -> None:
    """The message has the option, the value and what it must be."""
    with pytest.raises(SettingsError) as caught:
        load_settings(**({"runtime": "h:1"} | given))
    assert words in str(caught.value)


def test_every_bad_value_has_its_line() -> None:
    """All problems are told at once, a missing runtime among them."""
    with pytest.raises(SettingsError) as caught:
        load_settings(token_budget=0, chunk_size=-1)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert any("--runtime is missing (or PAGEMIRROR_RUNTIME" in line for line in lines)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:50051", "host.name:1", "unix:/run/x.sock"])
def test_good_addresses(address: str) -> None:
    """host:port and unix paths are addresses."""
    check_address(address)
