"""A whole runtime inside of another process: session checks, mirror and model, driven step by step.

    runner = open_runner(RuntimeSettings(model="models/smollm2-135m-instruct", page_size=16, num_pages=512))
    runner.open(scheduler_epoch=1, session_no=1, overlap_depth=0)
    answer = runner.run(op)                         # StepResult, or a Refusal that has changed nothing

No gRPC, no event loop and no thread: whoever calls is the execution thread. On a GPU the work goes to the current CUDA stream.
"""

from __future__ import annotations

from collections.abc import Callable

from runtime_service.executors import attach_graphs, checked, create_executor, warm_up_kernels
from runtime_service.executors.base import Capacity, ModelExecutor
from runtime_service.req_to_page import ReqToPage
from runtime_service.session import SessionState
from runtime_service.settings import RuntimeSettings
from runtime_service.step_runner import StepRunner

Create = Callable[[RuntimeSettings], tuple[ModelExecutor, Capacity]]


def open_runner(settings: RuntimeSettings, create: Create = create_executor) -> StepRunner:
    """Load the model, warm it up and put mirror and session beside it.

    `create` makes the model; by default the one that `settings.model` names. Raises SettingsError for settings that cannot be
    used (where one alone is wrong, `RuntimeSettings(...)` has raised pydantic's ValidationError), TypeError or ValueError for
    what is no model, and whatever loading the model raises.
    """
    executor, capacity = checked(create(settings))
    model = executor.info
    broken = settings.demonstrate_tail_only
    shape = (settings.max_rows, capacity.max_pages_per_row, capacity.num_pages, settings.page_size)
    session = SessionState(*shape, model.vocab_size, lenient=broken, greedy_only=model.greedy_only)
    mirror = ReqToPage(*shape, device=model.device, zero_fill=not broken)
    runner = StepRunner(session, mirror, executor)
    executor.warm_up()
    warm_up_kernels(executor, mirror)
    attach_graphs(executor, settings, mirror)
    return runner
