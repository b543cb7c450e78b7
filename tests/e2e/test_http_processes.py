"""`pagemirror up --http` as processes: a full queue, killed children, signals, what is left behind, and who may call."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from http_up import Up, is_running, running_up, status_of, until
from scheduler_service.client import Client

openai = pytest.importorskip("openai", reason="the extra `dev` is not installed")
for name in ("smg", "smg_grpc_proto", "tokenizers"):
    pytest.importorskip(name, reason="the extra `gateway` is not installed")

LONG = {"max_tokens": 3000, "stream": True, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def served(child_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One row, and a queue of one. The last test of this module ends it."""
    log = tmp_path_factory.mktemp("up") / "log"
    options = ("--model", "tiny", "--http", "0", "--max-rows", "1", "--max-waiting", "1")
    with running_up(child_env, log, *options, "--num-pages", "256") as up:
        yield up


@pytest.fixture
def client(served: Up) -> Iterator[Any]:
    with openai.OpenAI(base_url=served.http, api_key="none", max_retries=0) as client:
        yield client


def short(client: Any, **options: Any) -> str:
    """The text of a short completion."""
    return str(client.completions.create(model="tiny", prompt="abc", max_tokens=4, temperature=0, **options).choices[0].text)


async def test_full_queue_is_429(served: Up, client: Any) -> None:
    """One request runs, one waits, the third is refused with 429 and the reason; the two are not disturbed."""
    async with Client(served.grpc) as observer:

        async def counts() -> tuple[int, int]:
            info = (await observer.info()).raw
            return info.num_running, info.num_waiting

        with contextlib.ExitStack() as stack:
            running = stack.enter_context(client.completions.create(model="tiny", prompt="abc", **LONG))
            assert next(iter(running)).choices
            # A stream's headers may come only with its first token, which the second has to wait for.
            waiting = threading.Thread(target=_read_some, args=(served.http,))
            waiting.start()
            async with asyncio.timeout(60):
                while await counts() != (1, 1):
                    await asyncio.sleep(0.01)
            with pytest.raises(openai.RateLimitError, match="the queue is full"):
                await asyncio.to_thread(short, client)
            assert next(iter(running)).choices
        await asyncio.to_thread(waiting.join, 60)
        assert not waiting.is_alive()
        async with asyncio.timeout(60):
            while await counts() != (0, 0):
                await asyncio.sleep(0.01)


def _read_some(http: str) -> None:
    with (
        openai.OpenAI(base_url=http, api_key="none", max_retries=0) as client,
        client.completions.create(model="tiny", prompt="def", **LONG) as stream,
    ):
        next(iter(stream))


def test_killed_runtime_is_a_pause(served: Up, client: Any) -> None:
    """A runtime that was killed is started again, and a request that came meanwhile is answered as ever."""
    before, text = served.children(), short(client)
    os.kill(before["runtime"], signal.SIGKILL)
    assert short(client) == text
    after = served.children()
    assert after["runtime"] != before["runtime"]
    assert (after["scheduler"], after["gateway"]) == (before["scheduler"], before["gateway"])


def test_killed_gateway_is_started_again(served: Up, client: Any) -> None:
    """The gateway comes back on its port, alone; the stream through the one before is broken, and its request over."""
    before, text = served.children(), short(client)
    stream = client.completions.create(model="tiny", prompt="abc", **LONG)
    next(iter(stream))
    os.kill(before["gateway"], signal.SIGKILL)
    with pytest.raises(openai.APIConnectionError):
        list(stream)
    until(lambda: status_of(f"{served.http}/models") == 200)
    until(lambda: _text_or_none(client) == text)
    after = served.children()
    assert after["gateway"] != before["gateway"]
    assert (after["scheduler"], after["runtime"]) == (before["scheduler"], before["runtime"])
    assert "the gateway ended by signal SIGKILL; it is started again" in served.errors.read_text()


def _text_or_none(client: Any) -> str | None:
    try:
        return short(client)
    except openai.APIStatusError as error:
        # It has no worker yet, the scheduler just hears of the dropped request, or the connection broke under this very call.
        assert error.status_code in {429, 503} or "transport error" in str(error)
        return None


def test_control_plane_is_not_for_everybody(served: Up) -> None:
    """Workers are not registered or listed, and caches not emptied, by whoever can reach the port."""
    root = served.http.removesuffix("/v1")
    assert status_of(f"{root}/workers") == 401
    assert status_of(f"{root}/get_loads") == 401


def test_port_in_use_is_told_at_once(served: Up, child_env: dict[str, str]) -> None:
    """A second server on the HTTP port does not start anything."""
    port = served.http.removesuffix("/v1").rpartition(":")[2]
    command = ["pagemirror", "up", "--model", "tiny", "--port", "0", "--http", port]
    result = subprocess.run(command, env=child_env, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"error: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_sigterm_lets_a_stream_end_and_leaves_nothing(served: Up, client: Any) -> None:
    """SIGTERM with a stream under way: the stream comes to its end, then all four processes are gone and the status is 0."""
    children = served.children()
    assert set(children) == {"scheduler", "runtime", "gateway"}
    stream = client.completions.create(
        model="tiny", prompt="abc", max_tokens=300, stream=True, temperature=0, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    served.process.send_signal(signal.SIGTERM)
    assert list(stream)[-1].choices[0].finish_reason == "length"
    assert served.process.wait(60) == 0, served.errors.read_text()
    assert not any(is_running(pid) for pid in children.values())


@pytest.fixture
def with_tokens(child_env: dict[str, str], tmp_path: Path) -> Iterator[Up]:
    """Behind a front end, with tokens."""
    (tmp_path / "tokens").write_text("first-token-of-a-file\nsecond-token-of-it\n")
    options = ("--model", "tiny", "--http", "0", "--workers", "1", "--num-pages", "64")
    with running_up(child_env, tmp_path / "log", *options, "--token-file", str(tmp_path / "tokens")) as up:
        yield up


def test_tokens_are_api_keys_and_a_killed_up_leaves_nothing(with_tokens: Up) -> None:
    """Each line of --token-file is an API key, nothing else is, and no key is on a command line. A killed worker of the front
    end comes back where the gateway looks for it. When `up` is killed, all that it started ends.
    """
    up = with_tokens
    for key in ("first-token-of-a-file", "second-token-of-it"):
        with openai.OpenAI(base_url=up.http, api_key=key, max_retries=0) as client:
            assert short(client)
    stranger = openai.OpenAI(base_url=up.http, api_key="another-token-than-those", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        short(stranger)
    children = up.children()
    assert set(children) == {"scheduler", "runtime", "frontend", "worker", "gateway"}
    for pid in children.values():
        assert b"-token-of-" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    with openai.OpenAI(base_url=up.http, api_key="first-token-of-a-file", max_retries=0) as client:
        text = short(client)
        os.kill(children["worker"], signal.SIGKILL)
        until(lambda: _text_or_none(client) == text)
    assert up.children()["gateway"] == children["gateway"]
    children = up.children()
    up.process.kill()
    until(lambda: not any(is_running(pid) for pid in children.values()))
    host, port = up.http.removeprefix("http://").removesuffix("/v1").split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)


def test_killed_scheduler_ends_the_command(child_env: dict[str, str], tmp_path: Path) -> None:
    """Its clients' streams cannot go on, so everything ends, with the reason and a status other than 0."""
    options = ("--model", "tiny", "--http", "0", "--num-pages", "64")
    with running_up(child_env, tmp_path / "log", *options) as up:
        children = up.children()
        os.kill(children["scheduler"], signal.SIGKILL)
        assert up.process.wait(60) == 1
        assert not any(is_running(pid) for pid in children.values())
        assert "the scheduler ended by signal SIGKILL" in up.errors.read_text()


def test_gateway_that_never_comes_back_ends_the_command(child_env: dict[str, str], tmp_path: Path) -> None:
    """Killed five times before it served again, it is given up: everything ends in order, with a status other than 0."""
    with running_up(child_env, tmp_path / "log", "--model", "tiny", "--http", "0", "--num-pages", "64") as up:
        killed: set[int] = set()

        def kill_the_next() -> bool:
            pid = up.children().get("gateway")
            if pid is not None and pid not in killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
            return up.process.poll() is not None

        until(kill_the_next)
        assert up.process.returncode == 1
        log = up.errors.read_text()
        assert len(killed) == log.count("the gateway ended by signal SIGKILL") == 5
        assert log.count("it is started again") == 4
