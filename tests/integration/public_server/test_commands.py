"""Commands of the command line that must not serve, and `doctor`, which asks whether it is served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from runtime_service.__main__ import cli as runtime_command
from scheduler_service import cli_doctor, logs
from scheduler_service.cli import app
from scheduler_service.doctor_findings import Finding

SCHEDULER = ("scheduler", "--runtime", "127.0.0.1:1")


@pytest.fixture(autouse=True)
def _own_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands run in this process: they must not leave its logs at a stream that is closed after them."""
    monkeypatch.setattr(logs, "configure_logs", lambda level, *, as_json: None)


def failure(*arguments: str) -> tuple[int, str]:
    """Status and message of a command that ends at once."""
    result = CliRunner().invoke(app, arguments)
    assert result.stdout == ""
    return result.exit_code, result.stderr


def test_public_address_needs_tls_or_a_clear_word() -> None:
    """Neither service listens in plaintext where other machines can connect; the status is that of a wrong setting."""
    status, error = failure(*SCHEDULER, "--listen", "0.0.0.0:0")
    runtime = CliRunner().invoke(runtime_command, ["--listen", "0.0.0.0:0"])
    for code, text in ((status, error), (runtime.exit_code, runtime.stderr)):
        assert code == 2
        assert text.startswith("error: --listen 0.0.0.0:0 can be reached from other machines")
        assert text.endswith("or say --insecure\n")


def test_files_that_cannot_be_used_end_the_command(certificates: Any, strangers: Any, tmp_path: Path) -> None:
    """A key that does not fit, a token that is too short and a client's missing file are named, in one line each."""
    (tmp_path / "short").write_text("short")
    missing = str(tmp_path / "none.pem")
    cert, other = str(certificates.issue("mine")["tls_cert"]), str(strangers.issue("theirs")["tls_key"])
    local = (*SCHEDULER, "--listen", "127.0.0.1:0")
    for arguments, words in (
        ((*local, "--tls-cert", cert, "--tls-key", other), "key values mismatch"),
        ((*local, "--token-file", str(tmp_path / "short")), "line 1: a token has 16 to 4096 characters, this one 5"),
        ((*local, "--runtime-tls-ca", missing), "none.pem: No such file or directory"),
        (("rows", "--tls-ca", missing), "none.pem: No such file or directory"),
        (("generate", "--tokens", "1", "--tls-name", "x"), "need --tls-ca"),
        (("generate", "--tokens", "1", "--token-file", missing), "none.pem: No such file or directory"),
        (("rows", "--tls-ca", str(certificates.ca), "--tls-key", other), "--tls-cert and --tls-key go together"),
    ):
        status, error = failure(*arguments)
        assert status == 1
        assert error.startswith("error: ")
        assert words in error
        assert error.count("\n") == 1


async def test_doctor_says_whether_it_is_served(
    serving: Callable[..., Any], certificates: Any, token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is served and how it is reached, with status 0; or the reason why not, with status 1."""
    monkeypatch.setattr(cli_doctor, "examine", lambda model: [Finding("torch", "9")])
    (tmp_path / "wrong").write_text("another-token-of-the-tests")
    async with serving(**certificates.issue("server"), token_file=token_file) as served:

        def doctor(*options: str) -> tuple[int, str]:
            result = CliRunner().invoke(app, ["doctor", "--target", served.front.address, *options])
            return result.exit_code, result.stdout

        tls = ("--tls-ca", str(certificates.ca))
        status, text = await asyncio.to_thread(doctor, *tls, "--token-file", str(token_file))
        assert status == 0
        # The server logs to the same stream, since it is in this process.
        assert f" at {served.front.address} by TLS: model fingerprint, 0 running, 0 waiting\n" in text
        status, text = await asyncio.to_thread(doctor, *tls, "--token-file", str(tmp_path / "wrong"))
        assert status == 1
        assert "fix   scheduler  no: UNAUTHENTICATED: a valid bearer token is needed" in text.splitlines()
