"""The product as its users start it: `pagemirror up` and the client commands, as processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from scheduler_service.client import Client, Piece, RpcFailedError

LIMIT_S = 60.0
VOCAB_SIZE = 997
READY = re.compile(r"pagemirror ready on (\S+) \(model (\S+)\)")
NUMBERS = "20 104 629 421 384 473\n"


def continuation(prompt: list[int], num_tokens: int) -> list[int]:
    """The fingerprint model by its definition, summed up as it goes."""
    total = sum((i + 1) * (token + 1) for i, token in enumerate(prompt))
    output: list[int] = []
    for length in range(len(prompt), len(prompt) + num_tokens):
        token = total % VOCAB_SIZE
        output.append(token)
        total += (length + 1) * (token + 1)
    return output


@dataclass
class Served:
    """A process that serves, and where."""

    process: asyncio.subprocess.Process
    target: str
    errors: Path

    async def end(self) -> int:
        """Its exit status."""
        async with asyncio.timeout(LIMIT_S):
            return await self.process.wait()

    def children(self) -> dict[str, int]:
        """Process ids of its two children by what they are."""
        found = {}
        pid = self.process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
            found["runtime" if "runtime_service" in words else "scheduler"] = int(child)
        return found


def is_running(pid: int) -> bool:
    """Whether a process exists and is more than its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again until it is so."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            result = condition()
            if result if isinstance(result, bool) else await result:
                return
            await asyncio.sleep(0.02)


async def append_rest(pieces: AsyncIterator[Piece], tokens: list[int]) -> None:
    """Append what is still to come."""
    async for piece in pieces:
        tokens += piece.tokens


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A temporary directory whose name is short enough to hold a socket."""
    with tempfile.TemporaryDirectory(prefix="pm-", dir="/tmp") as folder:
        yield Path(folder)


@contextlib.asynccontextmanager
async def serving(
    command: list[str], env: dict[str, str], errors: Path, ready: re.Pattern[str] = READY
) -> AsyncIterator[Served]:
    """Start a command, wait for its readiness line, and kill whatever is left of it at the end."""
    with errors.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "pagemirror", *command, env=env, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            line = (await process.stdout.readline()).decode()
        match = ready.match(line)
        assert match, f"{line!r} is no readiness line; stderr: {errors.read_text()}"
        yield Served(process, match[1], errors)
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(20):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


def up(*options: str) -> list[str]:
    """`pagemirror up` on any free port; a busy machine must not look like a dead runtime."""
    return ["up", "--port", "0", "--heartbeat-timeout", "30", *options]


async def run(env: dict[str, str], *arguments: str) -> tuple[int, str, str]:
    """One client command to its end: status, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        "pagemirror", *arguments, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(LIMIT_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_one_command_serves_and_the_clients_find_it(child_env: dict[str, str], short_tmp: Path) -> None:
    """The whole use: tokens by the command line, many at once in a tiny pool, rows, retraction, reset, disconnect, drain."""
    env = child_env | {"TMPDIR": str(short_tmp)}
    pool = ["--page-size", "4", "--num-pages", "30", "--max-pages-per-row", "30", "--chunk-size", "8", "--check"]
    async with serving(up("--model", "fingerprint", *pool), env, short_tmp / "log") as served:
        target = ["--target", served.target]
        assert set(served.children()) == {"runtime", "scheduler"}
        assert await run(env, "generate", *target, "--tokens", "1,2,3", "--max-tokens", "6") == (0, NUMBERS, "")
        status, out, err = await run(env, "generate", *target, "--tokens", "1 2 3", "--stop", "629,7", "--stats")
        assert (status, out) == (0, "20 104 629\n")
        assert err == "stop: 3 prompt tokens (0 cached), 3 returned, 0 retractions\n"
        piped = f"pagemirror generate --target {served.target} --tokens 1,2,3 --max-tokens 100 | head -c 7"
        process = await asyncio.create_subprocess_exec("bash", "-c", piped, env=env, stdout=-1, stderr=-1)
        assert await process.communicate() == (b"20 104 ", b"")
        status, out, err = await run(env, "generate", *target, "--tokens", "1,997")
        assert (status, out) == (1, "")
        assert err.startswith("error: INVALID_ARGUMENT: ")
        assert "prompt token 1 is 997, but ids are in [0, 997)" in err
        status, _, err = await run(env, "generate", *target, "--prompt", "hello")
        assert status == 1
        assert "model 'fingerprint' has no tokenizer" in err
        async with Client(served.target) as client:
            await _many_at_once(client)
            await _retract_while_rows_are_compared(client, env, target)
            await _reset_of_the_cache(client)
            await _disconnect(client, env, target)
        await _health_and_reflection(served.target)
        status, out, _ = await run(env, "rows", *target)
        assert (status, "no row is in use" in out) == (0, True)
        served.process.send_signal(signal.SIGTERM)
        assert await served.end() == 0, served.errors.read_text()
        assert [path for path in short_tmp.iterdir() if path.name != "log"] == []


async def _many_at_once(client: Client) -> None:
    async def one(prompt: list[int], num_tokens: int) -> int:
        tokens: list[int] = []
        retractions = 0
        async for piece in client.generate(prompt, max_tokens=num_tokens):
            tokens += piece.tokens
            retractions = piece.ending.num_retractions if piece.ending else 0
        assert tokens == continuation(prompt, num_tokens)
        return retractions

    shared = list(range(50, 62))
    async with asyncio.timeout(LIMIT_S):
        retractions = await asyncio.gather(*(one(shared[: n % 12 + 1] + [n], 20 + n) for n in range(16)))
    assert sum(retractions) > 0


async def _retract_while_rows_are_compared(client: Client, env: dict[str, str], target: list[str]) -> None:
    prompt = [9, 8, 7, 6, 5]
    tokens: list[int] = []
    retracted = 0
    compared = 0
    async for piece in client.generate(prompt, max_tokens=110, request_id="watched"):
        tokens += piece.tokens
        if len(tokens) > 20 * retracted and retracted < 4 and not piece.ending:
            try:
                await client.retract("watched")
                retracted += 1
            except RpcFailedError as error:
                assert error.code is grpc.StatusCode.FAILED_PRECONDITION
            found = await client.rows()
            assert all(row.equal for row in found.rows)
            compared += len(found.rows)
        if piece.ending:
            assert piece.ending.num_retractions == retracted
    assert tokens == continuation(prompt, 110)
    assert retracted == 4
    assert compared > 0


async def _reset_of_the_cache(client: Client) -> None:
    info = (await client.info()).raw
    assert info.cached_pages > 0
    assert await client.reset_prefix_cache() == info.cached_pages
    info = (await client.info()).raw
    assert (info.cached_pages, info.free_pages) == (0, 30)


async def _disconnect(client: Client, env: dict[str, str], target: list[str]) -> None:
    """A client process that is killed; its request is gone soon after, and `rows` shows it while it lives."""
    async for piece in client.generate([1, 2], max_tokens=110, request_id="mine"):
        if piece.tokens:
            status, out, _ = await run(env, "rows", *target, "--json")
            found = json.loads(out)
            assert status == 0
            assert all(row["equal"] and row["scheduler_pages"] == row["mirror_pages"] for row in found["rows"])
            break
    arguments = [*target, "--tokens", "4,5", "--max-tokens", "110", "--request-id", "killed"]
    process = await asyncio.create_subprocess_exec(
        "pagemirror", "generate", *arguments, env=env, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readexactly(3)
    process.kill()
    await process.wait()

    async def is_idle() -> bool:
        info = (await client.info()).raw
        return (info.num_waiting, info.num_running, info.num_retracted) == (0, 0, 0)

    await until(is_idle)
    info = (await client.info()).raw
    assert info.free_pages + info.cached_pages == 30


async def _health_and_reflection(target: str) -> None:
    async with grpc.aio.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "pagemirror.v1.GenerationService"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=LIMIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        response = await anext(aiter(call))
        services = {service.name for service in response.list_services_response.service}
        assert {"pagemirror.v1.GenerationService", "grpc.health.v1.Health"} <= services


async def test_sigterm_drains_and_a_second_one_does_not_wait(child_env: dict[str, str], short_tmp: Path) -> None:
    """After SIGTERM new requests are refused while a live one goes on; after another its stream ends with UNAVAILABLE."""
    async with serving(up("--model", "fingerprint", "--max-pages-per-row", "4096"), child_env, short_tmp / "log") as served:
        children = served.children()
        async with Client(served.target) as client, Client(served.target) as other:
            tokens: list[int] = []
            pieces = client.generate([1, 2, 3], max_tokens=60_000)
            async for piece in pieces:
                tokens += piece.tokens
                if piece.tokens:
                    break
            served.process.send_signal(signal.SIGTERM)

            async def is_draining() -> bool:
                try:
                    async for _ in other.generate([4], max_tokens=1):
                        pass
                except RpcFailedError as error:
                    assert error.code is grpc.StatusCode.UNAVAILABLE
                    return "shutting down" in error.details
                return False

            await until(is_draining)
            async for piece in pieces:
                tokens += piece.tokens
                if piece.tokens:
                    break
            served.process.send_signal(signal.SIGTERM)
            with pytest.raises(RpcFailedError) as caught:
                await append_rest(pieces, tokens)
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
            assert tokens == continuation([1, 2, 3], len(tokens))
        assert await served.end() == 0, served.errors.read_text()
        assert not any(map(is_running, children.values()))


async def test_drain_waits_for_the_last_request(child_env: dict[str, str], short_tmp: Path) -> None:
    """A request that runs at SIGTERM is served to its end, and the exit status is 0."""
    async with serving(up("--model", "fingerprint"), child_env, short_tmp / "log") as served:
        async with Client(served.target) as client:
            tokens: list[int] = []
            async for piece in client.generate([1, 2, 3], max_tokens=600):
                if not tokens and piece.tokens:
                    served.process.send_signal(signal.SIGTERM)
                tokens += piece.tokens
        assert tokens == continuation([1, 2, 3], 600)
        assert await served.end() == 0, served.errors.read_text()


@pytest.mark.parametrize("victim", ["runtime", "scheduler"])
async def test_when_one_process_dies_the_other_is_ended(child_env: dict[str, str], short_tmp: Path, victim: str) -> None:
    """The death of either ends both, with a message and a status other than 0, and leaves no file behind."""
    env = child_env | {"TMPDIR": str(short_tmp)}
    async with serving(up("--model", "fingerprint"), env, short_tmp / "log") as served:
        children = served.children()
        os.kill(children[victim], signal.SIGKILL)
        assert await served.end() == 1
        assert f"pagemirror up: the {victim} ended by signal SIGKILL" in served.errors.read_text()
        assert not any(map(is_running, children.values()))
        assert [path for path in short_tmp.iterdir() if path.name != "log"] == []


async def test_children_do_not_outlive_a_killed_parent(child_env: dict[str, str], short_tmp: Path) -> None:
    """Even when `up` itself is killed, neither process stays."""
    env = child_env | {"TMPDIR": str(short_tmp)}  # what a killed process leaves behind goes with the test
    async with serving(up("--model", "fingerprint"), env, short_tmp / "log") as served:
        children = served.children()
        served.process.kill()
        await until(lambda: not any(map(is_running, children.values())))


async def test_runtime_that_is_killed_and_started_again_is_a_pause(child_env: dict[str, str], short_tmp: Path) -> None:
    """Two commands instead of one: the runtime is killed in the middle of a stream, comes back, and no token is wrong."""
    address = f"unix:{short_tmp}/r.sock"
    runtime = ["runtime", "--listen", address, "--model", "fingerprint", "--max-pages-per-row", "1024"]
    runtime_ready = re.compile(r"pagemirror runtime ready on (\S+)")
    scheduler = ["scheduler", "--runtime", address, "--listen", "127.0.0.1:0", "--heartbeat-timeout", "30"]
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(serving(runtime, child_env, short_tmp / "runtime-log", runtime_ready))
        served = await stack.enter_async_context(serving(scheduler, child_env, short_tmp / "log"))
        client = await stack.enter_async_context(Client(served.target))
        tokens: list[int] = []
        async for piece in client.generate([1, 2, 3], max_tokens=2500):
            if not tokens and piece.tokens:
                first.process.kill()
                await first.process.wait()
                await stack.enter_async_context(serving(runtime, child_env, short_tmp / "runtime-log-2", runtime_ready))
            tokens += piece.tokens
        assert tokens == continuation([1, 2, 3], 2500)
        assert "session_lost" in served.errors.read_text()


async def test_port_in_use_is_refused(child_env: dict[str, str], short_tmp: Path) -> None:
    """The second server on a port ends at once, with the address in its message, and takes its runtime with it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        env = child_env | {"TMPDIR": str(short_tmp)}
        status, out, err = await run(env, "up", "--model", "fingerprint", "--port", str(port))
    assert (status, out) == (1, "")
    assert f"cannot listen on 127.0.0.1:{port}" in err
    assert "the scheduler ended with status 1" in err
    assert list(short_tmp.iterdir()) == []


async def test_model_that_does_not_exist_ends_with_the_reason(child_env: dict[str, str]) -> None:
    """The runtime's refusal is the command's: a message that names the value, no readiness line, no server left."""
    status, out, err = await run(child_env, "up", "--model", "no/such/model", "--port", "0")
    assert status != 0
    assert out == ""
    assert "no/such/model" in err
    assert "the runtime ended with status" in err


async def test_clients_without_a_server_say_so(child_env: dict[str, str]) -> None:
    """Nothing listens: status 1, and a message that names the address and what to start."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets the port meanwhile
        target = f"127.0.0.1:{unused.getsockname()[1]}"
        for command in (["generate", "--tokens", "1"], ["generate", "--prompt", "x"], ["rows"]):
            status, out, err = await run(child_env, *command, "--target", target)
            assert (status, out) == (1, "")
            assert err == f"error: UNAVAILABLE: nothing answers at {target}; is `pagemirror up` running there?\n"


async def test_bad_usage_is_status_2(child_env: dict[str, str]) -> None:
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
        status, out, err = await run(child_env, *command)
        assert (status, out) == (2, ""), command
        assert words in err, command


async def test_help_and_version_need_no_heavy_import(child_env: dict[str, str]) -> None:
    """Help is there without grpc, torch or numpy being imported; every command has some; `version` prints one."""
    for command in ("up", "scheduler", "generate", "rows", "simulate", "demo", "doctor", "version"):
        status, out, _ = await run(child_env, command, "--help")
        assert (status, "Usage: pagemirror" in out) == (0, True)
    status, out, _ = await run(child_env, "version")
    assert (status, bool(re.fullmatch(r"pagemirror \d+\.\d+\.\d+\S*\n", out))) == (0, True)
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom scheduler_service.cli import app\n"
        "assert CliRunner().invoke(app, ['up', '--help']).exit_code == 0\n"
        "print([name for name in ('grpc', 'torch', 'numpy') if name in sys.modules])\n"
    )
    process = await asyncio.create_subprocess_exec("python", "-c", code, env=child_env, stdout=asyncio.subprocess.PIPE)
    out_bytes, _ = await process.communicate()
    assert out_bytes == b"[]\n"


async def test_text_of_a_model_without_files(child_env: dict[str, str], short_tmp: Path) -> None:
    """`tiny` speaks bytes: a prompt in text gives text, the same for the same seed, and no special token is printed."""
    async with serving(up("--model", "tiny", "--num-pages", "64"), child_env, short_tmp / "log") as served:
        command = ["generate", "--target", served.target, "--prompt", "Grüße", "--max-tokens", "24", "--stats"]
        sampled = [*command, "--temperature", "1", "--seed", "5", "--ignore-default-stop"]
        status, out, err = await run(child_env, *sampled)
        assert (status, out.endswith("\n")) == (0, True)
        assert "7 prompt tokens" in err  # of its UTF-8
        assert "24 returned" in err
        assert (await run(child_env, *sampled))[1] == out
        status, out, err = await run(child_env, *command, "--chat")
        assert (status, out) == (1, "")
        assert "no chat template" in err


async def test_text_of_a_real_model(child_env: dict[str, str], short_tmp: Path, project_root: Path) -> None:
    """SmolLM2 from its directory: the greedy texts that transformers gives, of a bare prompt and through the chat template."""
    model = project_root / "models" / "smollm2-135m-instruct"
    if not (model / "model.safetensors").is_file():
        pytest.skip("models/smollm2-135m-instruct is not there: run `make model`")
    async with serving(up("--model", str(model), "--num-pages", "64"), child_env, short_tmp / "log") as served:
        command = ["generate", "--target", served.target, "--max-tokens", "20", "--prompt", "The capital of France is"]
        assert await run(child_env, *command) == (0, " Paris.\n\nThe answer is: 2018-01-22 \n", "")
        status, out, err = await run(child_env, *command, "--chat", "--stats")
        assert (status, out) == (0, "L'aujourcé! I am your friendly AI, and I am here to help you\n")
        assert err == "length: 35 prompt tokens (0 cached), 20 returned, 0 retractions\n"
