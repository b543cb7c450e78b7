"""A real model end to end in one process: the directory that `make model` writes, through the mirror, to text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from runtime_service.batch_builder import BatchBuilder
from runtime_service.executors.base import Capacity
from runtime_service.executors.transformer import TransformerExecutor, create_transformer
from runtime_service.ops import ForwardOp, LeaseStart, SamplingParams
from runtime_service.req_to_page import ReqToPage
from runtime_service.settings import RuntimeSettings

tokenizers = pytest.importorskip("tokenizers", reason="prompts as text need the extra `text`")

MODEL = Path(__file__).resolve().parents[2] / "models" / "smollm2-135m-instruct"
if not (MODEL / "model.safetensors").is_file():
    pytest.skip("models/smollm2-135m-instruct is not there: run `make model`", allow_module_level=True)

PROMPT = "The capital of France is"
GREEDY_TEXT = " Paris.\n\nThe answer is: 2018-01-22 "
MAX_ROWS = 4


@pytest.fixture(scope="module")
def loaded() -> tuple[TransformerExecutor, Capacity]:
    return create_transformer(RuntimeSettings(model=str(MODEL), device="cpu", page_size=16, num_pages=24, max_rows=MAX_ROWS))


def generate(
    loaded: tuple[TransformerExecutor, Capacity],
    prompts: list[list[int]],
    chunk: int,
    sampling: SamplingParams,
    num_tokens: int = 20,
) -> list[list[int]]:
    """Runs prompts side by side: first in chunks of `chunk` tokens, then decoding; returns `num_tokens` tokens of each."""
    executor, capacity = loaded
    executor.reset()
    mirror = ReqToPage(MAX_ROWS, capacity.max_pages_per_row, capacity.num_pages, 16)
    builder = BatchBuilder(mirror, "cpu")
    last_tokens = torch.zeros(MAX_ROWS + 1, dtype=torch.int64)
    rows = np.arange(1, len(prompts) + 1, dtype=np.int32)
    lens = [-(-(len(prompt) + num_tokens) // 16) for prompt in prompts]
    # From the highest id down, so that pages lie in an order of their own.
    pages = np.arange(capacity.num_pages, capacity.num_pages - sum(lens), -1, dtype=np.int32)
    executor.start_leases([LeaseStart(int(row), f"request {row}", sampling) for row in rows])
    done = [0] * len(prompts)
    outputs: list[list[int]] = [[] for _ in prompts]
    step = 0
    while min(map(len, outputs)) < num_tokens:
        # Extend rows first, as in any op.
        order = sorted(range(len(prompts)), key=lambda i: done[i] >= len(prompts[i]))
        extend = [i for i in order if done[i] < len(prompts[i])]
        inputs = [min(chunk, len(prompts[i]) - done[i]) if i in extend else 1 for i in order]
        first = step == 0
        starts = np.cumsum([0, *lens])
        op = ForwardOp(
            session_no=1,
            step=(step := step + 1),
            req_pool_indices=rows[order],
            row_generations=np.ones(len(order), dtype=np.int32),
            row_lens=np.array([lens[i] for i in order], dtype=np.int32),
            begins=np.array([0 if first else lens[i] for i in order], dtype=np.int32),
            sizes=np.array([lens[i] if first else 0 for i in order], dtype=np.int32),
            full_refresh=np.full(len(order), first),
            occupied_pages=np.concatenate([pages[starts[i] : starts[i + 1] if first else starts[i]] for i in order]),
            num_computed=np.array([done[i] for i in order], dtype=np.int32),
            num_extend_rows=len(extend),
            input_lens=np.array(inputs, dtype=np.int32),
            input_ids=np.array(sum((prompts[i][done[i] : done[i] + chunk] for i in extend), []), dtype=np.int32),
            sample=np.array([done[i] + n >= len(prompts[i]) for i, n in zip(order, inputs, strict=True)]),
            released_rows=np.zeros(0, dtype=np.int32),
        )
        mirror.apply(op)
        result = executor.execute(builder.build(op, last_tokens))
        for place, i in enumerate(order):
            done[i] += inputs[place]
            if op.sample[place]:
                outputs[i].append(int(result.tokens[place]))
                last_tokens[rows[i]] = outputs[i][-1]
    return [output[:num_tokens] for output in outputs]


def test_greedy_reference(loaded: tuple[TransformerExecutor, Capacity]) -> None:
    """The published greedy continuation, token for token, although the checkpoint is bfloat16: on a CPU it runs in float32."""
    executor, capacity = loaded
    assert (executor.info.dtype, executor.info.max_context, capacity.max_pages_per_row) == ("float32", 8192, 24)
    assert executor.info.default_stop_ids == (2,)
    assert executor.info.tokenizer_path == MODEL
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    (tokens,) = generate(loaded, [tokenizer.encode(PROMPT).ids], 512, SamplingParams())
    assert tokenizer.decode(tokens) == GREEDY_TEXT


def test_batch_and_chunks_do_not_change_the_text(loaded: tuple[TransformerExecutor, Capacity]) -> None:
    """Greedy and sampled text are the same alone and whole, and among others in chunks of four tokens."""
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in (PROMPT, "Once upon a time there was a small dog who")]
    for sampling in (SamplingParams(), SamplingParams(temperature=0.8, top_p=0.95, seed=11)):
        alone = [generate(loaded, [prompt], 512, sampling, 8)[0] for prompt in prompts]
        assert generate(loaded, prompts, 4, sampling, 8) == alone
