"""An executor beside transformers' model of the same weights, and a scheduler by hand that does everything that pages do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime_service.batch_builder import BatchBuilder
from runtime_service.executors.transformer import TransformerExecutor, create_transformer
from runtime_service.forward_batch import ForwardBatch
from runtime_service.ops import ForwardOp, LeaseStart
from runtime_service.req_to_page import ReqToPage
from runtime_service.settings import RuntimeSettings

PAGE_SIZE = 4
MAX_ROWS = 8
NUM_PAGES = 256
VOCAB_SIZE = 97
COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE, hidden_size=48, intermediate_size=80, num_hidden_layers=3, max_position_embeddings=512
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", dict(num_attention_heads=4, num_key_value_heads=4, rope_parameters={"rope_theta": 10000.0})),
    "llama3_sharded": (
        "Llama",
        dict(num_attention_heads=6, num_key_value_heads=2, head_dim=16, rope_parameters=LLAMA3_ROPE),
    ),
    "llama_linear_biased": (
        "Llama",
        dict(
            num_attention_heads=4,
            num_key_value_heads=1,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters={"rope_type": "linear", "rope_theta": 3000.0, "factor": 4.0},
        ),
    ),
    "smollm2": (
        "Llama",
        dict(num_attention_heads=9, num_key_value_heads=3, hidden_size=72, tie_word_embeddings=True, rope_theta=100000.0),
    ),
    "mistral": ("Mistral", dict(num_attention_heads=6, num_key_value_heads=2, head_dim=16, sliding_window=320)),
    "qwen2": (
        "Qwen2",
        dict(num_attention_heads=6, num_key_value_heads=3, tie_word_embeddings=True, rope_parameters={"rope_theta": 1e6}),
    ),
    "qwen3": ("Qwen3", dict(num_attention_heads=4, num_key_value_heads=2, head_dim=24, rope_parameters={"rope_theta": 1e6})),
}


def make_reference(family: str, directory: Path, **changes: Any) -> torch.nn.Module:
    """A seeded model of a family, saved to the directory."""
    transformers = pytest.importorskip("transformers", reason="the reference implementation needs the extra `convert`")
    name, values = FAMILIES[family]
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(
        **(COMMON | dict(initializer_range=0.25, rms_norm_eps=1e-5, pad_token_id=None, eos_token_id=1) | values | changes)
    )
    reference = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    reference.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter_name, parameter in reference.named_parameters():
            if parameter_name.endswith(("norm.weight", ".bias")):  # otherwise ones and zeros, which hide mistakes
                parameter.add_(0.3 * torch.randn(parameter.shape))
    sharded = family.endswith("sharded")
    reference.save_pretrained(directory, max_shard_size="60KB" if sharded else "5GB")
    assert (directory / "model.safetensors.index.json").exists() == sharded
    return reference


def load(directory: Path, device: str, **changes: Any) -> Rig:
    """The executor of a saved model, as a user would have it made."""
    values: dict[str, Any] = dict(
        model=str(directory),
        device=device,
        dtype="float32",
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        max_rows=MAX_ROWS,
        max_context=320,
    )
    executor, capacity = create_transformer(RuntimeSettings(**(values | changes)))
    return Rig(executor, capacity.num_pages, capacity.max_pages_per_row)


@dataclass
class Sequence:
    """A request with known tokens: its row, its pages, and how much is computed."""

    tokens: list[int]
    row: int = 0
    pages: list[int] = field(default_factory=list)
    num_shared: int = 0  # pages at the start that belong to another sequence
    num_computed: int = 0
    num_sent: int = 0  # length of the row as last sent in this lease


class Rig:
    """A hand-driven scheduler: grants pages, builds ops, applies them to a real mirror and runs the executor.

    Free pages hold not-a-number, the dummy page as well, so that any read of what a sequence did not write shows.
    """

    def __init__(self, executor: TransformerExecutor, num_pages: int, width: int) -> None:
        self.executor = executor
        device = executor.info.device
        self.mirror = ReqToPage(MAX_ROWS, width, num_pages, PAGE_SIZE, device)
        self.builder = BatchBuilder(self.mirror, device)
        self.last_tokens = torch.zeros(MAX_ROWS + 1, dtype=torch.int64, device=device)
        self.free_pages = list(range(num_pages, 0, -1))
        self.free_rows = list(range(MAX_ROWS, 0, -1))
        self.released: list[int] = []
        self.num_steps = 0
        for layer in executor.cache.layers:
            layer.fill_(torch.nan)

    def start(self, sequence: Sequence, shared: list[int] | None = None) -> None:
        """Begins a lease whose first pages are another sequence's, already computed."""
        sequence.row = self.free_rows.pop()
        sequence.pages = list(shared or [])
        sequence.num_shared = len(sequence.pages)
        sequence.num_computed = sequence.num_shared * PAGE_SIZE
        sequence.num_sent = 0

    def retract(self, sequence: Sequence) -> None:
        """Takes row and pages away and poisons what is nobody's any more."""
        own = sequence.pages[sequence.num_shared :]
        for layer in self.executor.cache.layers:
            layer[:, own] = torch.nan
        self.free_pages += own
        self.free_rows.append(sequence.row)
        self.released.append(sequence.row)
        sequence.row = 0

    def build(self, work: list[tuple[Sequence, int]]) -> ForwardBatch:
        """Plans one step, `(sequence, tokens)` each, 0 tokens for a decode, and applies it to the mirror."""
        work = sorted(work, key=lambda item: item[1] == 0)
        self.num_steps += 1
        columns: dict[str, list[int]] = {name: [] for name in ("rows", "lens", "begins", "sizes", "computed", "inputs")}
        pages, ids, full, leases = [], [], [], []
        for sequence, count in work:
            end = sequence.num_computed + max(count, 1)
            while len(sequence.pages) * PAGE_SIZE < end:
                sequence.pages.append(self.free_pages.pop())
            fresh = sequence.num_sent == 0
            full.append(fresh)
            begin = min(sequence.num_sent, len(sequence.pages))
            pages += sequence.pages if fresh else sequence.pages[begin:]
            if count:
                ids += sequence.tokens[sequence.num_computed : end]
            else:
                self.last_tokens[sequence.row] = sequence.tokens[sequence.num_computed]
            if fresh:
                leases.append(LeaseStart(sequence.row, f"row{sequence.row}"))
            numbers = (
                sequence.row,
                len(sequence.pages),
                begin,
                len(sequence.pages) - begin,
                sequence.num_computed,
                max(count, 1),
            )
            for column, number in zip(columns.values(), numbers, strict=True):
                column.append(number)
            sequence.num_sent, sequence.num_computed = len(sequence.pages), end
        arrays = {name: np.array(column, dtype=np.int32) for name, column in columns.items()}
        released, self.released = self.released, []
        op = ForwardOp(
            session_no=1,
            step=self.num_steps,
            req_pool_indices=arrays["rows"],
            row_generations=np.ones(len(work), dtype=np.int32),
            row_lens=arrays["lens"],
            begins=arrays["begins"],
            sizes=arrays["sizes"],
            full_refresh=np.array(full, dtype=np.bool_),
            occupied_pages=np.array(pages, dtype=np.int32),
            num_computed=arrays["computed"],
            num_extend_rows=sum(count > 0 for _, count in work),
            input_lens=arrays["inputs"],
            input_ids=np.array(ids, dtype=np.int32),
            sample=np.ones(len(work), dtype=np.bool_),
            released_rows=np.array(released, dtype=np.int32),
            lease_starts=leases,
        )
        self.executor.release_rows(op.released_rows)
        self.executor.start_leases(leases)
        self.mirror.apply(op)
        return self.builder.build(op, self.last_tokens)

    def step(self, *work: tuple[Sequence, int]) -> list[tuple[Sequence, torch.Tensor]]:
        """Runs one step; returns each sequence with the logits after its last computed token."""
        batch = self.build(list(work))
        logits = self.executor.forward(batch, np.arange(batch.num_rows)).cpu()
        by_row = {int(row): logits[i] for i, row in enumerate(batch.host_rows)}
        return [(sequence, by_row[sequence.row]) for sequence, _ in work]


@dataclass
class Pair:
    """The reference model, and a rig around the executor that was loaded from the reference's own files."""

    reference: torch.nn.Module
    rig: Rig
    max_difference: float = 0.0
    num_compared: int = 0
    _expected: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def expected(self, sequence: Sequence) -> torch.Tensor:
        """The reference's logits after every token of a sequence whose tokens stay what they are, [length, vocab]."""
        tokens = tuple(sequence.tokens)
        if tokens not in self._expected:
            with torch.no_grad():
                self._expected[tokens] = self.reference(input_ids=torch.tensor([sequence.tokens])).logits[0]
        return self._expected[tokens]

    def check(self, results: list[tuple[Sequence, torch.Tensor]]) -> None:
        """Compares logits with those of the whole sequence computed at once by the reference."""
        for sequence, logits in results:
            difference = float((logits - self.expected(sequence)[sequence.num_computed - 1]).abs().max())
            assert difference <= 1e-4, f"row {sequence.row}, {sequence.num_computed} tokens: differs by {difference}"
            self.max_difference = max(self.max_difference, difference)
            self.num_compared += 1

    def sequence(self, generator: np.random.Generator, length: int, prefix: list[int] | None = None) -> Sequence:
        """Random tokens behind a prefix."""
        return Sequence((prefix or []) + generator.integers(0, VOCAB_SIZE, length).tolist())


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """A model of each family, saved, and the reference."""
    directory = tmp_path_factory.mktemp(request.param)
    return directory, make_reference(request.param, directory)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def pair(request: pytest.FixtureRequest, saved: tuple[Path, torch.nn.Module]) -> Pair:
    """Both, with no page written yet."""
    directory, reference = saved
    return Pair(reference, load(directory, request.param))


@pytest.fixture
def make_pair(tmp_path: Path) -> Callable[..., Pair]:
    """Makes a pair of one family; `settings` of the runtime and keyword changes of the model's configuration."""

    def make(family: str, settings: dict[str, Any], **changes: Any) -> Pair:
        directory = tmp_path / family
        reference = make_reference(family, directory, **changes)
        return Pair(reference, load(directory, "cpu", **settings))

    return make
