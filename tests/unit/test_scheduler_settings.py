"""scheduler_service.settings: command line over environment over defaults, and messages that name value and limit."""

from __future__ import annotations

from pathlib import Path

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
        ({"gateway_listen": "nowhere"}, "--gateway-listen is 'nowhere': must be HOST:PORT or unix:/PATH"),
        ({"gateway_listen": "0.0.0.0:1"}, "--gateway-listen 0.0.0.0:1 can be reached from other machines"),
        ({"gateway_listen": "0.0.0.0:1", "tls_cert": "a", "tls_key": "b"}, "without TLS and without a token"),
        ({"gateway_tokenizer": "/none"}, "must be a folder with a tokenizer.json"),
        ({"api": "sglang"}, "--api is 'sglang'"),
        ({"runtime": "unix:/" + "x" * 120}, "the socket's path has 121 bytes, but at most 100"),
        ({"runtime": "a:1,b"}, "--runtime is 'a:1,b': must be HOST:PORT or unix:/PATH"),
        ({"runtime": "a:1, b:2,a:1"}, "names a:1 twice; each rank has an address of its own"),
        ({"log_level": "loud"}, "must be debug, info, warning or error"),
        ({"heartbeat_timeout": 0}, "--heartbeat-timeout is 0"),
        ({"check": True, "dump_dir": "/nowhere"}, "--dump-dir is '/nowhere': must be a folder that can be written to"),
        ({"verify": "always"}, "--verify is 'always': Input should be 'off', 'sample' or 'every'"),
        ({"verify_interval": 0}, "--verify-interval is 0"),
        ({"verify_window": -1}, "--verify-window is -1"),
    ],
    ids=str,
)
def test_bad_values_are_named(given: dict[str, object], words: str) -> None:
    """The message has the option, the value and what it must be."""
    with pytest.raises(SettingsError) as caught:
        load_settings(**({"runtime": "h:1"} | given))
    assert words in str(caught.value)


def test_several_runtimes_are_a_list_with_commas() -> None:
    """Order is kept and spaces are not."""
    assert load_settings(runtime="b:2, unix:/tmp/a.sock").runtimes == ("b:2", "unix:/tmp/a.sock")
    assert load_settings(runtime="b:2").runtimes == ("b:2",)


def test_dump_folder_matters_with_check_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is the folder at the start; where nothing is dumped it is not looked at."""
    monkeypatch.chdir(tmp_path)
    assert load_settings(runtime="h:1", check=True).dump_dir.resolve() == tmp_path
    assert load_settings(runtime="h:1", dump_dir=tmp_path / "nowhere").dump_dir == tmp_path / "nowhere"


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


def test_where_metrics_are_served() -> None:
    """On the public port's host where plaintext may be spoken there, else on loopback; elsewhere only by a clear word."""
    tls = {"tls_cert": "a", "tls_key": "b"}
    for given, host in (
        ({}, "127.0.0.1"),
        ({"listen": "[::1]:5"}, "::1"),
        ({"listen": "unix:/tmp/x"}, "127.0.0.1"),
        ({"listen": "0.0.0.0:5", "insecure": True}, "0.0.0.0"),
        ({"listen": "0.0.0.0:5", **tls}, "127.0.0.1"),
        ({"metrics_host": "0.0.0.0", "insecure": True}, "0.0.0.0"),
        ({"metrics_host": "::1"}, "::1"),
    ):
        assert load_settings(runtime="a:1", **given).metrics_address == host
    with pytest.raises(SettingsError, match=r"--metrics-host 0.0.0.0 can be reached from other machines"):
        load_settings(runtime="a:1", metrics_host="0.0.0.0", **tls)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tls_cert": "a"}, "--tls-cert needs --tls-key"),
        ({"tls_key": "a"}, "--tls-key needs --tls-cert"),
        ({"tls_ca": "a"}, "--tls-ca needs --tls-cert and --tls-key"),
        ({"runtime_tls_ca": "a", "runtime_tls_key": "b"}, "--runtime-tls-key needs --runtime-tls-cert"),
        ({"runtime_tls_cert": "a", "runtime_tls_key": "b"}, "need --runtime-tls-ca"),
        ({"runtime_tls_name": "a"}, "need --runtime-tls-ca"),
        ({"max_streams": 0}, "--max-streams is 0"),
        ({"max_unread_tokens": 0}, "--max-unread-tokens is 0"),
        ({"write_timeout": 0}, "--write-timeout is 0"),
        ({"max_message_mib": 1025}, "--max-message-mib is 1025"),
    ],
    ids=str,
)
def test_security_settings_that_do_not_go_together(given: dict[str, object], words: str) -> None:
    """Half of a pair, an authority without a certificate, and limits of nothing are refused by name."""
    with pytest.raises(SettingsError, match=words):
        load_settings(runtime="a:1", **given)
