"""Client processes of the soak test: a server that forks them, so that each is a process of its own and none costs an import.

Lines of JSON on stdin: {"start": N, "life": K, "port": P, "seed": S}, {"kill": N}, {"finish": true}. Lines of JSON on stdout,
from every process: a call that begins, a call that ended and how, and what the server itself did. A line is shorter than what
a pipe takes in one piece, so lines of different processes do not mix.

A client checks each token against the definition of the fingerprint model as it comes. What it asks for next is drawn from its
seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from scheduler_service.client import Client, Ending, RpcFailedError

VOCAB_SIZE = 997
CALL_LIMIT_S = 150.0
"""A call that has no end by then has none at all: longer than the scheduler waits for a runtime until it tells its clients."""
KINDS = {"plain": 58, "abort": 8, "retract": 12, "vanish": 7, "slow": 8, "bad_request": 7}
NUM_FAMILIES = 5
LONGEST_PROMPT, LONGEST_OUTPUT = 60, 90


def say(**record: Any) -> None:
    """One line, in one write."""
    os.write(1, json.dumps(record, separators=(",", ":")).encode() + b"\n")


def continuation(prompt: list[int]) -> Iterator[int]:
    """The fingerprint model by its definition: the tokens after `prompt`, without end."""
    length = len(prompt)
    total = sum((i + 1) * (token + 1) for i, token in enumerate(prompt))
    while True:
        token = total % VOCAB_SIZE
        yield token
        length += 1
        total += length * (token + 1)


@dataclass(slots=True)
class Job:
    """One request and what its client does with it."""

    kind: str
    prompt: list[int]
    max_tokens: int
    turn: int  # the token after which the client does what its kind says

    @classmethod
    def draw(cls, rng: random.Random) -> Job:
        """Prompts begin like one of a few families', so that prefixes are shared, and differ after that, as a rule."""
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        family = random.Random(rng.randrange(NUM_FAMILIES))
        shared = [family.randrange(VOCAB_SIZE) for _ in range(LONGEST_PROMPT)][: rng.randrange(LONGEST_PROMPT - 8)]
        prompt = shared + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 8))]
        if kind == "bad_request":
            prompt[rng.randrange(len(prompt))] = VOCAB_SIZE + rng.randrange(10)
        max_tokens = rng.randint(1, LONGEST_OUTPUT)
        return cls(kind, prompt, max_tokens, rng.randint(1, max_tokens))


class SoakClient:
    """One client process: requests one after another, each until it has its whole output."""

    _client: Client

    def __init__(self, number: int, life: int, port: int, seed: int) -> None:
        self._name, self._life = number, life
        self._target = f"127.0.0.1:{port}"
        self._rng = random.Random(f"{seed} {number} {life}")
        self._finishing = False
        self._num_calls = 0
        self._retractions = self._cached_tokens = 0  # of the present call

    async def run(self) -> None:
        """Until SIGTERM, and then to the end of the present request."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._finish)
        self._client = Client(self._target)
        while not self._finishing:
            job = Job.draw(self._rng)
            pause = 0.05
            while not await self._call(job):
                # The connection is lost, or the scheduler is; or the request was a suspect by mistake.
                # A new channel, since an old one would wait longer and longer.
                await self._client.close()
                await asyncio.sleep(pause * self._rng.uniform(0.5, 1))
                pause = min(2 * pause, 1.0)
                self._client = Client(self._target)
        await self._client.close()

    def _finish(self) -> None:
        self._finishing = True

    async def _call(self, job: Job) -> bool:
        """One Generate call to its end; False when it has to be made again."""
        self._num_calls += 1
        request_id = f"c{self._name}-{self._life}-{self._num_calls}"
        record: dict[str, Any] = {"client": self._name, "life": self._life, "call": self._num_calls}
        say(**record, begin=time.monotonic())
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                outcome, detail = await self._generate(job, request_id)
        except TimeoutError:
            outcome, detail = "overdue", f"no end within {CALL_LIMIT_S:g} s"
        say(
            **record,
            end=time.monotonic(),
            kind=job.kind,
            outcome=outcome,
            detail=detail[:500],
            retractions=self._retractions,
            cached=self._cached_tokens,
        )
        self._retractions = self._cached_tokens = 0
        return outcome not in {"unavailable", "internal"}

    async def _generate(self, job: Job, request_id: str) -> tuple[str, str]:
        expected = continuation(job.prompt)
        count, asked = 0, False
        ending: Ending | None = None
        pieces = self._client.generate(job.prompt, max_tokens=job.max_tokens, request_id=request_id)
        try:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    if ending is not None:
                        return "wrong", f"a message after the last one: {piece}"
                    for token in piece.tokens:
                        right = next(expected)
                        if token != right:
                            return "wrong", f"{request_id}: token {count} after {job.prompt} is {token}, right is {right}"
                        count += 1
                    ending = piece.ending
                    if job.kind == "slow" and ending is None:
                        await asyncio.sleep(self._rng.uniform(0, 0.1))
                    if count >= job.turn and not asked:
                        asked = True
                        if job.kind == "vanish":
                            return "vanished", ""
                        if ending is None:
                            await self._meddle(job.kind, request_id)
        except RpcFailedError as error:
            return self._failure(job, error)
        if ending is not None:
            self._retractions, self._cached_tokens = ending.num_retractions, ending.cached_tokens
        return self._verdict(job, ending, count, asked)

    @staticmethod
    def _verdict(job: Job, ending: Ending | None, count: int, asked: bool) -> tuple[str, str]:
        if ending is None:
            return "wrong", "the stream ended with OK and without its last message"
        if ending.reason == "abort" and job.kind == "abort" and asked:
            return "aborted", ""
        if job.kind == "bad_request":
            return "wrong", f"{job.prompt} was accepted"
        if ending.reason != "length" or count != job.max_tokens or ending.completion_tokens != count:
            return "wrong", f"{ending} after {count} tokens of {job.max_tokens}, {job.kind}"
        return "finished", ""

    async def _meddle(self, kind: str, request_id: str) -> None:
        """Abort or retract it; it may be over, or wait, or the connection may be gone: then there is nothing to be done."""
        with contextlib.suppress(RpcFailedError):
            if kind == "abort":
                await self._client.abort(request_id)
            elif kind == "retract":
                await self._client.retract(request_id)

    @staticmethod
    def _failure(job: Job, error: RpcFailedError) -> tuple[str, str]:
        if error.code is grpc.StatusCode.UNAVAILABLE:
            return "unavailable", error.details
        if error.code is grpc.StatusCode.INTERNAL:
            return "internal", error.details
        if job.kind == "bad_request" and error.code is grpc.StatusCode.INVALID_ARGUMENT:
            return "refused", ""
        return "failed", str(error)


def fork_client(command: dict[str, Any]) -> int:
    """Start one client process; its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        client = SoakClient(command["start"], command["life"], command["port"], command["seed"])
        asyncio.run(client.run())
        status = 0
    except BaseException as error:
        say(client=command["start"], life=command["life"], crashed=repr(error)[:500])
    finally:
        os._exit(status)


def main() -> None:
    pids: dict[int, int] = {}
    last_signal = signal.SIGKILL  # when whoever starts them is gone
    for line in sys.stdin:
        command = json.loads(line)
        if "start" in command:
            pids[command["start"]] = fork_client(command)
        elif "kill" in command:
            pid = pids.pop(command["kill"])
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            say(killed=command["kill"])
        else:
            last_signal = signal.SIGTERM
            break
    for pid in pids.values():
        os.kill(pid, last_signal)
    for number, pid in pids.items():
        _, status = os.waitpid(pid, 0)
        say(done=number, status=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
