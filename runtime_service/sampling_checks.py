"""Ranges of sampling parameters: those of `SamplingParams` in forward.proto."""

from __future__ import annotations

from runtime_service.ops import SamplingParams

MAX_TEMPERATURE = 100.0
MAX_SEED = 2**64 - 1
MAX_REPETITION_PENALTY = 100.0
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIAS_ENTRIES = 1024
MAX_LOGPROBS = 20


def sampling_error(sampling: SamplingParams, prompt_len: int, vocab_size: int) -> str:
    """What is wrong with these parameters, with value and range; empty when nothing is. NaN is in no range."""
    if not 0.0 <= sampling.temperature <= MAX_TEMPERATURE:
        return f"temperature {sampling.temperature} is outside [0, {MAX_TEMPERATURE:g}]"
    if sampling.top_k is not None and sampling.top_k < 1:
        return f"top_k {sampling.top_k} is below 1"
    if not 0.0 < sampling.top_p <= 1.0:
        return f"top_p {sampling.top_p} is outside (0, 1]"
    if not 0.0 <= sampling.min_p <= 1.0:
        return f"min_p {sampling.min_p} is outside [0, 1]"
    if not 0 <= sampling.seed <= MAX_SEED:
        return f"seed {sampling.seed} is outside [0, 2^64)"
    if sampling.min_new_tokens < 0:
        return f"min_new_tokens {sampling.min_new_tokens} is below 0"
    if sampling.min_new_tokens > 0 and prompt_len < 1:
        return f"min_new_tokens {sampling.min_new_tokens} needs prompt_len, which is {prompt_len}"
    return _penalty_error(sampling, prompt_len) or _bias_error(sampling, vocab_size) or _logprobs_error(sampling)


def _penalty_error(sampling: SamplingParams, prompt_len: int) -> str:
    if not 0.0 < sampling.repetition_penalty <= MAX_REPETITION_PENALTY:
        return f"repetition_penalty {sampling.repetition_penalty} is outside (0, {MAX_REPETITION_PENALTY:g}]"
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        if not -MAX_PENALTY <= value <= MAX_PENALTY:
            return f"{name} {value} is outside [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]"
    if sampling.has_penalty and prompt_len < 1:
        return f"a penalty needs prompt_len, which is {prompt_len}"
    return ""


def _bias_error(sampling: SamplingParams, vocab_size: int) -> str:
    if len(sampling.logit_bias) > MAX_BIAS_ENTRIES:
        return f"logit_bias has {len(sampling.logit_bias)} entries, at most {MAX_BIAS_ENTRIES} are allowed"
    seen: set[int] = set()
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocab_size:
            return f"logit_bias names token {token}, which is outside [0, {vocab_size})"
        if token in seen:
            return f"logit_bias names token {token} twice"
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            return f"logit_bias {bias} of token {token} is outside [-{MAX_BIAS:g}, {MAX_BIAS:g}]"
        seen.add(token)
    return ""


def _logprobs_error(sampling: SamplingParams) -> str:
    if sampling.num_logprobs is not None and not 0 <= sampling.num_logprobs <= MAX_LOGPROBS:
        return f"num_logprobs {sampling.num_logprobs} is outside [0, {MAX_LOGPROBS}]"
    return ""


def greedy_only_error(sampling: SamplingParams) -> str:
    """What a model without logits cannot honour, with its value; empty when there is nothing.

    At temperature 0 the greatest logit is taken, whatever seed, top_k, top_p and min_p are: they ask for nothing.
    """
    asked = {
        "temperature": (sampling.temperature, 0.0),
        "min_new_tokens": (sampling.min_new_tokens, 0),
        "repetition_penalty": (sampling.repetition_penalty, 1.0),
        "presence_penalty": (sampling.presence_penalty, 0.0),
        "frequency_penalty": (sampling.frequency_penalty, 0.0),
        "logit_bias": (len(sampling.logit_bias), 0),
        "num_logprobs": (sampling.num_logprobs, None),
    }
    for name, (value, neutral) in asked.items():
        if value != neutral:
            shown = f"{value} entries" if name == "logit_bias" else value
            return f"{name} is {shown}, but this model computes its tokens without logits and cannot honour it"
    return ""
