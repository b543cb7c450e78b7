"""Keep one more worker registered with a running gateway (smg): at the start, and again whenever the gateway has lost it.

usage: join_gateway.py GATEWAY_URL WORKER_URL     for instance  join_gateway.py http://gateway:8080 grpc://scheduler-2:50052

The gateway's own list is fixed when it starts; a worker that comes later has to say so, and to say so again to a gateway that
was started anew. GATEWAY_ADMIN_KEY_FILE names the file with the key of the gateway's administration (run_gateway.py).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

INTERVAL_S = 5.0
CALL_S = 5.0


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON that the gateway answers. Raises OSError, with the gateway's words where it refused."""
    headers = {"content-type": "application/json"}
    if path := os.environ.get("GATEWAY_ADMIN_KEY_FILE"):
        # Read each time: a gateway that was started anew has a new one.
        headers["authorization"] = f"Bearer {Path(path).read_text().strip()}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=CALL_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise OSError(f"{error.code} {error.read(300).decode(errors='replace')}") from None


def keep(gateway: str, worker: str) -> str:
    """One look: what was found or done, in words."""
    try:
        known = [entry.get("url") for entry in call(f"{gateway}/workers")["workers"]]
        if worker in known:
            return "known"
        call(f"{gateway}/workers", {"url": worker})
    except OSError as error:
        return f"not yet: {error}"
    return "announced"


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    gateway, worker = sys.argv[1].rstrip("/"), sys.argv[2]
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    said = ""
    while not ended.is_set():
        found = keep(gateway, worker)
        if found != said:
            print(f"join_gateway: {worker} at {gateway}: {found}", flush=True)
            said = found
        ended.wait(INTERVAL_S)


if __name__ == "__main__":
    main()
