"""`pagemirror generate`: what its options become, and how tokens and log probabilities are printed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from typer.testing import CliRunner

from scheduler_service import cli_client
from scheduler_service.cli import app
from scheduler_service.client import Ending, Piece
from scheduler_service.client_security import ClientSecurity

ENDING = Ending("length", 3, 2, 0, 0)


class PlainClient:
    """Answers every request with these pieces."""

    given: dict[str, Any]
    pieces: list[Piece]

    def __init__(self, target: str, security: ClientSecurity) -> None:
        self.target, self.security = target, security

    async def __aenter__(self) -> PlainClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def generate(self, prompt: list[int], **options: Any) -> AsyncIterator[Piece]:
        """Note what was asked for."""
        PlainClient.given = options
        for piece in self.pieces:
            yield piece


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> type[PlainClient]:
    """In place of the real client."""
    monkeypatch.setattr(cli_client, "Client", PlainClient)
    PlainClient.pieces = [
        Piece([], "r"),
        Piece([20], logprobs=[-0.25], top_logprobs=[[(20, -0.25), (7, -1.5)]]),
        Piece([104], logprobs=[-3.0], top_logprobs=[[(5, -0.125), (-1, float("nan"))]], ending=ENDING),
    ]
    return PlainClient


def generate(*options: str) -> Any:
    """One run of the command."""
    return CliRunner().invoke(app, ["generate", "--tokens", "1,2,3", *options])


def test_sampling_options_reach_the_client(client: type[PlainClient]) -> None:
    """Each option is the parameter of its name; options that were not given leave it to the server."""
    result = generate(
        *("--repetition-penalty", "1.5", "--presence-penalty", "-0.5", "--frequency-penalty", "0.25"),
        *("--logit-bias", "42:-5", "--logit-bias", "7:2.5", "--logprobs", "2", "--min-new-tokens", "3"),
    )
    assert result.exit_code == 0
    expected = {
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {42: -5.0, 7: 2.5},
        "num_logprobs": 2,
        "min_new_tokens": 3,
    }
    assert {name: client.given[name] for name in expected} == expected
    assert generate().exit_code == 0
    assert {client.given[name] for name in expected if name != "logit_bias"} == {None}
    assert client.given["logit_bias"] == {}


@pytest.mark.parametrize("entry", ["42", "42:", ":5", "a:5", "42:x", "4.5:1"])
def test_bias_that_is_none(client: type[PlainClient], entry: str) -> None:
    """A bias that is not ID:BIAS ends the command with an error that shows it; so does an id given twice."""
    result = generate("--logit-bias", entry)
    assert result.exit_code == 2
    assert repr(entry) in result.output
    twice = generate("--logit-bias", "42:1", "--logit-bias", "42:2")
    assert (twice.exit_code, "token 42 twice" in twice.output) == (2, True)


def test_log_probabilities_go_to_stderr(client: type[PlainClient]) -> None:
    """Stdout stays the tokens; stderr has a line per token with its own and the most probable ones'."""
    result = generate("--logprobs", "2")
    assert result.stdout == "20 104\n"
    assert result.stderr.splitlines() == ["20: -0.2500 | 20 -0.2500, 7 -1.5000", "104: -3.0000 | 5 -0.1250"]


def test_json_has_an_object_per_token_and_one_for_the_end(client: type[PlainClient]) -> None:
    """Every line parses; absent entries of a small vocabulary are left out."""
    result = generate("--logprobs", "2", "--json")
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {
            "token": 20,
            "logprob": -0.25,
            "top_logprobs": [{"token": 20, "logprob": -0.25}, {"token": 7, "logprob": -1.5}],
        },
        {"token": 104, "logprob": -3.0, "top_logprobs": [{"token": 5, "logprob": -0.125}]},
        {"reason": "length", "prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 0, "num_retractions": 0},
    ]
    client.pieces = [Piece([20], "r"), Piece([], ending=ENDING)]
    lines = [json.loads(line) for line in generate("--json").stdout.splitlines()]
    assert lines[0] == {"token": 20}
