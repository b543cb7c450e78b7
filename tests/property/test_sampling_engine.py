"""Sampling through the whole engine beside plain Python, whatever batch, chunks, retractions, resumes and cached prefixes.

The model's logits depend on the last token alone and are looked up, so they are the same bits in every batch, and what the
engine makes of them has one right answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemirror.v1 import forward_pb2
from runtime_service import ops as runtime_ops
from runtime_service import wire as runtime_wire
from runtime_service.executors.base import ExecutionResult, ModelInfo
from runtime_service.forward_batch import ForwardBatch
from runtime_service.req_to_page import ReqToPage
from runtime_service.sampler import Sampler
from runtime_service.session import SessionState
from runtime_service.step_runner import StepRunner
from scheduler_service import wire as scheduler_wire
from scheduler_service.core import invariants
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.ops import SamplingParams, StepResult, TokenLogprobs
from scheduler_service.core.scheduler import Scheduler

VOCAB = 12
NUM_PAGES = 24
MAX_ROWS = 4
TABLE = 2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(12))

Output = tuple[list[int], list[TokenLogprobs | None]]


class LookUpModel:
    """Logits are a row of TABLE. Real sampler, no KV."""

    info = ModelInfo("lookup", "lookup", VOCAB, 0, (), None, "cpu", "float32")

    def __init__(self) -> None:
        self.sampler = Sampler(MAX_ROWS, VOCAB)
        self.start_leases = self.sampler.start_leases
        self.release_rows = self.sampler.release_rows
        self.reset = self.sampler.reset

    def warm_up(self) -> None:
        """Nothing."""

    def execute(self, batch: ForwardBatch) -> ExecutionResult:
        """As the transformer does it."""
        self.sampler.count_inputs(batch)
        sampled = np.flatnonzero(batch.sample)
        tokens = np.full(batch.num_rows, runtime_ops.NO_TOKEN, dtype=np.int32)
        status = np.zeros(batch.num_rows, dtype=np.uint8)
        if len(sampled) == 0:
            return ExecutionResult(tokens, status)
        last = batch.input_ids[torch.from_numpy(np.cumsum(batch.host_input_lens)[sampled] - 1)]
        positions = (batch.host_num_computed + batch.host_input_lens)[sampled].astype(np.int64)
        chosen, _, logprobs = self.sampler.choose(TABLE[last], batch.host_rows[sampled], positions)
        tokens[sampled] = chosen.numpy()
        if logprobs is None:
            return ExecutionResult(tokens, status)
        return ExecutionResult(tokens, status, *logprobs.spread(torch.from_numpy(sampled), batch.num_rows).to_host())


def naive(prompt: Sequence[int], num_tokens: int, params: SamplingParams, stop_ids: Sequence[int]) -> Output:
    """One request alone, recomputed from its text for every token. The draw itself is the sampler's, from changed logits."""
    tokens, logprobs = list(prompt), list[TokenLogprobs | None]()
    draw = Sampler(1, VOCAB)
    plain = runtime_ops.SamplingParams(params.temperature, params.top_k, params.top_p, params.min_p, params.seed)
    draw.start_leases([runtime_ops.LeaseStart(1, "naive", plain)])
    repetition = np.float32(params.repetition_penalty)
    presence, frequency = np.float32(params.presence_penalty), np.float32(params.frequency_penalty)
    for num_output in range(num_tokens):
        logits = TABLE[tokens[-1]].numpy().copy()
        for token, bias in params.logit_bias:
            logits[token] += np.float32(bias)
        for token in range(VOCAB):
            count = tokens[len(prompt) :].count(token)
            if token in tokens:
                logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
            logits[token] = np.float32(logits[token] - frequency * np.float32(count)) - presence * np.float32(count > 0)
        values = torch.from_numpy(logits.copy()).log_softmax(-1)
        if num_output < params.min_new_tokens:
            logits[list(stop_ids)] = -np.inf
        chosen, _ = draw.sample(torch.from_numpy(logits)[None], np.array([1]), np.array([len(tokens)]))
        token = int(chosen[0])
        tokens.append(token)
        if params.num_logprobs is not None:
            best = values.argsort(descending=True, stable=True)[: params.num_logprobs]
            logprobs.append(TokenLogprobs(float(values[token]), best.tolist(), values[best].tolist()))
        if token in stop_ids:
            break
    return tokens[len(prompt) :], logprobs


penalties = st.sampled_from([0.0, 0.0, 0.75, -1.25])
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 1.5]),
    top_p=st.sampled_from([1.0, 0.5]),
    seed=st.integers(0, 99),
    min_new_tokens=st.sampled_from([0, 3]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5, 0.5]),
    presence_penalty=penalties,
    frequency_penalty=penalties,
    logit_bias=st.sampled_from([(), ((2, 3.0), (5, -2.5))]),
    num_logprobs=st.sampled_from([None, None, 0, 3, VOCAB]),
)
# Few different prompts with long common beginnings, so that the prefix cache has something to give.
prompts = st.tuples(st.sampled_from([[1, 2, 3, 4, 1, 2, 7, 7], [5, 5]]), st.lists(st.integers(0, VOCAB - 1), max_size=3)).map(
    lambda parts: parts[0] + parts[1]
)
requests = st.lists(st.tuples(prompts, st.integers(1, 9), samplings, st.sampled_from([(), (4, 9)])), min_size=1, max_size=7)


@settings(max_examples=60)
@given(
    requests=requests,
    retracted=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=12),
    page_size=st.integers(1, 4),
    chunk_size=st.integers(1, 6),
    overlap_depth=st.integers(0, 2),
    max_lease_bytes=st.sampled_from([0, 100, 1 << 20]),
)
def test_engine_equals_plain_python(
    requests: list[tuple[list[int], int, SamplingParams, tuple[int, ...]]],
    retracted: list[tuple[int, int]],
    page_size: int,
    chunk_size: int,
    overlap_depth: int,
    max_lease_bytes: int,
) -> None:
    """Tokens and log probabilities of every request are those of the naive recomputation, exactly."""
    config = SchedulerConfig(
        page_size=page_size,
        num_pages=NUM_PAGES,
        max_rows=MAX_ROWS,
        max_pages_per_row=NUM_PAGES,
        vocab_size=VOCAB,
        token_budget=9,
        chunk_size=chunk_size,
        overlap_depth=overlap_depth,
        max_lease_bytes=max_lease_bytes,
    )
    scheduler, model = Scheduler(config), LookUpModel()
    shape = (MAX_ROWS, NUM_PAGES, NUM_PAGES, page_size)
    runner = StepRunner(SessionState(*shape, VOCAB), ReqToPage(*shape), model)
    runner.open(1, 1, overlap_depth)
    limits = {}
    for i, (prompt, max_tokens, sampling, stop_ids) in enumerate(requests):
        request = scheduler.submit(str(i), prompt, max_tokens=max_tokens, sampling=sampling, stop_ids=stop_ids)
        limits[str(i)] = request.limit_len - request.prompt_len
    outputs: dict[str, Output] = {name: ([], []) for name in limits}
    pending: deque[StepResult] = deque()
    for plan_no in range(2000):
        if not scheduler.has_work:
            break
        for when, which in retracted:
            request = scheduler.requests.get(str(which))
            if when == plan_no and request is not None and request.state.holds_row:
                scheduler.retract(request.request_id)
        while scheduler.num_in_flight <= overlap_depth and (op := scheduler.plan()) is not None:
            data = scheduler_wire.op_to_proto(op).SerializeToString()
            answer = runner.run(runtime_wire.op_from_proto(forward_pb2.ForwardOp.FromString(data)))
            assert not isinstance(answer, Exception), answer
            message = runtime_wire.result_to_proto(answer).result
            pending.append(scheduler_wire.result_from_proto(message, op.num_rows))
        if pending:
            scheduler.complete(pending.popleft())
        invariants.check(scheduler)
        found = scheduler.take_outputs()
        logprobs = found.logprobs or [None] * len(found.tokens)
        for request, token, logprob in zip(found.requests, found.tokens, logprobs, strict=True):
            outputs[request.request_id][0].append(token)
            if request.sampling.num_logprobs is None:
                assert logprob is None
            else:
                outputs[request.request_id][1].append(logprob)
    assert not scheduler.has_work
    for i, (prompt, _, sampling, stop_ids) in enumerate(requests):
        assert outputs[str(i)] == naive(prompt, limits[str(i)], sampling, stop_ids)
