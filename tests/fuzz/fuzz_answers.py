"""Whether an answer of the runtime is one of the right ones; what is wrong with it, in words, where it is not."""

from __future__ import annotations

import math
import struct

from fuzz_columns import ints, longs
from fuzz_model import Expected, Result, Shape

from pagemirror.v1 import forward_pb2, runtime_pb2

MAX_DETAIL_BYTES = 1024
MAX_REQUEST_ID_LEN = 256


def answer_fault(answer: runtime_pb2.ExecuteResponse, op: forward_pb2.ForwardOp, expected: Expected, shape: Shape) -> str:
    """Empty when `answer` is right for `op`."""
    kind = answer.WhichOneof("message")
    if expected.refusals:
        if kind != "refusal":
            return f"a refusal ({sorted(expected.refusals)}) is due"
        return _refusal_fault(answer.refusal, op, expected)
    if expected.reset_done:
        return "" if kind == "reset_done" and answer.reset_done.session_no == expected.reset_done else "ResetDone is due"
    if expected.result is None:
        return "no answer is due"
    if kind != "result":
        return f"a result is due: {expected.result}"
    return _result_fault(answer.result, op, expected.result, shape)


def _refusal_fault(refusal: runtime_pb2.Refusal, op: forward_pb2.ForwardOp, expected: Expected) -> str:
    code = runtime_pb2.RefusalCode.Name(refusal.code).removeprefix("REFUSAL_CODE_")
    if code not in expected.refusals:
        return f"{code} is none of the codes that fit: {sorted(expected.refusals)}"
    if (refusal.session_no, refusal.step) != (op.session_no, op.step):
        return f"the refusal names step {refusal.step} of session {refusal.session_no}"
    if not 0 < len(refusal.detail.encode()) <= MAX_DETAIL_BYTES:
        return f"the detail has {len(refusal.detail.encode())} bytes"
    return "" if len(refusal.request_id) <= MAX_REQUEST_ID_LEN else f"the request id has {len(refusal.request_id)} characters"


def _result_fault(result: forward_pb2.StepResult, op: forward_pb2.ForwardOp, expected: Result, shape: Shape) -> str:
    if (result.session_no, result.step) != (op.session_no, expected.step):
        return f"the result names step {result.step} of session {result.session_no}"
    tokens, num_rows = ints(result.tokens), len(expected.tokens)
    if tokens is None or len(tokens) != num_rows:
        return f"{tokens} are no tokens of {num_rows} rows"
    for token, right in zip(tokens, expected.tokens, strict=True):
        if token != right and not (right is None and 0 <= token < shape.vocab_size):
            return f"tokens are {tokens}, right are {expected.tokens}"
    if list(result.row_status or bytes(num_rows)) != expected.statuses:
        return f"row_status is {list(result.row_status)}, right is {expected.statuses}"
    if longs(result.digests) != expected.digests:
        return f"digests are {longs(result.digests)}, right are {expected.digests}"
    if result.num_tokens:
        return "num_tokens is set"
    return "" if expected.logprobs_unsaid else _logprobs_fault(result, expected)


def _logprobs_fault(result: forward_pb2.StepResult, expected: Result) -> str:
    num_rows = len(expected.tokens)
    asked = [number for number in expected.num_logprobs if number is not None]
    num_top = max(asked, default=0)
    if result.num_top != num_top:
        return f"num_top is {result.num_top}, the largest num_logprobs of the rows is {num_top}"
    sizes = (len(result.logprobs), len(result.top_tokens), len(result.top_logprobs))
    if sizes != (4 * num_rows * bool(asked), 4 * num_rows * num_top, 4 * num_rows * num_top):
        return f"logprobs, top_tokens and top_logprobs have {sizes} bytes for {num_rows} rows"
    if asked:
        for value, number in zip(struct.unpack(f"<{num_rows}f", result.logprobs), expected.num_logprobs, strict=True):
            if number is None and not math.isnan(value):
                return "a row that asked for no log probability has one"
    return ""


def rows_fault(response: runtime_pb2.ReadRowsResponse, rows: list[tuple[int, int, int, int, list[int]]]) -> str:
    """Empty when ReadRows says of each row what the model says: number, generation, length, valid length, pages."""
    columns = [ints(getattr(response, name)) for name in ("rows", "row_generations", "row_lens", "valid_lens")]
    right = [list(column) for column in zip(*(row[:4] for row in rows), strict=True)] or [[], [], [], []]
    if columns != right:
        return f"ReadRows says {columns}, right is {right}"
    pages, right_pages = ints(response.pages), [page for row in rows for page in row[4]]
    return "" if pages == right_pages else f"ReadRows has pages {pages}, right are {right_pages}"
