"""The runtime of pagemirror, as a library: the mirror of page rows, its checks, and a model behind it.

    from runtime_service import PageFeed, PageUpdate, ReqToPage

Names of `__all__` are kept compatible within a major version; docs/embedding.md describes them. Importing this package costs
nothing: what a name needs (numpy; torch for the mirror; gRPC for the client alone) is imported when the name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime_service.adapters.errors import MissingAttributeError as MissingAttributeError
    from runtime_service.adapters.errors import UnsupportedPlanError as UnsupportedPlanError
    from runtime_service.adapters.sglang import SglangRows as SglangRows
    from runtime_service.adapters.tokenspeed import TokenSpeedAdapter as TokenSpeedAdapter
    from runtime_service.adapters.vllm import VllmAdapter as VllmAdapter
    from runtime_service.client import RuntimeClient as RuntimeClient
    from runtime_service.client import RuntimeUnavailableError as RuntimeUnavailableError
    from runtime_service.columns import ColumnTypeError as ColumnTypeError
    from runtime_service.columns import ColumnValueError as ColumnValueError
    from runtime_service.embedding import open_runner as open_runner
    from runtime_service.errors import Refusal as Refusal
    from runtime_service.errors import RuntimeServiceError as RuntimeServiceError
    from runtime_service.errors import SettingsError as SettingsError
    from runtime_service.executors.base import Capacity as Capacity
    from runtime_service.executors.base import ExecutionResult as ExecutionResult
    from runtime_service.executors.base import ModelExecutor as ModelExecutor
    from runtime_service.executors.base import ModelInfo as ModelInfo
    from runtime_service.forward_batch import ForwardBatch as ForwardBatch
    from runtime_service.ops import ForwardOp as ForwardOp
    from runtime_service.ops import LeaseStart as LeaseStart
    from runtime_service.ops import RefusalCode as RefusalCode
    from runtime_service.ops import RowStatus as RowStatus
    from runtime_service.ops import SamplingParams as SamplingParams
    from runtime_service.ops import StepResult as StepResult
    from runtime_service.page_update import PageFeed as PageFeed
    from runtime_service.page_update import PageUpdate as PageUpdate
    from runtime_service.req_to_page import ReqToPage as ReqToPage
    from runtime_service.session import SessionState as SessionState
    from runtime_service.settings import RuntimeSettings as RuntimeSettings
    from runtime_service.step_runner import StepRunner as StepRunner
    from runtime_service.views import PagedKv as PagedKv
    from runtime_service.views import block_table as block_table
    from runtime_service.views import paged_kv as paged_kv
    from runtime_service.views import req_to_token as req_to_token
    from runtime_service.views import row_digests as row_digests
    from runtime_service.views import slot_mapping as slot_mapping

_HOMES = {
    "adapters.errors": ("MissingAttributeError", "UnsupportedPlanError"),
    "adapters.sglang": ("SglangRows",),
    "adapters.tokenspeed": ("TokenSpeedAdapter",),
    "adapters.vllm": ("VllmAdapter",),
    "client": ("RuntimeClient", "RuntimeUnavailableError"),
    "columns": ("ColumnTypeError", "ColumnValueError"),
    "embedding": ("open_runner",),
    "errors": ("Refusal", "RuntimeServiceError", "SettingsError"),
    "executors.base": ("Capacity", "ExecutionResult", "ModelExecutor", "ModelInfo"),
    "forward_batch": ("ForwardBatch",),
    "ops": ("ForwardOp", "LeaseStart", "RefusalCode", "RowStatus", "SamplingParams", "StepResult"),
    "page_update": ("PageFeed", "PageUpdate"),
    "req_to_page": ("ReqToPage",),
    "session": ("SessionState",),
    "settings": ("RuntimeSettings",),
    "step_runner": ("StepRunner",),
    "views": ("PagedKv", "block_table", "paged_kv", "req_to_token", "row_digests", "slot_mapping"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605  (a list of strings, which is not seen)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
