"""scheduler_service.http_settings and gateway_process: what `up --http` accepts, and what smg is told."""

from __future__ import annotations

import importlib.util
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.errors import StartError
from scheduler_service.gateway_process import GatewayProcess
from scheduler_service.http_settings import HttpSettings, load_http_settings
from scheduler_service.public_settings import SettingsError


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder that has a tokenizer."""
    (tmp_path / "tokenizer.json").write_text("{}")
    return str(tmp_path)


def settings_of(model: str, **given: Any) -> HttpSettings:
    return HttpSettings(**({"http": "127.0.0.1:0", "model": model} | given))


@pytest.mark.parametrize(
    ("http", "address", "url"),
    [
        ("8080", "127.0.0.1:8080", "http://127.0.0.1:8080/v1"),
        ("localhost:1", "localhost:1", "http://localhost:1/v1"),
        ("[::1]:80", "[::1]:80", "http://[::1]:80/v1"),
    ],
)
def test_port_alone_is_one_of_loopback(model: str, http: str, address: str, url: str) -> None:
    """A number is a port of 127.0.0.1; anything else names its host."""
    settings = settings_of(model, http=http)
    assert (settings.http, settings.url) == (address, url)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"http": "unix:/tmp/s"}, "--http is 'unix:/tmp/s': must be PORT or HOST:PORT"),
        ({"http": "70000"}, "must be PORT or HOST:PORT"),
        ({"http": "0.0.0.0:80"}, "--http 0.0.0.0:80 can be reached from other machines"),
        ({"gateway_listen": "unix:/tmp/s"}, "--gateway-listen must be HOST:PORT with --http"),
        ({"tls_cert": "c"}, "--tls-cert needs --tls-key"),
        ({"tls_cert": "c", "tls_key": "k", "tls_ca": "a"}, "cannot ask of HTTP clients"),
        ({"model": "fingerprint"}, "there is no tokenizer.json in fingerprint"),
    ],
)
def test_what_cannot_be_is_refused_in_words(model: str, given: dict[str, str], words: str) -> None:
    """Each wrong setting is told before anything starts, by the names of the options."""
    with pytest.raises(SettingsError) as error:
        load_http_settings(**({"http": "0", "model": model} | given))
    assert words in str(error.value)


@pytest.mark.parametrize("given", [{"insecure": True}, {"tls_cert": "c", "tls_key": "k"}])
def test_other_machines_by_tls_or_on_demand(model: str, given: dict[str, Any]) -> None:
    """An address that others can reach needs TLS, or the word that it may do without."""
    assert settings_of(model, http="0.0.0.0:80", **given).http == "0.0.0.0:80"


def test_extra_that_is_missing_is_named(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without smg the message says what to install."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "smg" else found(name))
    with pytest.raises(StartError, match=r"--http needs smg, not installed here: pip install 'pagemirror\[gateway\]'"):
        load_http_settings(http="0", model=model)


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_smg_is_told_its_ports_and_a_key_of_its_own(model: str) -> None:
    """Two gateways of one machine share no port, and whoever does not know the drawn key cannot change either."""
    ours, other = GatewayProcess(settings_of(model)), GatewayProcess(settings_of(model))
    try:
        lists = [process.arguments("0.0.0.0:5000") for process in (ours, other)]
        ports = [option(arguments, name) for arguments in lists for name in ("--port", "--prometheus-port")]
        assert len(set(ports)) == 4
        keys = [argument for arguments in lists for argument in arguments if argument.startswith("--control-plane-api-keys=")]
        assert keys[0] != keys[1]
        assert all(len(key.rpartition(":")[2]) == 32 for key in keys)
        assert option(lists[0], "--worker-urls") == "grpc://127.0.0.1:5000"
        assert option(lists[0], "--prometheus-host") == "127.0.0.1"
        assert not [argument for argument in lists[0] if "tls" in argument or "tenant" in argument]
    finally:
        ours.release()
        other.release()


def test_certificate_tokens_grace_and_logs_are_passed_on(model: str, tmp_path: Path) -> None:
    """What holds for the gRPC port holds for HTTP."""
    tokens = tmp_path / "tokens"
    tokens.write_text("# those\n-begins-with-a-dash-1234\nsecond-second-second\n")
    given = {
        "tls_cert": "c.pem",
        "tls_key": "k.pem",
        "token_file": tokens,
        "grace": 12.4,
        "log_level": "debug",
        "log_json": True,
    }
    process = GatewayProcess(settings_of(model, **given))
    try:
        arguments = process.arguments("127.0.0.1:5000")
    finally:
        process.release()
    assert (option(arguments, "--tls-cert-path"), option(arguments, "--tls-key-path")) == ("c.pem", "k.pem")
    assert option(arguments, "--shutdown-grace-period-secs") == "12"
    assert option(arguments, "--log-level") == "info"
    assert "--log-json" in arguments
    keys = [argument for argument in arguments if argument.startswith("--tenant-api-key=")]
    assert keys == ["--tenant-api-key=token0:-begins-with-a-dash-1234", "--tenant-api-key=token1:second-second-second"]


@pytest.mark.skipif(importlib.util.find_spec("smg") is None, reason="the extra `gateway` is not installed")
def test_smg_understands_every_argument(model: str, tmp_path: Path) -> None:
    """The options are those of the version that is installed, with the values that were meant."""
    from smg.launch_router import parse_router_args

    tokens = tmp_path / "tokens"
    tokens.write_text("-begins-with-a-dash-1234\n")
    process = GatewayProcess(settings_of(model, token_file=tokens, log_json=True))
    try:
        told = parse_router_args(process.arguments("127.0.0.1:5000"))
    finally:
        process.release()
    assert told.worker_urls == ["grpc://127.0.0.1:5000"]
    assert told.tenant_api_keys == [("token0", "-begins-with-a-dash-1234")]
    assert (told.policy, told.disable_retries, told.log_level) == ("round_robin", True, "warn")


def test_port_in_use_is_told_before_anything_starts(model: str) -> None:
    """A listener on the port, and it is an error with the address in it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartError, match=f"cannot listen on {address}: Address already in use"):
            GatewayProcess(settings_of(model, http=address))


def test_smg_does_not_outlive_a_parent_that_is_gone(child_env: dict[str, str]) -> None:
    """The program ends at once where its parent is another process than it was told."""
    import subprocess

    command = [sys.executable, "-m", "scheduler_service.smg_main", "1"]
    result = subprocess.run(command, env=child_env, input="[]", capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "")
