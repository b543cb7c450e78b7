"""The transformer executor: creation, limits, and what a step may touch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from runtime_service.batch_builder import BatchBuilder
from runtime_service.errors import SettingError
from runtime_service.executors import transformer
from runtime_service.executors.base import ExecutionResult, ModelExecutor
from runtime_service.executors.transformer import TransformerExecutor, create_transformer
from runtime_service.forward_batch import ForwardBatch
from runtime_service.models import attention
from runtime_service.models.config import ModelConfig
from runtime_service.models.errors import ModelConfigError, WeightsError
from runtime_service.models.tiny import END_ID, TINY_CONFIG, tiny_tensors
from runtime_service.ops import NO_TOKEN, ForwardOp, LeaseStart, RowStatus, SamplingParams
from runtime_service.req_to_page import ReqToPage
from runtime_service.settings import RuntimeSettings

PAGE_SIZE = 4
MAX_ROWS = 5
NUM_PAGES = 40
Rows = dict[int, tuple[list[int], int, list[int]]]
SMALL = ModelConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    dtype="bfloat16",
)


def settings(model: Path | str = "tiny", **changes: Any) -> RuntimeSettings:
    values: dict[str, Any] = dict(model=str(model), device="cpu", page_size=PAGE_SIZE, num_pages=NUM_PAGES, max_rows=MAX_ROWS)
    return RuntimeSettings(**(values | changes))


def write_model(directory: Path, **changes: Any) -> Path:
    """A Hugging Face directory of SMALL, its config.json changed."""
    directory.mkdir(exist_ok=True)
    data = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": SMALL.vocab_size,
        "hidden_size": SMALL.hidden_size,
        "intermediate_size": SMALL.intermediate_size,
        "num_hidden_layers": SMALL.num_layers,
        "num_attention_heads": SMALL.num_heads,
        "num_key_value_heads": SMALL.num_kv_heads,
        "max_position_embeddings": SMALL.max_position,
        "eos_token_id": [7, 8],
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(data | changes))
    save_file({name: tensor.bfloat16() for name, tensor in tiny_tensors(SMALL).items()}, directory / "model.safetensors")
    return directory


class Rig:
    """An executor behind a mirror; ops are written by hand."""

    def __init__(self, executor: TransformerExecutor, width: int = 8) -> None:
        self.executor = executor
        self.mirror = ReqToPage(MAX_ROWS, width, executor.cache.num_pages, PAGE_SIZE)
        self.builder = BatchBuilder(self.mirror, "cpu")
        self.last_tokens = torch.zeros(MAX_ROWS + 1, dtype=torch.int64)
        self.step = 0

    def batch(self, rows: Rows, sample: list[bool] | None = None) -> ForwardBatch:
        """Rows as `row: (pages, num_computed, input ids)`, whole rows refreshed; no ids makes a decode row (listed last)."""
        self.step += 1
        pages, computed, ids = (list(column) for column in zip(*rows.values(), strict=True))
        lens = np.array([len(row) for row in pages], dtype=np.int32)
        op = ForwardOp(
            session_no=1,
            step=self.step,
            req_pool_indices=np.array(list(rows), dtype=np.int32),
            row_generations=np.ones(len(rows), dtype=np.int32),
            row_lens=lens,
            begins=np.zeros(len(rows), dtype=np.int32),
            sizes=lens,
            full_refresh=np.ones(len(rows), dtype=np.bool_),
            occupied_pages=np.array(sum(pages, []), dtype=np.int32),
            num_computed=np.array(computed, dtype=np.int32),
            num_extend_rows=sum(map(bool, ids)),
            input_lens=np.array([len(tokens) or 1 for tokens in ids], dtype=np.int32),
            input_ids=np.array(sum(ids, []), dtype=np.int32),
            sample=np.array(sample or [True] * len(rows)),
            released_rows=np.zeros(0, dtype=np.int32),
        )
        self.mirror.apply(op)
        return self.builder.build(op, self.last_tokens)

    def run(self, rows: Rows, sample: list[bool] | None = None) -> ExecutionResult:
        result = self.executor.execute(self.batch(rows, sample))
        for row, token in zip(rows, result.tokens.tolist(), strict=True):
            self.last_tokens[row] = max(token, 0)
        return result

    def greedy(self, prompt: list[int], num_tokens: int, pages: list[int]) -> list[int]:
        """A prompt alone, prefilled at once."""
        tokens = [int(self.run({1: (pages, 0, prompt)}).tokens[0])]
        while len(tokens) < num_tokens:
            tokens.append(int(self.run({1: (pages, len(prompt) + len(tokens) - 1, [])}).tokens[0]))
        return tokens


@pytest.fixture
def rig() -> Rig:
    rig = Rig(create_transformer(settings())[0])
    for layer in rig.executor.cache.layers:
        layer.fill_(torch.nan)
    return rig


def test_tiny_model() -> None:
    """`--model tiny` needs no files, says what it is, and fits the protocol."""
    executor, capacity = create_transformer(settings(num_pages=None, kv_cache_gib=0.01))
    protocol: ModelExecutor = executor
    info = protocol.info
    assert (info.name, info.architecture, info.vocab_size, info.max_context) == ("tiny", "LlamaForCausalLM", 259, 4096)
    assert (info.default_stop_ids, info.tokenizer_path, info.device, info.dtype) == ((END_ID,), None, "cpu", "float32")
    # A page takes 2 layers * 2 * 4 tokens * 2 heads * 16 * 4 bytes = 2 KiB; one of them is the dummy page.
    assert capacity.num_pages == int(0.01 * 2**30) // 2048 - 1 == executor.cache.num_pages
    assert capacity.max_pages_per_row == 4096 // PAGE_SIZE


def test_tiny_text_is_seeded_and_lively(rig: Rig) -> None:
    """Greedy bytes are the same for every instance, many different ones, never specials, and depend on the first token."""
    prompt = list(b"Hello, world")
    tokens = rig.greedy(prompt, 20, [3, 1, 2, 9, 8, 7, 20, 21])
    again = Rig(create_transformer(settings())[0]).greedy(prompt, 20, [30, 4, 12, 13, 14, 15, 16, 17])
    assert tokens == again
    assert bool((tiny_tensors()["lm_head.weight"][256:] == 0).all())
    assert max(tokens) < 256
    assert len(set(tokens)) > 10
    assert rig.greedy([prompt[0] ^ 1, *prompt[1:]], 20, [3, 1, 2, 9, 8, 7, 20, 21]) != tokens


def test_directory(tmp_path: Path) -> None:
    """A checkpoint in bfloat16 runs in float32 on a CPU unless asked otherwise; limits and stop ids come from config.json."""
    directory = write_model(tmp_path / "model")
    executor, capacity = create_transformer(settings(directory))
    assert executor.decoder.weights.embedding.dtype == executor.cache.layers[0].dtype == torch.float32
    info = executor.info
    assert (info.name, info.dtype, info.max_context) == (str(directory), "float32", 64)
    assert (info.default_stop_ids, info.tokenizer_path) == ((7, 8), None)
    assert capacity.max_pages_per_row == 64 // PAGE_SIZE
    (directory / "tokenizer.json").write_text("{}")
    executor, _ = create_transformer(settings(directory, dtype="bfloat16"))
    assert executor.decoder.weights.embedding.dtype == executor.cache.layers[0].dtype == torch.bfloat16
    assert (executor.info.dtype, executor.info.tokenizer_path) == ("bfloat16", directory)
    assert 0 <= Rig(executor).greedy([1, 2, 3], 1, [5])[0] < 50


def test_both_forms_of_config_give_equal_logits(tmp_path: Path) -> None:
    """The two forms of RoPE keys load to bit-equal logits, and another base to other ones."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    new = write_model(tmp_path / "new", rope_parameters={"rope_type": "llama3", "rope_theta": 100.0, **scaling})
    old = write_model(tmp_path / "old", rope_theta=100.0, rope_scaling={"type": "llama3", **scaling}, torch_dtype="bfloat16")
    other = write_model(tmp_path / "other", rope_scaling={"type": "llama3", **scaling})
    logits = []
    for directory in (new, old, other):
        rig = Rig(create_transformer(settings(directory))[0])
        logits.append(rig.executor.forward(rig.batch({1: ([4, 2, 6], 0, list(range(10)))}), np.array([0])))
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2], atol=1e-3)


def test_capacity_follows_the_settings(tmp_path: Path) -> None:
    """A row is as wide as max_context needs, never wider than the pool, unless the width is stated."""
    directory = write_model(tmp_path / "model")
    for changes, pages_per_row, max_context in (
        ({"max_context": 30}, 8, 30),
        ({"num_pages": 5}, 5, 64),
        ({"max_pages_per_row": 3}, 3, 64),
    ):
        executor, capacity = create_transformer(settings(directory, **changes))
        assert (capacity.max_pages_per_row, executor.info.max_context) == (pages_per_row, max_context)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_context": 65}, "--max-context: 65 is not within [1, 64]"),
        (
            {"num_pages": None, "kv_cache_gib": 1e-6},
            "--kv-cache-gib: 1e-06 leaves 1073 bytes for KV pages, and two pages take 2048",
        ),
        ({"num_pages": 2**31 - 2, "page_size": 256}, "--num-pages: 2147483646 takes 131072.0 GiB on cpu"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    """A setting that model or machine does not allow is an error with value and limit."""
    directory = write_model(tmp_path / "model")
    with pytest.raises(SettingError) as caught:
        create_transformer(settings(directory, **changes))
    assert words in str(caught.value)


def test_device_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, auto is the CPU and cuda an error that says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert create_transformer(settings(device="auto"))[0].info.device == "cpu"
    with pytest.raises(SettingError, match="--device: cuda needs a GPU"):
        create_transformer(settings(device="cuda"))


def test_gpu_dtype_is_the_checkpoints() -> None:
    """On a GPU, auto takes the checkpoint's dtype, float32 where it states none, and refuses to guess for float16."""
    cuda = torch.device("cuda", 0)
    assert transformer._dtype("auto", SMALL, cuda) == torch.bfloat16
    assert transformer._dtype("auto", replace(SMALL, dtype=None), cuda) == torch.float32
    with pytest.raises(SettingError, match="--dtype: float16 is not one of float32, bfloat16"):
        transformer._dtype("auto", replace(SMALL, dtype="float16"), cuda)


def test_no_such_model(tmp_path: Path) -> None:
    """A missing directory and one without weights are errors that name it."""
    with pytest.raises(ModelConfigError, match="does not exist"):
        create_transformer(settings(tmp_path / "absent"))
    directory = write_model(tmp_path / "model")
    (directory / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="has neither"):
        create_transformer(settings(directory))


def test_warm_up_touches_no_usable_page(rig: Rig) -> None:
    """Warming up runs the model on the dummy page alone and leaves sampling parameters as they were."""
    rig.executor.warm_up()
    for layer in rig.executor.cache.layers:
        assert bool(layer[:, 1:].isnan().all())
        assert not bool(layer[:, 0, 0].isnan().any())


def test_a_step_writes_only_its_own_slots(rig: Rig) -> None:
    """Positions [num_computed, num_computed + input_len) of each row are written, every other cell stays bit for bit."""
    rig.run({1: ([7, 3], 0, [1, 2, 3, 4, 5])})
    before = [layer.clone() for layer in rig.executor.cache.layers]
    rig.run({2: ([9, 4], 0, [5, 6, 7, 8, 9, 10]), 1: ([7, 3, 5], 5, [])})
    written = torch.zeros(NUM_PAGES + 1, PAGE_SIZE, dtype=torch.bool)
    written[9], written[4, :2], written[3, 1] = True, True, True
    for old, new in zip(before, rig.executor.cache.layers, strict=True):
        changed = (old.view(torch.int32) != new.view(torch.int32)).any(dim=-1).any(dim=-1)
        assert torch.equal(changed[0], written)
        assert torch.equal(changed[1], written)


def test_clamped_row(rig: Rig) -> None:
    """A row wider than the mirror gets no token and writes past the width only to the dummy page; its neighbour is unharmed."""
    neighbour = rig.run({2: ([20, 21, 22, 23, 24, 25, 26, 27], 0, list(range(30)))})
    rig.run({1: ([1, 2, 3, 4, 5, 6, 7, 8], 0, list(range(31)))})
    before = [layer.clone() for layer in rig.executor.cache.layers]
    rows = {1: ([1, 2, 3, 4, 5, 6, 7, 8, 9], 31, [40, 41, 42]), 2: ([20, 21, 22, 23, 24, 25, 26, 27], 30, [])}
    result = rig.run(rows)
    assert result.row_status.tolist() == [RowStatus.CLAMPED, RowStatus.OK]
    assert result.tokens[0] == NO_TOKEN
    written = torch.zeros(NUM_PAGES + 1, PAGE_SIZE, dtype=torch.bool)
    written[8, 3] = written[27, 2] = True
    for old, new in zip(before, rig.executor.cache.layers, strict=True):
        changed = (old.view(torch.int32) != new.view(torch.int32)).any(dim=-1).any(dim=-1)
        assert torch.equal(changed[:, 1:], written[1:].expand(2, -1, -1))
    alone = Rig(create_transformer(settings())[0])
    alone.run({2: ([20, 21, 22, 23, 24, 25, 26, 27], 0, list(range(30)))})
    alone.last_tokens[2] = int(neighbour.tokens[0])
    assert alone.run({2: rows[2]}).tokens[0] == result.tokens[1]
    decode = rig.run({1: ([1, 2, 3, 4, 5, 6, 7, 8, 9], 34, []), 2: ([20, 21, 22, 23, 24, 25, 26, 27], 31, [])})
    assert decode.row_status.tolist() == [RowStatus.CLAMPED, RowStatus.OK]


def test_non_finite_row_is_alone_in_it(rig: Rig) -> None:
    """A row whose KV turned into not-a-number gets status NON_FINITE and no token; the others' logits keep every bit."""
    rows: Rows = {1: ([1, 2], 6, []), 2: ([3, 4, 5], 9, []), 3: ([6], 2, [])}
    for row, (pages, computed, _) in rows.items():
        rig.run({row: (pages, 0, list(range(row, row + computed)))})
    clean = rig.executor.forward(rig.batch(rows), np.arange(3)).clone()
    rig.executor.cache.layers[1][1, 4, 0, 1, 5] = torch.nan
    poisoned = rig.executor.forward(rig.batch(rows), np.arange(3))
    assert torch.equal(poisoned[[0, 2]], clean[[0, 2]])
    result = rig.run(rows)
    assert result.row_status.tolist() == [RowStatus.OK, RowStatus.NON_FINITE, RowStatus.OK]
    assert result.tokens.tolist() == [int(clean[0].argmax()), NO_TOKEN, int(clean[2].argmax())]


def test_rows_that_want_no_token(rig: Rig) -> None:
    """A chunk that leaves prompt tokens gets -1 and status OK; so may a whole batch, and a batch may be empty."""
    result = rig.run({1: ([1, 2], 0, [1, 2, 3]), 2: ([3], 0, [4, 5])}, [False, True])
    assert result.tokens[0] == NO_TOKEN
    assert result.tokens[1] >= 0
    assert result.row_status.tolist() == [0, 0]
    assert rig.run({1: ([1, 2], 3, [1, 2])}, [False]).tokens.tolist() == [NO_TOKEN]
    empty = rig.batch({1: ([1, 2], 5, [1])})
    none = np.zeros(0, dtype=np.int32)
    empty.host_rows = empty.host_num_computed = empty.host_input_lens = none
    empty.sample = empty.clamped = np.zeros(0, dtype=np.bool_)
    assert rig.executor.execute(empty).tokens.tolist() == []


def test_long_batches_are_cut(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode rows that together are too long for one gather attend in several calls, to the same effect."""
    rows: Rows = {1: ([1, 2], 6, []), 2: ([3, 4, 5], 9, []), 3: ([6], 2, []), 4: ([7, 8], 7, [])}
    for row, (pages, computed, _) in rows.items():
        rig.run({row: (pages, 0, list(range(row, row + computed)))})
    whole = rig.executor.forward(rig.batch(rows), np.arange(4)).clone()
    for limit, expected in ((20, [2, 2]), (1, [1, 1, 1, 1]), (30, [3, 1])):
        monkeypatch.setattr(attention, "MAX_GATHERED_TOKENS", limit)
        batch = rig.batch(rows)
        assert [reads.end - reads.begin for reads in attention.plan_attention(batch).decode] == expected
        torch.testing.assert_close(rig.executor.forward(batch, np.arange(4)), whole, rtol=0, atol=1e-5)


def test_sampling_parameters_follow_the_row(rig: Rig) -> None:
    """A lease's seed and temperature decide its tokens, the same after a retraction to another row and other pages."""
    params = SamplingParams(temperature=3.0, top_p=0.99, seed=77)
    prompt = list(b"seeded")
    rig.executor.start_leases([LeaseStart(1, "a", params), LeaseStart(2, "b", replace(params, seed=78))])
    outputs: dict[int, list[int]] = {1: [], 2: []}
    result = rig.run({1: ([1, 2, 3, 4], 0, prompt), 2: ([5, 6, 7, 8], 0, prompt)})
    for i in range(7):
        outputs[1].append(int(result.tokens[0]))
        outputs[2].append(int(result.tokens[1]))
        result = rig.run({1: ([1, 2, 3, 4], 6 + i, []), 2: ([5, 6, 7, 8], 6 + i, [])})
    assert outputs[1] != outputs[2]
    rig.executor.release_rows(np.array([1, 2], dtype=np.int32))
    rig.executor.start_leases([LeaseStart(4, "a", params)])
    resumed = [int(rig.run({4: ([11, 12, 13, 14], 0, prompt + outputs[1][:3])}).tokens[0])]
    resumed += [int(rig.run({4: ([11, 12, 13, 14], 9 + i, [])}).tokens[0]) for i in range(3)]
    assert resumed == outputs[1][3:7]
    rig.executor.reset()
    assert rig.greedy(prompt, 4, [1, 2, 3, 4]) == Rig(create_transformer(settings())[0]).greedy(prompt, 4, [1, 2, 3, 4])
    assert TINY_CONFIG.vocab_size == rig.executor.info.vocab_size
