"""lone_op: the op of a lone prompt row is the one that the builder of ops of any size makes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from scheduler_driver import DEFAULTS, Driver
from scheduler_service.core import op_builder
from scheduler_service.core.choice import Choice, Extend
from scheduler_service.core.config import RefreshPolicy, SchedulerConfig, Verify
from scheduler_service.core.ops import ForwardOp, SamplingParams
from scheduler_service.core.placement import Placement
from scheduler_service.core.states import State
from scheduler_service.wire import op_to_proto


def _general(placement: Placement, extend: Extend, session_no: int, step: int) -> ForwardOp:
    return op_builder._new_op(placement, Choice([extend]), session_no, step)


def _story(driver: Driver, seed: int) -> list[tuple[Any, ...]]:
    """What is planned while requests come one by one, with pages for hardly two of them; some share prefixes."""
    draw, told = random.Random(seed), []
    for number in range(20):
        name = f"r{number}"
        prompt = [draw.randrange(2) for _ in range(draw.randint(1, 9))]
        asked = {"min_new_tokens": draw.choice([0, 1]), "presence_penalty": draw.choice([0.0, 0.5])}
        asked["num_logprobs"] = draw.choice([None, 0])
        sampling = SamplingParams(**asked) if draw.random() < 0.5 else SamplingParams()
        driver.submit(
            name, prompt, draw.randint(1, 6), stop_ids=[7, 2000], sampling=sampling, traceparent=draw.choice(["", "t"])
        )
        for _ in range(draw.randint(1, 6)):
            op = driver.scheduler.plan()
            if op is None:
                break
            facts = (op.causes, op.num_ended, op.may_end, op.num_logprobs is None, [r.request_id for r in op.requests])
            told.append((op_to_proto(op).SerializeToString(deterministic=True), *facts))
            result = driver.runtime.run(op)
            if op.num_logprobs is not None:
                result.logprobs = (op.sample * -1.0).astype("f4")
            driver.scheduler.complete(result)
            driver.collect()
            driver.audit()
            live = [
                request for request in driver.scheduler.requests.values() if request.state in (State.PREFILLING, State.DECODING)
            ]
            if live and draw.random() < 0.3:
                driver.scheduler.retract(draw.choice(live).request_id)
    return told


@pytest.mark.parametrize("verify", [Verify.OFF, Verify.EVERY])
@pytest.mark.parametrize("policy", [policy for policy in RefreshPolicy if policy is not RefreshPolicy.TAIL_ONLY])
def test_both_builders_say_the_same(policy: RefreshPolicy, verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns, lease starts, causes and digests of first chunks, later chunks and resumes are equal, whoever wrote them."""
    options: dict[str, Any] = {"num_pages": 8, "max_rows": 3, "page_size": 2, "chunk_size": 3, "overlap_depth": 0}
    config = SchedulerConfig(**DEFAULTS | options | {"refresh_policy": policy, "verify": verify})
    lone = 0
    for seed in range(3):
        quick = _story(Driver(config), seed)
        with monkeypatch.context() as patch:
            patch.setattr(op_builder, "lone_op", _general)
            assert _story(Driver(config), seed) == quick
        lone += sum(len(causes) == 1 for _, causes, *_ in quick)
    assert lone > 20
