"""A party of the scheduler benchmarks as a process of its own, and how the parent talks to it.

A worker reads one JSON request a line on stdin and answers each with one JSON line; while it waits it takes no CPU. So all
parties can be set up at once and measured in turn, a few milliseconds each, and what the machine does meanwhile hits everyone.
Only the standard library is needed: this file is imported in the peers' own environments, too.
"""

from __future__ import annotations

import gc
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ANSWER_LIMIT_S = 300.0

Answer = dict[str, Any]
Handler = Callable[..., Answer]


class WorkerError(Exception):
    """A worker ended, did not answer in time, or answered that it could not do what was asked."""


def serve(handlers: dict[str, Handler]) -> None:
    """The worker's side: call `handlers[request["do"]]` with the request's other fields until stdin ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no answer
    for text in sys.stdin:
        request: dict[str, Any] = json.loads(text)
        try:
            answer = handlers[request.pop("do")](**request)
            gc.collect()
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Worker:
    """The parent's side. A context manager: leaving it ends the process.

    Args:
        command: the process; it calls `serve`.
    """

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the worker)
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            cwd=Path(__file__).resolve().parent,
        )  # fmt: skip

    def ask(self, do: str, **fields: Any) -> Answer:
        """One request and its answer. Raises WorkerError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._last_words()) from None
        if not select.select([self._process.stdout], [], [], ANSWER_LIMIT_S)[0]:
            raise WorkerError(f"no answer to {do!r} for {ANSWER_LIMIT_S:.0f} s")
        text = self._process.stdout.readline()
        if not text:
            raise WorkerError(self._last_words())
        answer: Answer = json.loads(text)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # what it had not read is nobody's any more
                pipe.close()
        self._errors.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _last_words(self) -> str:
        self._process.wait(timeout=10)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the process ended with status {self._process.returncode}"
