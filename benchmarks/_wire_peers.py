"""The other processes of `bench_wire.py`, and the runtime of `bench_streaming.py`:

    python benchmarks/_wire_peers.py runtime SOCKET STEP_MS [ROWS PAGES]   the product's runtime, a model that computes nothing
    python benchmarks/_wire_peers.py echo SOCKET RESULT_BYTES              a bare grpc.aio stream: bytes in, that many out

The model is a device whose steps take STEP_MS each, one after another, whatever the host does meanwhile: launching a step
returns at once and its result is there when the device has come to its end. With STEP_MS 0 a step is over when it is launched.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import numpy as np

NUM_PAGES, MAX_ROWS, MAX_PAGES_PER_ROW, PAGE_SIZE, VOCAB_SIZE = 1 << 15, 256, 512, 16, 32_000
METHOD = "/benchmark/Echo"


def run_loop(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine, on uvloop where it can be imported."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        import uvloop  # type: ignore[import-not-found, unused-ignore]

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


async def echo(socket: str, num_bytes: int) -> None:
    """Answer each message with its first bytes."""

    async def handle(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request[:num_bytes]

    handler = grpc.stream_stream_rpc_method_handler(handle)
    service, method = METHOD[1:].split("/")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    server.add_insecure_port(f"unix:{socket}")
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await server.start()
    await stop.wait()
    await server.stop(0)


def make_model(step_s: float) -> Any:
    """The executor, see the module."""
    import torch

    from runtime_service.executors.base import ExecutionResult, ModelInfo
    from runtime_service.ops import RowStatus

    class Step:
        """A step of the device, which ends at `ends_at`."""

        def __init__(self, num_rows: int, ends_at: float) -> None:
            self.device_tokens = torch.ones(num_rows, dtype=torch.int64)
            self._ends_at = ends_at
            self._result = ExecutionResult(np.ones(num_rows, np.int32), np.full(num_rows, RowStatus.OK, np.uint8))

        def ready(self) -> bool:
            return time.perf_counter() >= self._ends_at

        def wait(self) -> ExecutionResult:
            if (left := self._ends_at - time.perf_counter()) > 0:
                time.sleep(left)  # noqa: TID251  (this is what a device does)
            return self._result

    class Device:
        """Implements `ModelExecutor`."""

        info = ModelInfo("device", "benchmark", VOCAB_SIZE, 0, (), None, "cpu", "float32", short_steps=not step_s)

        def __init__(self) -> None:
            self._free_at = 0.0
            self._nothing_computed: dict[int, ExecutionResult] = {}

        def execute(self, batch: Any) -> Step | ExecutionResult:
            num_rows = batch.num_rows
            if not step_s:
                if num_rows not in self._nothing_computed:
                    result = ExecutionResult(np.ones(num_rows, np.int32), np.full(num_rows, RowStatus.OK, np.uint8))
                    self._nothing_computed[num_rows] = result
                return self._nothing_computed[num_rows]
            self._free_at = max(self._free_at, time.perf_counter()) + step_s
            return Step(num_rows, self._free_at)

        def _nothing(self, *args: Any) -> None:
            """No state to keep."""

        warm_up = start_leases = release_rows = reset = _nothing

    return Device()


async def runtime(socket: str, step_s: float, max_rows: int, num_pages: int) -> None:
    """The product's runtime around that model."""
    from runtime_service.app import configure_logging, serve
    from runtime_service.execution import ExecutionThread
    from runtime_service.executors.base import Capacity
    from runtime_service.settings import load_settings

    settings = load_settings(
        listen=f"unix:{socket}",
        page_size=PAGE_SIZE,
        max_rows=max_rows,
        log_level="error",
        exit_with_parent=os.getppid(),
    )
    configure_logging(settings)
    thread = ExecutionThread()
    capacity = Capacity(num_pages, MAX_PAGES_PER_ROW)
    await serve(settings, thread, create=lambda _: (make_model(step_s), capacity), announce=lambda line: None)


def main() -> None:
    what, socket, number, *sizes = sys.argv[1:]
    if what == "echo":
        run_loop(echo(socket, int(number)))
    else:
        max_rows, num_pages = map(int, sizes) if sizes else (MAX_ROWS, NUM_PAGES)
        run_loop(runtime(socket, float(number) / 1000, max_rows, num_pages))


if __name__ == "__main__":
    main()
