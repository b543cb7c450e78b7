"""`vllm.grpc.engine.VllmEngine` over a gateway engine."""

from __future__ import annotations

import secrets
from typing import Any

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from scheduler_service.core.ops import SamplingParams, TokenLogprobs
from scheduler_service.engine_loop import SubmitOptions
from scheduler_service.gateway.engine import NO_LIMIT
from scheduler_service.gateway.fields import UnsupportedFieldError, choices_of, limit_of, prompt_of, refuse_others
from scheduler_service.gateway.generation import Choice, Ending, Wanted
from scheduler_service.gateway.model_facts import ModelFacts
from scheduler_service.gateway.servicer import Context, GatewayServicer, statuses
from scheduler_service.gateway.stops import check_stop_strings
from scheduler_service.generation_servicer import traceparent_of

SERVICE_NAME = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name

REQUEST_FIELDS = frozenset({"request_id", "tokenized", "sampling_params", "stream"})
"""Fields of GenerateRequest that are honoured."""

SAMPLING_FIELDS = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "n", "logit_bias", "seed", "logprobs"),
        "skip_special_tokens",
        # About text, which the gateway makes:
        *("spaces_between_special_tokens", "include_stop_str_in_output"),
    }
)
"""Fields of SamplingParams that are honoured."""

REFUSED = {
    "text": "the server takes token ids; send `tokenized`",
    **dict.fromkeys(("kv_transfer_params", "kv_transfer_params_json"), "prefill and decode are not split over workers"),
    **dict.fromkeys(("mm_inputs", "extra_mm_inputs", "media_refs"), "the model takes text only"),
    "data_parallel_rank": "the server is one rank; leave it unset",
    "prompt_logprobs": "there are no log probabilities of prompts",
    "truncate_prompt_tokens": "a prompt is taken whole or not at all",
    **dict.fromkeys(
        ("json_schema", "regex", "grammar", "structural_tag", "json_object", "choice", "grammar_from_first_token"),
        "there is no constrained decoding",
    ),
}
"""Fields that are refused, and why; others are refused as well."""


class VllmServicer(GatewayServicer):
    """Methods are coroutines of grpc.aio."""

    service_name = SERVICE_NAME

    def register(self, server: Any) -> None:
        """Have a server serve this."""
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self, server)

    # --- requests ---------------------------------------------------------------------------------------------------------

    async def Generate(self, request: Any, context: Context) -> None:
        """Run a request; with `stream` its tokens are written as they come."""
        async with statuses(context, "Generate"):
            wanted = await self._wanted(request, context)
            await self.calls.serve(wanted, self, context.write)

    async def Embed(self, request: Any, context: Context) -> None:
        """Not here."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the model generates; it makes no embeddings")

    async def Abort(self, request: Any, context: Context) -> Any:
        """End requests, all their completions; one that is over, or unknown, is as good as ended."""
        async with statuses(context, "Abort"):
            for request_id in request.request_ids:
                await self.calls.abort(request_id)
        return vllm_engine_pb2.AbortResponse()

    async def _wanted(self, request: Any, context: Context) -> Wanted:
        request_id = request.request_id or f"req-{secrets.token_hex(8)}"
        refuse_others(request_id, request, REQUEST_FIELDS, REFUSED)
        params = request.sampling_params
        refuse_others(request_id, params, SAMPLING_FIELDS, REFUSED)
        facts = await self.facts()
        stops = check_stop_strings(request_id, "stop", params.stop)
        # The output keeps its last token whichever it was; it is said what it was where the request had named it.
        return Wanted(
            request_id=request_id,
            prompt=prompt_of(request_id, request.tokenized.input_ids, facts.vocab_size),
            options=SubmitOptions(
                max_tokens=limit_of(request_id, "max_tokens", params.max_tokens) if params.HasField("max_tokens") else NO_LIMIT,
                sampling=_sampling(request_id, params, facts),
                stop_ids=tuple(params.stop_token_ids),
                ignore_default_stop_ids=params.ignore_eos,
                traceparent=traceparent_of(context),
            ),
            num_choices=choices_of(request_id, params.n),
            seed=_seed(params),
            stream=request.stream,
            stop_strings=stops,
            decode=await self.decoder(request_id, "stop", skip_special=params.skip_special_tokens) if stops else None,
            end_ids=frozenset(params.stop_token_ids),
        )

    def chunk(self, wanted: Wanted, choice: Choice, tokens: list[int], logprobs: list[TokenLogprobs]) -> Any:
        """See Wording."""
        chunk = vllm_engine_pb2.GenerateStreamChunk(
            token_ids=tokens,
            prompt_tokens=choice.num_prompt,
            completion_tokens=choice.num_completion,
            output_logprobs=_logprobs(tokens, logprobs),
            index=choice.index,
        )
        return vllm_engine_pb2.GenerateResponse(chunk=chunk)

    def complete(self, wanted: Wanted, choice: Choice, ending: Ending) -> Any:
        """See Wording."""
        complete = vllm_engine_pb2.GenerateComplete(
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
        return vllm_engine_pb2.GenerateResponse(complete=complete)

    # --- the server ---------------------------------------------------------------------------------------------------------

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        """Whether requests are served now."""
        healthy = self.engine.connected
        message = "" if healthy else "no runtime serves, or the server is shutting down"
        return vllm_engine_pb2.HealthCheckResponse(healthy=healthy, message=message)

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        """What is served."""
        async with statuses(context, "GetModelInfo"):
            info, facts = await self.engine.info(), await self.facts()
            return vllm_engine_pb2.GetModelInfoResponse(
                model_path=info.model,
                is_generation=True,
                max_context_length=info.max_context,
                vocab_size=info.vocab_size,
                served_model_name=info.served_name,
                tokenizer_path=facts.tokenizer_path,
                model_type=facts.model_type,
                architectures=facts.architectures,
                eos_token_ids=info.default_stop_ids,
                pad_token_id=facts.pad_token_id,
                bos_token_id=facts.bos_token_id,
                max_req_input_len=info.max_prompt_len,
                default_sampling_params_json=facts.defaults_json,
            )

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        """How it is served."""
        async with statuses(context, "GetServerInfo"):
            info, facts = await self.engine.info(), await self.facts()
            return vllm_engine_pb2.GetServerInfoResponse(
                active_requests=info.num_waiting + info.num_running + info.num_retracted,
                uptime_seconds=self.uptime_s,
                server_type="vllm-grpc",
                data_parallel_size=1,
                block_size=info.page_size,
                model_dtype=facts.dtype,
                max_num_seqs=info.max_rows,
            )

    async def GetLoads(self, request: Any, context: Context) -> Any:
        """How full it is. There is one rank, number 0."""
        async with statuses(context, "GetLoads"):
            info = await self.engine.info()
            waiting = info.num_waiting + info.num_retracted
            load = vllm_engine_pb2.SchedulerLoad(
                num_running_reqs=info.num_running,
                num_waiting_reqs=waiting,
                num_total_reqs=info.num_running + waiting,
                num_used_tokens=info.used_tokens,
                max_total_num_tokens=info.capacity,
                max_running_requests=info.max_rows,
                token_usage=info.used_tokens / info.capacity,
                utilization=info.num_running / info.max_rows,
            )
            loads = [load] if not request.HasField("dp_rank") or request.dp_rank == 0 else []
            return vllm_engine_pb2.GetLoadsResponse(
                timestamp=self.now(), version=f"pagemirror {info.version}", dp_rank_count=len(loads), loads=loads
            )


def _sampling(request_id: str, params: Any, facts: ModelFacts) -> SamplingParams:
    """Parameters of a message where 0 is how an unset field reads: it asks for nothing, but for the temperature, which is told
    apart. The gateway has filled in the model's defaults.
    """
    if params.HasField("logprobs") and params.logprobs < 0:
        raise UnsupportedFieldError(request_id, "logprobs", "those of all tokens are too many")
    temperature = params.temperature if params.HasField("temperature") else facts.defaults.get("temperature", 1.0)
    return SamplingParams(
        temperature=float(temperature),
        top_k=params.top_k or None,
        top_p=params.top_p or 1.0,
        min_p=params.min_p,
        min_new_tokens=limit_of(request_id, "min_tokens", params.min_tokens),
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(sorted(params.logit_bias.items())),
        num_logprobs=params.logprobs if params.HasField("logprobs") else None,
    )


def _seed(params: Any) -> int | None:
    """-1 asks for a new one, as no seed does; other negative ones are themselves, modulo 2^64."""
    return params.seed % 2**64 if params.HasField("seed") and params.seed != -1 else None


def _logprobs(tokens: list[int], logprobs: list[TokenLogprobs]) -> Any:
    if not logprobs:
        return None
    return vllm_engine_pb2.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in logprobs],
        token_ids=tokens,
        top_logprobs=[vllm_engine_pb2.TopLogProbs(values=entry.top_logprobs, token_ids=entry.top_tokens) for entry in logprobs],
    )
