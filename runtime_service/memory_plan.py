"""What memory a runtime of these settings takes, and for what, worked out before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TextIO

from runtime_service.errors import SettingError
from runtime_service.executors import FINGERPRINT, TINY, fingerprint_capacity
from runtime_service.settings import RuntimeSettings

# A fingerprint cell is a token id and a hash.
_FINGERPRINT_CELL_NBYTES = 12


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One use of memory."""

    name: str
    nbytes: int
    detail: str
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where memory goes; sizes in bytes, of one device."""

    model: str
    device: str
    dtype: str
    attention_backend: str  # "" where there is no attention
    page_size: int
    num_pages: int
    max_rows: int
    max_pages_per_row: int
    available_nbytes: int
    available: str
    """What `available_nbytes` counts."""
    items: tuple[MemoryItem, ...]

    @property
    def total_nbytes(self) -> int:
        """Of all items."""
        return sum(item.nbytes for item in self.items)

    @property
    def left_nbytes(self) -> int:
        """Available beyond the total; below 0 where an estimate exceeds it."""
        return self.available_nbytes - self.total_nbytes


def plan_memory(settings: RuntimeSettings) -> MemoryPlan:
    """The plan of these settings on this machine. Reads configuration and headers of the model's files, and loads nothing.

    Raises:
        SettingError: too little memory, or a setting that model or machine do not allow; it names the value and the limit.
        ModelError: the directory holds no model that can be served.
    """
    if settings.model == FINGERPRINT:
        return _plan_fingerprint(settings)
    if settings.model != TINY and not settings.model_path.is_dir():
        raise SettingError(
            "--model", settings.model, f"is neither {FINGERPRINT!r} nor {TINY!r} nor the path of an existing directory"
        )
    from runtime_service.executors.sizing import size_model
    from runtime_service.models.config import load_config
    from runtime_service.models.tiny import TINY_CONFIG
    from runtime_service.models.weights import expected_tensors, find_tensors

    directory = None if settings.model == TINY else settings.model_path.resolve()
    config = TINY_CONFIG if directory is None else load_config(directory)
    if directory is not None:
        find_tensors(directory, config)
    sizing = size_model(settings, config)
    dtype = str(sizing.dtype).removeprefix("torch.")
    reserve = sizing.reserve
    page_nbytes = sizing.kv_nbytes // (sizing.num_pages + 1)
    items = [
        MemoryItem(f"weights ({dtype})", sizing.weights_nbytes, f"{len(expected_tensors(config))} tensors"),
        MemoryItem(
            f"KV pages ({dtype})", sizing.kv_nbytes, f"{sizing.num_pages} pages and the dummy page, {page_nbytes:,} bytes each"
        ),
        _mirror(settings.max_rows, sizing.max_pages_per_row),
        MemoryItem("activations", reserve.activations, f"a step of {settings.max_step_tokens} tokens", estimated=True),
        MemoryItem(
            "CUDA graphs",
            reserve.graphs,
            f"{reserve.num_graphs} batch sizes" if reserve.num_graphs else "none",
            estimated=reserve.num_graphs > 0,
        ),
    ]
    return MemoryPlan(
        model=settings.model,
        device=str(sizing.device),
        dtype=dtype,
        attention_backend=sizing.attention_backend,
        page_size=settings.page_size,
        num_pages=sizing.num_pages,
        max_rows=settings.max_rows,
        max_pages_per_row=sizing.max_pages_per_row,
        available_nbytes=sizing.memory_nbytes,
        available=sizing.memory_name,
        items=tuple(items),
    )


def _plan_fingerprint(settings: RuntimeSettings) -> MemoryPlan:
    from runtime_service.executors.sizing import available_memory, choose_device

    capacity = fingerprint_capacity(settings)
    device = choose_device("cuda" if settings.device == "cuda" else "cpu")
    available, where = available_memory(device)
    cells = (capacity.num_pages + 1) * settings.page_size
    return MemoryPlan(
        model=settings.model,
        device=str(device),
        dtype="int32",
        attention_backend="",
        page_size=settings.page_size,
        num_pages=capacity.num_pages,
        max_rows=settings.max_rows,
        max_pages_per_row=capacity.max_pages_per_row,
        available_nbytes=available,
        available=where,
        items=(
            MemoryItem("KV pages (cells)", cells * _FINGERPRINT_CELL_NBYTES, f"{cells:,} cells of a token id and a hash"),
            _mirror(settings.max_rows, capacity.max_pages_per_row),
        ),
    )


def _mirror(max_rows: int, max_pages_per_row: int) -> MemoryItem:
    return MemoryItem(
        "mirror (int32)", (max_rows + 1) * max_pages_per_row * 4, f"{max_rows} rows and row 0, {max_pages_per_row} pages each"
    )


def write_plan(plan: MemoryPlan, out: TextIO, *, as_json: bool) -> None:
    """Write a plan as a table for people, or as one JSON object with sizes in bytes."""
    if as_json:
        totals = {"total_nbytes": plan.total_nbytes, "left_nbytes": plan.left_nbytes}
        out.write(json.dumps(asdict(plan) | totals) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    attention = f", attention {plan.attention_backend}" if plan.attention_backend else ""
    title = f"{plan.model} on {plan.device}: {plan.dtype}{attention}, page_size {plan.page_size}"
    table = Table("what", "size", "of", title=title, title_justify="left")
    table.columns[1].justify = "right"
    for item in plan.items:
        table.add_row(item.name, format_nbytes(item.nbytes), item.detail + (" (estimated)" if item.estimated else ""))
    table.add_section()
    table.add_row("total", format_nbytes(plan.total_nbytes), f"of {format_nbytes(plan.available_nbytes)}: {plan.available}")
    left = plan.left_nbytes
    table.add_row("left" if left >= 0 else "missing", format_nbytes(abs(left)), "")
    Console(file=out, width=max(100, Console(file=out).width), soft_wrap=True, markup=False).print(table)


def format_nbytes(nbytes: int) -> str:
    """A size in the largest binary unit that leaves it at least 1."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
