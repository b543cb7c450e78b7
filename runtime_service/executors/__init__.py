"""Models behind the mirror: one interface (`base`), and the one place that knows which names stand for which model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime_service.errors import SettingError

if TYPE_CHECKING:
    from runtime_service.executors.base import Capacity, ModelExecutor
    from runtime_service.settings import RuntimeSettings

FINGERPRINT = "fingerprint"
TINY = "tiny"

FINGERPRINT_NUM_PAGES = 4096
FINGERPRINT_MAX_PAGES_PER_ROW = 512


def create_executor(settings: RuntimeSettings) -> tuple[ModelExecutor, Capacity]:
    """The executor that `settings.model` names, not yet warmed up, and the KV capacity it was made with.

    `fingerprint` is the exact test model, `tiny` a seeded small Llama, anything else the path of a Hugging Face directory.
    Heavy modules are imported here, so that `--help` and a refused setting cost nothing. Raises `SettingError`.
    """
    if settings.model == FINGERPRINT:
        return _create_fingerprint(settings)
    if settings.model != TINY and not settings.model_path.is_dir():
        raise SettingError(
            "--model", settings.model, f"is neither {FINGERPRINT!r} nor {TINY!r} nor the path of an existing directory"
        )
    from runtime_service.executors.transformer import create_transformer

    return create_transformer(settings)


def _create_fingerprint(settings: RuntimeSettings) -> tuple[ModelExecutor, Capacity]:
    import torch

    from runtime_service.executors.base import Capacity
    from runtime_service.executors.fingerprint import FingerprintExecutor

    device = "cuda:0" if settings.device == "cuda" else "cpu"  # exact arithmetic on the host: a GPU only when asked for
    if device != "cpu" and not torch.cuda.is_available():
        raise SettingError("--device", settings.device, "but this machine has no CUDA device that torch can use")
    num_pages = settings.num_pages or FINGERPRINT_NUM_PAGES
    width = settings.max_pages_per_row
    if width is None and settings.max_context is not None:
        width = -(-settings.max_context // settings.page_size)
    executor = FingerprintExecutor(num_pages=num_pages, page_size=settings.page_size, device=device)
    return executor, Capacity(num_pages=num_pages, max_pages_per_row=width or FINGERPRINT_MAX_PAGES_PER_ROW)
