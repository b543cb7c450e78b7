"""Ranges of a request's parameters, and what a model without logits cannot honour. Nothing is ever ignored silently."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import BadParameterError, UnsupportedParameterError
from scheduler_service.core.ops import GREEDY, SamplingParams

MAX_REQUEST_ID_LEN = 256
MAX_NAMESPACE_LEN = 256
MAX_TRACEPARENT_LEN = 256
MAX_STOP_IDS = 1024
MAX_BIAS_ENTRIES = 1024
MAX_LOGPROBS = 20
_INT32_MAX = 2**31 - 1
_TINY = float(np.finfo(np.float32).tiny)  # for bounds of 0 that do not belong to the range
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def check_parameters(
    request_id: str,
    max_tokens: int,
    priority: int,
    stop_ids: Sequence[int],
    sampling: SamplingParams,
    config: SchedulerConfig,
) -> None:
    """Refuse parameters out of range.

    Raises:
        BadParameterError: names the parameter, its value and its range.
        UnsupportedParameterError: the model cannot honour it.
    """
    if not isinstance(request_id, str) or not 1 <= len(request_id) <= MAX_REQUEST_ID_LEN:
        shown = request_id[:MAX_REQUEST_ID_LEN] if isinstance(request_id, str) else repr(request_id)
        raise BadParameterError(shown, "request_id", shown, f"a text of 1 to {MAX_REQUEST_ID_LEN} characters")
    _integer(request_id, "max_tokens", max_tokens, 1, _INT32_MAX)
    _integer(request_id, "priority", priority, -(2**31), _INT32_MAX)
    if len(stop_ids) > MAX_STOP_IDS:
        raise BadParameterError(request_id, "stop_ids", f"{len(stop_ids)} ids", f"at most {MAX_STOP_IDS} ids")
    for stop_id in stop_ids:
        _integer(request_id, "stop_ids", stop_id, 0, _INT32_MAX)
    if sampling is GREEDY:
        return
    _check_sampling(request_id, sampling, config.vocab_size)
    if config.greedy_only:
        _check_greedy(request_id, sampling)


def check_labels(request_id: str, cache_namespace: str, traceparent: str) -> None:
    """Refuse labels that are too long. Raises BadParameterError."""
    if not cache_namespace and not traceparent:
        return
    for name, value, most in (
        ("cache_namespace", cache_namespace, MAX_NAMESPACE_LEN),
        ("traceparent", traceparent, MAX_TRACEPARENT_LEN),
    ):
        if len(value) > most:
            raise BadParameterError(request_id, name, f"a text of {len(value)} characters", f"at most {most} characters")


def _check_sampling(request_id: str, sampling: SamplingParams, vocab_size: int) -> None:
    _real(request_id, "temperature", sampling.temperature, 0.0, 100.0)
    _real(request_id, "top_p", sampling.top_p, 0.0, 1.0, open_low=True)
    _real(request_id, "min_p", sampling.min_p, 0.0, 1.0)
    if sampling.top_k is not None:
        _integer(request_id, "top_k", sampling.top_k, 1, _INT32_MAX)
    _integer(request_id, "seed", sampling.seed, 0, 2**64 - 1)
    _integer(request_id, "min_new_tokens", sampling.min_new_tokens, 0, _INT32_MAX)
    _real(request_id, "repetition_penalty", sampling.repetition_penalty, 0.0, 100.0, open_low=True)
    _real(request_id, "presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _real(request_id, "frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    if len(sampling.logit_bias) > MAX_BIAS_ENTRIES:
        entries = f"{len(sampling.logit_bias)} entries"
        raise BadParameterError(request_id, "logit_bias", entries, f"at most {MAX_BIAS_ENTRIES} entries")
    seen: set[int] = set()
    for token, bias in sampling.logit_bias:
        _integer(request_id, "logit_bias.token", token, 0, vocab_size - 1)
        if token in seen:
            raise BadParameterError(request_id, "logit_bias.token", token, "named once")
        seen.add(token)
        _real(request_id, "logit_bias.bias", bias, -100.0, 100.0)
    if sampling.num_logprobs is not None:
        _integer(request_id, "num_logprobs", sampling.num_logprobs, 0, MAX_LOGPROBS)


def _check_greedy(request_id: str, sampling: SamplingParams) -> None:
    """At temperature 0 the most probable token is taken, whatever seed, top_k, top_p and min_p are: they ask for nothing."""
    neutral = SamplingParams()
    for name in (
        "temperature",
        "min_new_tokens",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "num_logprobs",
    ):
        value = getattr(sampling, name)
        if value != getattr(neutral, name):
            raise UnsupportedParameterError(request_id, name, f"{len(value)} entries" if name == "logit_bias" else value)


def _integer(request_id: str, name: str, value: object, low: int, high: int) -> None:
    if type(value) is int and low <= value <= high:
        return
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise BadParameterError(request_id, name, value, f"an integer from {low} to {high}")


def _real(request_id: str, name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if type(value) is float and (_TINY if open_low else low) <= value <= high:
        return  # the bounds are float32, so the nearest float32 is within them as well
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadParameterError(request_id, name, value, "a finite number")
    # As the runtime will read it: a double may be above 0 where the nearest float32 is not.
    sent = float(np.float32(value)) if abs(value) <= _FLOAT32_MAX else value
    if not (low < sent if open_low else low <= sent) or sent > high:
        raise BadParameterError(request_id, name, value, f"in {'(' if open_low else '['}{low:g}, {high:g}]")
