"""Log probabilities beside log_softmax and a stable sort: of which logits, of how many tokens, for which rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime_service.logprobs import compute_logprobs
from runtime_service.ops import GREEDY, LeaseStart, SamplingParams
from runtime_service.sampler import Sampler

VOCAB = 50


def sampler_of(params: list[SamplingParams], **lease: object) -> Sampler:
    """Row i + 1 has params[i]."""
    sampler = Sampler(len(params), VOCAB)
    sampler.start_leases([LeaseStart(i + 1, str(i), p, **lease) for i, p in enumerate(params)])  # type: ignore[arg-type]
    return sampler


def test_equal_to_log_softmax_and_a_stable_sort() -> None:
    """Values are those of log_softmax; ids go by logit, then by id, with ties, signed zeros and negative numbers among them."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(8, VOCAB, generator=generator)
    logits[1] = 0.0
    logits[1, ::2] = -0.0
    logits[2] = logits[2].round()
    logits[3] = -logits[3].abs() * 1e-40  # subnormal
    logits[4] = logits[4] * 1e30
    tokens = torch.arange(8)
    found = compute_logprobs(logits, tokens, torch.full((8,), 20), 20)
    values = logits.log_softmax(-1)
    expected = logits.argsort(dim=-1, descending=True, stable=True)[:, :20]
    assert torch.equal(found.top_tokens.long(), expected)
    assert torch.equal(found.top_logprobs, values.gather(1, expected))
    assert torch.equal(found.logprobs, values[tokens, tokens])


def test_rows_get_what_they_asked_for() -> None:
    """Rows of one batch ask for none, their own, few or many; what a row did not ask for is not there."""
    counts = [None, 0, 3, 20, None, 1]
    sampler = sampler_of([replace(GREEDY, num_logprobs=count) for count in counts])
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(2))
    tokens, _, logprobs = sampler.choose(logits, np.arange(1, 7), np.arange(6))
    assert logprobs is not None
    assert logprobs.top_tokens.shape == logprobs.top_logprobs.shape == (6, 20)
    own, top_tokens, top_logprobs = logprobs.to_host()
    assert (own.dtype, top_tokens.dtype, top_logprobs.dtype) == (np.float32, np.int32, np.float32)
    for i, count in enumerate(counts):
        values = logits[i].log_softmax(-1)
        if count is None:
            assert np.isnan(own[i])
        else:
            assert own[i] == values[tokens[i]]
        number = count or 0
        best = logits[i].argsort(descending=True)[:number]
        assert top_tokens[i].tolist() == best.tolist() + [-1] * (20 - number)
        assert top_logprobs[i, :number].tolist() == values[best].tolist()
        assert np.isnan(top_logprobs[i, number:]).all()
    alone = sampler_of([replace(GREEDY, num_logprobs=0)]).choose(logits[:1], np.array([1]), np.array([0]))[2]
    assert alone is not None
    assert alone.top_tokens.shape == (1, 0)
    assert sampler.choose(logits[:1], np.array([1]), np.array([0]))[2] is None


def test_more_than_the_vocabulary_has() -> None:
    """A vocabulary smaller than the number asked for gives all of it and leaves the rest empty."""
    found = compute_logprobs(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([0]), torch.tensor([5]), 5)
    assert found.top_tokens.tolist() == [[1, 2, 0, -1, -1]]
    assert torch.isnan(found.top_logprobs[0, 3:]).all()


@pytest.mark.parametrize("params", [SamplingParams(temperature=3.0, top_k=2, seed=4), SamplingParams(min_new_tokens=9)])
def test_of_the_logits_before_temperature_truncation_and_minimum_length(params: SamplingParams) -> None:
    """What decides the draw alone does not show in the log probabilities; bias does."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    best = int(logits.argmax())
    biased = replace(params, num_logprobs=4, logit_bias=((7, 4.0),))
    sampler = sampler_of([biased], stop_ids=(best,), prompt_len=1)
    tokens, _, logprobs = sampler.choose(logits, np.array([1]), np.array([1]))
    assert logprobs is not None
    changed = logits.clone()
    changed[0, 7] += 4.0
    values = changed.log_softmax(-1)[0]
    assert logprobs.logprobs[0] == values[tokens[0]]
    assert logprobs.top_tokens[0].tolist() == values.argsort(descending=True)[:4].tolist()
    assert best in logprobs.top_tokens[0].tolist()


def test_batch_independence() -> None:
    """A row's log probabilities are bit for bit the same alone and among others."""
    params = [SamplingParams(temperature=0.5 * (i % 3), seed=i, num_logprobs=i % 5) for i in range(20)]
    logits = 2 * torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(5))
    sampler, rows, positions = sampler_of(params), np.arange(1, 21), np.arange(20)
    together = sampler.choose(logits, rows, positions)[2]
    assert together is not None
    for i in range(20):
        alone = sampler.choose(logits[i : i + 1], rows[i : i + 1], positions[i : i + 1])[2]
        assert alone is not None
        width = alone.top_tokens.shape[1]
        assert alone.logprobs[0] == together.logprobs[i]
        assert torch.equal(alone.top_tokens[0], together.top_tokens[i, :width])
        assert torch.equal(alone.top_logprobs[0], together.top_logprobs[i, :width])
