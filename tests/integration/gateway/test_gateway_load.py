"""Many requests of the gateway at once, in a pool that is too small for them: each exact, none left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

GatewayOf = Callable[..., AbstractAsyncContextManager[Any]]
Continuation = Callable[[Any, int], list[int]]


async def test_mixed_requests_are_exact_and_leave_nothing(
    gateway: GatewayOf, continuation: Continuation, word_tokenizer: Path
) -> None:
    """Streams and plain calls, fan-outs, stop strings, aborts and cancelled calls, all at the same time."""
    dice = random.Random(6)
    async with gateway(num_pages=24, max_rows=6, gateway_tokenizer=word_tokenizer) as served:

        async def whole(number: int) -> None:
            prompt = [*range(50, 50 + dice.randrange(1, 12)), number]
            expected = continuation(prompt, dice.randrange(4, 16))
            stop_at = dice.randrange(len(expected))
            first = expected.index(expected[stop_at])  # the same token may come earlier
            options: dict[str, Any] = {"n": dice.randrange(1, 4), "stream": dice.random() < 0.5}
            if stops := dice.random() < 0.5:
                options["stop"] = [f"w{expected[stop_at]} "]
            chunks, completes = await served.run_all(prompt, len(expected), **options)
            assert sorted(completes) == list(range(options["n"]))
            for index, complete in completes.items():
                tokens = expected[: first + 1] if stops else expected
                assert list(complete.output_ids) == tokens
                assert complete.finish_reason == ("stop" if stops else "length")
                assert sum(chunks.get(index, []), []) == (tokens if options["stream"] else [])

        async def cut_off(number: int) -> None:
            request_id = f"cut-{number}"
            call = served.stub.Generate(served.api.request([9, number], 30, request_id=request_id, stream=True, n=2))
            message = await call.read()
            assert list(message.chunk.token_ids) == continuation([9, number], 30)[: len(message.chunk.token_ids)]
            if dice.random() < 0.5:
                await served.stub.Abort(served.api.abort(request_id))
            call.cancel()

        async with asyncio.timeout(60):
            await asyncio.gather(*(whole(n) if n % 4 else cut_off(n) for n in range(32)))
        await served.until(lambda: not served.engine.core.requests)
        pages = served.engine.core.stats()
        assert (pages.private, pages.free + pages.cached) == (0, 24)
        flushed = await served.stub.FlushCache(served.api.common.FlushCacheRequest())
        assert flushed.success
