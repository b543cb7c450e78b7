"""Sampling: the right distribution, the right sets, and the same token whoever else is in the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from runtime_service.ops import GREEDY, LeaseStart, SamplingParams
from runtime_service.sampler import Sampler, gumbel_noise, stream_keys

VOCAB = 40


def make(params: Sequence[SamplingParams], **lease: object) -> Sampler:
    """A sampler whose row i + 1 has params[i]."""
    sampler = Sampler(len(params), VOCAB)
    sampler.start_leases([LeaseStart(i + 1, f"request {i}", p, **lease) for i, p in enumerate(params)])  # type: ignore[arg-type]
    return sampler


def draw(sampler: Sampler, logits: torch.Tensor, row: int, positions: np.ndarray) -> np.ndarray:
    """Tokens of one row at many positions, all from the same logits."""
    rows = np.full(len(positions), row, dtype=np.int32)
    tokens, finite = sampler.sample(logits.expand(len(positions), -1), rows, positions)
    assert bool(finite.all())
    return tokens.numpy()


def chi_square(tokens: np.ndarray, probabilities: torch.Tensor) -> float:
    """Pearson's statistic of drawn tokens against probabilities above 0."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    kept = probabilities.numpy() > 0
    assert counts[~kept].sum() == 0
    expected = probabilities.numpy()[kept] * len(tokens)
    assert expected.min() > 5  # the statistic means nothing otherwise
    return float(((counts[kept] - expected) ** 2 / expected).sum())


def chi_square_bound(degrees: int) -> float:
    """Above this, one honest sampler in about 30,000 ends (normal approximation, 4 standard deviations)."""
    return degrees + 4 * math.sqrt(2 * degrees)


def naive_kept(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities after temperature, top-k, top-p, min-p, one definition after the other; 0 where left out."""
    probabilities = torch.softmax(logits.double() / params.temperature, dim=-1)
    order = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    kept = order[: params.top_k]
    total = sum(float(probabilities[token]) for token in kept)
    nucleus, mass = [], 0.0
    for token in kept:
        nucleus.append(token)
        mass += float(probabilities[token]) / total
        if mass >= params.top_p:
            break
    best = float(probabilities[order[0]])
    final = [token for token in nucleus if float(probabilities[token]) >= params.min_p * best]
    result = torch.zeros(len(logits), dtype=torch.float64)
    result[final] = probabilities[final]
    return result / result.sum()


def test_splitmix64_vectors() -> None:
    """The noise is that of splitmix64: its first outputs from state 0, by the published reference, give these numbers."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    expected = [-math.log(-math.log(((value >> 12) + 0.5) * 2.0**-52)) for value in published]
    assert gumbel_noise(torch.zeros(1, dtype=torch.int64), torch.arange(3))[0].tolist() == pytest.approx(expected, rel=1e-12)


def test_stream_keys_depend_on_seed_and_position() -> None:
    """Seeds over the whole 64 bits and positions give distinct keys, the same ones each time."""
    seeds = np.repeat(np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64), 1000)
    positions = np.tile(np.arange(1000), 4)
    keys = stream_keys(seeds, positions)
    assert len(set(keys.tolist())) == 4000
    assert np.array_equal(keys[::-1], stream_keys(seeds[::-1], positions[::-1]))


def test_greedy_takes_the_first_of_equal_logits() -> None:
    """Equal logits are decided by the smaller id; top-k, top-p and seed do not matter at temperature 0."""
    logits = torch.zeros(2, VOCAB)
    logits[0, [7, 30]] = 5.0
    sampler = make([GREEDY, SamplingParams(temperature=0.0, top_k=3, top_p=0.5, seed=9)])
    tokens, finite = sampler.sample(logits, np.array([1, 2]), np.array([4, 4]))
    assert tokens.tolist() == [7, 0]
    assert finite.tolist() == [True, True]


def test_greedy_batch_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of greedy rows never reaches the code that makes noise."""

    def refuse(*_args: object) -> None:
        raise AssertionError("noise for a greedy batch")

    monkeypatch.setattr("runtime_service.sampler.gumbel_noise", refuse)
    sampler = make([GREEDY, GREEDY, SamplingParams(temperature=1.0)])
    sampler.sample(torch.randn(2, VOCAB), np.array([1, 2]), np.array([1, 1]))
    with pytest.raises(AssertionError, match="noise for a greedy batch"):
        sampler.sample(torch.randn(1, VOCAB), np.array([3]), np.array([1]))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.6, seed=2**64 - 1),
        SamplingParams(temperature=1.7, min_p=0.05, seed=3),
        SamplingParams(temperature=1.0, top_k=12, seed=4),
        SamplingParams(temperature=1.3, top_p=0.8, seed=5),
        SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.05, seed=6),
    ],
)
def test_distribution(params: SamplingParams) -> None:
    """Tokens drawn at 40,000 positions of one seed follow the softmax of what is kept (chi-square, 4 sigma)."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(17))
    expected = naive_kept(logits, params)
    tokens = draw(make([params]), logits, 1, np.arange(40_000))
    assert chi_square(tokens, expected) < chi_square_bound(int((expected > 0).sum()) - 1)


def test_distribution_over_seeds() -> None:
    """At one position, consecutive seeds draw from the softmax as well, and neighbours are not alike."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(18))
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(20_000)]
    rows = np.arange(1, len(params) + 1)
    tokens = make(params).sample(logits.expand(len(params), -1), rows, np.full(len(params), 3))[0].numpy()
    probabilities = torch.softmax(logits.double(), dim=-1)
    assert chi_square(tokens, probabilities) < chi_square_bound(VOCAB - 1)
    expected_equal = float((probabilities**2).sum())
    deviation = math.sqrt(expected_equal * (1 - expected_equal) / len(tokens))
    assert abs(float((tokens[1:] == tokens[:-1]).mean()) - expected_equal) < 4 * deviation


@pytest.mark.parametrize("top_k", [None, 1, 2, 7, VOCAB, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.99, 0.5, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.5, 1.0])
def test_kept_sets(top_k: int | None, top_p: float, min_p: float) -> None:
    """Exactly the tokens that the definitions keep can be drawn: at a high temperature each of them is, and no other."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(19))
    logits[5] = logits[11] = logits.max() + 0.1  # a tie, which top_k=1 decides by the smaller id
    params = SamplingParams(temperature=1.4, top_k=top_k, top_p=top_p, min_p=min_p, seed=8)
    kept = set(torch.nonzero(naive_kept(logits, params))[:, 0].tolist())
    assert set(draw(make([params]), logits, 1, np.arange(6000)).tolist()) == kept


@pytest.mark.parametrize(
    "truncation", [{"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.9, "min_p": 0.02}]
)
def test_truncation_only_takes_tokens_away(truncation: dict[str, Any]) -> None:
    """Noise belongs to a token id: where truncation leaves the unrestricted draw in, that is the draw."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(24))
    whole = SamplingParams(temperature=1.5, seed=12)
    cut = replace(whole, **truncation)
    kept = naive_kept(logits, cut).numpy() > 0
    free, bound = (draw(make([params]), logits, 1, np.arange(3000)) for params in (whole, cut))
    assert 500 < int(kept[free].sum()) < 2900
    assert np.array_equal(bound[kept[free]], free[kept[free]])


def test_batch_independence() -> None:
    """Each row's token is the same alone, in the whole batch, in any order, and under another row number, bit for bit."""
    generator = torch.Generator().manual_seed(20)
    logits = 3 * torch.randn(60, 500, generator=generator)
    kinds = [
        GREEDY,
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.0, top_k=40),
        SamplingParams(temperature=1.2, top_p=0.9),
        SamplingParams(temperature=0.9, min_p=0.1),
        SamplingParams(temperature=2.0, top_k=100, top_p=0.95, min_p=0.01, min_new_tokens=3),
    ]
    params = [replace(kinds[i % len(kinds)], seed=1000 + i) for i in range(60)]
    rows, positions = np.arange(1, 61), np.arange(60) * 7 % 50
    sampler = make(params, stop_ids=(3,), prompt_len=20)
    together = sampler.sample(logits, rows, positions)[0]
    order = np.random.default_rng(0).permutation(60)
    shuffled = sampler.sample(logits[torch.from_numpy(order)], rows[order], positions[order])[0]
    assert torch.equal(shuffled, together[torch.from_numpy(order)])
    for i in range(60):
        alone = make([params[i]], stop_ids=(3,), prompt_len=20)
        assert alone.sample(logits[i : i + 1], np.array([1]), positions[i : i + 1])[0].item() == together[i].item()


def test_small_noise_of_logits_rarely_changes_a_draw() -> None:
    """Logits that differ in their last digits draw the same tokens, for every kind of truncation."""
    generator = torch.Generator().manual_seed(21)
    logits = 2 * torch.randn(400, 1000, generator=generator)
    noisy = logits + 1e-5 * torch.randn(logits.shape, generator=generator)
    for params in (
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=1.0, top_p=0.9, seed=1),
        SamplingParams(temperature=1.0, top_k=50, min_p=0.01, seed=1),
    ):
        sampler, rows, positions = make([params]), np.ones(400, dtype=np.int64), np.arange(400)
        changed = sampler.sample(logits, rows, positions)[0] != sampler.sample(noisy, rows, positions)[0]
        assert int(changed.sum()) <= 1


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=1.0, seed=5), SamplingParams(temperature=1.0, top_k=2, seed=5)]
)
def test_min_new_tokens(params: SamplingParams) -> None:
    """Stop ids are left out until min_new_tokens tokens follow the prompt, also when a resume starts a lease later on."""
    logits = torch.zeros(VOCAB)
    logits[[4, 9]] = 50.0
    logits[6] = 20.0
    sampler = make([replace(params, min_new_tokens=3)], stop_ids=(9, 4), prompt_len=10)
    before = draw(sampler, logits, 1, np.array([10, 11, 12]))
    after = draw(sampler, logits, 1, np.arange(13, 113))
    assert before.tolist() == [6, 6, 6]
    assert set(after.tolist()) == ({4} if params == GREEDY else {4, 9})
    sampler.release_rows(np.array([1], dtype=np.int32))
    assert draw(sampler, logits, 1, np.array([10])).tolist() == [4]


def test_extreme_parameters() -> None:
    """The ends of every range give a token of the vocabulary: the best one where nothing else is left."""
    logits = 10 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(22))
    best = int(logits.argmax())
    for params in (
        SamplingParams(temperature=5e-324),
        SamplingParams(temperature=1e-30, top_k=5),
        SamplingParams(temperature=100.0, top_k=1),
        SamplingParams(temperature=100.0, top_p=5e-324),
        SamplingParams(temperature=100.0, min_p=1.0),
    ):
        assert set(draw(make([params]), logits, 1, np.arange(50)).tolist()) == {best}
    hot = draw(make([SamplingParams(temperature=100.0, top_k=2**32 - 1, seed=2**64 - 1)]), logits, 1, np.arange(2000))
    assert set(hot.tolist()) == set(range(VOCAB))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits(bad: float, temperature: float) -> None:
    """One bad logit marks its row, and the others draw what they draw without it."""
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(3)]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(23))
    expected = make(params).sample(logits, np.arange(1, 4), np.arange(3))[0]
    logits[1, 17] = bad
    tokens, finite = make(params).sample(logits, np.arange(1, 4), np.arange(3))
    assert finite.tolist() == [True, False, True]
    assert tokens[[0, 2]].tolist() == expected[[0, 2]].tolist()


def test_rows_forget_their_tenant() -> None:
    """A released or reset row is greedy, and a new lease replaces every parameter of the old one."""
    logits = torch.zeros(VOCAB)
    logits[2] = 1.0
    hot = SamplingParams(temperature=50.0, top_k=30, top_p=0.99, min_p=0.001, seed=3, min_new_tokens=90)
    for forget in ("release", "reset", "lease"):
        sampler = make([hot], stop_ids=(2,), prompt_len=1)
        assert len(set(draw(sampler, logits, 1, np.arange(200)).tolist())) > 5
        if forget == "release":
            sampler.release_rows(np.array([1], dtype=np.int32))
        elif forget == "reset":
            sampler.reset()
        else:
            sampler.start_leases([LeaseStart(1, "next")])
        assert set(draw(sampler, logits, 1, np.arange(200)).tolist()) == {2}
