"""Both services in this process, over loopback servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from runtime_service.execution import ExecutionThread
from runtime_service.servicer import RuntimeServicer
from runtime_service.step_runner import StepRunner
from scheduler_service.channels import SERVER_OPTIONS, bind
from scheduler_service.client import Client
from scheduler_service.engine_loop import EngineLoop
from scheduler_service.public_server import HealthBoard, PublicServer
from scheduler_service.settings import SchedulerSettings

Services = tuple[EngineLoop, Client, StepRunner]


@contextlib.asynccontextmanager
async def both_services(load: Callable[[], Any], *, limit_s: float, **settings: Any) -> AsyncIterator[Services]:
    """A runtime of what `load` makes, a scheduler with these settings, and a client of it."""
    async with contextlib.AsyncExitStack() as stack:
        thread = ExecutionThread()
        stack.callback(thread.stop)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        servicer = RuntimeServicer(thread)
        servicer.register(server)
        address = bind(server, "127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, 0)
        stack.callback(servicer.shut_down)
        runner, facts = await thread.call(load)
        servicer.set_ready(runner, facts)

        given = SchedulerSettings(runtime=address, listen="127.0.0.1:0", **({"heartbeat_timeout": 30.0} | settings))
        engine = EngineLoop(given)
        board = HealthBoard()
        front = PublicServer(given, engine.metrics, board)
        front.add(engine)
        async with asyncio.timeout(limit_s):
            await engine.start()
        stack.push_async_callback(engine.stop)
        await front.server.start()
        board.show(True)
        stack.push_async_callback(front.server.stop, 0)
        client = await stack.enter_async_context(Client(front.address))
        async with asyncio.timeout(limit_s):
            yield engine, client, runner
        assert not engine.failed.is_set()
