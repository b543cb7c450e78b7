"""The `openai` client against `pagemirror up --http`: SmolLM2 behind the real gateway, through both of its APIs."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from http_up import Up, running_up
from scheduler_service.client import Client

openai = pytest.importorskip("openai", reason="the extra `dev` is not installed")
for name in ("smg", "smg_grpc_proto"):
    pytest.importorskip(name, reason="the extra `gateway` is not installed")

MODEL = Path(__file__).resolve().parents[2] / "models" / "smollm2-135m-instruct"
if not (MODEL / "model.safetensors").is_file():
    pytest.skip("models/smollm2-135m-instruct is not there: run `make model`", allow_module_level=True)

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
PROMPT, CONTINUATION = "The capital of France is", " Paris.\n\nThe answer is: 2018-01-22 "


@dataclass
class Served:
    """A running server and a client of it."""

    up: Up
    client: Any

    def chat(self, **options: Any) -> Any:
        """One chat completion of the model that is served."""
        given = {"messages": QUESTION, "max_tokens": 20, "temperature": 0} | options
        return self.client.chat.completions.create(model=MODEL.name, **given)


@pytest.fixture(scope="module", params=["tokenspeed", "vllm"])
def served(
    request: pytest.FixtureRequest, child_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The scheduler's own gateway port with one API, that of a front end with the other."""
    workers = {"tokenspeed": "0", "vllm": "1"}[request.param]
    log = tmp_path_factory.mktemp(request.param) / "log"
    command = ("--model", str(MODEL), "--http", "0", "--api", request.param, "--workers", workers, "--num-pages", "256")
    with running_up(child_env, log, *command) as up, openai.OpenAI(base_url=up.http, api_key="none", max_retries=0) as client:
        yield Served(up, client)


def test_chat_names_paris(served: Served) -> None:
    """The model that the gateway lists answers, and the usage adds up."""
    assert [model.id for model in served.client.models.list().data] == [MODEL.name]
    completion = served.chat()
    [choice] = completion.choices
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (37, 8, 45)


def test_streamed_chat_ends_with_usage(served: Served) -> None:
    """A stream's pieces are the answer, in more than one piece; the last chunk counts what the whole answer counts."""
    chunks = list(served.chat(stream=True, stream_options={"include_usage": True}))
    pieces = [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content]
    assert "".join(pieces) == ANSWER
    assert len(pieces) > 3
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (37, 8)


def test_completion_is_the_models_own_text(served: Served) -> None:
    """A plain prompt is continued as the published checkpoint continues it."""
    completion = served.client.completions.create(model=MODEL.name, prompt=PROMPT, max_tokens=20, temperature=0)
    assert completion.choices[0].text == CONTINUATION
    assert completion.usage.prompt_tokens == 5


def test_max_tokens_is_the_length(served: Served) -> None:
    """An answer that is cut has as many tokens as were allowed, and says that it was cut."""
    completion = served.chat(max_tokens=5)
    assert completion.choices[0].message.content == "The capital of France is"
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage.completion_tokens == 5


def test_log_probabilities(served: Served) -> None:
    """Each token has its own and those of the two most probable; greedy tokens are the most probable."""
    completion = served.chat(logprobs=True, top_logprobs=2, max_tokens=6)
    entries = completion.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == completion.choices[0].message.content
    assert len(entries) == 6
    for entry in entries:
        first, second = entry.top_logprobs
        assert (first.token, first.logprob) == (entry.token, entry.logprob)
        assert second.logprob <= first.logprob <= 0


def test_three_choices_of_one_seed(served: Served) -> None:
    """n=3 gives three choices that differ, and the same three for the same seed."""
    options = {
        "n": 3,
        "temperature": 1.0,
        "max_tokens": 8,
        "seed": 7,
        "messages": [{"role": "user", "content": "Tell a story."}],
    }
    first, again = served.chat(**options), served.chat(**options)
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) > 1
    assert [choice.message.content for choice in again.choices] == texts
    assert first.usage.completion_tokens <= 24


def test_seed_decides_sampled_text(served: Served) -> None:
    """The same seed, the same text; another seed, another text."""
    options = {"temperature": 1.0, "max_tokens": 12, "messages": [{"role": "user", "content": "Tell a story."}]}
    texts = [served.chat(seed=seed, **options).choices[0].message.content for seed in (11, 11, 12)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_request_in_the_scheduler(served: Served, stream: bool) -> None:
    """The text ends before the string, and no token is computed for what comes after it."""
    options = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "stop": ["answer is"]}
    if stream:
        options |= {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(served.client.completions.create(model=MODEL.name, **options))
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        reason, usage = [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1], chunks[-1].usage
    else:
        completion = served.client.completions.create(model=MODEL.name, **options)
        text, reason, usage = completion.choices[0].text, completion.choices[0].finish_reason, completion.usage
    assert text == " Paris.\n\nThe "
    assert reason == "stop"
    assert usage.completion_tokens < 10


def test_parameter_that_cannot_be_honoured_is_refused(served: Served) -> None:
    """A grammar is not ignored: the request fails, and the message names it."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    with pytest.raises(openai.BadRequestError, match="json_schema"):
        served.chat(response_format=schema)


def test_examples_of_the_pages_answer(served: Served, project_root: Path, child_env: dict[str, str]) -> None:
    """The program of docs/serving.md prints what its comment says, and the README's curl sends a request that is answered."""
    page = (project_root / "docs/serving.md").read_text()
    program = re.search(r"^```python\n(from openai.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert program
    code = program[1].replace("http://127.0.0.1:8080/v1", served.up.http)
    done = subprocess.run([sys.executable, "-c", code], env=child_env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == (f"{ANSWER}\n", "")
    assert f"# {ANSWER}\n" in code
    command = re.search(r"curl http://127.0.0.1:8080/v1(\S+) .*-d '(.*?)'", (project_root / "README.md").read_text(), re.DOTALL)
    assert command
    request = urllib.request.Request(
        served.up.http + command[1], data=command[2].encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response)["choices"][0]["message"]["content"] == ANSWER


async def test_dropped_stream_frees_its_pages(served: Served) -> None:
    """A client that goes away in the middle of a stream ends the request: in the end every page is free or cached, and of three
    tries at least one saw no more than two steps from the last look at the running request to the first without it.
    """
    lags = []
    async with Client(served.up.grpc) as observer:
        for _ in range(3):
            stream = await asyncio.to_thread(served.chat, stream=True, max_tokens=2000, extra_body={"ignore_eos": True})
            await asyncio.to_thread(next, iter(stream))
            running = (await observer.info()).raw
            assert running.num_running == 1
            await asyncio.to_thread(stream.close)
            async with asyncio.timeout(60):
                while (now := (await observer.info()).raw).num_running:
                    running = now
            assert now.free_pages + now.cached_pages == now.num_pages
            lags.append(now.num_steps - running.num_steps)
    assert min(lags) <= 2
