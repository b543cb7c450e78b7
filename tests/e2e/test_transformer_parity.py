"""Logits of the executor against transformers on the same small weights, through the mirror, with everything that pages do."""

from __future__ import annotations

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

transformers = pytest.importorskip("transformers", reason="the reference implementation needs the extra `convert`")

PAGE_SIZE = 4
MAX_ROWS = 6
TOLERANCE = 1e-4
COMMON: dict[str, Any] = dict(
    vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, max_position_embeddings=256
)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain_tied": dict(num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True),
    "llama3_sharded": dict(
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "linear_biased": dict(
        num_attention_heads=4,
        num_key_value_heads=1,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 3000.0, "factor": 4.0},
    ),
    "every_head_its_own": dict(num_attention_heads=4, num_key_value_heads=4, rope_parameters={"rope_theta": 100000.0}),
}


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

    def check(self, results: list[tuple[Sequence, torch.Tensor]]) -> None:
        """Compares logits with those of the whole sequence computed at once by the reference."""
        for sequence, logits in results:
            with torch.no_grad():
                known = torch.tensor([sequence.tokens[: sequence.num_computed]])
                expected = self.reference(input_ids=known).logits[0, -1]
            difference = float((logits - expected).abs().max())
            assert difference <= TOLERANCE, f"row {sequence.row}, {sequence.num_computed} tokens: differs by {difference}"
            self.max_difference = max(self.max_difference, difference)


@pytest.fixture(scope="module", params=VARIANTS)
def model_directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    directory = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(7)
    config = transformers.LlamaConfig(**COMMON, **VARIANTS[request.param], initializer_range=0.25, rms_norm_eps=1e-5)
    reference = transformers.LlamaForCausalLM(config).eval()
    reference.set_attn_implementation("eager")
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith(("norm.weight", ".bias")):  # otherwise ones and zeros, which hide mistakes
                parameter.add_(0.3 * torch.randn(parameter.shape))
    size = "60KB" if request.param.endswith("sharded") else "5GB"
    reference.save_pretrained(directory, max_shard_size=size)
    assert (directory / "model.safetensors.index.json").exists() == request.param.endswith("sharded")
    return directory, reference


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def pair(request: pytest.FixtureRequest, model_directory: tuple[Path, torch.nn.Module]) -> Pair:
    directory, reference = model_directory
    settings = RuntimeSettings(
        model=str(directory), device=request.param, dtype="float32", page_size=PAGE_SIZE, num_pages=64, max_rows=MAX_ROWS
    )
    executor, capacity = create_transformer(settings)
    return Pair(reference, Rig(executor, capacity.num_pages, capacity.max_pages_per_row))


def random_tokens(generator: np.random.Generator, length: int) -> list[int]:
    tokens: list[int] = generator.integers(0, COMMON["vocab_size"], length).tolist()
    return tokens


def test_logits_are_large_enough_to_compare(pair: Pair) -> None:
    """The tolerance is far below the spread of the logits, so agreement means something."""
    with torch.no_grad():
        logits = pair.reference(input_ids=torch.arange(97)[None]).logits
    assert logits.std() > 0.5


def test_mixed_prefill_and_decode(pair: Pair) -> None:
    """Chunks of one to many tokens, decodes beside them, rows of different lengths: each step's logits agree."""
    generator = np.random.default_rng(1)
    rig = pair.rig
    first, second, third = (Sequence(random_tokens(generator, 60)) for _ in range(3))
    for sequence in (first, second, third):
        rig.start(sequence)
    pair.check(rig.step((first, 13)))
    pair.check(rig.step((first, 0), (second, 1)))
    pair.check(rig.step((first, 0), (second, 6), (third, 17)))
    pair.check(rig.step((first, 7), (second, 0), (third, 3)))
    for _ in range(6):
        pair.check(rig.step((second, 0), (third, 0), (first, 0)))


def test_cached_prefixes(pair: Pair) -> None:
    """A sequence that starts on pages another one wrote computes the same as one that starts cold."""
    generator = np.random.default_rng(2)
    rig = pair.rig
    system = random_tokens(generator, 3 * PAGE_SIZE)
    first, second, third = (Sequence(system + random_tokens(generator, 30)) for _ in range(3))
    rig.start(first)
    pair.check(rig.step((first, 18)))
    rig.start(second, first.pages[:3])
    rig.start(third, first.pages[:2])
    pair.check(rig.step((first, 0), (second, 9), (third, 5)))
    pair.check(rig.step((first, 0), (second, 0), (third, 12)))
    pair.check(rig.step((third, 0), (second, 0), (first, 0)))


def test_forced_retraction_and_resume(pair: Pair) -> None:
    """Rows are taken away mid-stream, their pages poisoned and granted to others, and recomputed elsewhere in chunks."""
    generator = np.random.default_rng(3)
    rig = pair.rig
    system = random_tokens(generator, 2 * PAGE_SIZE)
    victim, holder, guest = (Sequence(system + random_tokens(generator, 50)) for _ in range(3))
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


def test_random_schedules(pair: Pair) -> None:
    """Sixty random steps over six rows, with prefix sharing, retraction and row numbers that change hands."""
    generator = np.random.default_rng(4)
    rig = pair.rig
    system = random_tokens(generator, 2 * PAGE_SIZE)
    keeper = Sequence(system + random_tokens(generator, 80))
    rig.start(keeper)
    pair.check(rig.step((keeper, len(system))))
    live: list[Sequence] = []
    for _ in range(60):
        if len(live) < MAX_ROWS - 1 and generator.random() < 0.5:
            sequence = Sequence(system + random_tokens(generator, 24))
            rig.start(sequence, keeper.pages[: generator.integers(0, 3)])
            live.append(sequence)
        if live and generator.random() < 0.3:
            victim = live.pop(int(generator.integers(len(live))))
            rig.retract(victim)
        work = [(keeper, 0)] if keeper.num_computed < len(keeper.tokens) else []
        for sequence in live:
            left = len(sequence.tokens) - sequence.num_computed
            if left:
                started = sequence.num_computed > sequence.num_shared * PAGE_SIZE
                count = int(generator.integers(1, min(left, 9) + 1))
                work.append((sequence, 0 if started and generator.random() < 0.5 else count))
        if work:
            pair.check(rig.step(*work))


def test_greedy_text_is_the_references(pair: Pair) -> None:
    """Twenty greedy tokens through the executor are those of the reference, recomputed from scratch each time."""
    generator = np.random.default_rng(5)
    sequence = Sequence(random_tokens(generator, 9))
    pair.rig.start(sequence)
    for i in range(20):
        batch = pair.rig.build([(sequence, 9 if i == 0 else 0)])
        result = pair.rig.executor.execute(batch)
        with torch.no_grad():
            expected = int(pair.reference(input_ids=torch.tensor([sequence.tokens])).logits[0, -1].argmax())
        assert result.tokens.tolist() == [expected]
        sequence.tokens.append(expected)
