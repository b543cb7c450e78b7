"""Clients gone mad: mutated calls of GenerationService, each status held against the words of generation.proto."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fuzz_bytes import ByteMutator
from fuzz_columns import ints, pack
from fuzz_fields import MAX_INT32, MAX_UINT32, ODD_TEXTS, odd_sampling
from fuzz_model import FINGERPRINT_VOCABULARY
from google.protobuf.message import DecodeError
from grpc import aio

from pagemirror.v1 import generation_pb2, generation_pb2_grpc

WAIT_S = 100.0
OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
MAX_TEXT_LEN = 256
MAX_MESSAGE_BYTES = 16 << 20
MAX_STOP_IDS = 1024
STOP, LENGTH, ABORT, CAPACITY = 1, 2, 3, 4
REQUESTS = {
    "Abort": generation_pb2.AbortRequest,
    "Retract": generation_pb2.RetractRequest,
    "GetState": generation_pb2.GetStateRequest,
    "ListRows": generation_pb2.ListRowsRequest,
    "ResetPrefixCache": generation_pb2.ResetPrefixCacheRequest,
    "GetInfo": generation_pb2.GetInfoRequest,
}
STATUSES = {
    "Abort": {"OK", "NOT_FOUND"},
    "Retract": {"OK", "NOT_FOUND", "FAILED_PRECONDITION"},
    "GetState": {"OK", "NOT_FOUND"},
    "ListRows": {"OK"},
    "ResetPrefixCache": {"OK", "FAILED_PRECONDITION"},
    "GetInfo": {"OK"},
}


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The fingerprint model by its definition."""
    tokens: list[int] = []
    total = sum((i + 1) * (token + 1) for i, token in enumerate(prompt))
    for position in range(len(prompt) + 1, len(prompt) + 1 + count):
        tokens.append(total % FINGERPRINT_VOCABULARY)
        total += position * (tokens[-1] + 1)
    return tokens


class MadClients:
    """Calls of one scheduler that serves the fingerprint model."""

    def __init__(self, address: str, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._bytes = ByteMutator(self.rng)
        self._channel = aio.insecure_channel(address, options=OPTIONS)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        path = "/pagemirror.v1.GenerationService/"
        self._generate = self._channel.unary_stream(f"{path}Generate")
        self._calls = {name: self._channel.unary_unary(path + name) for name in REQUESTS}
        self._live: list[str] = []

    async def __aenter__(self) -> MadClients:
        self.info = await self.get_info()
        self.room = min(self.info.max_pages_per_row, self.info.num_pages) * self.info.page_size
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def get_info(self) -> generation_pb2.ServerInfo:
        return await asyncio.wait_for(self._stub.GetInfo(generation_pb2.GetInfoRequest()), WAIT_S)

    async def fuzz(self, num_calls: int, num_clients: int = 12) -> None:
        """So many mutated calls, by clients side by side, and beside them clean requests."""
        left = iter(range(num_calls))

        async def client() -> None:
            for _ in left:
                await (self._mutated_generate() if self.rng.random() < 0.6 else self._mutated_call())

        clients = [asyncio.ensure_future(client()) for _ in range(num_clients)]
        clean = asyncio.ensure_future(self._clean_requests(clients))
        try:
            await asyncio.gather(*clients, clean)
        finally:
            for task in (*clients, clean):
                task.cancel()
            await asyncio.gather(*clients, clean, return_exceptions=True)

    async def until_idle(self) -> generation_pb2.ServerInfo:
        """What the server says of itself once it has nothing to do, which it must come to."""
        async with asyncio.timeout(WAIT_S):
            while (info := await self.get_info()).num_running + info.num_waiting + info.num_retracted:
                await asyncio.sleep(0.02)
        return info

    async def _clean_requests(self, clients: list[asyncio.Future[None]]) -> None:
        number = 0
        while not all(client.done() for client in clients):
            number += 1
            prompt = [self.rng.randrange(FINGERPRINT_VOCABULARY) for _ in range(self.rng.randint(1, 20))]
            request = generation_pb2.GenerateRequest(request_id=f"clean-{number}", prompt=pack(prompt), max_tokens=10)
            status, _, tokens, reason = await self._run(request.SerializeToString())
            if (status, tokens, reason) != ("OK", continuation(prompt, 10), LENGTH):
                raise self._error(f"a clean request gave {status} {tokens} {reason}", "Generate", request.SerializeToString())
            self.counts["clean requests"] += 1

    # -- Generate

    async def run(self, prompt: Sequence[int], max_tokens: int) -> tuple[str, list[int]]:
        """Status and tokens of one request that is right."""
        request = generation_pb2.GenerateRequest(prompt=pack(prompt), max_tokens=max_tokens)
        status, _, tokens, _ = await self._run(request.SerializeToString())
        return status, tokens

    async def _mutated_generate(self) -> None:
        rng = self.rng
        data = self._generate_bytes()
        message = _parsed(generation_pb2.GenerateRequest, data)
        right = {"INVALID_ARGUMENT"} if message is None else self._right_statuses(message)
        if len(data) > MAX_MESSAGE_BYTES:
            right = {"RESOURCE_EXHAUSTED"}
        name = message.request_id if message is not None else ""
        if "OK" in right and name:
            if name in self._live:
                right = {"ALREADY_EXISTS", *right}
            self._live.append(name)
        pieces = rng.randint(0, 3) if rng.random() < 0.1 else None
        try:
            status, detail, tokens, reason = await self._run(data, leave_after=pieces)
        finally:
            if "OK" in right and name:
                self._live.remove(name)
        self.counts[f"Generate: {status}"] += 1
        self.counts["mutated"] += 1
        if status == "left":
            return
        if status not in right or len(detail.encode()) > 1024:
            raise self._error(f"{status} ({detail}) came, right are {right}", "Generate", data)
        if status == "OK" and (fault := self._output_fault(message, tokens, reason)):
            raise self._error(fault, "Generate", data)

    def _generate_bytes(self) -> bytes:
        rng = self.rng
        prompt = [rng.randrange(FINGERPRINT_VOCABULARY) for _ in range(rng.randint(1, 24))]
        request = generation_pb2.GenerateRequest(
            request_id=rng.choice(("", f"mad-{rng.randrange(40)}")),
            prompt=pack(prompt),
            max_tokens=rng.randint(1, 8),
            priority=rng.randint(-3, 3),
            stop_token_ids=pack(rng.sample(range(FINGERPRINT_VOCABULARY), rng.choice((0, 1, 60)))),
        )
        if rng.random() < 0.85:
            for _ in range(rng.choice((1, 1, 1, 2))):
                self._change(request, prompt)
        if rng.random() < 0.7:
            return request.SerializeToString()
        return self._bytes.mutate(request.SerializeToString(), pack(prompt))

    def _change(self, request: generation_pb2.GenerateRequest, prompt: list[int]) -> None:
        rng = self.rng
        kind = rng.randrange(11)
        if kind == 0:
            request.request_id = rng.choice(ODD_TEXTS)
        elif kind == 1:
            prompt[rng.randrange(len(prompt))] = rng.choice((-1, FINGERPRINT_VOCABULARY, MAX_INT32, -MAX_INT32 - 1, 0))
            request.prompt = pack(prompt)
        elif kind == 2:
            request.prompt = rng.choice((b"", request.prompt[:-1], request.prompt * 50, b"\0" * rng.choice((1, 3, 400_000))))
        elif kind == 3:
            request.max_tokens = rng.choice((0, -1, 1, self.room, MAX_INT32, -MAX_INT32 - 1))
        elif kind == 4:
            odd_sampling(rng, request.sampling, FINGERPRINT_VOCABULARY)
        elif kind == 5:
            ids = rng.choice(([-1], [MAX_INT32], [FINGERPRINT_VOCABULARY], [0] * 1024, [0] * 1025, [0] * 100_000))
            request.stop_token_ids = pack(ids)[rng.choice((0, 0, 1)) :]
        elif kind == 6:
            request.priority = rng.choice((MAX_INT32, -MAX_INT32 - 1, 0))
        elif kind == 7:
            request.cache_namespace = rng.choice(ODD_TEXTS)
        elif kind == 8:
            request.max_queue_wait_ms = rng.choice((0, 1, 5, MAX_UINT32))
        elif kind == 9:
            request.prefix_cache = rng.random() < 0.5
        else:
            request.ignore_default_stop_ids = True

    def _right_statuses(self, request: generation_pb2.GenerateRequest) -> set[str]:
        prompt, stop_ids = ints(request.prompt), ints(request.stop_token_ids)
        sampling = request.sampling
        tokens = [entry.token for entry in sampling.logit_bias]
        good = (
            prompt
            and stop_ids is not None
            and all(0 <= token < FINGERPRINT_VOCABULARY for token in prompt)
            and len(prompt) <= self.room
            and all(stop_id >= 0 for stop_id in stop_ids)
            and len(stop_ids) <= MAX_STOP_IDS
            and len(request.request_id) <= MAX_TEXT_LEN
            and len(request.cache_namespace) <= MAX_TEXT_LEN
            and (request.max_tokens >= 1 or not request.HasField("max_tokens"))
            and (request.max_queue_wait_ms >= 1 or not request.HasField("max_queue_wait_ms"))
            # The fingerprint model has no logits, so whatever needs them is refused.
            and sampling.temperature == 0
            and not tokens
            and sampling.min_new_tokens == 0
            and sampling.presence_penalty == 0
            and sampling.frequency_penalty == 0
            and (sampling.repetition_penalty == 1 or not sampling.HasField("repetition_penalty"))
            and not sampling.HasField("num_logprobs")
            and (1 <= sampling.top_k <= MAX_INT32 or not sampling.HasField("top_k"))
            and (0 < sampling.top_p <= 1 or not sampling.HasField("top_p"))
            and 0 <= sampling.min_p <= 1
        )
        if not good:
            # Whether an id is free may be looked at before or after the parameters.
            return {"INVALID_ARGUMENT", "ALREADY_EXISTS"} if request.request_id in self._live else {"INVALID_ARGUMENT"}
        return {"OK", "DEADLINE_EXCEEDED"} if request.HasField("max_queue_wait_ms") else {"OK"}

    def _output_fault(self, request: generation_pb2.GenerateRequest, tokens: list[int], reason: int) -> str:
        prompt, stop_ids = ints(request.prompt), set(ints(request.stop_token_ids))
        limit = min(request.max_tokens if request.HasField("max_tokens") else 16, self.room - len(prompt) + 1)
        right = continuation(prompt, limit)
        end = next((i + 1 for i, token in enumerate(right) if token in stop_ids), limit)
        if reason == ABORT:
            return "" if tokens == right[: len(tokens)] and len(tokens) <= end else f"aborted after {tokens}, not {right}"
        stopped = right[end - 1] in stop_ids
        if tokens != right[:end] or reason not in ({STOP} if stopped else {LENGTH, CAPACITY}):
            return f"tokens are {tokens} and the reason is {reason}, right are {right[:end]}"
        return ""

    async def _run(self, data: bytes, leave_after: int | None = None) -> tuple[str, str, list[int], int]:
        """Status, its message, tokens and finish reason; the status is "left" where we cancelled the call."""
        call = self._generate(data)
        tokens: list[int] = []
        reason, number = 0, 0
        try:
            async with asyncio.timeout(WAIT_S):
                while (piece := await call.read()) is not aio.EOF:
                    response = generation_pb2.GenerateResponse.FromString(piece)
                    tokens += ints(response.tokens)
                    reason = response.finished.reason
                    if number == leave_after and not reason:
                        call.cancel()
                        return "left", "", tokens, 0
                    number += 1
        except aio.AioRpcError as error:
            return error.code().name, error.details() or "", tokens, reason
        return "OK", "", tokens, reason

    # -- the other calls

    async def _mutated_call(self) -> None:
        rng = self.rng
        method = rng.choice(list(REQUESTS))
        request: Any = REQUESTS[method]()
        if "request_id" in request.DESCRIPTOR.fields_by_name:
            request.request_id = rng.choice((*self._live, *ODD_TEXTS, "nobody"))
        elif method == "ResetPrefixCache":
            request.force = rng.random() < 0.2
        data = request.SerializeToString()
        if rng.random() < 0.6:
            data = self._bytes.mutate(data, rng.choice(ODD_TEXTS).encode())
        right = {"INVALID_ARGUMENT"} if _parsed(REQUESTS[method], data) is None else STATUSES[method]
        status, detail = "OK", ""
        try:
            await asyncio.wait_for(self._calls[method](data), WAIT_S)
        except aio.AioRpcError as error:
            status, detail = error.code().name, error.details() or ""
        self.counts[f"{method}: {status}"] += 1
        self.counts["mutated"] += 1
        if status not in right or len(detail.encode()) > 1024:
            raise self._error(f"{status} ({detail}) came, right are {right}", method, data)

    def _error(self, what: str, method: str, data: bytes) -> AssertionError:
        shown = f"bytes.fromhex({data.hex()!r})" if len(data) < 10_000 else f"{len(data)} bytes"
        return AssertionError(f"{what[:2000]}\nseed {self.seed}; {method} of {shown}")


def _parsed(kind: Any, data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError:
        return None
