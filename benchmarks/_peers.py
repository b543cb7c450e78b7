"""Peers in environments of their own: two versions of one distribution cannot share one."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from _report import progress

INSTALL_LIMIT_S = 300


class PeerMissingError(Exception):
    """A peer cannot be installed here; the message says why."""


def environment_with(folder: Path, *requirements: str) -> Path:
    """The interpreter of a virtual environment in `folder` that has these pinned requirements; made where it is missing.

    Raises:
        PeerMissingError: it could not be made, or pip could not install them.
    """
    python, done = folder / "bin" / "python", folder / "installed.txt"
    wanted = "\n".join((sys.version, *requirements))
    if done.exists() and python.exists() and done.read_text(encoding="utf-8") == wanted:
        return python
    progress(f"making an environment with {' and '.join(requirements)}")
    try:
        venv.create(folder, with_pip=True, clear=True)
        command = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--only-binary=:all:",
            *requirements,
        ]
        made = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise PeerMissingError(str(error)) from error
    if made.returncode:
        said = [line for line in made.stderr.splitlines() if line.startswith("ERROR")] or made.stderr.strip().splitlines()
        raise PeerMissingError(said[-1] if said else f"pip ended with status {made.returncode}")
    done.write_text(wanted, encoding="utf-8")
    return python
