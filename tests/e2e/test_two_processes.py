"""The product as its users start it: `pagemirror up` and the client commands, as processes of their own."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from scheduler_service.client import Client, RpcFailedError

Continuation = Callable[[list[int], int], list[int]]

LIMIT_S = 60.0
NUMBERS = "20 104 629 421 384 473\n"


async def test_one_command_serves_and_the_clients_find_it(
    commands: Any, continuation: Continuation, child_env: dict[str, str], short_tmp: Path
) -> None:
    """The whole use: tokens by the command line, many at once in a tiny pool, rows, retraction, reset, disconnect, drain."""
    env = child_env | {"TMPDIR": str(short_tmp)}
    pool = ["--page-size", "4", "--num-pages", "30", "--max-pages-per-row", "30", "--chunk-size", "8", "--check"]
    async with commands.serving(commands.up("--model", "fingerprint", "--reflection", *pool), env, short_tmp / "log") as served:
        target = ["--target", served.target]
        assert set(served.children()) == {"runtime", "scheduler"}
        assert await commands.run(env, "generate", *target, "--tokens", "1,2,3", "--max-tokens", "6") == (0, NUMBERS, "")
        status, out, err = await commands.run(env, "generate", *target, "--tokens", "1 2 3", "--stop", "629,7", "--stats")
        assert (status, out) == (0, "20 104 629\n")
        assert err == "stop: 3 prompt tokens (0 cached), 3 returned, 0 retractions\n"
        piped = f"pagemirror generate --target {served.target} --tokens 1,2,3 --max-tokens 100 | head -c 7"
        process = await asyncio.create_subprocess_exec("bash", "-c", piped, env=env, stdout=-1, stderr=-1)
        assert await process.communicate() == (b"20 104 ", b"")
        status, out, err = await commands.run(env, "generate", *target, "--tokens", "1,997")
        assert (status, out) == (1, "")
        assert err.startswith("error: INVALID_ARGUMENT: ")
        assert "prompt token 1 is 997, but ids are in [0, 997)" in err
        status, _, err = await commands.run(env, "generate", *target, "--prompt", "hello")
        assert status == 1
        assert "model 'fingerprint' has no tokenizer" in err
        async with Client(served.target) as client:
            await _many_at_once(client, continuation)
            await _retract_while_rows_are_compared(client, continuation)
            await _reset_of_the_cache(client)
            await _disconnect(commands, client, env, target)
        await _health_and_reflection(served.target)
        status, out, _ = await commands.run(env, "rows", *target)
        assert (status, "no row is in use" in out) == (0, True)
        served.process.send_signal(signal.SIGTERM)
        assert await served.end() == 0, served.errors.read_text()
        assert [path for path in short_tmp.iterdir() if path.name != "log"] == []


async def _many_at_once(client: Client, continuation: Continuation) -> None:
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


async def _retract_while_rows_are_compared(client: Client, continuation: Continuation) -> None:
    """However far the server is ahead of this client, it meets enough requests alive and enough rows held, sooner or later."""
    retracted = 0
    compared = 0
    async with asyncio.timeout(LIMIT_S):
        while retracted < 4 or compared < 4:
            prompt = [9, 8, 7, 6, retracted]
            tokens: list[int] = []
            retracted_now = 0
            async for piece in client.generate(prompt, max_tokens=110, request_id="watched"):
                tokens += piece.tokens
                if piece.ending:
                    assert piece.ending.num_retractions == retracted_now
                    continue
                try:
                    await client.retract("watched")
                    retracted_now += 1
                except RpcFailedError as error:
                    assert error.code in {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND}
                found = await client.rows()
                assert all(row.equal for row in found.rows)
                compared += len(found.rows)
            assert tokens == continuation(prompt, 110)
            retracted += retracted_now


async def _reset_of_the_cache(client: Client) -> None:
    info = (await client.info()).raw
    assert info.cached_pages > 0
    assert await client.reset_prefix_cache() == info.cached_pages
    info = (await client.info()).raw
    assert (info.cached_pages, info.free_pages) == (0, 30)


async def _disconnect(commands: Any, client: Client, env: dict[str, str], target: list[str]) -> None:
    """A client process that is killed; its request is gone soon after, and `rows` shows it while it lives."""
    async for piece in client.generate([1, 2], max_tokens=110, request_id="mine"):
        if piece.tokens:
            status, out, _ = await commands.run(env, "rows", *target, "--json")
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

    await commands.until(is_idle)
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


async def test_text_of_a_model_without_files(commands: Any, child_env: dict[str, str], short_tmp: Path) -> None:
    """`tiny` speaks bytes: a prompt in text gives text, the same for the same seed, and no special token is printed."""
    async with commands.serving(commands.up("--model", "tiny", "--num-pages", "64"), child_env, short_tmp / "log") as served:
        command = ["generate", "--target", served.target, "--prompt", "Grüße", "--max-tokens", "24", "--stats"]
        sampled = [*command, "--temperature", "1", "--seed", "5", "--ignore-default-stop"]
        status, out, err = await commands.run(child_env, *sampled)
        assert (status, out.endswith("\n")) == (0, True)
        assert "7 prompt tokens" in err  # of its UTF-8
        assert "24 returned" in err
        assert (await commands.run(child_env, *sampled))[1] == out
        status, lines, err = await commands.run(child_env, *sampled, "--logprobs", "2", "--json")
        *tokens, end = [json.loads(line) for line in lines.splitlines()]
        assert "".join(token["text"] for token in tokens) + end.get("text", "") == out.removesuffix("\n")
        assert all(token["logprob"] <= token["top_logprobs"][0]["logprob"] < 0 for token in tokens)
        assert [len(token["top_logprobs"]) for token in tokens] == [2] * 24
        status, out, err = await commands.run(child_env, *sampled, "--frequency-penalty", "3")
        assert (status, out, "frequency_penalty is 3.0, but must be in [-2, 2]" in err) == (1, "", True)
        status, out, err = await commands.run(child_env, *command, "--chat")
        assert (status, out) == (1, "")
        assert "no chat template" in err


async def test_text_of_a_real_model(commands: Any, child_env: dict[str, str], short_tmp: Path, project_root: Path) -> None:
    """SmolLM2 from its directory: the greedy texts that transformers gives, of a bare prompt and through the chat template."""
    model = project_root / "models" / "smollm2-135m-instruct"
    if not (model / "model.safetensors").is_file():
        pytest.skip("models/smollm2-135m-instruct is not there: run `make model`")
    async with commands.serving(
        commands.up("--model", str(model), "--num-pages", "64"), child_env, short_tmp / "log"
    ) as served:
        command = ["generate", "--target", served.target, "--max-tokens", "20", "--prompt", "The capital of France is"]
        assert await commands.run(child_env, *command) == (0, " Paris.\n\nThe answer is: 2018-01-22 \n", "")
        status, out, err = await commands.run(child_env, *command, "--chat", "--stats")
        assert (status, out) == (0, "L'aujourcé! I am your friendly AI, and I am here to help you\n")
        assert err == "length: 35 prompt tokens (0 cached), 20 returned, 0 retractions\n"
