"""`pagemirror up` with certificates and tokens: served to whom it should be, and no secret where others can look."""

from __future__ import annotations

import asyncio
import base64
import sys
from pathlib import Path
from typing import Any

import pytest
import trustme

TOKEN = "correct-horse-battery-staple"
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """An authority, certificates of a server and of a client, and files of tokens."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name in ("server", "client"):
        issued = authority.issue_cert("127.0.0.1")
        issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
        issued.private_key_pem.write_to_path(tmp_path / f"{name}.key")
    (tmp_path / "tokens").write_text(TOKEN + "\n")
    (tmp_path / "wrong").write_text("wrong-horse-battery-staple\n")
    return {path.name: path for path in tmp_path.iterdir()}


def secrets_of(files: dict[str, Path]) -> list[bytes]:
    """What must be seen nowhere: tokens, and lines of keys, also as they look in a log line of their own encoding."""
    lines = [
        line for name in ("server.key", "client.key") for line in files[name].read_bytes().splitlines() if b"-----" not in line
    ]
    tokens = [TOKEN.encode(), b"wrong-horse-battery-staple", base64.b64encode(TOKEN.encode())]
    return [line for line in lines if len(line) > 20] + tokens


async def test_served_to_its_clients_and_no_secret_shows(
    commands: Any, child_env: dict[str, str], files: dict[str, Path], tmp_path: Path, project_root: Path
) -> None:
    """Mutual TLS and a token, past proxies in the environment; wrong ones end with their reason; the log at its most talkative,
    the command lines and the output of the clients hold none of the secrets.
    """
    env = child_env | dict.fromkeys(PROXIES, "http://127.0.0.1:9") | {"no_proxy": ""}
    # Of a link to other machines, which this one is not.
    env["PAGEMIRROR_RUNTIME_TLS_CERT"] = env["PAGEMIRROR_RUNTIME_TLS_KEY"] = str(tmp_path / "none")
    server = ["--tls-cert", str(files["server.pem"]), "--tls-key", str(files["server.key"]), "--tls-ca", str(files["ca.pem"])]
    up = commands.up("--model", "fingerprint", *server, "--token-file", str(files["tokens"]), "--log-level", "debug")
    log = tmp_path / "log"
    async with commands.serving(up, env, log) as served:

        async def client(*arguments: str, token: str = "tokens") -> tuple[int, str, str]:
            ours = [
                "--tls-ca",
                str(files["ca.pem"]),
                "--tls-cert",
                str(files["client.pem"]),
                "--tls-key",
                str(files["client.key"]),
            ]
            target = ["--target", served.target, *ours, "--token-file", str(files[token])]
            result: tuple[int, str, str] = await commands.run(env, *arguments, *target)
            return result

        request = ("generate", "--tokens", "1,2,3", "--max-tokens", "6")
        good = await client(*request)
        wrong = await client("rows", token="wrong")
        bare = await commands.run(env, *request, "--target", served.target)
        probe = await probing(project_root, served.target, env | probe_env(files))
        cmdlines = b"".join(
            Path(f"/proc/{pid}/cmdline").read_bytes() for pid in [served.process.pid, *served.children().values()]
        )
    assert good == (0, "20 104 629 421 384 473\n", "")
    assert wrong == (1, "", "error: UNAUTHENTICATED: a valid bearer token is needed\n")
    assert (bare[0], bare[1]) == (1, "")
    assert "it closes the connection: it wants TLS (--tls-ca) or a client certificate" in bare[2]
    assert probe == (0, "SERVING\n")
    shown = log.read_bytes() + cmdlines + repr((good, wrong, bare, probe)).encode()
    assert b"call_refused" in shown  # it was talkative
    assert b"--token-file" in shown
    assert [secret for secret in secrets_of(files) if secret in shown] == []


def probe_env(files: dict[str, Path]) -> dict[str, str]:
    """Variables of the health probe."""
    names = {"CA": "ca.pem", "CERT": "client.pem", "KEY": "client.key"}
    return {f"PROBE_TLS_{variable}": str(files[name]) for variable, name in names.items()}


async def probing(root: Path, target: str, env: dict[str, str]) -> tuple[int | None, str]:
    """One run of the containers' health probe."""
    script = str(root / "deploy" / "grpc_health_probe.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, script, target, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode()
