"""Run the gateway smg in a container: `smg launch` with the options given, and with keys that no command line shows.

usage: run_gateway.py SMG_OPTION...

GATEWAY_ADMIN_KEY_FILE  a key for smg's administration (workers, caches) is drawn at each start and written there, readable by
                        this user alone; without it the key is drawn and nobody has it. Without a key whoever reaches the HTTP
                        port could register workers and get the prompts of others.
GATEWAY_TOKEN_FILE      if set: clients must show a token of this file as their API key; one a line, `#` begins a comment
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path


def admin_key(path: Path | None) -> str:
    """A new key; in a file, too, whole at any moment."""
    key = secrets.token_hex(16)
    if path is not None:
        draft = path.with_name(f".{path.name}")
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key)
        draft.rename(path)
    return key


def tokens(path: Path | None) -> list[str]:
    """What clients may show; empty: they need nothing."""
    if path is None:
        return []
    lines = [line.strip() for line in path.read_text().splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise SystemExit(f"run_gateway: {path} has no token, and nobody could call")
    return found


def arguments(given: list[str], key_file: Path | None, token_file: Path | None) -> list[str]:
    """Of `smg launch`."""
    added = [f"--control-plane-api-keys=container:pagemirror:admin:{admin_key(key_file)}"]
    added += [f"--tenant-api-key=token{number}:{token}" for number, token in enumerate(tokens(token_file))]
    return [*given, *added]


def _path(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value) if value else None


def main() -> None:
    told = arguments(sys.argv[1:], _path("GATEWAY_ADMIN_KEY_FILE"), _path("GATEWAY_TOKEN_FILE"))
    from smg.launch_router import launch_router, parse_router_args

    sys.argv[:] = ["smg"]
    launch_router(parse_router_args(told))


if __name__ == "__main__":
    main()
