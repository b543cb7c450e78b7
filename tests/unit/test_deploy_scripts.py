"""deploy/*.py: what the containers run beside the product, each against a server of the test's own."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

Answer = tuple[int, Any]


class Web:
    """An HTTP server that answers by a table of (method, path), and notes what it was sent."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], Answer] = {}
        self.bodies: list[Any] = []
        self.seen = threading.Event()
        web = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                if length:
                    web.bodies.append(json.loads(self.rfile.read(length)) | {"auth": self.headers.get("authorization")})
                status, body = web.answers.get((self.command, self.path), (404, "no such page"))
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
                if length:
                    web.seen.set()

            do_GET = do_POST = _answer

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class' name)
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def web() -> Iterator[Web]:
    """A server without answers yet."""
    server = Web()
    yield server
    server.close()


@pytest.fixture
def script(project_root: Path, child_env: dict[str, str]) -> Callable[..., tuple[int, str]]:
    """Run a script of deploy/; its status and what it printed."""

    def run(name: str, *arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-I", str(project_root / "deploy" / name), *arguments]
        done = subprocess.run(command, env=child_env, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout + done.stderr

    return run


def _chat(answer: str) -> Answer:
    return 200, {"choices": [{"message": {"role": "assistant", "content": answer}}]}


def test_probe_says_ready_or_why_not(web: Web, script: Callable[..., tuple[int, str]]) -> None:
    """2xx is status 0; another answer, or none, is status 1 with the reason."""
    web.answers["GET", "/ok"] = 200, "ready"
    web.answers["GET", "/no"] = 503, "insufficient healthy workers"
    assert script("http_probe.py", f"{web.url}/ok") == (0, '200 "ready"\n')
    assert script("http_probe.py", f"{web.url}/no") == (1, '503 "insufficient healthy workers"\n')
    status, text = script("http_probe.py", "http://127.0.0.1:1/")
    assert status == 1
    assert "no answer from http://127.0.0.1:1/ within 3 s" in text


@pytest.mark.parametrize(("answer", "status", "word"), [("It is Paris.", 0, "right"), ("It is Lyon.", 1, "wrong")])
def test_question_is_asked_of_the_served_model(
    answer: str, status: int, word: str, web: Web, script: Callable[..., tuple[int, str]]
) -> None:
    """The first model listed is asked, greedy, and the status is that of its answer."""
    web.answers["GET", "/v1/models"] = 200, {"data": [{"id": "m"}]}
    web.answers["POST", "/v1/chat/completions"] = _chat(answer)
    found, text = script("smoke.py", web.url)
    assert (found, text.splitlines()[-1]) == (status, f"smoke: {word}")
    (body,) = web.bodies
    assert (body["model"], body["temperature"]) == ("m", 0)


def test_question_that_is_refused_says_why(web: Web, script: Callable[..., tuple[int, str]]) -> None:
    """A refusal ends with status 1 and the server's own words."""
    web.answers["POST", "/v1/chat/completions"] = 429, {"error": "queue is full"}
    status, text = script("smoke.py", web.url, "m")
    assert status == 1
    assert text.startswith("smoke: ")
    assert '429 {"error": "queue is full"}' in text


@pytest.fixture
def module(project_root: Path) -> Callable[[str], dict[str, Any]]:
    """Load a script of deploy/, which is no package."""
    return lambda name: runpy.run_path(str(project_root / "deploy" / name), run_name=name)


def test_worker_is_announced_once(
    web: Web, module: Callable[[str], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that does not know the worker is told, with the key where there is one; one that does is left alone."""
    join = module("join_gateway.py")["keep"]
    monkeypatch.setenv("GATEWAY_ADMIN_KEY_FILE", str(tmp_path / "key"))
    assert join(web.url, "grpc://w:1").startswith("not yet: ")
    (tmp_path / "key").write_text("k\n")
    assert join(web.url, "grpc://w:1").startswith("not yet: 404")
    web.answers["GET", "/workers"] = 200, {"workers": [{"url": "grpc://other:1"}]}
    web.answers["POST", "/workers"] = 202, {"status": "accepted"}
    assert join(web.url, "grpc://w:1") == "announced"
    assert web.bodies == [{"url": "grpc://w:1", "auth": "Bearer k"}]
    web.answers["GET", "/workers"] = 200, {"workers": [{"url": "grpc://w:1"}]}
    assert join(web.url, "grpc://w:1") == "known"
    assert len(web.bodies) == 1


def test_joiner_ends_when_it_is_told_to(web: Web, project_root: Path, child_env: dict[str, str]) -> None:
    """It announces the worker at its start, goes on, and ends with status 0 on SIGTERM."""
    web.answers["GET", "/workers"] = 200, {"workers": []}
    web.answers["POST", "/workers"] = 202, {}
    command = [sys.executable, "-I", str(project_root / "deploy/join_gateway.py"), web.url, "grpc://w:1"]
    with subprocess.Popen(command, env=child_env, stdout=subprocess.PIPE, text=True) as process:
        assert web.seen.wait(30)
        assert process.poll() is None
        process.terminate()
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert output == f"join_gateway: grpc://w:1 at {web.url}: announced\n"


def test_gateway_gets_a_new_key_and_the_tokens(module: Callable[[str], dict[str, Any]], tmp_path: Path) -> None:
    """Each start draws a key, which its file has for this user alone; each token of the file is one of a client's keys."""
    arguments = module("run_gateway.py")["arguments"]
    key_file, token_file = tmp_path / "key", tmp_path / "tokens"
    token_file.write_text("# ours\none-token\n\ntwo-token\n")
    first = arguments(["--port", "1"], key_file, token_file)
    key = key_file.read_text()
    assert first == [
        *("--port", "1", f"--control-plane-api-keys=container:pagemirror:admin:{key}"),
        *("--tenant-api-key=token0:one-token", "--tenant-api-key=token1:two-token"),
    ]
    assert key_file.stat().st_mode & 0o777 == 0o600
    assert len(key) == 32
    arguments([], key_file, None)
    assert key_file.read_text() != key
    token_file.write_text("# none\n")
    with pytest.raises(SystemExit, match="has no token"):
        arguments([], None, token_file)
