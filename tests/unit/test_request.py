"""Request: what is refused at submit, how long an answer may be, and the request's own views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import (
    BadParameterError,
    BadTokenError,
    EmptyPromptError,
    PromptTooLongError,
)
from scheduler_service.core.ops import GREEDY, SamplingParams
from scheduler_service.core.parameters import MAX_REQUEST_ID_LEN, MAX_STOP_IDS, check_parameters
from scheduler_service.core.request import FinishReason, Request, check_prompt, output_limit
from scheduler_service.core.states import State

MakeConfig = Callable[..., SchedulerConfig]


# The prompt


@pytest.mark.parametrize(
    "prompt",
    [
        [0, 996, 5],
        (0, 996, 5),
        np.array([0, 996, 5], dtype=np.int32),
        np.array([0, 996, 5], dtype=np.int64),
        np.array([0, 996, 5], dtype=np.uint16),
        np.array([[0, 7], [996, 7], [5, 7]])[:, 0],
        [np.int32(0), np.int64(996), 5],
    ],
    ids=["list", "tuple", "int32", "int64", "uint16", "strided", "numpy integers in a list"],
)
def test_prompt_becomes_int32(make_config: MakeConfig, prompt: Any) -> None:
    """Any sequence of integers of the vocabulary is taken, its ends included, as contiguous int32."""
    tokens = check_prompt("r", prompt, make_config())
    assert tokens.dtype == np.int32
    assert tokens.flags.c_contiguous
    assert tokens.tolist() == [0, 996, 5]


@pytest.mark.parametrize("prompt", [[], (), np.array([], dtype=np.int32)])
def test_empty_prompt_is_refused(make_config: MakeConfig, prompt: Any) -> None:
    """At least one token is needed to sample from."""
    with pytest.raises(EmptyPromptError, match="'r': the prompt is empty"):
        check_prompt("r", prompt, make_config())


@pytest.mark.parametrize("token", [-1, 997, 2**31 - 1, 2**31, -(2**31) - 1, 2**70])
def test_token_out_of_the_vocabulary_is_refused(make_config: MakeConfig, token: int) -> None:
    """The error names the position, the token and the vocabulary, also for numbers that no int32 holds."""
    with pytest.raises(BadTokenError) as caught:
        check_prompt("r", [3, token, 4], make_config())
    assert (caught.value.position, caught.value.token, caught.value.vocab_size) == (1, token, 997)
    assert f"prompt token 1 is {token}, but ids are in [0, 997)" in str(caught.value)


@pytest.mark.parametrize(
    "prompt", [np.array([3, -1]), np.array([3, 2**40]), np.array([3, 4_000_000_000], dtype=np.uint32)], ids=str
)
def test_token_out_of_the_vocabulary_is_refused_in_arrays(make_config: MakeConfig, prompt: Any) -> None:
    """No integer type wraps on its way to int32."""
    with pytest.raises(BadTokenError) as caught:
        check_prompt("r", prompt, make_config())
    assert (caught.value.position, caught.value.token) == (1, prompt.tolist()[1])


@pytest.mark.parametrize(
    "prompt",
    [[3, 1.0], [3, True], [3, "4"], [3, None], np.array([3.0, 4.0]), np.array([True, False]), ["ab"]],
    ids=str,
)
def test_token_that_is_no_integer_is_refused(make_config: MakeConfig, prompt: Any) -> None:
    """Floats, truth values, texts and nothing are no tokens, in lists and in arrays."""
    with pytest.raises(BadTokenError):
        check_prompt("r", prompt, make_config())


def test_first_bad_token_is_the_one_named(make_config: MakeConfig) -> None:
    """Of several bad tokens the first is reported."""
    with pytest.raises(BadTokenError) as caught:
        check_prompt("r", [1, 2, 1000, -5], make_config())
    assert (caught.value.position, caught.value.token) == (2, 1000)


@pytest.mark.parametrize(
    ("options", "longest", "words"),
    [
        ({"num_pages": 4, "max_pages_per_row": 16}, 16, "num_pages = 4 pages of 4 tokens"),
        ({"num_pages": 16, "max_pages_per_row": 3}, 12, "max_pages_per_row = 3 pages of 4 tokens"),
        ({"num_pages": 3, "max_pages_per_row": 3}, 12, "max_pages_per_row = 3"),
        ({"max_context": 10}, 9, "max_context = 10"),
        ({"num_pages": 2, "max_context": 9}, 8, "num_pages = 2"),
    ],
)
def test_longest_prompt(make_config: MakeConfig, options: dict[str, int], longest: int, words: str) -> None:
    """The longest prompt that can be computed and answered is taken, one more is refused with both numbers and the cause."""
    config = make_config(**options)
    assert len(check_prompt("r", [1] * longest, config)) == longest
    with pytest.raises(PromptTooLongError) as caught:
        check_prompt("r", [1] * (longest + 1), config)
    assert (caught.value.prompt_len, caught.value.limit) == (longest + 1, longest)
    assert words in str(caught.value)


# How long the answer may be


@pytest.mark.parametrize(
    ("options", "prompt_len", "max_tokens", "expected"),
    [
        # Row and pool hold 12 positions; a prompt of 10 and k tokens store 10 + k - 1.
        ({"num_pages": 8, "max_pages_per_row": 3}, 10, 2, (2, "length")),
        ({"num_pages": 8, "max_pages_per_row": 3}, 10, 3, (3, "length")),
        ({"num_pages": 8, "max_pages_per_row": 3}, 10, 4, (3, "length")),
        ({"num_pages": 3, "max_pages_per_row": 8}, 10, 2, (2, "length")),
        ({"num_pages": 3, "max_pages_per_row": 8}, 10, 3, (3, "length")),
        ({"num_pages": 3, "max_pages_per_row": 8}, 10, 4, (3, "capacity")),
        ({"num_pages": 3, "max_pages_per_row": 8}, 12, 9, (1, "capacity")),
        # A tie of row and pool is the row's.
        ({"num_pages": 3, "max_pages_per_row": 3}, 10, 4, (3, "length")),
        # The context counts every token, the last one included.
        ({"max_context": 12}, 10, 2, (2, "length")),
        ({"max_context": 12}, 10, 9, (2, "length")),
        ({"max_context": 11}, 10, 9, (1, "length")),
        # A tie of pool and context is the context's; a pool smaller by one is the pool's.
        ({"num_pages": 3, "max_context": 13}, 10, 9, (3, "length")),
        ({"num_pages": 3, "max_context": 14}, 10, 9, (3, "capacity")),
        # An unbounded wish.
        ({"num_pages": 3, "max_pages_per_row": 8}, 1, 2**31 - 1, (12, "capacity")),
        ({"num_pages": 8, "max_pages_per_row": 3}, 1, 2**31 - 1, (12, "length")),
    ],
)
def test_output_limit(
    make_config: MakeConfig, options: dict[str, int], prompt_len: int, max_tokens: int, expected: tuple[int, str]
) -> None:
    """The limit is the least of wish, row, pool and context; only where the pool alone cut it is it `capacity`."""
    limit, reason = output_limit(prompt_len, max_tokens, make_config(**options))
    assert (limit, str(reason)) == expected


def test_output_limit_fills_the_room_exactly(make_config: MakeConfig) -> None:
    """For every prompt length the answer stores exactly the last position there is, never one beyond."""
    config = make_config(page_size=3, num_pages=4)
    for prompt_len in range(1, config.room + 1):
        limit, _ = output_limit(prompt_len, 2**31 - 1, config)
        assert prompt_len + limit - 1 == config.room


# Parameters


def _check(request_id: Any = "r", max_tokens: Any = 1, priority: Any = 0, stop_ids: Any = (), **sampling: Any) -> None:
    config = SchedulerConfig(page_size=4, num_pages=16, max_rows=8, max_pages_per_row=16, vocab_size=997)
    check_parameters(request_id, max_tokens, priority, stop_ids, SamplingParams(**sampling), config)


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 2**31 - 1},
        {"priority": -(2**31)},
        {"priority": 2**31 - 1},
        {"stop_ids": [0, 2**31 - 1]},
        {"stop_ids": list(range(MAX_STOP_IDS))},
        {"temperature": 0},
        {"temperature": 100.0},
        {"top_k": 1},
        {"top_k": None},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"seed": 2**64 - 1},
        {"min_new_tokens": 2**31 - 1},
        {"request_id": "x" * MAX_REQUEST_ID_LEN},
        {"max_tokens": np.int64(3), "stop_ids": np.array([4, 5])},
    ],
    ids=", ".join,
)
def test_parameters_in_range_are_taken(values: dict[str, Any]) -> None:
    """The ends of every range belong to it."""
    _check(**values)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        *(({"max_tokens": value}, "max_tokens") for value in (0, -1, 2**31, 1.0, True, "1", None)),
        *(({"priority": value}, "priority") for value in (-(2**31) - 1, 2**31, 0.5, False)),
        *(({"stop_ids": value}, "stop_ids") for value in ([-1], [0, 2**31], [True], ["a"], [0] * (MAX_STOP_IDS + 1))),
        *(({"temperature": value}, "temperature") for value in (-0.1, 100.1, float("nan"), float("inf"), True, "0")),
        *(({"top_k": value}, "top_k") for value in (0, -1, 2**31, 1.5, True)),
        *(({"top_p": value}, "top_p") for value in (0.0, -0.1, 1.0001, float("nan"))),
        *(({"min_p": value}, "min_p") for value in (-0.1, 1.1, float("nan"))),
        *(({"seed": value}, "seed") for value in (-1, 2**64, 0.0)),
        *(({"min_new_tokens": value}, "min_new_tokens") for value in (-1, 2**31, True)),
        *(({"request_id": value}, "request_id") for value in ("", "x" * (MAX_REQUEST_ID_LEN + 1), None, 5)),
    ],
)
def test_parameters_out_of_range_are_refused(values: dict[str, Any], name: str) -> None:
    """Each error names the parameter and what it must be."""
    with pytest.raises(BadParameterError, match=f"{name} is .*, but must be ") as caught:
        _check(**values)
    assert caught.value.name == name


def test_long_ids_are_cut_in_the_message() -> None:
    """An id of a megabyte does not become a message of a megabyte."""
    with pytest.raises(BadParameterError) as caught:
        _check(request_id="x" * 1_000_000)
    assert len(str(caught.value)) < 1000


# The request itself


def _request(**options: Any) -> Request:
    prompt = np.array([4, 5, 6], dtype=np.int32)
    fixed = {"max_tokens": 2, "limit_len": 5, "limit_reason": FinishReason.LENGTH, "arrival": 7}
    return Request("r", prompt, **(fixed | options))


def test_new_request() -> None:
    """A request begins Submitted, with its prompt as its only tokens and no row."""
    request = _request()
    assert request.state is State.SUBMITTED
    assert (request.prompt_len, request.num_output, request.output, request.row) == (3, 0, [], 0)
    assert (request.num_retractions, request.num_outstanding, request.cached_tokens) == (0, 0, 0)
    assert (request.finish_reason, request.sampling, request.stop_ids) == (None, GREEDY, ())


def test_output_is_what_follows_the_prompt() -> None:
    """The output is a list of plain integers, and later tokens do not change a list that was handed out."""
    request = _request()
    request.tokens.append(9)
    output = request.output
    request.tokens.append(8)
    assert (output, request.output, request.num_output) == ([9], [9, 8], 2)
    assert type(output[0]) is int


def test_token_slice_is_a_copy() -> None:
    """A slice stays as it was while the request goes on, and does not keep the request from growing."""
    request = _request()
    tokens = request.token_slice(1, 3)
    request.tokens.extend(range(100))
    assert tokens.tolist() == [5, 6]
    assert tokens.dtype == np.int32


def test_order_is_priority_then_arrival() -> None:
    """A smaller number goes first; arrival settles ties."""
    orders = [_request(priority=priority, arrival=arrival).order for priority, arrival in ((1, 1), (0, 3), (0, 2), (-1, 9))]
    assert sorted(orders) == [(-1, 9), (0, 2), (0, 3), (1, 1)]


def test_repr_says_who_where_and_how_far() -> None:
    """The text for logs and errors names id, state, row and progress."""
    assert repr(_request()) == "<Request 'r' submitted row=0 tokens=3/5>"
