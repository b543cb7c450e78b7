"""A client's request, as it is submitted to the engine, and the account that it gets at its end."""

from __future__ import annotations

import secrets
from dataclasses import replace

from pagemirror.v1 import generation_pb2
from scheduler_service.columns import int32_from_bytes
from scheduler_service.core.errors import BadParameterError
from scheduler_service.core.ops import SamplingParams
from scheduler_service.core.parameters import MAX_BIAS_ENTRIES, MAX_STOP_IDS
from scheduler_service.core.request import FinishReason, Request
from scheduler_service.engine_loop import SubmitOptions
from scheduler_service.wire import sampling_from_proto

DEFAULT_MAX_TOKENS = 16

_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: generation_pb2.FINISH_REASON_ABORT,
    FinishReason.CAPACITY: generation_pb2.FINISH_REASON_CAPACITY,
}


def submit_options(request_id: str, request: generation_pb2.GenerateRequest, traceparent: str) -> SubmitOptions:
    """Everything of a request but its id and its prompt.

    Raises:
        BadParameterError, BadColumnError: a value that could not even be handed on; the rest is checked by the core.
    """
    queue_wait_ms = request.max_queue_wait_ms if request.HasField("max_queue_wait_ms") else None
    if queue_wait_ms == 0:
        raise BadParameterError(request_id, "max_queue_wait_ms", 0, "at least 1, or unset for no limit")
    # Before anything is made of them: a message has room for millions.
    if len(request.stop_token_ids) > 4 * MAX_STOP_IDS:
        raise BadParameterError(
            request_id, "stop_ids", f"{len(request.stop_token_ids) // 4} ids", f"at most {MAX_STOP_IDS} ids"
        )
    if (count := len(request.sampling.logit_bias)) > MAX_BIAS_ENTRIES:
        raise BadParameterError(request_id, "logit_bias", f"{count} entries", f"at most {MAX_BIAS_ENTRIES} entries")
    return SubmitOptions(
        max_tokens=request.max_tokens if request.HasField("max_tokens") else DEFAULT_MAX_TOKENS,
        sampling=_sampling(request),
        stop_ids=tuple(int32_from_bytes(request.stop_token_ids, "stop_token_ids").tolist()),
        ignore_default_stop_ids=request.ignore_default_stop_ids,
        priority=request.priority,
        prefix_cache=request.prefix_cache if request.HasField("prefix_cache") else True,
        cache_namespace=request.cache_namespace,
        queue_wait_ms=queue_wait_ms,
        traceparent=traceparent,
    )


def finished_message(request: Request) -> generation_pb2.Finished:
    """How a request ended and what it took."""
    return generation_pb2.Finished(
        reason=_REASONS[request.finish_reason] if request.finish_reason else generation_pb2.FINISH_REASON_UNSPECIFIED,
        prompt_tokens=request.prompt_len,
        completion_tokens=request.num_output,
        cached_tokens=request.cached_tokens,
        num_retractions=request.num_retractions,
    )


def _sampling(request: generation_pb2.GenerateRequest) -> SamplingParams:
    """The client's parameters; a seed is drawn here, once, where it gave none, so that a resume draws the same tokens."""
    sampling = sampling_from_proto(request.sampling)
    if sampling.temperature > 0 and not request.sampling.HasField("seed"):
        return replace(sampling, seed=secrets.randbits(64))
    return sampling
