"""The executor of real language models: a decoder behind the mirror, on CPU or GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from runtime_service.errors import SettingError
from runtime_service.executors import TINY
from runtime_service.executors.base import Capacity, DeviceResult, ExecutionResult, ModelInfo, PendingResult
from runtime_service.executors.profiling import CudaMeter, measure_peak, profile_steps
from runtime_service.executors.sizing import Sizing, size_model
from runtime_service.forward_batch import ForwardBatch
from runtime_service.kv_cache import PagedKVCache
from runtime_service.models.config import ModelConfig, load_config
from runtime_service.models.decoder import Decoder
from runtime_service.models.tiny import TINY_CONFIG, tiny_weights
from runtime_service.models.weights import find_tensors, load_weights
from runtime_service.ops import NO_TOKEN, Int32Array, LeaseStart, RowStatus
from runtime_service.output_ring import NDArray, OutputRing
from runtime_service.sampler import Sampler
from runtime_service.settings import RuntimeSettings
from runtime_service.upload import upload

OUTPUT_DEPTH = 4
"""Results that may be on their way to the host: `MAX_OVERLAP_DEPTH + 2` of the session, which is a neighbour of this module."""


class DecodeGraphs(Protocol):
    """Captured decode steps."""

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Hidden states [T, hidden_size] of the batch, valid until the next call; None: it has to be computed without."""


class TransformerExecutor:
    """A decoder, its KV pages and its sampler.

    Attributes:
        decoder: the model.
        cache: KV pages; every slot that is read or written comes from a batch.
        sampler: parameters of each row.
        graphs: captured decode steps, or None; set once the model is warm.
    """

    def __init__(self, decoder: Decoder, cache: PagedKVCache, info: ModelInfo, max_rows: int) -> None:
        self.decoder = decoder
        self.cache = cache
        self.sampler = Sampler(max_rows, info.vocab_size, cache.layers[0].device)
        self.graphs: DecodeGraphs | None = None
        self._info = info
        self._outputs: OutputRing | None = None

    @property
    def info(self) -> ModelInfo:
        return self._info

    def warm_up(self) -> None:
        """Runs a prefill and a decode on the dummy page, so that libraries load and choose their kernels."""
        device = self.cache.layers[0].device
        for num_tokens, num_extend_rows in ((self.cache.page_size, 1), (1, 0)):
            positions = torch.arange(num_tokens, device=device)
            zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
            zero, count = zeros[:1], torch.tensor([num_tokens], device=device)
            batch = ForwardBatch(
                req_to_page=torch.zeros((1, 1), dtype=torch.int32, device=device),
                page_size=self.cache.page_size,
                rows=zero,
                num_computed=zero,
                input_lens=count,
                seq_lens=count,
                query_indptr=torch.tensor([0, num_tokens], device=device),
                input_ids=zeros,
                positions=positions,
                token_rows=zeros,
                out_cache_loc=positions,
                num_extend_rows=num_extend_rows,
                host_rows=np.zeros(1, dtype=np.int32),
                host_num_computed=np.zeros(1, dtype=np.int32),
                host_input_lens=np.array([num_tokens], dtype=np.int32),
                sample=np.ones(1, dtype=np.bool_),
                clamped=np.zeros(1, dtype=np.bool_),
            )
            self.execute(batch).wait()

    def start_leases(self, leases: list[LeaseStart]) -> None:
        """Takes the sampling parameters of the requests that begin a lease."""
        self.sampler.start_leases(leases)

    def release_rows(self, rows: Int32Array) -> None:
        """Forgets the sampling parameters of these rows."""
        self.sampler.release_rows(rows)

    def reset(self) -> None:
        """Forgets all rows; KV pages keep what they hold, and nobody reads it."""
        self.sampler.reset()

    @torch.inference_mode()
    def execute(self, batch: ForwardBatch) -> PendingResult:
        """Starts one step: one token for each row that wants one, unless it is clamped or its logits are not finite."""
        sampled = np.flatnonzero(batch.sample & ~batch.clamped)
        row_status = np.where(batch.clamped, RowStatus.CLAMPED, RowStatus.OK).astype(np.uint8)
        self.sampler.count_inputs(batch)
        logits = self.forward(batch, sampled)
        if not len(sampled):
            return ExecutionResult(np.full(batch.num_rows, NO_TOKEN, dtype=np.int32), row_status)
        positions = (batch.host_num_computed + batch.host_input_lens)[sampled].astype(np.int64)
        chosen, finite, logprobs = self.sampler.choose(logits, batch.host_rows[sampled], positions)
        tokens = torch.where(finite, chosen, NO_TOKEN)
        columns = [] if logprobs is None else [logprobs.logprobs, logprobs.top_tokens, logprobs.top_logprobs]
        if len(sampled) < batch.num_rows:
            index = upload(sampled, tokens.device)
            tokens = tokens.new_full((batch.num_rows,), NO_TOKEN).index_copy_(0, index, tokens)
            if logprobs is not None:
                spread = logprobs.spread(index, batch.num_rows)
                columns = [spread.logprobs, spread.top_tokens, spread.top_logprobs]

        def finish(columns: list[NDArray]) -> ExecutionResult:
            on_host = columns[0].astype(np.int32)
            row_status[sampled[on_host[sampled] == NO_TOKEN]] = RowStatus.NON_FINITE
            return ExecutionResult(on_host, row_status, *columns[1:])

        if tokens.device.type == "cpu":
            return finish([column.numpy() for column in (tokens, *columns)])
        if self._outputs is None:
            self._outputs = OutputRing(tokens.device, OUTPUT_DEPTH)
        return DeviceResult(tokens, self._outputs.start([tokens, *columns]), finish)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, sampled: npt.NDArray[np.integer]) -> torch.Tensor:
        """Writes the batch's KV and returns the logits after the last token of the rows `sampled` of the batch.

        Args:
            batch: R rows; R may be 0.
            sampled: indices into its rows, [N], ascending.

        Returns:
            float32 [N, vocab_size].
        """
        if batch.num_rows == 0:
            return torch.empty((0, self._info.vocab_size))
        num_tokens = int(batch.host_input_lens.sum())
        wanted = None
        if len(sampled) < num_tokens:
            last = np.cumsum(batch.host_input_lens, dtype=np.int64)[sampled] - 1
            wanted = upload(last, self.cache.layers[0].device)
        hidden = None if self.graphs is None else self.graphs.run(batch)
        if hidden is None:
            hidden = self.decoder.forward(batch, self.cache, wanted)
        elif wanted is not None:
            hidden = hidden[wanted]
        return self.decoder.logits(hidden)


def create_transformer(settings: RuntimeSettings) -> tuple[TransformerExecutor, Capacity]:
    """Loads a model and makes room for its KV cache; everything that can be refused is refused before anything is allocated.

    Raises:
        ModelError: the directory holds no model that can be served (`runtime_service.models.errors`).
        SettingError: a setting that the model or the machine does not allow; it names the value and the limit.
    """
    directory = None if settings.model == TINY else settings.model_path.resolve()
    config = TINY_CONFIG if directory is None else load_config(directory)
    if directory is not None:
        find_tensors(directory, config)
    sizing = size_model(settings, config)
    if directory is None:
        weights = tiny_weights(dtype=sizing.dtype, device=sizing.device)
    else:
        weights = load_weights(directory, config, dtype=sizing.dtype, device=sizing.device)
    decoder = Decoder(config, weights, sizing.attention_backend)
    info = ModelInfo(
        name=settings.model,
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_context=sizing.max_context,
        default_stop_ids=config.stop_ids,
        tokenizer_path=directory if directory is not None and (directory / "tokenizer.json").is_file() else None,
        device=str(sizing.device),
        dtype=str(sizing.dtype).removeprefix("torch."),
    )
    if sizing.device.type == "cuda" and settings.num_pages is None:
        measured = _largest_step_nbytes(settings, decoder, info, sizing)
        torch.cuda.empty_cache()  # what loading and measuring needed for a moment is free again
        sizing = size_model(settings, config, measured)
    executor = TransformerExecutor(decoder, _allocate(settings, config, sizing), info, settings.max_rows)
    return executor, Capacity(num_pages=sizing.num_pages, max_pages_per_row=sizing.max_pages_per_row)


def _largest_step_nbytes(settings: RuntimeSettings, decoder: Decoder, info: ModelInfo, sizing: Sizing) -> int:
    """Bytes beside weights and KV pages that the largest step takes, measured by running it on the dummy page."""
    cache = _allocate(settings, decoder.config, replace(sizing, num_pages=1))
    executor = TransformerExecutor(decoder, cache, info, settings.max_rows)

    def run() -> None:
        profile_steps(
            executor,
            num_tokens=settings.max_step_tokens,
            max_rows=settings.max_rows,
            page_size=settings.page_size,
            max_context=sizing.max_context,
            device=sizing.device,
        )

    run()  # compiles kernels, and has libraries take the workspaces that they keep
    return measure_peak(run, CudaMeter(sizing.device))


def _allocate(settings: RuntimeSettings, config: ModelConfig, sizing: Sizing) -> PagedKVCache:
    try:
        return PagedKVCache(
            num_layers=config.num_layers,
            num_pages=sizing.num_pages,
            page_size=settings.page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=sizing.dtype,
            device=sizing.device,
        )
    except RuntimeError as error:  # torch's out-of-memory error on a GPU is one as well
        limit = f"takes {sizing.kv_nbytes / 2**30:.1f} GiB on {sizing.device}, more than can be allocated"
        raise SettingError("--num-pages", sizing.num_pages, limit) from error
