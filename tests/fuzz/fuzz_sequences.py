"""Ops that a real scheduler sends: the core plans them, and the model of the runtime answers."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from fuzz_columns import ints, pack, pack_longs, row_digest
from fuzz_model import RuntimeModel, Shape

from pagemirror.v1 import forward_pb2, runtime_pb2
from scheduler_service.core.config import RefreshPolicy, SchedulerConfig
from scheduler_service.core.errors import RequestError
from scheduler_service.core.ops import ForwardOp, SamplingParams, StepResult
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.wire import op_to_proto

SESSION = 1
SERVED = (RefreshPolicy.TRANSITION, RefreshPolicy.DIFF, RefreshPolicy.ALWAYS)


@dataclass
class Sequence:
    """A session's ops, in order, and what the scheduler said at hello."""

    ops: list[forward_pb2.ForwardOp]
    overlap_depth: int


class Source:
    """Draws one scheduler configuration and one workload per sequence."""

    def __init__(self, rng: random.Random, shape: Shape) -> None:
        self.rng = rng
        self.shape = shape

    def sequence(self, num_ops: int) -> Sequence:
        """The first ops of a session in which requests come, grow, are retracted, resumed, aborted and ended."""
        config = self._config()
        core, model = Scheduler(config, SESSION), RuntimeModel(self.shape)
        model.open(SESSION, config.overlap_depth)
        verify = self.rng.choice(("off", "every", "sample"))
        ops: list[forward_pb2.ForwardOp] = []
        results: list[StepResult] = []
        while len(ops) < num_ops:
            self._events(core)
            op = core.plan() if core.has_work else core.flush_releases()
            if op is not None:
                message = op_to_proto(op)
                result = model.take(runtime_pb2.ExecuteRequest(op=message)).result
                assert result is not None, "the model refuses what the scheduler plans"
                add_digests(message, model, verify)
                ops.append(message)
                results.append(self._answer(op, result.tokens, result.statuses))
            if results and (op is None or core.num_in_flight > config.overlap_depth or self.rng.random() < 0.3):
                core.complete(results.pop(0))
                core.take_outputs()
        return Sequence(ops, config.overlap_depth)

    def _config(self) -> SchedulerConfig:
        rng, shape = self.rng, self.shape
        return SchedulerConfig(
            page_size=shape.page_size,
            num_pages=min(shape.num_pages, rng.choice((10, 16, 40, 10_000))),
            max_rows=min(shape.max_rows, rng.choice((2, 4, 8))),
            # A scheduler that takes the mirror for wider than it is makes it clamp.
            max_pages_per_row=shape.width + rng.choice((0, 0, 0, 3)),
            vocab_size=shape.vocab_size,
            token_budget=rng.choice((6, 24, 64)),
            chunk_size=rng.choice((3, 8, 64)),
            refresh_policy=rng.choice(SERVED),
            overlap_depth=rng.choice((0, 1, 2)),
            mixed=rng.random() < 0.7,
            prefix_cache=rng.random() < 0.8,
            greedy_only=shape.greedy_only,
        )

    def _events(self, core: Scheduler) -> None:
        rng = self.rng
        while not core.has_work or (len(core.requests) < 6 and rng.random() < 0.4):
            self._submit(core)
        name = rng.choice(list(core.requests))
        draw = rng.random()
        try:
            if draw < 0.12:
                core.retract(name)
            elif draw < 0.17 and len(core.requests) > 1:
                core.abort(name)
            elif draw < 0.19:
                core.reset_prefix_cache(force=rng.random() < 0.5)
        except RequestError:
            return  # it holds no row, or the cache is in use

    def _submit(self, core: Scheduler) -> None:
        rng = self.rng
        usual = min(core.config.room, 6 * self.shape.page_size)
        length = rng.randint(1, core.config.room if rng.random() < 0.2 else usual)
        vocabulary = min(self.shape.vocab_size, 4 if rng.random() < 0.5 else self.shape.vocab_size)
        core.submit(
            f"request-{len(core.requests)}-{rng.getrandbits(32):08x}",
            [rng.randrange(vocabulary) for _ in range(length)],
            max_tokens=rng.randint(1, 12),
            sampling=SamplingParams() if self.shape.greedy_only else self._sampling(),
            stop_ids=[rng.randrange(self.shape.vocab_size)],
            priority=rng.randint(-2, 2),
            traceparent=rng.choice(("", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")),
        )

    def _sampling(self) -> SamplingParams:
        rng = self.rng
        maybe = lambda value, otherwise: value if rng.random() < 0.5 else otherwise  # noqa: E731
        return SamplingParams(
            temperature=maybe(rng.uniform(0.1, 2.0), 0.0),
            top_k=maybe(rng.randint(1, 50), None),
            top_p=maybe(rng.uniform(0.1, 1.0), 1.0),
            min_p=maybe(rng.uniform(0.0, 0.2), 0.0),
            seed=rng.getrandbits(64),
            min_new_tokens=maybe(rng.randint(1, 4), 0),
            repetition_penalty=maybe(rng.uniform(0.5, 2.0), 1.0),
            presence_penalty=maybe(rng.uniform(-2.0, 2.0), 0.0),
            frequency_penalty=maybe(rng.uniform(-2.0, 2.0), 0.0),
            logit_bias=tuple((token, rng.uniform(-5.0, 5.0)) for token in rng.sample(range(50), rng.randint(0, 3))),
            num_logprobs=maybe(rng.randint(0, 3), None),
        )

    def _answer(self, op: ForwardOp, tokens: list[int | None], statuses: list[int]) -> StepResult:
        # Where only the model could say, any token does: the scheduler plans alike.
        values = [self.rng.randrange(self.shape.vocab_size) if token is None else token for token in tokens]
        result = StepResult(op.session_no, op.step, np.array(values, dtype=np.int32), np.array(statuses, dtype=np.uint8))
        if op.num_logprobs is not None:
            width = max(int(op.num_logprobs.max()), 0)
            result.logprobs = np.zeros(len(values), dtype=np.float32)
            result.top_tokens = np.zeros((len(values), width), dtype=np.int32)
            result.top_logprobs = np.zeros((len(values), width), dtype=np.float32)
        return result


def add_digests(op: forward_pb2.ForwardOp, after: RuntimeModel, verify: str) -> None:
    """Have the runtime compare rows with the state that the model is in after the op."""
    if verify == "off":
        return
    rows, width = ints(op.req_pool_indices), after.shape.width
    digest = lambda row: row_digest(after.leases[row].pages[:width], len(after.leases[row].pages))  # noqa: E731
    op.row_digests = pack_longs([digest(row) for row in rows])
    if verify == "sample":
        others = sorted(set(after.leases) - set(rows))
        op.verify_rows, op.verify_digests = pack(others), pack_longs([digest(row) for row in others])
