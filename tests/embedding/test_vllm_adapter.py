"""The adapter for vLLM's SchedulerOutput: rows and tokens under random requests, and objects that are none."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime_service import (
    ColumnTypeError,
    MissingAttributeError,
    Refusal,
    RefusalCode,
    ReqToPage,
    RuntimeSettings,
    StepResult,
    UnsupportedPlanError,
    VllmAdapter,
    open_runner,
)
from vllm_shapes import CachedRequestData, NewRequestData, PlainScheduler, SchedulerOutput

BLOCK_SIZE, NUM_BLOCKS, MAX_SEQS = 4, 11, 4


def _alone(prompt: list[int], count: int) -> list[int]:
    known = list(prompt)
    for _ in range(count):
        known.append(sum((i + 1) * (token + 1) for i, token in enumerate(known)) % 997)
    return known


@pytest.mark.parametrize("seed", range(6))
def test_rows_and_tokens_follow_the_scheduler(seed: int) -> None:
    """Chunked prefill, preemption, resume: after each step each row is the request's blocks; every output is as if alone."""
    scheduler = PlainScheduler(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_seqs=MAX_SEQS, budget=7, seed=seed)
    settings = RuntimeSettings(
        model="fingerprint", page_size=BLOCK_SIZE, num_pages=NUM_BLOCKS, max_rows=MAX_SEQS, max_pages_per_row=NUM_BLOCKS
    )
    runner = open_runner(settings)
    runner.open(1, 1, 0)
    adapter = VllmAdapter(MAX_SEQS)
    draw = scheduler.draw
    for number in range(25):
        scheduler.add(f"r{number}", [draw.randrange(997) for _ in range(draw.randint(1, 20))], draw.randint(1, 14))
    num_rows = num_refreshed = 0
    while scheduler.requests or scheduler.finished:
        output = scheduler.schedule()
        op, request_ids = adapter.forward_op(output)
        assert set(request_ids) == set(output.num_scheduled_tokens)
        result = runner.run(op)
        assert isinstance(result, StepResult), result
        num_refreshed += int(op.full_refresh.sum())
        for request_id, row, token in zip(request_ids, op.req_pool_indices.tolist(), result.tokens.tolist(), strict=True):
            num_rows += 1
            assert runner.mirror.row(row).tolist() == scheduler.blocks_of(request_id)
            assert (token >= 0) == scheduler.samples(request_id)
            if token >= 0:
                scheduler.update(request_id, token)
    assert {request.name: request.tokens for request in scheduler.done} == {
        request.name: _alone(request.prompt, request.max_tokens) for request in scheduler.done
    }
    assert len(scheduler.done) == 25
    assert scheduler.num_preempted > 3
    assert num_refreshed == 25 + scheduler.num_preempted < num_rows / 3
    assert runner.mirror.row_lens.sum() == 0  # all released


def _first() -> SchedulerOutput:
    return SchedulerOutput([NewRequestData("a", [1, 2, 3, 4, 5], ([7, 9],), 0)], CachedRequestData(), {"a": 5})


def _next(**changes: Any) -> SchedulerOutput:
    cached = CachedRequestData(["a"], set(), [[]], {}, [None], [5], [1])
    for name, value in changes.items():
        setattr(cached, name, value)
    return SchedulerOutput([], cached, {"a": 1})


def test_columns_of_new_cached_resumed_and_finished() -> None:
    """A new request is refreshed, its next step is a tail, a resumed one is refreshed under a new generation, a finished one is
    released.
    """
    adapter = VllmAdapter(4)
    first = adapter.forward_op(_first()).op
    assert (first.full_refresh.tolist(), first.occupied_pages.tolist(), first.begins.tolist()) == ([True], [7, 9], [0])
    tail = adapter.forward_op(_next(new_block_ids=[([4],)], num_computed_tokens=[5])).op
    assert (tail.full_refresh.tolist(), tail.occupied_pages.tolist(), tail.begins.tolist()) == ([False], [4], [2])
    assert tail.num_extend_rows == 0
    resumed = _next(resumed_req_ids={"a"}, all_token_ids={"a": [1, 2, 3, 4, 5, 6, 8]}, new_block_ids=[([3, 5],)])
    resumed.scheduled_cached_reqs.num_computed_tokens = [4]  # its first block was found in the prefix cache
    resumed.num_scheduled_tokens = {"a": 3}
    op = adapter.forward_op(resumed).op
    assert (op.full_refresh.tolist(), op.occupied_pages.tolist(), op.row_generations.tolist()) == ([True], [3, 5], [2])
    assert (op.input_ids.tolist(), op.num_computed.tolist(), op.sample.tolist()) == ([5, 6, 8], [4], [True])
    over = adapter.forward_op(SchedulerOutput([], CachedRequestData(), {}, {}, {"a"})).op
    assert (over.num_rows, over.released_rows.tolist()) == (0, [1])
    assert adapter.row_of("a") is None


def test_older_shape_of_a_resume() -> None:
    """`resumed_from_preemption`, one bool a request, and `resumed_req_token_ids` mean the same."""
    adapter = VllmAdapter(4)
    adapter.forward_op(_first())
    cached = SimpleNamespace(
        req_ids=["a"],
        resumed_from_preemption=[True],
        resumed_req_token_ids=[[1, 2, 3, 4, 5, 6]],
        new_block_ids=[[3, 5]],
        num_computed_tokens=[0],
    )
    op = adapter.forward_op(SchedulerOutput([], cached, {"a": 6})).op  # type: ignore[arg-type]
    assert (op.full_refresh.tolist(), op.occupied_pages.tolist(), op.input_ids.tolist()) == ([True], [3, 5], [1, 2, 3, 4, 5, 6])


def test_rows_are_given_back_and_taken_again() -> None:
    """With all rows in use one more request is refused; the row of one that is over goes to another in the same output."""
    adapter = VllmAdapter(1)
    adapter.forward_op(_first())
    other = NewRequestData("b", [1, 2], ([5],), 0)
    with pytest.raises(Refusal, match="request 'b' is one more than the 1 rows"):
        adapter.forward_op(SchedulerOutput([other], CachedRequestData(), {"b": 2}))
    op = adapter.forward_op(SchedulerOutput([other], CachedRequestData(), {"b": 2}, {}, {"a"})).op
    assert (op.req_pool_indices.tolist(), op.row_generations.tolist(), op.released_rows.tolist()) == ([1], [2], [1])


@pytest.mark.parametrize(
    "attribute", ["scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "finished_req_ids"]
)
def test_missing_attribute_is_named(attribute: str) -> None:
    """An object that is no SchedulerOutput: the attribute and the producer are told."""
    plain = dict(vars(_first()))
    del plain[attribute]
    with pytest.raises(MissingAttributeError, match=f"no attribute '{attribute}'; expected a SchedulerOutput of vLLM v1"):
        VllmAdapter(4).forward_op(SimpleNamespace(**plain))


def test_resume_without_tokens_names_what_is_missing() -> None:
    """A resumed request whose tokens nobody gave cannot be computed anew."""
    adapter = VllmAdapter(4)
    adapter.forward_op(_first())
    with pytest.raises(MissingAttributeError, match=r"all_token_ids\['a'\]"):
        adapter.forward_op(_next(resumed_req_ids={"a"}, new_block_ids=[([3],)]))


BAD: dict[str, tuple[SchedulerOutput, type[Exception], str]] = {
    "unknown request": (_next(req_ids=["z"]), Refusal, "request 'z' is cached and not resumed, but holds no row"),
    "unequal lists": (_next(new_block_ids=[]), Refusal, "1 req_ids, 0 new_block_ids, 1 num_computed_tokens"),
    "nothing scheduled": (replace(_next(), num_scheduled_tokens={}), Refusal, "no tokens for request 'a'"),
    "scheduled alone": (replace(_next(), num_scheduled_tokens={"a": 1, "z": 2}), Refusal, "tokens for request 'z' alone"),
    "twice": (
        replace(_next(), scheduled_new_reqs=_first().scheduled_new_reqs, num_scheduled_tokens={"a": 1}),
        Refusal,
        "names a request twice",
    ),
    "over and cached": (
        replace(_next(), finished_req_ids={"a"}),
        Refusal,
        "'a' is cached and not resumed, but holds no",
    ),
    "new twice": (
        SchedulerOutput([NewRequestData("b", [1], ([3],), 0)] * 2, CachedRequestData(), {"b": 1}),
        Refusal,
        "names a request twice",
    ),
    "cached twice": (
        _next(req_ids=["a", "a"], new_block_ids=[None, None], num_computed_tokens=[5, 6]),
        Refusal,
        "names a request twice",
    ),
    "not where it was": (
        _next(num_computed_tokens=[6]),
        Refusal,
        "request 'a': num_computed_tokens is 6, its last step ended at 5",
    ),
    "block of a fraction": (_next(new_block_ids=[([4.5],)]), ColumnTypeError, "block_ids is float64"),
    "drafts": (replace(_next(), scheduled_spec_decode_tokens={"a": [1]}), UnsupportedPlanError, "draft tokens for 'a'"),
    "two tokens": (replace(_next(), num_scheduled_tokens={"a": 2}), UnsupportedPlanError, "a decode step of 2 tokens"),
    "embeddings": (
        SchedulerOutput([NewRequestData("b", None, ([3],), 0)], CachedRequestData(), {"b": 1}),
        UnsupportedPlanError,
        "request 'b' has no prompt_token_ids",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_output_changes_nothing(name: str) -> None:
    """What cannot be done is a typed error that names it, and the next output is taken as if nothing had come."""
    output, kind, text = BAD[name]
    adapter = VllmAdapter(4)
    adapter.forward_op(_first())
    twin = copy.deepcopy(adapter)
    with pytest.raises(kind, match=text):
        adapter.forward_op(output)
    good = _next(new_block_ids=[([4],)])
    op, expected = adapter.forward_op(good).op, twin.forward_op(good).op
    assert op.step == expected.step == 2
    assert op.occupied_pages.tolist() == expected.occupied_pages.tolist() == [4]
    assert adapter.pages("a").tolist() == [7, 9, 4]


def _begun(adapter: VllmAdapter) -> VllmAdapter:
    adapter.forward_op(_first())
    return adapter


def test_request_that_begins_where_another_of_its_name_ended() -> None:
    """An id is over and comes again in one output, cached up to where the first one ended: a new lease all the same."""
    again = NewRequestData("a", [1, 2, 3, 4, 5, 6], ([7, 9],), 5)
    op = _begun(VllmAdapter(4)).forward_op(SchedulerOutput([again], CachedRequestData(), {"a": 1}, {}, {"a"})).op
    assert (op.row_generations.tolist(), op.full_refresh.tolist(), op.occupied_pages.tolist()) == ([2], [True], [7, 9])
    assert [(start.req_pool_index, start.prompt_len) for start in op.lease_starts] == [(1, 6)]
    assert op.released_rows.tolist() == [1]


def test_resume_at_the_place_of_the_preemption_is_a_new_lease() -> None:
    """All that was computed was found in the prefix cache: the row is sent whole, under a new generation."""
    resumed = _next(resumed_req_ids={"a"}, all_token_ids={"a": [1, 2, 3, 4, 5, 6]}, new_block_ids=[([7, 9],)])
    op = _begun(VllmAdapter(4)).forward_op(resumed).op
    assert (op.row_generations.tolist(), op.full_refresh.tolist(), op.num_extend_rows) == ([2], [True], 1)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_blocks_and_tokens_of_any_kind_mean_the_same(kind: Any) -> None:
    """Lists, tuples, arrays or tensors of blocks, in groups or bare, and of tokens; what is done to them later is not seen."""
    adapter, blocks = VllmAdapter(4), kind([7, 9])
    first = adapter.forward_op(
        SchedulerOutput([NewRequestData("a", kind([1, 2, 3, 4, 5]), (blocks,), 0)], CachedRequestData(), {"a": 5})
    ).op
    assert (first.occupied_pages.tolist(), first.input_ids.tolist()) == ([7, 9], [1, 2, 3, 4, 5])
    if not isinstance(blocks, tuple):
        blocks[0] = 3
    tail = adapter.forward_op(_next(new_block_ids=[kind([4])], num_computed_tokens=kind([5]))).op
    assert (tail.full_refresh.tolist(), tail.occupied_pages.tolist()) == ([False], [4])
    assert adapter.pages("a").tolist() == [7, 9, 4]


def test_unknown_cache_group_is_named() -> None:
    """Blocks of one group where the second was asked for."""
    with pytest.raises(UnsupportedPlanError, match="blocks of 1 groups, none of them is group 1"):
        VllmAdapter(4, group=1).forward_op(_first())


def test_tail_update_into_a_bare_mirror() -> None:
    """The op is one for `ReqToPage.apply` as well, without session or model."""
    adapter, mirror = VllmAdapter(4), ReqToPage(4, 4, 16, 4)
    for output in (_first(), _next(new_block_ids=[([4],)])):
        mirror.apply(adapter.forward_op(output).op)
    assert mirror.row(1).tolist() == [7, 9, 4]


def test_refusal_codes_are_those_of_the_wire() -> None:
    """An adapter's refusal can be handled as the runtime's own."""
    with pytest.raises(Refusal) as caught:
        VllmAdapter(4).forward_op(_next())
    assert caught.value.code is RefusalCode.LEASE_NOT_STARTED
    assert caught.value.request_id == "a"
