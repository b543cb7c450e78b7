"""Of `pagemirror doctor`: what Triton needs on a GPU host, namely a C compiler, Python's headers, and a cache folder from which
shared objects can be loaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from scheduler_service.doctor_findings import Finding, State

_COMPILE_TIMEOUT_S = 60
_SOURCE = """
#include <Python.h>
const char *pagemirror_check(void) { return PY_VERSION; }
"""
_LOAD = "import ctypes, sys; f = ctypes.CDLL(sys.argv[1]).pagemirror_check; f.restype = ctypes.c_char_p; print(f().decode())"


def triton_cache() -> Path:
    """Where Triton puts what it compiles."""
    given = os.environ.get("TRITON_CACHE_DIR")
    return Path(given) if given else Path.home() / ".triton" / "cache"


def check_compiler(cache: Path, *, needed: bool) -> list[Finding]:
    """A C compiler, Python.h, and a cache from which a shared object can be loaded: what Triton needs on a GPU host.

    Args:
        cache: Triton's cache folder; what is made in it for the check is removed.
        needed: whether there is a GPU, so that a lack of these is a fault.
    """
    lack = State.FIX if needed else State.NOTE
    where = "" if needed else " (for a GPU host)"
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    findings = []
    if compiler is None:
        findings.append(Finding("C compiler", "none", lack, f"install gcc and libc6-dev{where}"))
    else:
        findings.append(Finding("C compiler", compiler))
    if header.is_file():
        findings.append(Finding("Python.h", str(header)))
    else:
        findings.append(Finding("Python.h", f"no {header}", lack, f"install the Python headers, such as python3-dev{where}"))
    findings.append(_check_cache(cache, compiler if header.is_file() else None, lack))
    return findings


def _check_cache(cache: Path, compiler: str | None, lack: State) -> Finding:
    name, folder = "Triton's cache", _existing(cache)
    elsewhere = "set TRITON_CACHE_DIR to a folder of this user on a file system that is not mounted noexec"
    if not os.access(folder, os.W_OK | os.X_OK):
        return Finding(name, f"{cache}: {folder} cannot be written to", lack, elsewhere)
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return Finding(name, f"{cache} is on a file system mounted noexec", lack, elsewhere)
    if compiler is None:
        return Finding(name, f"{cache}, not tried without compiler and headers", State.NOTE, "see above")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".pagemirror-doctor-") as scratch:
        source, library = Path(scratch, "check.c"), Path(scratch, "check.so")
        source.write_text(_SOURCE)
        build = [compiler, "-shared", "-fPIC", "-I", sysconfig.get_path("include"), "-o", str(library), str(source)]
        if reason := _failure(build):
            return Finding(name, f"{compiler} cannot build a shared object: {reason}", lack, "install gcc and libc6-dev")
        if reason := _failure([sys.executable, "-I", "-c", _LOAD, str(library)]):
            return Finding(name, f"{cache}: what is compiled there cannot be loaded: {reason}", lack, elsewhere)
    return Finding(name, f"{cache}: a shared object was compiled and loaded")


def _existing(folder: Path) -> Path:
    """The folder, or the closest one above it that exists: where it would be made."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _failure(command: list[str]) -> str:
    """Why a command failed, in its last line; empty: it did not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    except (subprocess.SubprocessError, OSError) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"
