"""The command line with a seed: the same text alone, in a crowd, and after losing its pages."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.client import Client, RpcFailedError

NUM_OTHERS = 15
NUM_TOKENS = 14
NUM_ATTEMPTS = 10  # a busy machine may notice too late that the request streams
PROMPT = "Once upon a time"
OTHER_PROMPT = list(b"Somebody else's words, ")


def _model(name: str, project_root: Path) -> str:
    if name == "tiny":
        return name
    folder = project_root / "models" / name
    if not (folder / "model.safetensors").is_file():
        pytest.skip(f"models/{name} is not there: run `make model`")
    return str(folder)


async def _keep_busy(client: Client, number: int, begun: asyncio.Event) -> None:
    """One of the others: another prompt and another seed, again and again."""
    prompt = [*OTHER_PROMPT, number]
    while True:
        async for piece in client.generate(
            prompt, max_tokens=400, temperature=1.0, seed=1000 + number, ignore_default_stop_ids=True
        ):
            if piece.tokens:
                begun.set()


async def _retract_once(client: Client, request_id: str) -> None:
    """Take the request's row away as soon as it has returned a few tokens."""
    while True:
        # Until it is submitted, and when it holds no row.
        with contextlib.suppress(RpcFailedError):
            if (await client.state(request_id)).completion_tokens >= 3:
                await client.retract(request_id)
                return
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("model", ["tiny", "smollm2-135m-instruct"])
async def test_seed_fixes_the_text(
    commands: Any, child_env: dict[str, str], short_tmp: Path, project_root: Path, model: str
) -> None:
    """`--seed 7` gives one text: alone, among fifteen other requests, and when its row is taken away; `--seed 8` another."""
    options = commands.up("--model", _model(model, project_root), "--num-pages", "1024", "--page-size", "8")
    async with commands.serving(options, child_env, short_tmp / "log") as served, Client(served.target) as client:
        command = ["generate", "--target", served.target, "--prompt", PROMPT, "--max-tokens", str(NUM_TOKENS)]
        command += ["--temperature", "0.8", "--ignore-default-stop"]
        alone = await commands.run(child_env, *command, "--seed", "7")
        assert alone[0] == 0
        assert alone[1].strip()
        begun = [asyncio.Event() for _ in range(NUM_OTHERS)]
        others = [asyncio.create_task(_keep_busy(client, number, event)) for number, event in enumerate(begun)]
        try:
            async with asyncio.timeout(60):
                for event in begun:
                    await event.wait()
            assert await commands.run(child_env, *command, "--seed", "7") == alone
            assert not any(other.done() for other in others)  # none has failed
            for attempt in range(NUM_ATTEMPTS):
                name = f"mine-{attempt}"
                retracting = asyncio.create_task(_retract_once(client, name))
                status, out, err = await commands.run(child_env, *command, "--seed", "7", "--request-id", name, "--stats")
                retracting.cancel()
                assert (status, out) == alone[:2]
                if err.endswith(f"{NUM_TOKENS} returned, 1 retractions\n"):
                    break
            else:
                pytest.fail(f"{NUM_ATTEMPTS} times the request ended before it was retracted: {err}")
        finally:
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        assert (await commands.run(child_env, *command, "--seed", "8"))[1] != alone[1]
