"""`pagemirror frontend` as processes: exact outputs, a killed worker, a scheduler that comes back, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.client import Client, RpcFailedError
from scheduler_service.client_security import ClientSecurity

READY = re.compile(r"pagemirror frontend ready on (\S+) \(workers \d+\)")


def workers_of(served: Any) -> list[int]:
    """Process ids of its workers."""
    pid = served.process.pid
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes()
        if b"scheduler_service.frontend_worker" in words:
            found.append(int(child))
    return found


async def tokens_of(client: Client, prompt: list[int], count: int, **options: Any) -> list[int]:
    """The whole output of one request."""
    return sum([piece.tokens async for piece in client.generate(prompt, max_tokens=count, **options)], [])


async def until_served(target: str) -> None:
    """Try until a request is served; connections are new each time, so that each worker gets a turn."""
    async with asyncio.timeout(60):
        good = 0
        while good < 12:
            async with Client(target) as client:
                try:
                    await tokens_of(client, [1], 1)
                    good += 1
                except RpcFailedError as error:
                    assert error.code.name == "UNAVAILABLE"
                    good = 0
                    await asyncio.sleep(0.05)


async def test_frontend_of_two_workers(
    commands: Any, child_env: dict[str, str], tmp_path: Path, continuation: Callable[..., list[int]]
) -> None:
    """Requests of many connections are exact; a killed worker's requests end at the scheduler and it is started again; SIGTERM
    lets live requests come to their end, and leaves no process behind.
    """
    up = commands.up("--model", "fingerprint", "--num-pages", "2048", "--max-rows", "64")
    async with commands.serving(up, child_env, tmp_path / "up") as scheduler:
        command = ["frontend", "--scheduler", scheduler.target, "--listen", "127.0.0.1:0", "--workers", "2"]
        async with (
            commands.serving(command, child_env, tmp_path / "frontend", READY) as front,
            contextlib.AsyncExitStack() as stack,
        ):
            await until_served(front.target)
            clients = [await stack.enter_async_context(Client(front.target)) for _ in range(8)]
            prompts = [[n, 3, n] for n in range(40)]
            outputs = await asyncio.gather(*(tokens_of(clients[n % 8], prompt, 25) for n, prompt in enumerate(prompts)))
            assert outputs == [continuation(prompt, 25) for prompt in prompts]

            direct = await stack.enter_async_context(Client(scheduler.target))
            long = [asyncio.ensure_future(tokens_of(client, [n], 20_000)) for n, client in enumerate(clients)]
            await commands.until(lambda: _num_running(direct, 8))
            old = workers_of(front)
            assert len(old) == 2
            os.kill(old[0], signal.SIGKILL)
            await asyncio.wait(long, return_when=asyncio.FIRST_COMPLETED)
            async with asyncio.timeout(60):
                while (await direct.info()).raw.num_running + sum(task.done() for task in long) != 8:
                    await asyncio.sleep(0.02)
            for task in long:
                if task.done():
                    assert task.exception().code.name == "UNAVAILABLE"
                task.cancel()
            await asyncio.gather(*long, return_exceptions=True)
            await commands.until(lambda: len(workers_of(front)) == 2 and old[0] not in workers_of(front))
            await until_served(front.target)
            assert (
                f"worker {0 if 'worker 0' in front.errors.read_text() else 1} ended with status -9" in front.errors.read_text()
            )

            async with Client(front.target) as client:
                last = client.generate([5, 6], max_tokens=2000)
                first = await anext(last)
                everybody = workers_of(front)
                front.process.send_signal(signal.SIGTERM)
                assert first.tokens + sum([piece.tokens async for piece in last], []) == continuation([5, 6], 2000)
            assert await front.end() == 0
            assert not any(commands.is_running(pid) for pid in everybody)


async def _num_running(client: Client, count: int) -> bool:
    return (await client.info()).raw.num_running == count


async def test_scheduler_that_comes_back(
    commands: Any, child_env: dict[str, str], short_tmp: Path, tmp_path: Path, continuation: Callable[..., list[int]]
) -> None:
    """Without its scheduler a front end answers UNAVAILABLE; it serves again when one is there at the same address."""
    runtime_socket, scheduler_socket = f"unix:{short_tmp / 'r'}", f"unix:{short_tmp / 's'}"
    scheduler = ["scheduler", "--runtime", runtime_socket, "--listen", scheduler_socket, "--heartbeat-timeout", "30"]
    runtime = ["runtime", "--model", "fingerprint", "--listen", runtime_socket, "--num-pages", "256"]
    front_command = ["frontend", "--scheduler", scheduler_socket, "--listen", "127.0.0.1:0"]
    runtime_ready = re.compile(r"pagemirror runtime ready on (\S+)")
    async with (
        commands.serving(front_command, child_env, tmp_path / "frontend", READY) as front,
        commands.serving(runtime, child_env, tmp_path / "runtime", runtime_ready),
        Client(front.target) as client,
    ):
        with pytest.raises(RpcFailedError, match="UNAVAILABLE: this front end has no scheduler now"):
            await tokens_of(client, [1], 3)
        async with commands.serving(scheduler, child_env, tmp_path / "first") as first:
            await until_served(front.target)
            assert await tokens_of(client, [1, 2], 9) == continuation([1, 2], 9)
            running = client.generate([3], max_tokens=3000)
            await anext(running)
            first.process.kill()
            with pytest.raises(RpcFailedError, match="UNAVAILABLE"):
                _ = [piece async for piece in running]
        async with commands.serving(scheduler, child_env, tmp_path / "second"):
            await until_served(front.target)
            assert await tokens_of(client, [1, 2], 9) == continuation([1, 2], 9)


async def test_port_is_taken_by_one_front_end(commands: Any, child_env: dict[str, str], tmp_path: Path) -> None:
    """A second front end on the port is refused, though the workers of the first share it; bad options are named."""
    command = ["frontend", "--scheduler", "127.0.0.1:1", "--workers", "2", "--listen"]
    async with commands.serving([*command, "127.0.0.1:0"], child_env, tmp_path / "frontend", READY) as front:
        status, out, err = await commands.run(child_env, *command, front.target)
        assert (status, out) == (1, "")
        assert err == f"error: cannot listen on {front.target}: Address already in use\n"
        status, _, err = await commands.run(child_env, "scheduler", "--runtime", "127.0.0.1:1", "--listen", front.target)
        assert (status, f"cannot listen on {front.target}" in err) == (1, True)
    status, _, err = await commands.run(child_env, *command, "unix:/tmp/nobody-is-here")
    assert (status, err) == (2, "error: --workers above 1 needs --listen HOST:PORT: processes cannot share a unix socket\n")
    wrong = ["frontend", "--scheduler", "nowhere", "--workers", "0"]
    status, _, err = await commands.run(child_env, *wrong)
    assert status == 2
    assert "--scheduler is 'nowhere'" in err
    assert "--workers is 0" in err
    bad = [
        "frontend",
        "--scheduler",
        "127.0.0.1:1",
        "--listen",
        "127.0.0.1:0",
        "--scheduler-token-file",
        str(tmp_path / "none"),
    ]
    status, out, err = await commands.run(child_env, *bad)
    assert (status, out) == (1, "")
    assert "error: " in err


async def test_up_with_workers(
    commands: Any, child_env: dict[str, str], tmp_path: Path, continuation: Callable[..., list[int]]
) -> None:
    """`up --workers` serves by a front end once it says so; SIGTERM lets live requests end; then every process is gone."""
    tokens = tmp_path / "tokens"
    tokens.write_text("0123456789abcdef-first\n")
    env = child_env | {"PAGEMIRROR_TOKEN_FILE": str(tokens)}  # of the public port: not for the scheduler behind it
    up = commands.up("--model", "fingerprint", "--num-pages", "1024", "--workers", "2", "--max-streams", "50")
    async with commands.serving(up, env, tmp_path / "up") as served:
        async with Client(served.target) as stranger:
            with pytest.raises(RpcFailedError, match="UNAUTHENTICATED"):
                await tokens_of(stranger, [1], 1)
        async with contextlib.AsyncExitStack() as stack:
            security = ClientSecurity.of(token_file=tokens)
            clients = [await stack.enter_async_context(Client(served.target, security)) for _ in range(6)]
            outputs = await asyncio.gather(*(tokens_of(client, [n, 2], 30) for n, client in enumerate(clients)))
            assert outputs == [continuation([n, 2], 30) for n in range(6)]
            status, _, err = await commands.run(env, *up, "--port", served.target.rpartition(":")[2])
            assert (status, err) == (1, f"error: cannot listen on {served.target}: Address already in use\n")
            last = clients[0].generate([5, 6], max_tokens=2000)
            first = await anext(last)
            children = [int(pid) for pid in _descendants(served.process.pid)]
            assert len(children) >= 5  # runtime, scheduler, front end and two workers
            served.process.send_signal(signal.SIGTERM)
            assert first.tokens + sum([piece.tokens async for piece in last], []) == continuation([5, 6], 2000)
        assert await served.end() == 0
        assert not any(commands.is_running(pid) for pid in children)


async def test_up_ends_with_its_front_end(commands: Any, child_env: dict[str, str], tmp_path: Path) -> None:
    """A front end that was killed takes the rest with it."""
    up = commands.up("--model", "fingerprint", "--num-pages", "256", "--workers", "1")
    async with commands.serving(up, child_env, tmp_path / "up") as served:
        children = _descendants(served.process.pid)
        [front] = [pid for pid in children if b"\0frontend\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(front, signal.SIGKILL)
        assert await served.end() == 1
        await commands.until(lambda: not any(commands.is_running(pid) for pid in children))
        assert "the front end ended by signal SIGKILL" in served.errors.read_text()


def _descendants(pid: int) -> list[int]:
    """Process ids of all that it started, and of theirs."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *_descendants(int(child))]
    return found
