"""Ranges of sampling parameters, the same on both sides: the scheduler refuses at submit what the runtime would refuse."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from runtime_service import ops as runtime_ops
from runtime_service.sampling_checks import greedy_only_error, sampling_error
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import BadParameterError, RequestError, UnsupportedParameterError
from scheduler_service.core.ops import SamplingParams
from scheduler_service.core.scheduler import Scheduler

VOCAB_SIZE = 997
Make = Callable[..., SchedulerConfig]

GOOD: list[dict[str, Any]] = [
    {"repetition_penalty": 100.0},
    {"repetition_penalty": 1e-30},
    {"repetition_penalty": 2},
    {"presence_penalty": -2.0, "frequency_penalty": 2.0},
    {"logit_bias": ((0, -100.0), (996, 100.0))},
    {"logit_bias": tuple((token, 0.5) for token in range(VOCAB_SIZE))},
    {"num_logprobs": 0},
    {"num_logprobs": 20},
    {"min_new_tokens": 5},
]
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"repetition_penalty": 0.0}, "repetition_penalty", "in (0, 100]"),
    ({"repetition_penalty": -1.0}, "repetition_penalty", "in (0, 100]"),
    ({"repetition_penalty": 100.5}, "repetition_penalty", "in (0, 100]"),
    ({"repetition_penalty": math.nan}, "repetition_penalty", "a finite number"),
    ({"presence_penalty": -2.1}, "presence_penalty", "in [-2, 2]"),
    ({"presence_penalty": math.inf}, "presence_penalty", "a finite number"),
    ({"frequency_penalty": 2.1}, "frequency_penalty", "in [-2, 2]"),
    ({"frequency_penalty": math.nan}, "frequency_penalty", "a finite number"),
    ({"logit_bias": ((997, 1.0),)}, "logit_bias.token", "an integer from 0 to 996"),
    ({"logit_bias": ((-1, 1.0),)}, "logit_bias.token", "an integer from 0 to 996"),
    ({"logit_bias": ((5, 1.0), (5, 2.0))}, "logit_bias.token", "named once"),
    ({"logit_bias": ((5, 100.5),)}, "logit_bias.bias", "in [-100, 100]"),
    ({"logit_bias": ((5, math.nan),)}, "logit_bias.bias", "a finite number"),
    ({"logit_bias": tuple((token % 997, 1.0) for token in range(1025))}, "logit_bias", "at most 1024 entries"),
    ({"num_logprobs": 21}, "num_logprobs", "an integer from 0 to 20"),
    ({"num_logprobs": -1}, "num_logprobs", "an integer from 0 to 20"),
]


def as_runtime(sampling: dict[str, Any]) -> runtime_ops.SamplingParams:
    """The same parameters on the other side."""
    return runtime_ops.SamplingParams(**sampling)


@pytest.mark.parametrize("sampling", GOOD)
def test_ends_of_every_range_are_accepted(make_config: Make, sampling: dict[str, Any]) -> None:
    """Both sides take the ends of the ranges."""
    request = Scheduler(make_config()).submit("a", [1], max_tokens=1, sampling=SamplingParams(**sampling))
    assert dataclasses.asdict(request.sampling) == dataclasses.asdict(SamplingParams(**sampling))
    assert sampling_error(as_runtime(sampling), 1, VOCAB_SIZE) == ""


@pytest.mark.parametrize(("sampling", "name", "expected"), BAD)
def test_values_out_of_range_are_refused(make_config: Make, sampling: dict[str, Any], name: str, expected: str) -> None:
    """The error names the parameter, the value and the range; the scheduler keeps nothing; the runtime would refuse as well."""
    scheduler = Scheduler(make_config())
    with pytest.raises(BadParameterError) as caught:
        scheduler.submit("a", [1], max_tokens=1, sampling=SamplingParams(**sampling))
    assert (caught.value.name, caught.value.expected, caught.value.code) == (name, expected, "INVALID_ARGUMENT")
    assert name in str(caught.value)
    assert repr(caught.value.value) in str(caught.value)
    assert not scheduler.has_work
    wrong = sampling_error(as_runtime(sampling), 1, VOCAB_SIZE)
    assert wrong.startswith(name.split(".", maxsplit=1)[0])


@pytest.mark.parametrize("name", ["top_p", "repetition_penalty"])
def test_a_number_that_float32_makes_zero_is_refused(make_config: Make, name: str) -> None:
    """A double above 0 that is 0 on the wire would be refused by the runtime, so the scheduler refuses it."""
    with pytest.raises(BadParameterError, match=name):
        Scheduler(make_config()).submit("a", [1], max_tokens=1, sampling=SamplingParams(**{name: 1e-60}))


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.5},
        {"min_new_tokens": 1},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"logit_bias": ((1, 1.0),)},
        {"num_logprobs": 0},
    ],
)
def test_a_model_without_logits_refuses_what_it_cannot_honour(make_config: Make, sampling: dict[str, Any]) -> None:
    """Nothing is ignored: each parameter that needs logits is refused by name, on both sides."""
    scheduler = Scheduler(make_config(greedy_only=True))
    (name,) = sampling
    with pytest.raises(UnsupportedParameterError, match=f"{name} is .* cannot honour it") as caught:
        scheduler.submit("a", [1], max_tokens=1, sampling=SamplingParams(**sampling))
    assert isinstance(caught.value, RequestError)
    assert caught.value.code == "INVALID_ARGUMENT"
    assert greedy_only_error(as_runtime(sampling)).startswith(f"{name} is ")
    assert not scheduler.has_work


def test_a_model_without_logits_takes_what_greedy_decoding_ignores(make_config: Make) -> None:
    """At temperature 0 the best token is taken whatever seed, top_k, top_p and min_p are, so they are no reason to refuse."""
    sampling = {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 7}
    Scheduler(make_config(greedy_only=True)).submit("a", [1], max_tokens=1, sampling=SamplingParams(**sampling))
    assert greedy_only_error(as_runtime(sampling)) == ""


def test_penalties_need_the_length_of_the_prompt() -> None:
    """Without prompt_len the runtime could not tell prompt and output apart."""
    assert "prompt_len" in sampling_error(as_runtime({"presence_penalty": 0.5}), 0, VOCAB_SIZE)
