"""The executor of real language models: a Llama decoder behind the mirror, in plain torch, on CPU or GPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from runtime_service.errors import SettingError
from runtime_service.executors import TINY
from runtime_service.executors.base import Capacity, ExecutionResult, ModelInfo
from runtime_service.forward_batch import ForwardBatch
from runtime_service.kv_cache import PagedKVCache, kv_bytes_per_page
from runtime_service.models.config import ModelConfig, load_config
from runtime_service.models.llama import LlamaDecoder
from runtime_service.models.tiny import TINY_CONFIG, tiny_weights
from runtime_service.models.weights import load_weights
from runtime_service.ops import NO_TOKEN, Int32Array, LeaseStart, RowStatus
from runtime_service.sampler import Sampler
from runtime_service.settings import RuntimeSettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_DEFAULT_PAGES = 1 << 20
"""Most pages that are taken without being asked for: a tiny model on a large GPU would otherwise get hundreds of millions."""


class TransformerExecutor:
    """A decoder, its KV pages and its sampler.

    Attributes:
        decoder: the model.
        cache: KV pages; every slot that is read or written comes from a batch.
        sampler: parameters of each row.
    """

    def __init__(self, decoder: LlamaDecoder, cache: PagedKVCache, info: ModelInfo, max_rows: int) -> None:
        self.decoder = decoder
        self.cache = cache
        self.sampler = Sampler(max_rows)
        self._info = info

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
            self.execute(batch)

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
    def execute(self, batch: ForwardBatch) -> ExecutionResult:
        """Computes one step: one token for each row that wants one, unless it is clamped or its logits are not finite."""
        tokens = np.full(batch.num_rows, NO_TOKEN, dtype=np.int32)
        row_status = np.where(batch.clamped, RowStatus.CLAMPED, RowStatus.OK).astype(np.uint8)
        sampled = np.flatnonzero(batch.sample & ~batch.clamped)
        logits = self.forward(batch, sampled)
        if len(sampled):
            positions = (batch.host_num_computed + batch.host_input_lens)[sampled].astype(np.int64)
            chosen, finite = self.sampler.sample(logits, batch.host_rows[sampled], positions)
            # One copy to the host for both, which is where this step is waited for.
            answer = torch.where(finite, chosen, NO_TOKEN).cpu().numpy()
            tokens[sampled] = answer
            row_status[sampled[answer == NO_TOKEN]] = RowStatus.NON_FINITE
        return ExecutionResult(tokens=tokens, row_status=row_status)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, sampled: npt.NDArray[np.integer]) -> torch.Tensor:
        """Writes the batch's KV and returns the logits after the last token of the rows `sampled` of the batch.

        Args:
            batch: R rows; R may be 0.
            sampled: indices into its rows, [N].

        Returns:
            float32 [N, vocab_size].
        """
        if batch.num_rows == 0:
            return torch.empty((0, self._info.vocab_size))
        hidden = self.decoder.forward(batch, self.cache)
        if len(sampled) == 0:
            return torch.empty((0, self._info.vocab_size))
        last = np.cumsum(batch.host_input_lens)[sampled] - 1
        return self.decoder.logits(hidden[torch.from_numpy(last).to(hidden.device)])


def create_transformer(settings: RuntimeSettings) -> tuple[TransformerExecutor, Capacity]:
    """Loads a model and makes room for its KV cache.

    Raises:
        ModelError: the directory holds no model that can be served (`runtime_service.models.errors`).
        SettingError: a setting that the model or the machine does not allow; it names the value and the limit.
    """
    device = _device(settings.device)
    directory = None if settings.model == TINY else settings.model_path.resolve()
    config = TINY_CONFIG if directory is None else load_config(directory)
    dtype = _dtype(settings.dtype, config, device)
    max_context = config.max_position if settings.max_context is None else settings.max_context
    if not 1 <= max_context <= config.max_position:
        raise SettingError(
            "--max-context", max_context, f"is not within [1, {config.max_position}], what the model is made for"
        )
    weights = (
        tiny_weights(dtype=dtype, device=device)
        if directory is None
        else load_weights(directory, config, dtype=dtype, device=device)
    )
    num_pages = settings.num_pages or _default_num_pages(settings, config, dtype, device)
    cache = _allocate(settings, config, num_pages, dtype, device)
    info = ModelInfo(
        name=settings.model,
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_context=max_context,
        default_stop_ids=config.stop_ids,
        tokenizer_path=directory if directory is not None and (directory / "tokenizer.json").is_file() else None,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
    )
    # A row never has more pages than there are.
    max_pages_per_row = settings.max_pages_per_row or min(-(-max_context // settings.page_size), num_pages)
    executor = TransformerExecutor(LlamaDecoder(config, weights), cache, info, settings.max_rows)
    return executor, Capacity(num_pages=num_pages, max_pages_per_row=max_pages_per_row)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SettingError("--device", name, "needs a GPU that torch can use, and there is none; use cpu or auto")
    return torch.device("cuda", torch.cuda.current_device())


def _dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    if name == "auto":
        # On a CPU bfloat16 is slow and its rounding hides mistakes; float32 whatever the checkpoint says.
        name = "float32" if device.type == "cpu" else config.dtype or "float32"
    if name not in DTYPES:
        raise SettingError("--dtype", name, f"is not one of {', '.join(DTYPES)}; name one of them to convert the checkpoint")
    return DTYPES[name]


def _default_num_pages(settings: RuntimeSettings, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """As many pages as the memory set aside for them holds, the dummy page included in the memory but not in the count."""
    page_bytes = kv_bytes_per_page(config.num_layers, settings.page_size, config.num_kv_heads, config.head_dim, dtype)
    if device.type == "cpu":
        setting, value, budget = "--kv-cache-gib", settings.kv_cache_gib, int(settings.kv_cache_gib * 2**30)
    else:
        torch.cuda.empty_cache()  # what loading the weights needed for a moment is free again
        free, _total = torch.cuda.mem_get_info(device)
        setting, value, budget = "--kv-memory-fraction", settings.kv_memory_fraction, int(settings.kv_memory_fraction * free)
    num_pages = min(budget // page_bytes - 1, MAX_DEFAULT_PAGES)
    if num_pages < 1:
        raise SettingError(setting, value, f"leaves {budget} bytes for KV pages, and two pages take {2 * page_bytes}")
    return num_pages


def _allocate(
    settings: RuntimeSettings, config: ModelConfig, num_pages: int, dtype: torch.dtype, device: torch.device
) -> PagedKVCache:
    try:
        return PagedKVCache(
            num_layers=config.num_layers,
            num_pages=num_pages,
            page_size=settings.page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=device,
        )
    except RuntimeError as error:  # torch's out-of-memory error on a GPU is one as well
        page_bytes = kv_bytes_per_page(config.num_layers, settings.page_size, config.num_kv_heads, config.head_dim, dtype)
        gib = (num_pages + 1) * page_bytes / 2**30
        raise SettingError("--num-pages", num_pages, f"takes {gib:.1f} GiB on {device}, more than can be allocated") from error
