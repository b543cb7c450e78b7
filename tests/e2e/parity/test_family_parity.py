"""Logits of every supported family against transformers on the same weights, through the mirror, whatever pages do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

PAGE_SIZE = 4
MAX_ROWS = 8
LENGTHS = (1, 2, 3, 5, 31, 64, 129, 300)


def test_logits_are_large_enough_to_compare(pair: Any) -> None:
    """The tolerance is far below the spread of the logits, so agreement means something."""
    with torch.no_grad():
        logits = pair.reference(input_ids=torch.arange(97)[None]).logits
    assert logits.std() > 0.5


def test_prompts_of_1_to_300_tokens(pair: Any) -> None:
    """Prompts from 1 to 300 tokens in one step, then decode steps of rows of such different lengths."""
    generator = np.random.default_rng(0)
    rig = pair.rig
    sequences = [pair.sequence(generator, length + 3) for length in LENGTHS]
    for sequence in sequences:
        rig.start(sequence)
    pair.check(rig.step(*zip(sequences, LENGTHS, strict=True)))
    for _ in range(3):
        pair.check(rig.step(*((sequence, 0) for sequence in sequences)))
    assert pair.num_compared == 4 * len(LENGTHS)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill(pair: Any, chunk: int) -> None:
    """Prompts in chunks of one size, so that chunks of all rows meet cached ones of different lengths."""
    generator = np.random.default_rng(chunk)
    rig = pair.rig
    sequences = [pair.sequence(generator, length) for length in (chunk * 3 + 1, chunk * 4, 2, 5 * chunk // 2)]
    for sequence in sequences:
        rig.start(sequence)
    while work := [
        (sequence, min(chunk, len(sequence.tokens) - sequence.num_computed))
        for sequence in sequences
        if sequence.num_computed < len(sequence.tokens)
    ]:
        pair.check(rig.step(*work))


def test_mixed_prefill_and_decode(pair: Any) -> None:
    """Chunks of one to many tokens, decodes beside them, rows of different lengths: each step's logits agree."""
    generator = np.random.default_rng(1)
    rig = pair.rig
    first, second, third = (pair.sequence(generator, 60) for _ in range(3))
    for sequence in (first, second, third):
        rig.start(sequence)
    pair.check(rig.step((first, 13)))
    pair.check(rig.step((first, 0), (second, 1)))
    pair.check(rig.step((first, 0), (second, 6), (third, 17)))
    pair.check(rig.step((first, 7), (second, 0), (third, 3)))
    for _ in range(6):
        pair.check(rig.step((second, 0), (third, 0), (first, 0)))


def test_cached_prefixes(pair: Any) -> None:
    """A sequence that starts on pages another one wrote computes the same as one that starts cold."""
    generator = np.random.default_rng(2)
    rig = pair.rig
    system = generator.integers(0, 97, 3 * PAGE_SIZE).tolist()
    first, second, third = (pair.sequence(generator, 30, system) for _ in range(3))
    rig.start(first)
    pair.check(rig.step((first, 18)))
    rig.start(second, first.pages[:3])
    rig.start(third, first.pages[:2])
    pair.check(rig.step((first, 0), (second, 9), (third, 5)))
    pair.check(rig.step((first, 0), (second, 0), (third, 12)))
    pair.check(rig.step((third, 0), (second, 0), (first, 0)))


def test_forced_retraction_and_resume(pair: Any) -> None:
    """Rows are taken away mid-stream, their pages poisoned and granted to others, and recomputed elsewhere in chunks."""
    generator = np.random.default_rng(3)
    rig = pair.rig
    system = generator.integers(0, 97, 2 * PAGE_SIZE).tolist()
    victim, holder, guest = (pair.sequence(generator, 50, system) for _ in range(3))
    rig.start(holder)
    pair.check(rig.step((holder, 11)))
    rig.start(victim, holder.pages[:2])
    pair.check(rig.step((victim, 8), (holder, 0)))
    pair.check(rig.step((victim, 0), (holder, 0)))
    lost = set(victim.pages[2:])
    rig.retract(victim)
    rig.start(guest)
    pair.check(rig.step((guest, 21), (holder, 0)))
    assert lost & set(guest.pages), "the guest should have been granted pages that the victim lost"
    rig.start(victim, holder.pages[:2])
    pair.check(rig.step((victim, 5), (guest, 0), (holder, 0)))
    pair.check(rig.step((victim, 4), (guest, 0), (holder, 0)))
    pair.check(rig.step((victim, 0), (guest, 0), (holder, 0)))
    assert victim.num_computed == 18


def test_random_schedules(pair: Any) -> None:
    """Sixty random steps, with prefix sharing, retraction and row numbers that change hands."""
    generator = np.random.default_rng(4)
    rig = pair.rig
    system = generator.integers(0, 97, 2 * PAGE_SIZE).tolist()
    keeper = pair.sequence(generator, 80, system)
    rig.start(keeper)
    pair.check(rig.step((keeper, len(system))))
    live: list[Any] = []
    for _ in range(60):
        if len(live) < MAX_ROWS - 1 and generator.random() < 0.5:
            sequence = pair.sequence(generator, 24, system)
            rig.start(sequence, keeper.pages[: generator.integers(0, 3)])
            live.append(sequence)
        if live and generator.random() < 0.3:
            rig.retract(live.pop(int(generator.integers(len(live)))))
        work = [(keeper, 0)] if keeper.num_computed < len(keeper.tokens) else []
        for sequence in live:
            left = len(sequence.tokens) - sequence.num_computed
            if left:
                started = sequence.num_computed > sequence.num_shared * PAGE_SIZE
                count = int(generator.integers(1, min(left, 9) + 1))
                work.append((sequence, 0 if started and generator.random() < 0.5 else count))
        if work:
            pair.check(rig.step(*work))


def test_greedy_text_is_the_references(pair: Any) -> None:
    """Twenty greedy tokens through the executor are those of the reference, recomputed from scratch each time."""
    generator = np.random.default_rng(5)
    sequence = pair.sequence(generator, 9)
    pair.rig.start(sequence)
    for i in range(20):
        batch = pair.rig.build([(sequence, 9 if i == 0 else 0)])
        result = pair.rig.executor.execute(batch).wait()
        with torch.no_grad():
            expected = int(pair.reference(input_ids=torch.tensor([sequence.tokens])).logits[0, -1].argmax())
        assert result.tokens.tolist() == [expected]
        sequence.tokens.append(expected)


@pytest.mark.parametrize("family", ["llama3_sharded", "qwen3"])
def test_kernel_backend(make_pair: Callable[..., Any], family: str) -> None:
    """The path through the kernels' public functions, here their naive twins, computes what the gathering one does."""
    pair = make_pair(family, {"attention_backend": "triton"})
    assert pair.rig.executor.decoder.attention_backend == "triton"
    generator = np.random.default_rng(6)
    rig = pair.rig
    system = generator.integers(0, 97, 3 * PAGE_SIZE).tolist()
    first, second, third = (pair.sequence(generator, 20, system) for _ in range(3))
    for sequence in (first, second):
        rig.start(sequence)
    pair.check(rig.step((first, 13), (second, 2)))
    rig.start(third, first.pages[:3])
    pair.check(rig.step((first, 0), (second, 6), (third, 5)))
    for _ in range(3):
        pair.check(rig.step((first, 0), (second, 0), (third, 0)))
