"""`tokenspeed.grpc.scheduler.TokenSpeedScheduler` over a gateway engine."""

from __future__ import annotations

import secrets
from typing import Any

from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2, tokenspeed_scheduler_pb2_grpc

from scheduler_service.core.errors import BadParameterError
from scheduler_service.core.ops import SamplingParams, TokenLogprobs
from scheduler_service.engine_loop import SubmitOptions
from scheduler_service.gateway.engine import NO_LIMIT
from scheduler_service.gateway.fields import UnsupportedFieldError, choices_of, limit_of, prompt_of, refuse_others
from scheduler_service.gateway.generation import Choice, Ending, Wanted
from scheduler_service.gateway.model_facts import ModelFacts
from scheduler_service.gateway.servicer import Context, GatewayServicer, statuses
from scheduler_service.gateway.stops import check_stop_strings
from scheduler_service.generation_servicer import traceparent_of

SERVICE_NAME = tokenspeed_scheduler_pb2.DESCRIPTOR.services_by_name["TokenSpeedScheduler"].full_name

REQUEST_FIELDS = frozenset(
    {
        *("request_id", "tokenized", "sampling_params", "stream"),
        *("return_logprob", "logprob_start_len", "top_logprobs_num"),
    }
)
"""Fields of GenerateRequest that are honoured."""

SAMPLING_FIELDS = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "ignore_eos", "n", "logit_bias", "no_stop_trim"),
        *("skip_special_tokens", "sampling_seed"),
        "spaces_between_special_tokens",  # about text, which the gateway makes
    }
)
"""Fields of SamplingParams that are honoured."""

REFUSED = {
    "token_ids_logprob": "log probabilities are those of the sampled and of the most probable tokens",
    "mm_inputs": "the model takes text only",
    "encode_bootstrap_info": "there are no workers for encoding",
    "kv_bootstrap_info": "prefill and decode are not split over workers",
    "data_parallel_rank": "the server is one rank; leave it unset",
    **dict.fromkeys(("regex", "json_schema", "ebnf_grammar", "structural_tag"), "there is no constrained decoding"),
    "custom_params": "the server has no parameters of its own",
}
"""Fields that are refused, and why; others are refused as well."""


class TokenSpeedServicer(GatewayServicer):
    """Methods are coroutines of grpc.aio."""

    service_name = SERVICE_NAME

    def register(self, server: Any) -> None:
        """Have a server serve this."""
        tokenspeed_scheduler_pb2_grpc.add_TokenSpeedSchedulerServicer_to_server(self, server)

    # --- requests ---------------------------------------------------------------------------------------------------------

    async def Generate(self, request: Any, context: Context) -> None:
        """Run a request; with `stream` its tokens are written as they come."""
        async with statuses(context, "Generate"):
            wanted = await self._wanted(request, context)
            await self.calls.serve(wanted, self, context.write)

    async def Abort(self, request: Any, context: Context) -> Any:
        """End a request, all its completions; one that is over, or unknown, is as good as ended."""
        known = False
        async with statuses(context, "Abort"):
            known = await self.calls.abort(request.request_id)
        return tokenspeed_scheduler_pb2.AbortResponse(success=True, message="" if known else "no such request is live")

    async def _wanted(self, request: Any, context: Context) -> Wanted:
        request_id = request.request_id or f"req-{secrets.token_hex(8)}"
        refuse_others(request_id, request, REQUEST_FIELDS, REFUSED)
        params = request.sampling_params
        refuse_others(request_id, params, SAMPLING_FIELDS, REFUSED)
        facts = await self.facts()
        stops = check_stop_strings(request_id, "stop", params.stop)
        end_ids = tuple(params.stop_token_ids) + (() if params.ignore_eos else facts.default_stop_ids)
        return Wanted(
            request_id=request_id,
            prompt=prompt_of(request_id, request.tokenized.input_ids, facts.vocab_size),
            options=SubmitOptions(
                max_tokens=limit_of(request_id, "max_new_tokens", params.max_new_tokens)
                if params.HasField("max_new_tokens")
                else NO_LIMIT,
                sampling=_sampling(request_id, request, facts),
                stop_ids=tuple(params.stop_token_ids),
                ignore_default_stop_ids=params.ignore_eos,
                traceparent=traceparent_of(context),
            ),
            num_choices=choices_of(request_id, params.n),
            seed=params.sampling_seed if params.HasField("sampling_seed") else None,
            stream=request.stream,
            stop_strings=stops,
            decode=await self.decoder(request_id, "stop", skip_special=params.skip_special_tokens) if stops else None,
            end_ids=frozenset(end_ids),
            trim_end=not params.no_stop_trim,
        )

    def chunk(self, wanted: Wanted, choice: Choice, tokens: list[int], logprobs: list[TokenLogprobs]) -> Any:
        """See Wording."""
        chunk = tokenspeed_scheduler_pb2.GenerateStreamChunk(
            token_ids=tokens,
            prompt_tokens=choice.num_prompt,
            completion_tokens=choice.num_completion,
            output_logprobs=_logprobs(tokens, logprobs),
            index=choice.index,
        )
        return tokenspeed_scheduler_pb2.GenerateResponse(request_id=wanted.request_id, chunk=chunk)

    def complete(self, wanted: Wanted, choice: Choice, ending: Ending) -> Any:
        """See Wording."""
        complete = tokenspeed_scheduler_pb2.GenerateComplete(
            output_ids=choice.tokens,
            finish_reason=ending.reason,
            prompt_tokens=choice.num_prompt,
            completion_tokens=choice.num_completion,
            cached_tokens=ending.cached_tokens,
            output_logprobs=_logprobs(choice.tokens, choice.logprobs),
            index=choice.index,
        )
        if isinstance(ending.matched, int):
            complete.matched_token_id = ending.matched
        elif ending.matched is not None:
            complete.matched_stop_str = ending.matched
        return tokenspeed_scheduler_pb2.GenerateResponse(request_id=wanted.request_id, complete=complete)

    # --- the server ---------------------------------------------------------------------------------------------------------

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        """Whether requests are served now."""
        healthy = self.engine.connected
        message = "" if healthy else "no runtime serves, or the server is shutting down"
        return tokenspeed_scheduler_pb2.HealthCheckResponse(healthy=healthy, message=message)

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        """What is served."""
        async with statuses(context, "GetModelInfo"):
            info, facts = await self.engine.info(), await self.facts()
            return tokenspeed_scheduler_pb2.GetModelInfoResponse(
                model_path=info.model,
                tokenizer_path=facts.tokenizer_path,
                served_model_name=info.served_name,
                model_type=facts.model_type,
                architectures=facts.architectures,
                max_context_length=info.max_context,
                max_req_input_len=info.max_prompt_len,
                vocab_size=info.vocab_size,
                eos_token_ids=info.default_stop_ids,
                pad_token_id=facts.pad_token_id,
                bos_token_id=facts.bos_token_id,
                default_sampling_params_json=facts.defaults_json,
                model_dtype=facts.dtype,
            )

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        """How it is served."""
        async with statuses(context, "GetServerInfo"):
            info = await self.engine.info()
            args, scheduler = Struct(), Struct()
            args.update(
                {"served_model_name": info.served_name, "page_size": info.page_size, "max_running_requests": info.max_rows}
            )
            scheduler.update({"max_total_num_tokens": info.capacity, "max_req_input_len": info.max_prompt_len})
            started = Timestamp()
            started.FromNanoseconds(int(self.started_at * 1e9))
            return tokenspeed_scheduler_pb2.GetServerInfoResponse(
                server_args=args,
                scheduler_info=scheduler,
                active_requests=info.num_waiting + info.num_running + info.num_retracted,
                uptime_seconds=self.uptime_s,
                max_total_num_tokens=info.capacity,
                tokenspeed_version=f"pagemirror {info.version}",
                start_time=started,
            )

    async def GetLoads(self, request: Any, context: Context) -> Any:
        """How full it is. There is one rank, number 0."""
        async with statuses(context, "GetLoads"):
            info = await self.engine.info()
            waiting = info.num_waiting + info.num_retracted
            load = tokenspeed_scheduler_pb2.SchedulerLoad(
                num_running_reqs=info.num_running,
                num_waiting_reqs=waiting,
                num_total_reqs=info.num_running + waiting,
                num_used_tokens=info.used_tokens,
                max_total_num_tokens=info.capacity,
                max_running_requests=info.max_rows,
                token_usage=info.used_tokens / info.capacity,
                active_token_usage=info.active_tokens / info.capacity,
                utilization=info.num_running / info.max_rows,
            )
            wanted = set(request.include)
            if wanted & {"memory", "all"}:
                load.memory.token_capacity = info.capacity
            if wanted & {"queues", "all"}:
                load.queues.waiting, load.queues.retracted = info.num_waiting, info.num_retracted
            loads = [load] if not request.HasField("dp_rank") or request.dp_rank == 0 else []
            return tokenspeed_scheduler_pb2.GetLoadsResponse(
                timestamp=self.now(),
                version=f"pagemirror {info.version}",
                dp_rank_count=len(loads),
                loads=loads,
                aggregate=tokenspeed_scheduler_pb2.AggregateMetrics(
                    total_running_reqs=load.num_running_reqs,
                    total_waiting_reqs=load.num_waiting_reqs,
                    total_reqs=load.num_total_reqs,
                    avg_token_usage=load.token_usage,
                    avg_utilization=load.utilization,
                ),
            )


def _sampling(request_id: str, request: Any, facts: ModelFacts) -> SamplingParams:
    params, defaults = request.sampling_params, facts.defaults

    def value(name: str, otherwise: float) -> float:
        return float(getattr(params, name) if params.HasField(name) else defaults.get(name, otherwise))

    if request.HasField("logprob_start_len") and request.logprob_start_len != -1:
        raise UnsupportedFieldError(
            request_id, "logprob_start_len", "there are no log probabilities of prompts; leave it at -1"
        )
    if request.top_logprobs_num and not request.return_logprob:
        raise BadParameterError(request_id, "top_logprobs_num", request.top_logprobs_num, "0 unless return_logprob is set")
    top_k = int(value("top_k", -1))
    return SamplingParams(
        temperature=value("temperature", 1.0),
        top_k=None if top_k in {0, -1} else top_k,
        top_p=value("top_p", 1.0),
        min_p=value("min_p", 0.0),
        min_new_tokens=limit_of(request_id, "min_new_tokens", params.min_new_tokens),
        repetition_penalty=value("repetition_penalty", 1.0),
        presence_penalty=value("presence_penalty", 0.0),
        frequency_penalty=value("frequency_penalty", 0.0),
        logit_bias=tuple((_token_id(request_id, token), bias) for token, bias in sorted(params.logit_bias.items())),
        num_logprobs=request.top_logprobs_num if request.return_logprob else None,
    )


def _token_id(request_id: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise BadParameterError(request_id, "logit_bias", text[:32], "token ids as decimal numbers")
    return int(text[:20])


def _logprobs(tokens: list[int], logprobs: list[TokenLogprobs]) -> Any:
    if not logprobs:
        return None
    return tokenspeed_scheduler_pb2.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in logprobs],
        token_ids=tokens,
        top_logprobs=[
            tokenspeed_scheduler_pb2.TopLogProbs(values=entry.top_logprobs, token_ids=entry.top_tokens) for entry in logprobs
        ],
    )
