"""One request of a gateway: as many requests of the engine as completions are wanted, their tokens, and how each ends.

Whose messages carry them is not known here; a servicer gives a `Wording`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from scheduler_service.core.errors import DuplicateRequestError, PagemirrorError
from scheduler_service.core.ops import Int32Array, TokenLogprobs
from scheduler_service.core.request import FinishReason
from scheduler_service.engine_loop import SubmitOptions
from scheduler_service.gateway.engine import Finish, GatewayEngine, GatewayOutput
from scheduler_service.gateway.stops import Decode, Detokenizer, StopStrings

_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CAPACITY: "length",
    FinishReason.ABORT: "abort",
}
_SEEDS = 2**64


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a gateway asked for.

    `stop_strings` need `decode`. `seed` is that of the first completion, each later one draws with one more; None: drawn anew.
    `end_ids` are all ids that end the output; with `trim_end` such a token is not handed on, though it counts.
    """

    request_id: str
    prompt: Int32Array
    options: SubmitOptions
    num_choices: int = 1
    seed: int | None = None
    stream: bool = False
    stop_strings: tuple[str, ...] = ()
    decode: Decode | None = None
    end_ids: frozenset[int] = frozenset()
    trim_end: bool = False

    def options_of(self, index: int) -> SubmitOptions:
        """Of the completion with this number."""
        sampling = self.options.sampling
        if sampling.temperature == 0:
            return self.options
        seed = secrets.randbits(64) if self.seed is None else (self.seed + index) % _SEEDS
        return replace(self.options, sampling=replace(sampling, seed=seed))

    def id_of(self, index: int) -> str:
        """What the completion is called in the engine."""
        return self.request_id if self.num_choices == 1 else f"{self.request_id}-n{index}"


@dataclass(slots=True)
class Ending:
    """How one completion ended: "stop", "length" or "abort", and by which stop id or stop string, where it was one."""

    reason: str
    matched: int | str | None
    cached_tokens: int


@dataclass(slots=True)
class Choice:
    """One completion: its tokens so far, those that are handed on; `num_completion` counts all."""

    index: int
    num_prompt: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_completion: int = 0
    ended_by: int | None = None
    """The stop id that was its last token."""


class Wording(Protocol):
    """The messages of one gateway's service."""

    def chunk(self, wanted: Wanted, choice: Choice, tokens: list[int], logprobs: list[TokenLogprobs]) -> Any:
        """Tokens that have just been added to a completion."""

    def complete(self, wanted: Wanted, choice: Choice, ending: Ending) -> Any:
        """A completion that is over."""


class Call:
    """A gateway's call that is being served."""

    def __init__(self) -> None:
        self._outputs: list[GatewayOutput] = []
        self._aborted = False

    def add(self, output: GatewayOutput) -> None:
        """One more request of the engine belongs to it."""
        self._outputs.append(output)
        if self._aborted:
            output.abort()

    def abort(self) -> None:
        """End all of it, what is not submitted yet included."""
        self._aborted = True
        for output in self._outputs:
            output.abort()


class Calls:
    """The calls that are being served, by the ids of their requests."""

    def __init__(self, engine: GatewayEngine) -> None:
        self._engine = engine
        self._live: dict[str, Call] = {}

    @property
    def num_live(self) -> int:
        return len(self._live)

    async def abort(self, request_id: str) -> bool:
        """End a request; whether there was one. It may be another process's of this scheduler."""
        call = self._live.get(request_id)
        if call is None:
            return await self._engine.abort(request_id)
        call.abort()
        return True

    async def serve(self, wanted: Wanted, wording: Wording, write: Callable[[Any], Awaitable[None]]) -> None:
        """Run a request and write its messages. However this ends, the request ends.

        Raises:
            PagemirrorError: it was refused, or one of its completions ended by an error.
        """
        if wanted.request_id in self._live:
            raise DuplicateRequestError(wanted.request_id)
        call = self._live[wanted.request_id] = Call()
        try:
            outputs = []
            for index in range(wanted.num_choices):
                options = wanted.options_of(index)
                outputs.append(await self._engine.submit(wanted.id_of(index), wanted.prompt, options))
                call.add(outputs[-1])
            if len(outputs) == 1:
                await _run(wanted, 0, outputs[0], wording, write)
                return
            lock = asyncio.Lock()

            async def write_alone(message: Any) -> None:
                async with lock:
                    await write(message)

            try:
                async with asyncio.TaskGroup() as group:
                    for index, output in enumerate(outputs):
                        group.create_task(_run(wanted, index, output, wording, write_alone))
            except* PagemirrorError as errors:
                raise _first(errors) from None
        finally:
            call.abort()
            del self._live[wanted.request_id]


async def _run(
    wanted: Wanted, index: int, output: GatewayOutput, wording: Wording, write: Callable[[Any], Awaitable[None]]
) -> None:
    """One completion, from its first token to its end."""
    choice = Choice(index, len(wanted.prompt))
    stops = _stops(wanted)
    while True:
        piece = await output.take()
        tokens, logprobs, finished = piece.tokens, piece.logprobs, piece.finished
        matched: int | str | None = None
        if stops is not None and (found := _find(stops, tokens)) is not None:
            count, matched = found
            tokens, logprobs = tokens[:count], logprobs[:count]
            finished = finished or await _end(output)
        choice.num_completion += len(tokens)
        if tokens and tokens[-1] in wanted.end_ids:  # nothing follows such a token
            choice.ended_by = tokens[-1]
            if wanted.trim_end:
                tokens, logprobs = tokens[:-1], logprobs[:-1]
        choice.tokens += tokens
        choice.logprobs += logprobs
        if wanted.stream and tokens:
            await write(wording.chunk(wanted, choice, tokens, logprobs))
        if finished is not None:
            reason = _REASONS[finished.reason] if matched is None else "stop"
            if matched is None and reason == "stop":
                matched = choice.ended_by
            await write(wording.complete(wanted, choice, Ending(reason, matched, finished.cached_tokens)))
            return


def _stops(wanted: Wanted) -> StopStrings | None:
    if not wanted.stop_strings or wanted.decode is None:
        return None
    text = Detokenizer(wanted.decode, wanted.prompt[-64:].tolist())
    return StopStrings(text, wanted.stop_strings, wanted.options.sampling.min_new_tokens)


def _find(stops: StopStrings, tokens: list[int]) -> tuple[int, str] | None:
    """How many of the tokens it takes to a stop string, and which; None: there is none."""
    for position, token in enumerate(tokens):
        if (matched := stops.push(token)) is not None:
            return position + 1, matched
    return None


async def _end(output: GatewayOutput) -> Finish:
    """End a request now that its stop has come; its account. What it still puts out is nobody's."""
    output.stop()
    try:
        while (piece := await output.take()).finished is None:
            pass
    except PagemirrorError:  # its tokens are all here, so it ended well; only its account is lost
        return Finish(FinishReason.ABORT, 0, 0, 0)
    return piece.finished


def _first(errors: BaseExceptionGroup[PagemirrorError]) -> PagemirrorError:
    inner = errors.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
