"""Models behind the mirror: one interface (`base`), and the one place that knows which names stand for which model.

A package of somebody else's adds a model by an entry point in the group `pagemirror.executors`, a callable that is given the
settings and returns `(ModelExecutor, Capacity)`:

    [project.entry-points."pagemirror.executors"]
    acme = "acme_serving.pagemirror:create"

`--model acme`, or `--model acme:ANYTHING` where it wants an argument, then calls it.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

import structlog

from runtime_service.errors import SettingError, SettingsError

if TYPE_CHECKING:
    from runtime_service.executors.base import Capacity, ModelExecutor
    from runtime_service.req_to_page import ReqToPage
    from runtime_service.settings import RuntimeSettings

log = structlog.get_logger(__name__)

ENTRY_POINTS = "pagemirror.executors"
FINGERPRINT = "fingerprint"
TINY = "tiny"

_METHODS = ("warm_up", "start_leases", "release_rows", "execute", "reset")
"""Of a `ModelExecutor`."""

FINGERPRINT_NUM_PAGES = 4096
FINGERPRINT_MAX_PAGES_PER_ROW = 512


def create_executor(settings: RuntimeSettings) -> tuple[ModelExecutor, Capacity]:
    """The executor that `settings.model` names, not yet warmed up, and the KV capacity it was made with.

    `fingerprint` is the exact test model, `tiny` a seeded small Llama, anything else the path of a Hugging Face directory, or
    else the name of an entry point. Heavy modules are imported here, so that `--help` and a refused setting cost nothing.
    Raises `SettingError`.
    """
    if settings.model == FINGERPRINT:
        return _create_fingerprint(settings)
    if settings.model != TINY and not settings.model_path.is_dir():
        return _create_plugin(settings)
    from runtime_service.executors.transformer import create_transformer

    return create_transformer(settings)


def warm_up_kernels(executor: ModelExecutor, mirror: ReqToPage) -> None:
    """Compile what the first steps over `mirror` would otherwise wait for, where Triton kernels are used."""
    if mirror.table.device.type != "cuda":
        return
    from runtime_service.executors.transformer import TransformerExecutor
    from runtime_service.kernels import warm_up

    warm_up.warm_up_mirror_kernels(mirror.table)
    if isinstance(executor, TransformerExecutor) and executor.decoder.attention_backend == "triton":
        warm_up.warm_up_kernels(executor.cache.layers[0], mirror.table, executor.decoder.config.num_heads)


def attach_graphs(executor: ModelExecutor, settings: RuntimeSettings, mirror: ReqToPage) -> bool:
    """Capture the decode steps of a warm model as CUDA graphs, where settings, device and model allow it; whether it was done.

    Batches over `mirror` use them from then on. A capture that fails is a warning: the model serves without graphs.
    """
    device = mirror.table.device
    if not settings.graphs or device.type != "cuda" or settings.model == FINGERPRINT:
        return False
    from runtime_service.executors.decode_graphs import DecodeGraphs
    from runtime_service.executors.reserves import graph_buckets
    from runtime_service.executors.transformer import TransformerExecutor
    from runtime_service.kernels.decode_attention import DecodeWorkspace

    if not isinstance(executor, TransformerExecutor):
        return False
    decoder, cache = executor.decoder, executor.cache
    buckets = graph_buckets(settings, device, decoder.attention_backend)
    if not buckets:
        return False
    config = decoder.config
    decoder.workspace = DecodeWorkspace.create(
        max_rows=mirror.max_rows,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_seq_len=mirror.max_pages_per_row * mirror.page_size,
        device=device,
    )
    graphs = DecodeGraphs(
        lambda batch: decoder.forward(batch, cache),
        buckets=buckets,
        req_to_page=mirror.table,
        page_size=mirror.page_size,
        device=device,
    )
    try:
        graphs.capture()
    except RuntimeError as error:
        log.warning("decode steps run without CUDA graphs", reason=str(error), buckets=graphs.buckets)
        return False
    executor.graphs = graphs
    log.info("decode steps are captured", buckets=graphs.buckets)
    return True


def _create_plugin(settings: RuntimeSettings) -> tuple[ModelExecutor, Capacity]:
    name = settings.model.partition(":")[0]
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == name and found.setdefault(name, point).value != point.value:
            raise SettingError("--model", settings.model, f"is both {found[name].value} and {point.value}, of two packages")
        found[point.name] = point
    if name not in found:
        known = f", nor a model of another package ({', '.join(sorted(found))})" if found else ""
        what = f"is neither {FINGERPRINT!r} nor {TINY!r} nor the path of an existing directory{known}"
        raise SettingError("--model", settings.model, what)
    try:
        create = found[name].load()
        return checked(create(settings))
    except SettingsError:
        raise
    except Exception as error:
        log.exception("a model of another package cannot be made", entry_point=found[name].value)
        raise SettingError("--model", settings.model, f"failed in {found[name].value}: {error!r}") from error


def checked(made: object) -> tuple[ModelExecutor, Capacity]:
    """What the creator of a model has returned. Raises TypeError or ValueError where it is no executor with its capacity."""
    from runtime_service.executors.base import Capacity, ModelInfo

    if not isinstance(made, tuple) or len(made) != 2:
        raise TypeError(f"a model's creator returns (ModelExecutor, Capacity), not {made!r}")
    executor, capacity = made
    if not isinstance(capacity, Capacity):
        raise TypeError(f"the second of what a model's creator returns is a Capacity, not {capacity!r}")
    if min(capacity.num_pages, capacity.max_pages_per_row) < 1:
        raise ValueError(f"a model needs at least a page, and rows of one: {capacity}")
    if missing := [name for name in _METHODS if not callable(getattr(executor, name, None))]:
        raise TypeError(f"{type(executor).__name__!r} is no ModelExecutor, it has no {' and no '.join(missing)}()")
    if not isinstance(info := getattr(executor, "info", None), ModelInfo):
        raise TypeError(f"info of {type(executor).__name__!r} is a ModelInfo, not {info!r}")
    return executor, capacity


def _create_fingerprint(settings: RuntimeSettings) -> tuple[ModelExecutor, Capacity]:
    import torch

    from runtime_service.executors.fingerprint import FingerprintExecutor

    device = "cuda:0" if settings.device == "cuda" else "cpu"  # exact arithmetic on the host: a GPU only when asked for
    if device != "cpu" and not torch.cuda.is_available():
        raise SettingError("--device", settings.device, "but this machine has no CUDA device that torch can use")
    capacity = fingerprint_capacity(settings)
    executor = FingerprintExecutor(capacity.num_pages, settings.page_size, device, short_steps=device == "cpu")
    return executor, capacity


def fingerprint_capacity(settings: RuntimeSettings) -> Capacity:
    """KV capacity of the fingerprint model: as the settings say, or its defaults."""
    from runtime_service.executors.base import Capacity

    width = settings.max_pages_per_row
    if width is None and settings.max_context is not None:
        width = -(-settings.max_context // settings.page_size)
    return Capacity(
        num_pages=settings.num_pages or FINGERPRINT_NUM_PAGES, max_pages_per_row=width or FINGERPRINT_MAX_PAGES_PER_ROW
    )
