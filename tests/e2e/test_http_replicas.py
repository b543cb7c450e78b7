"""Two replicas behind one real smg with `--policy cache_aware`: prompts go to the replica that has their beginning."""

from __future__ import annotations

import contextlib
import re
import socket
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from http_up import Up, running_smg, running_up, until
from scheduler_service.client import Client

openai = pytest.importorskip("openai", reason="the extra `dev` is not installed")
for name in ("smg", "smg_grpc_proto", "tokenizers"):
    pytest.importorskip(name, reason="the extra `gateway` is not installed")

PAGE = 16
PAGES = 20


@pytest.fixture(scope="module")
def replicas(child_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Up]]:
    """One whose scheduler has the gateway's port, with one API, and one whose front end has it, with the other."""
    folder = tmp_path_factory.mktemp("replicas")
    options = ("--model", "tiny", "--num-pages", "512", "--max-rows", "8", "--gateway-listen", "127.0.0.1:0")
    with (
        running_up(child_env, folder / "a", *options, "--api", "tokenspeed") as first,
        running_up(child_env, folder / "b", *options, "--api", "vllm", "--workers", "2") as second,
    ):
        yield [first, second]


@dataclass
class Gateway:
    """A running smg: a client of it, and its metrics."""

    client: Any
    metrics: str

    def values(self, name: str) -> dict[str, float]:
        """A metric by worker."""
        with urllib.request.urlopen(self.metrics, timeout=10) as response:
            lines = response.read().decode().splitlines()
        pattern = re.compile(rf'{name}\{{worker="grpc://([^"]+)".*\}} (\S+)')
        return {match[1]: float(match[2]) for match in map(pattern.match, lines) if match}


@pytest.fixture
def gateway(replicas: list[Up], child_env: dict[str, str], tmp_path: Path) -> Iterator[Gateway]:
    """Of its own accord it sends now and then a request to a replica that has little cached; that is switched off."""
    with contextlib.ExitStack() as stack:
        http, metrics = (stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(2))
    options = (
        *("--policy", "cache_aware", "--worker-warmup-secs", "0", "--worker-warmup-divert-every", "0"),
        *("--worker-urls", *(f"grpc://{replica.gateway}" for replica in replicas), "--worker-startup-check-interval", "1"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)),
    )
    with (
        running_smg(child_env, tmp_path / "smg", f"127.0.0.1:{http}", *options) as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        yield Gateway(client, f"http://127.0.0.1:{metrics}/metrics")


async def test_prompts_go_where_their_beginning_is_cached(replicas: list[Up], gateway: Gateway) -> None:
    """The gateway has seen none of the prompts before: it knows from the events alone which replica computed which beginning,
    whatever the API, and whether directly or through a front end. A cache that is emptied is empty for it as well.
    """
    first, second = (replica.gateway for replica in replicas)
    until(lambda: set(gateway.values("smg_kv_event_subscriptions_total")) == {first, second})
    texts = [f"{number}{'the same words again and again, ' * 20}"[: PAGES * PAGE] for number in range(8)]
    for number, text in enumerate(texts):
        async with Client(replicas[number % 2].grpc) as direct:
            async for _ in direct.generate(list(text.encode()), max_tokens=1):
                pass
    until(lambda: gateway.values("smg_kv_index_blocks") == {first: 4 * PAGES, second: 4 * PAGES})
    for text in texts:
        completion = gateway.client.completions.create(model="tiny", prompt=text + "?", max_tokens=1, temperature=0)
        assert completion.usage.prompt_tokens_details.cached_tokens == PAGES * PAGE
    assert gateway.values("smg_worker_requests_total") == {first: 4, second: 4}
    for replica, left in zip(replicas, ({first: 0, second: 4 * PAGES}, {first: 0, second: 0}), strict=True):
        async with Client(replica.grpc) as direct:
            await direct.reset_prefix_cache()
        until(lambda left=left: gateway.values("smg_kv_index_blocks") == left)
