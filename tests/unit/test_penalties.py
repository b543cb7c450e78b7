"""Penalties and logit bias beside plain Python: the same float32 numbers, whatever order the tokens arrived in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runtime_service.forward_batch import ForwardBatch
from runtime_service.ops import GREEDY, LeaseStart, SamplingParams
from runtime_service.penalties import BYTES_PER_TOKEN_ID
from runtime_service.sampler import Sampler

VOCAB = 30
PENALISED = SamplingParams(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.25)


def naive_logits(logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> list[float]:
    """Bias and penalties by their definition, one float32 at a time."""
    result = [np.float32(value) for value in logits]
    for token, bias in params.logit_bias:
        result[token] = np.float32(result[token] + np.float32(bias))
    repetition = np.float32(params.repetition_penalty)
    presence, frequency = np.float32(params.presence_penalty), np.float32(params.frequency_penalty)
    for token in range(len(result)):
        count, value = list(output).count(token), result[token]
        if count or token in prompt:
            value = value / repetition if value > 0 else value * repetition
        value = np.float32(value - frequency * np.float32(count))
        result[token] = np.float32(value - presence * np.float32(count > 0))
    return [float(value) for value in result]


def batch_of(rows: Sequence[int], num_computed: Sequence[int], inputs: Sequence[Sequence[int]]) -> ForwardBatch:
    """A step of extend rows; only what the sampler reads is true."""
    nothing = torch.empty(0)
    lens = [len(ids) for ids in inputs]
    return ForwardBatch(
        req_to_page=nothing,
        page_size=1,
        rows=nothing,
        num_computed=nothing,
        input_lens=nothing,
        seq_lens=nothing,
        query_indptr=nothing,
        input_ids=torch.tensor([token for ids in inputs for token in ids], dtype=torch.int64),
        positions=nothing,
        token_rows=nothing,
        out_cache_loc=nothing,
        num_extend_rows=len(rows),
        host_rows=np.array(rows, dtype=np.int32),
        host_num_computed=np.array(num_computed, dtype=np.int32),
        host_input_lens=np.array(lens, dtype=np.int32),
        sample=np.ones(len(rows), dtype=np.bool_),
        clamped=np.zeros(len(rows), dtype=np.bool_),
    )


def history(tokens: Sequence[int]) -> bytes:
    """The column of a lease start."""
    return np.array(tokens, dtype="<i4").tobytes()


def counts(sampler: Sampler, row: int) -> tuple[list[int], dict[int, int]]:
    """Ids in the row's prompt, and ids of its output with their number."""
    in_prompt, in_output = sampler.penalties.counts(row)
    return torch.nonzero(in_prompt)[:, 0].tolist(), {i: n for i, n in enumerate(in_output.tolist()) if n}


def step(sampler: Sampler, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Tokens of one step."""
    tokens, finite = sampler.sample(logits, np.array(rows, dtype=np.int32), np.array(positions, dtype=np.int64))
    assert bool(finite.all())
    return tokens.tolist()


@pytest.mark.parametrize("cuts", [[9], [1, 8], [3, 3, 3], [1] * 9])
@pytest.mark.parametrize("cached", [0, 4, 8])
def test_counts_do_not_depend_on_chunks_or_cached_tokens(cuts: list[int], cached: int) -> None:
    """However many tokens come as history and in how many chunks the rest does, the counts are those of the text."""
    tokens, prompt_len = [3, 3, 7, 1, 9, 9, 9, 2, 7], 5
    sampler = Sampler(4, VOCAB)
    sampler.start_leases([LeaseStart(2, "a", PENALISED, prompt_len=prompt_len, history=history(tokens[:cached]))])
    begin = 0
    for size in cuts:
        start, end = max(begin, cached), begin + size
        if start < end:
            sampler.count_inputs(batch_of([2], [start], [tokens[start:end]]))
        begin = end
    assert counts(sampler, 2) == ([1, 3, 7, 9], {9: 2, 2: 1, 7: 1})


def test_a_position_counts_once() -> None:
    """A sampled token that a later extend row computes again is not counted again."""
    sampler = Sampler(2, VOCAB)
    sampler.start_leases([LeaseStart(1, "a", PENALISED, prompt_len=2)])
    sampler.count_inputs(batch_of([1], [0], [[5, 6]]))
    logits = torch.zeros(1, VOCAB)
    logits[0, 8] = 9.0
    assert step(sampler, logits, [1], [2]) == [8]
    sampler.count_inputs(batch_of([1], [2], [[8]]))
    assert counts(sampler, 1) == ([5, 6], {8: 1})


def test_logits_equal_plain_python() -> None:
    """For every combination of bias and penalties, and mixed batches, the changed logits are the same float32 numbers."""
    generator = torch.Generator().manual_seed(3)
    options = [
        GREEDY,
        PENALISED,
        SamplingParams(repetition_penalty=0.4),
        SamplingParams(presence_penalty=-1.5),
        SamplingParams(frequency_penalty=-2.0, logit_bias=((4, -100.0), (0, 1.25))),
        SamplingParams(logit_bias=((29, 100.0), (3, -0.5))),
        SamplingParams(repetition_penalty=100.0, presence_penalty=2.0, frequency_penalty=2.0, logit_bias=((1, 3.0),)),
    ]
    params = [replace(option, num_logprobs=20) for option in options]
    random = np.random.default_rng(4)
    prompts = [random.integers(0, VOCAB, 6).tolist() for _ in params]
    outputs = [random.integers(0, 12, 9).tolist() for _ in params]
    logits = 3 * torch.randn(len(params), VOCAB, generator=generator)
    sampler, rows = Sampler(len(params), VOCAB), np.arange(1, len(params) + 1)
    for row, param, prompt, output in zip(rows.tolist(), params, prompts, outputs, strict=True):
        known = prompt + output if param.has_penalty else []
        sampler.start_leases([LeaseStart(row, str(row), param, prompt_len=6, history=history(known))])
    before = logits.clone()
    tokens, _, logprobs = sampler.choose(logits, rows, np.full(len(params), 15))
    assert torch.equal(logits, before)
    assert logprobs is not None
    for i, param in enumerate(params):
        expected = torch.tensor(naive_logits(logits[i].tolist(), prompts[i], outputs[i], param))
        assert tokens[i] == expected.argmax()
        best = expected.argsort(descending=True, stable=True)[:20]
        assert logprobs.top_tokens[i].tolist() == best.tolist()
        assert torch.equal(logprobs.top_logprobs[i], expected.log_softmax(-1)[best])


def test_a_sampled_token_changes_the_next_step_at_once() -> None:
    """Token after token, each step's penalties know the one before, in rows side by side, and other rows stay as they are."""
    logits = torch.zeros(VOCAB)
    logits[:4] = torch.tensor([4.0, 3.75, 3.5, 3.25])
    sampler = Sampler(3, VOCAB)
    frequency = SamplingParams(frequency_penalty=0.5)
    sampler.start_leases([LeaseStart(1, "a", frequency, prompt_len=1), LeaseStart(3, "c", PENALISED, prompt_len=1)])
    sampler.count_inputs(batch_of([1, 3], [0, 0], [[0], [1]]))
    texts: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for position in range(1, 9):
        for row, token in zip((1, 2, 3), step(sampler, logits.expand(3, -1), [1, 2, 3], [position] * 3), strict=True):
            texts[row].append(token)
    expected: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for row, prompt, params in ((1, [0], frequency), (2, [], GREEDY), (3, [1], PENALISED)):
        for _ in range(8):
            scores = naive_logits(logits.tolist(), prompt, expected[row], params)
            expected[row].append(scores.index(max(scores)))
    assert texts == expected
    assert texts[1] == [0, 1, 0, 2, 1, 3, 0, 2]
    assert texts[2] == [0] * 8


def test_a_token_that_is_not_finite_is_not_counted() -> None:
    """A row whose logits are broken keeps its counts, so nothing that is no token enters them."""
    sampler = Sampler(1, VOCAB)
    sampler.start_leases([LeaseStart(1, "a", PENALISED, prompt_len=1)])
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = torch.nan
    _, finite = sampler.sample(logits, np.array([1]), np.array([1]))
    assert not finite.any()
    assert counts(sampler, 1) == ([], {})


@pytest.mark.parametrize("value", [3e38, -3e38, 1e30])
@pytest.mark.parametrize("penalty", [100.0, 1e-38])
def test_penalties_never_make_logits_infinite(value: float, penalty: float) -> None:
    """The ends of the range on huge logits give a token and a finite log probability, not a failed row."""
    params = SamplingParams(temperature=1.0, repetition_penalty=penalty, num_logprobs=2)
    sampler = Sampler(1, VOCAB)
    sampler.start_leases([LeaseStart(1, "a", params, prompt_len=2, history=history([0, 1]))])
    logits = torch.zeros(1, VOCAB)
    logits[0, :2] = value
    tokens, finite, logprobs = sampler.choose(logits, np.array([1]), np.array([2]))
    assert finite.tolist() == [True]
    assert logprobs is not None
    assert bool(torch.isfinite(logprobs.logprobs).all())
    assert 0 <= int(tokens[0]) < VOCAB


def test_rows_are_counted_from_nothing_in_each_lease() -> None:
    """A new lease of the row number begins empty; neither a released row nor a lease without penalties sees old counts."""
    logits = torch.zeros(1, VOCAB)
    logits[0, [1, 2]] = torch.tensor([2.0, 1.0])
    sampler = Sampler(2, VOCAB)
    strong = SamplingParams(presence_penalty=2.0)
    lease = LeaseStart(2, "a", strong, prompt_len=1)
    sampler.start_leases([lease])
    assert step(sampler, logits, [2], [1]) == [1]
    assert step(sampler, logits, [2], [2]) == [2]
    sampler.start_leases([lease])
    assert counts(sampler, 2) == ([], {})
    assert step(sampler, logits, [2], [1]) == [1]
    sampler.release_rows(np.array([2], dtype=np.int32))
    assert [step(sampler, logits, [2], [i])[0] for i in range(3)] == [1, 1, 1]
    sampler.start_leases([replace(lease, sampling=GREEDY)])
    assert [step(sampler, logits, [2], [i])[0] for i in range(3)] == [1, 1, 1]


def test_memory_is_what_the_documentation_says() -> None:
    """Nothing until a penalty is on; then 5 bytes per token id for rows up to the highest one, a power of two; reset frees."""
    sampler = Sampler(200, VOCAB)
    everything_else = SamplingParams(1.0, 5, 0.5, 0.1, 3, 2, logit_bias=((1, 1.0),), num_logprobs=20)
    sampler.start_leases([LeaseStart(199, "a", everything_else, stop_ids=(1,), prompt_len=1)])
    step(sampler, torch.zeros(1, VOCAB), [199], [1])
    assert sampler.penalties.num_bytes == 0
    for row, num_rows in ((1, 2), (2, 4), (3, 4), (100, 128), (129, 201), (200, 201)):
        sampler.start_leases([LeaseStart(row, "b", PENALISED, prompt_len=2, history=history([row % 7, 11]))])
        assert sampler.penalties.num_bytes == num_rows * VOCAB * BYTES_PER_TOKEN_ID
    assert [counts(sampler, row)[0] for row in (1, 2, 100)] == [[1, 11], [2, 11], [2, 11]]
    sampler.reset()
    assert sampler.penalties.num_bytes == 0


class OpNames(TorchDispatchMode):
    """Writes down the torch operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_greedy_batch_pays_for_nothing_else() -> None:
    """Greedy rows run the operations of a sampler that knows nothing else, also while rows outside the batch ask for more."""
    logits = torch.randn(2, VOCAB)
    everything = SamplingParams(1.0, 5, 0.5, 0.1, 3, 2, 1.5, 0.5, 0.5, ((1, 1.0),), 20)
    recorded = []
    for others in ([], [LeaseStart(3, "busy", everything, stop_ids=(1,), prompt_len=1)]):
        sampler = Sampler(3, VOCAB)
        sampler.start_leases([LeaseStart(1, "a"), LeaseStart(2, "b"), *others])
        with OpNames() as ops:
            sampler.count_inputs(batch_of([1, 2], [0, 0], [[4], [5]]))
            sampler.sample(logits, np.array([1, 2]), np.array([1, 1]))
        recorded.append(ops.names)
    assert recorded[0] == recorded[1]
    assert "max" in recorded[0]
    assert "argmax" not in recorded[0]
    assert not {"clone", "index", "index_put", "index_put_", "sort", "log", "topk", "_log_softmax"} & set(recorded[0])
    with OpNames() as ops:
        sampler.sample(logits[:1], np.array([3]), np.array([1]))
    assert {"index_put_", "sort", "log", "topk"} <= set(ops.names)


@pytest.mark.gpu
def test_a_gpu_chooses_what_the_cpu_chooses() -> None:
    """Bias, penalties, counts and minimum length are the same on a GPU, token after token, greedy and drawn."""
    everything = SamplingParams(0.0, None, 1.0, 0.0, 0, 3, 1.5, 0.5, 0.25, ((3, 1.0),), 4)
    params = [everything, replace(everything, temperature=1.0, seed=5, top_p=0.9), GREEDY]
    logits = 2 * torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(6))
    texts = []
    for device in ("cpu", "cuda"):
        sampler = Sampler(3, VOCAB, device)
        for row, param in enumerate(params, start=1):
            known = history([3, 4, 5]) if param.has_penalty else b""
            sampler.start_leases([LeaseStart(row, str(row), param, stop_ids=(1,), prompt_len=2, history=known)])
        texts.append([step(sampler, logits.to(device), [1, 2, 3], [position] * 3) for position in range(3, 20)])
        assert counts(sampler, 1)[0] == [3, 4]
    assert texts[0] == texts[1]
