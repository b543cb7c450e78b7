"""Run a service with two things added, for tests with real processes.

Arguments: a file name, `scheduler` or `runtime`, and the options of that service. On SIGUSR1 the number of asyncio tasks is
written to the file. On SIGUSR2 the order in FILE.order is obeyed; the fingerprint model knows two:

    fail                 the next step raises
    slow STEP DURATION   each step takes STEP seconds longer, for DURATION seconds

Whatever that model reads from a wrong place is written to stderr.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path


class Orders:
    """What the model was told to do."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._fails = False
        self._pause_s = 0.0
        self._slow_until = 0.0

    def read(self) -> None:
        words = self._file.read_text(encoding="ascii").split()
        if words[0] == "fail":
            self._fails = True
        else:
            self._pause_s, self._slow_until = float(words[1]), time.monotonic() + float(words[2])

    def obey(self) -> None:
        """Before each step."""
        if self._fails:
            self._fails = False
            raise RuntimeError("a step that was told to fail")
        if time.monotonic() < self._slow_until:
            time.sleep(self._pause_s)  # noqa: TID251  (a device that is busy for so long)


def teach_model(orders: Orders) -> None:
    """Have the fingerprint model obey, and say what it finds."""
    from runtime_service.executors.fingerprint import FingerprintExecutor

    execute = FingerprintExecutor.execute

    def obedient(self: FingerprintExecutor, batch: object) -> object:
        orders.obey()
        result = execute(self, batch)  # type: ignore[arg-type]
        while self.violations:
            sys.stderr.write(f"violation: {self.violations.pop()}\n")
        return result

    FingerprintExecutor.execute = obedient  # type: ignore[assignment,method-assign]


def main() -> None:
    path, service = Path(sys.argv[1]), sys.argv[2]

    def write_tasks(*_: object) -> None:
        try:
            count = len(asyncio.all_tasks())
        except RuntimeError:
            return  # no loop yet, or none any more
        new = path.with_suffix(".new")
        new.write_text(str(count), encoding="ascii")
        os.replace(new, path)

    signal.signal(signal.SIGUSR1, write_tasks)
    if service == "runtime":
        orders = Orders(path.with_suffix(".order"))
        signal.signal(signal.SIGUSR2, lambda *_: orders.read())
        teach_model(orders)
        from runtime_service.__main__ import cli
    else:
        from scheduler_service.cli import app as cli
    # What follows is the command line as the service knows it.
    sys.argv[1:] = sys.argv[3:] if service == "runtime" else ["scheduler", *sys.argv[3:]]
    cli()


if __name__ == "__main__":
    main()
