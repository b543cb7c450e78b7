"""What a session refuses of the sampling half of a lease start: ranges, history, and models that cannot honour it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runtime_service.ops import ForwardOp, RefusalCode, SamplingParams

NewSession = Callable[..., Any]
PENALTY: dict[str, Any] = {"presence_penalty": 0.5}


def history(*tokens: int) -> bytes:
    """The column."""
    return np.array(tokens, dtype="<i4").tobytes()


def lease_of(ops: Any, *, computed: int = 4, lease: dict[str, Any], **sampling: Any) -> ForwardOp:
    """A first step that begins a lease after `computed` cached tokens."""
    op = ops.make(1, ops.first_chunk(pages=(1, 2, 3), computed=computed))
    start = replace(op.lease_starts[0], sampling=SamplingParams(**sampling), **lease)
    return replace(op, lease_starts=[start])


@pytest.mark.parametrize(
    ("sampling", "detail"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0 is outside (0, 100]"),
        ({"presence_penalty": float("nan")}, "presence_penalty nan is outside [-2, 2]"),
        ({"frequency_penalty": -2.5}, "frequency_penalty -2.5 is outside [-2, 2]"),
        ({"logit_bias": ((100, 1.0),)}, "logit_bias names token 100, which is outside [0, 100)"),
        ({"logit_bias": ((1, 1.0), (1, 1.0))}, "logit_bias names token 1 twice"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias 101.0 of token 1 is outside [-100, 100]"),
        ({"logit_bias": ((1, 1.0),) * 1025}, "logit_bias has 1025 entries, at most 1024 are allowed"),
        ({"num_logprobs": 21}, "num_logprobs 21 is outside [0, 20]"),
    ],
)
def test_parameters_out_of_range(new_session: NewSession, ops: Any, sampling: dict[str, Any], detail: str) -> None:
    """BAD_SAMPLING names the row, the parameter, the value and the range."""
    refusal = new_session().refused(lease_of(ops, lease={"prompt_len": 9}, **sampling))
    assert (refusal.code, refusal.row, refusal.request_id) == (RefusalCode.BAD_SAMPLING, 1, "request-1")
    assert detail in refusal.detail


@pytest.mark.parametrize(
    ("lease", "sampling", "code", "detail"),
    [
        ({}, PENALTY, RefusalCode.BAD_SAMPLING, "a penalty needs prompt_len"),
        ({"prompt_len": 9}, PENALTY, RefusalCode.MALFORMED, "history has 0 tokens, num_computed is 4"),
        ({"prompt_len": 9, "history": history(1, 2, 3)}, PENALTY, RefusalCode.MALFORMED, "history has 3 tokens"),
        ({"history": history(1, 2, 3, 4)}, {}, RefusalCode.MALFORMED, "history has 4 tokens, no penalty is on"),
        (
            {"prompt_len": 9, "history": history(1, 2, 100, 4)},
            PENALTY,
            RefusalCode.TOKEN_OUT_OF_RANGE,
            "history token 100 is outside [0, 100)",
        ),
        ({"prompt_len": 9, "history": history(1, -1, 3, 4)}, PENALTY, RefusalCode.TOKEN_OUT_OF_RANGE, "history token -1"),
    ],
)
def test_history_that_is_not_what_was_computed(
    new_session: NewSession, ops: Any, lease: dict[str, Any], sampling: dict[str, Any], code: RefusalCode, detail: str
) -> None:
    """Penalties are never computed from a part of the tokens: a history of another length, or of no tokens, is refused."""
    refusal = new_session().refused(lease_of(ops, lease=lease, **sampling))
    assert (refusal.code, refusal.row) == (code, 1)
    assert detail in refusal.detail


def test_a_whole_history_is_accepted(new_session: NewSession, ops: Any) -> None:
    """All computed tokens where a penalty is on, and none where nothing is computed."""
    new_session().take(lease_of(ops, lease={"prompt_len": 9, "history": history(1, 2, 3, 99)}, **PENALTY))
    new_session().take(lease_of(ops, computed=0, lease={"prompt_len": 9}, **PENALTY))


@pytest.mark.parametrize(
    "sampling", [{"temperature": 1.0}, {"logit_bias": ((1, 1.0),)}, {"num_logprobs": 0}, {"repetition_penalty": 2.0}]
)
def test_a_model_without_logits(new_session: NewSession, ops: Any, sampling: dict[str, Any]) -> None:
    """Where the model cannot honour a parameter, it is refused by name instead of ignored."""
    lease = {"prompt_len": 9, "history": history(1, 2, 3, 4) if "repetition_penalty" in sampling else b""}
    op = lease_of(ops, lease=lease, **sampling)
    refusal = new_session(greedy_only=True).refused(op)
    assert refusal.code is RefusalCode.BAD_SAMPLING
    assert next(iter(sampling)) in refusal.detail
    assert "cannot honour it" in refusal.detail
    new_session().take(op)
