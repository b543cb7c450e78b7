"""Ask an HTTP server for a page: exit status 0 if it answers with 2xx, 1 otherwise. For container health checks.

usage: http_probe.py URL
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

TIMEOUT_S = 3.0
# Proxy variables of the container must not send a loopback call elsewhere.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def probe(url: str) -> tuple[bool, str]:
    """Whether the server answers with 2xx, and its first line or why there is none."""
    try:
        with _OPENER.open(url, timeout=TIMEOUT_S) as answer:
            return True, f"{answer.status} {answer.read(200).decode(errors='replace')}".strip()
    except urllib.error.HTTPError as error:
        return False, f"{error.code} {error.read(200).decode(errors='replace')}".strip()
    except OSError as error:
        return False, f"no answer from {url} within {TIMEOUT_S:g} s: {error}"


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    fine, text = probe(sys.argv[1])
    print(text)
    raise SystemExit(0 if fine else 1)


if __name__ == "__main__":
    main()
