"""The gateway smg as a child of ours: `python -m scheduler_service.smg_main PARENT`, with its arguments as JSON on stdin.

They may hold keys, which a command line would show to every user of the machine. smg ends with process PARENT, however that
ends: nobody else would end it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends. Ends it now if the parent is gone already."""
    # At once and for certain: there is nothing behind it any more, and nobody to end it if it did not.
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(1)


def main() -> None:
    """The program."""
    end_with(int(sys.argv[1]))
    arguments = json.load(sys.stdin)
    sys.argv[0] = "smg"
    from smg.launch_router import launch_router, parse_router_args

    try:
        launch_router(parse_router_args(arguments))
    except Exception as error:  # what smg itself could not do; its traceback is of no use to whoever started `up`
        sys.stderr.write(f"smg: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
