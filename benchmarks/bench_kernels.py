"""Measure the device kernels: bytes a second beside a plain copy, and attention beside torch's on gathered KV.

Needs a CUDA device and refuses to run without one. Each case is timed with device events, the L2 cache emptied before every
repetition, and reported as the median. `--json` prints one object instead of the table:

    {"device": ..., "copy_bytes_per_s": ..., "cases": [{"name", "seconds", "bytes_per_s", "of_copy", "peers": {name: ratio}}]}

`of_copy` is the achieved fraction of the copy bandwidth measured in the same run, counting each byte that must be moved once.
`peers` says how many times longer a peer takes: "sdpa" is torch's scaled dot product attention on keys and values that were
gathered beforehand, "gather_sdpa" includes the gathering, which a paged cache costs at every step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from runtime_service.kernels.decode_attention import paged_decode_attention
from runtime_service.kernels.decode_inputs import decode_inputs
from runtime_service.kernels.kv_write import kv_write
from runtime_service.kernels.prefill_attention import paged_prefill_attention
from runtime_service.kernels.warm_up import warm_up_kernels

REPETITIONS = 20
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
DECODE_CASES = ((1, 32768), (8, 8192), (32, 4096), (64, 2048), (256, 1024))  # rows, tokens of each
PREFILL_CASES = ((0, 4096), (12288, 4096))  # cached tokens, new tokens


class Bench:
    """Tensors of one configuration, the measured copy bandwidth, and the cases so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.dtype = DTYPES[args.dtype]
        self.scale = args.head_dim**-0.5
        self._flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        self.copy_bytes_per_s = 2 * source.nbytes / self.seconds(lambda: target.copy_(source))
        self.cases: list[dict[str, Any]] = []

    def seconds(self, work: Callable[[], object]) -> float:
        """Median time of `work` on the device, after three calls that do not count."""
        for _ in range(3):
            work()
        times = []
        for _ in range(REPETITIONS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._flush.zero_()
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return median(times)

    def case(self, name: str, work: Callable[[], object], num_bytes: int, peers: dict[str, Callable[[], object]]) -> None:
        """Time one kernel and its peers."""
        seconds = self.seconds(work)
        self.cases.append(
            {
                "name": name,
                "seconds": seconds,
                "bytes_per_s": num_bytes / seconds,
                "of_copy": num_bytes / seconds / self.copy_bytes_per_s,
                "peers": {peer: self.seconds(peer_work) / seconds for peer, peer_work in peers.items()},
            }
        )

    def pool(self, num_rows: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A cache and a mirror with rows of this length on scattered pages, and the rows' numbers."""
        args = self.args
        width = -(-num_tokens // args.page_size)
        num_pages = num_rows * width
        cache = torch.empty(
            (2, num_pages + 1, args.page_size, args.kv_heads, args.head_dim), dtype=self.dtype, device="cuda"
        ).normal_()
        table = torch.zeros((num_rows + 1, width), dtype=torch.int32, device="cuda")
        table[1:] = (torch.randperm(num_pages, device="cuda") + 1).view(num_rows, width)
        warm_up_kernels(cache, table, args.heads)
        return cache, table, torch.arange(1, num_rows + 1, device="cuda")

    def gather(self, cache: torch.Tensor, table: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all rows as torch's attention takes them, [rows, kv heads, tokens, head_dim]."""
        pages = table[1:].long()
        keys, values = (cache[which, pages].flatten(1, 2)[:, :num_tokens].transpose(1, 2) for which in (0, 1))
        return keys, values

    def heads(self, num_tokens: int, num_heads: int) -> torch.Tensor:
        """Random heads [num_tokens, num_heads, head_dim]."""
        return torch.randn((num_tokens, num_heads, self.args.head_dim), device="cuda").to(self.dtype)

    def run_decode(self, num_rows: int, num_tokens: int) -> None:
        """Decode attention of equally long rows."""
        cache, table, rows = self.pool(num_rows, num_tokens)
        query, lengths = self.heads(num_rows, self.args.heads), torch.full_like(rows, num_tokens)
        keys, values = (part.contiguous() for part in self.gather(cache, table, num_tokens))
        batched = query[:, :, None]

        def sdpa(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return scaled_dot_product_attention(batched, keys, values, scale=self.scale, enable_gqa=True)

        def paged() -> torch.Tensor:
            return paged_decode_attention(query, cache, table, rows, lengths, scale=self.scale, max_seq_len=num_tokens)

        torch.testing.assert_close(paged(), sdpa(keys, values)[:, :, 0], atol=3e-2, rtol=0)
        self.case(
            f"decode_attention {num_rows} x {num_tokens}",
            paged,
            keys.nbytes + values.nbytes + 2 * query.nbytes,
            {"sdpa": lambda: sdpa(keys, values), "gather_sdpa": lambda: sdpa(*self.gather(cache, table, num_tokens))},
        )

    def run_prefill(self, num_computed: int, num_new: int) -> None:
        """One chunk behind a cached prefix."""
        cache, table, rows = self.pool(1, num_computed + num_new)
        query = self.heads(num_new, self.args.heads)
        indptr, computed = torch.tensor([0, num_new], device="cuda"), torch.full_like(rows, num_computed)
        keys, values = (part.contiguous() for part in self.gather(cache, table, num_computed + num_new))
        position = torch.arange(num_computed + num_new, device="cuda")
        seen = None if num_computed == 0 else position <= position[num_computed:, None]
        batched = query.transpose(0, 1)[None]

        def sdpa(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return scaled_dot_product_attention(
                batched, keys, values, attn_mask=seen, is_causal=seen is None, scale=self.scale, enable_gqa=True
            )

        def paged() -> torch.Tensor:
            lengths = {"max_query_len": num_new, "max_seq_len": num_computed + num_new}
            return paged_prefill_attention(query, cache, table, rows, indptr, computed, scale=self.scale, **lengths)

        torch.testing.assert_close(paged(), sdpa(keys, values)[0].transpose(0, 1), atol=3e-2, rtol=0)
        self.case(
            f"prefill_attention {num_computed} + {num_new}",
            paged,
            keys.nbytes + values.nbytes + 2 * query.nbytes,
            {
                "sdpa": lambda: sdpa(keys, values),
                "gather_sdpa": lambda: sdpa(*self.gather(cache, table, num_computed + num_new)),
            },
        )

    def run_writes(self) -> None:
        """What a step does besides attention: new tokens into their slots, and the inputs of decode rows."""
        cache, table, rows = self.pool(256, 1024)
        slots = torch.randperm(cache.shape[1] * cache.shape[2], device="cuda")
        keys, values = (self.heads(8192, self.args.kv_heads) for _ in range(2))
        flat = [part.flatten(0, 1) for part in cache]

        def index_copy() -> None:
            flat[0].index_copy_(0, slots[:8192], keys)
            flat[1].index_copy_(0, slots[:8192], values)

        num_bytes = 2 * (keys.nbytes + values.nbytes) + 8 * 8192
        self.case("kv_write 8192", lambda: kv_write(keys, values, cache, slots[:8192]), num_bytes, {"index_copy": index_copy})
        lengths = torch.full((len(table),), 1000, device="cuda")
        page_size, width_tokens = self.args.page_size, table.shape[1] * self.args.page_size
        self.case(
            "decode_inputs 256",
            lambda: decode_inputs(table, rows, lengths, page_size, width_tokens=width_tokens),
            256 * (2 * 8 + 4 + 3 * 8),
            {},
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the device kernels. Needs a CUDA device.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=16)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_kernels measures GPU kernels: torch finds no CUDA device here", file=sys.stderr)
        return 2

    bench = Bench(args)
    bench.run_writes()
    for num_rows, num_tokens in DECODE_CASES:
        bench.run_decode(num_rows, num_tokens)
    for num_computed, num_new in PREFILL_CASES:
        bench.run_prefill(num_computed, num_new)
    options = {name: value for name, value in vars(args).items() if name != "json"}
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **options,
        "copy_bytes_per_s": bench.copy_bytes_per_s,
        "cases": bench.cases,
    }
    if args.json:
        print(json.dumps(report))
        return 0
    print(f"{report['device']}, {args.dtype}, copy {bench.copy_bytes_per_s / 1e9:.0f} GB/s")
    print(f"{'case':<34}{'µs':>10}{'GB/s':>8}{'of copy':>9}  peers, times as long")
    for case in bench.cases:
        peers = ", ".join(f"{name} {ratio:.2f}" for name, ratio in case["peers"].items())
        print(
            f"{case['name']:<34}{case['seconds'] * 1e6:>10.1f}{case['bytes_per_s'] / 1e9:>8.0f}{case['of_copy']:>9.2f}  {peers}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
