"""What the commands say when they cannot do what they are asked, and what their help needs."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path
from typing import Any


async def test_port_in_use_is_refused(commands: Any, child_env: dict[str, str], short_tmp: Path) -> None:
    """The second server on a port ends at once, with the address in its message, and takes its runtime with it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        env = child_env | {"TMPDIR": str(short_tmp)}
        status, out, err = await commands.run(env, "up", "--model", "fingerprint", "--port", str(port))
    assert (status, out) == (1, "")
    assert f"cannot listen on 127.0.0.1:{port}" in err
    assert "the scheduler ended with status 1" in err
    assert list(short_tmp.iterdir()) == []


async def test_model_that_does_not_exist_ends_with_the_reason(commands: Any, child_env: dict[str, str]) -> None:
    """The runtime's refusal is the command's: a message that names the value, no readiness line, no server left."""
    status, out, err = await commands.run(child_env, "up", "--model", "no/such/model", "--port", "0")
    assert status != 0
    assert out == ""
    assert "no/such/model" in err
    assert "the runtime ended with status" in err


async def test_clients_without_a_server_say_so(commands: Any, child_env: dict[str, str]) -> None:
    """Nothing listens: status 1, and a message that names the address and what to start."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets the port meanwhile
        target = f"127.0.0.1:{unused.getsockname()[1]}"
        for command in (["generate", "--tokens", "1"], ["generate", "--prompt", "x"], ["rows"]):
            status, out, err = await commands.run(child_env, *command, "--target", target)
            assert (status, out) == (1, "")
            assert err == f"error: UNAVAILABLE: nothing answers at {target}; is `pagemirror up` running there?\n"


async def test_bad_usage_is_status_2(commands: Any, child_env: dict[str, str]) -> None:
    """Wrong options end with status 2 and a message, before anything is started."""
    for command, words in (
        (["generate"], "one of --tokens and --prompt"),
        (["generate", "--tokens", "1,x"], "whole numbers"),
        (["generate", "--tokens", "1", "--chat"], "go with --prompt"),
        (["up"], "--model"),
        (["up", "--model", "fingerprint", "--port", "99999"], "65535"),
        (["scheduler"], "--runtime is missing"),
        (["scheduler", "--runtime", "h:1", "--token-budget", "0"], "--token-budget is 0"),
        (["scheduler", "--runtime", "h:1", "--refresh-policy", "tail_only"], "tail_only"),
        (["nonsense"], "nonsense"),
    ):
        status, out, err = await commands.run(child_env, *command)
        assert (status, out) == (2, ""), command
        assert words in err, command


async def test_help_and_version_need_no_heavy_import(commands: Any, child_env: dict[str, str]) -> None:
    """Help is there without grpc, torch or numpy being imported; every command has some; `version` prints one."""
    for command in ("up", "scheduler", "generate", "rows", "simulate", "demo", "doctor", "version"):
        status, out, _ = await commands.run(child_env, command, "--help")
        assert (status, "Usage: pagemirror" in out) == (0, True)
    status, out, _ = await commands.run(child_env, "version")
    assert (status, bool(re.fullmatch(r"pagemirror \d+\.\d+\.\d+\S*\n", out))) == (0, True)
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom scheduler_service.cli import app\n"
        "assert CliRunner().invoke(app, ['up', '--help']).exit_code == 0\n"
        "print([name for name in ('grpc', 'torch', 'numpy') if name in sys.modules])\n"
    )
    process = await asyncio.create_subprocess_exec("python", "-c", code, env=child_env, stdout=asyncio.subprocess.PIPE)
    out_bytes, _ = await process.communicate()
    assert out_bytes == b"[]\n"
