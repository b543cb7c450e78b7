"""Ask an OpenAI server a question whose answer is known: exit status 0 if it is right, 1 otherwise.

usage: smoke.py URL [MODEL]     for instance  smoke.py http://gateway:8080

It waits for the server to be ready. Without MODEL it asks the first model that the server lists.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from typing import Any

QUESTION, ANSWER = "What is the capital of France?", "Paris"
READY_WITHIN_S = 120.0
CALL_S = 120.0


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON that the server answers. Raises OSError, with the server's words where it refused."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=CALL_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise OSError(f"{url}: {error.code} {error.read(500).decode(errors='replace')}") from None


def first_model(base: str, within_s: float) -> str:
    """The first model of the server, once it has one. Raises OSError with the last reason when time is up."""
    until = time.monotonic() + within_s
    while True:
        try:
            if models := call(f"{base}/v1/models")["data"]:
                return str(models[0]["id"])
            reason = OSError(f"{base} serves no model")
        except OSError as error:
            reason = error
        if time.monotonic() > until:
            raise reason
        time.sleep(0.5)  # noqa: TID251  (there is nothing to wait on but another try)


def ask(base: str, model: str) -> str:
    """The answer to the question, greedy."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 32,
        "temperature": 0,
    }
    return str(call(f"{base}/v1/chat/completions", body)["choices"][0]["message"]["content"])


def main() -> None:
    if len(sys.argv) not in {2, 3}:
        raise SystemExit(__doc__)
    base = sys.argv[1].rstrip("/")
    try:
        model = sys.argv[2] if len(sys.argv) == 3 else first_model(base, READY_WITHIN_S)
        answer = ask(base, model)
    except OSError as error:
        raise SystemExit(f"smoke: {error}") from None
    right = ANSWER in answer
    print(f"smoke: {model} was asked: {QUESTION}\nsmoke: it answered: {answer}\nsmoke: {'right' if right else 'wrong'}")
    raise SystemExit(0 if right else 1)


if __name__ == "__main__":
    main()
