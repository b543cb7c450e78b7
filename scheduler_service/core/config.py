"""Settings of the scheduler core."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from scheduler_service.core.errors import ConfigError

MAX_OVERLAP_DEPTH = 2
"""Most ops that may be planned beyond the one whose result is awaited."""


class RefreshPolicy(StrEnum):
    """How the `full_refresh` bit is produced.

    `transition`: by the state transition, see `states.TRANSITIONS`. `diff`: when an entry below the length already sent
    differs from what was sent. `always`: on every row of every op. All three give the same mirror and differ in bytes.
    `tail_only` never sets it and is wrong on purpose: it exists for `simulate` and `demo`, to show what goes wrong.
    """

    TRANSITION = "transition"
    DIFF = "diff"
    ALWAYS = "always"
    TAIL_ONLY = "tail_only"


class Verify(StrEnum):
    """How often the runtime's mirror is compared with the rows here.

    `off`: never. `every`: each op says what digest each of its rows must have, and the runtime computes none that differs.
    `sample`: each `verify_interval`-th op does so, and compares all other rows in use as well.
    """

    OFF = "off"
    SAMPLE = "sample"
    EVERY = "every"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the pool, as the runtime stated them, and choices of policy.

    Raises:
        ConfigError: a value is out of range; the message names the key, the value and the limit.
    """

    page_size: int
    """Tokens in a page."""
    num_pages: int
    """Usable pages; ids are 1 ... num_pages."""
    max_rows: int
    """Rows of `req_to_page`; numbers are 1 ... max_rows."""
    max_pages_per_row: int
    """Width of `req_to_page`."""
    vocab_size: int
    max_context: int = 0
    """Longest sequence, prompt and output, in tokens; 0: no limit."""
    token_budget: int = 2048
    """Tokens computed in one step, over all rows."""
    chunk_size: int = 512
    """Prefill tokens of one request in one step; cut to token_budget."""
    refresh_policy: RefreshPolicy = RefreshPolicy.TRANSITION
    overlap_depth: int = 1
    """Ops that may be planned beyond the one whose result is awaited."""
    mixed: bool = True
    """Prefill and decode rows in one step. False: a step that can run a prefill or resume row runs only those."""
    prefix_cache: bool = True
    """Match and publish prefixes."""
    max_waiting: int = 0
    """Requests that may wait for their first admission; 0: no limit."""
    greedy_only: bool = False
    """The model has no logits: requests with sampling parameters that need them are refused."""
    max_lease_bytes: int = 32 * 1024 * 1024
    """Lease starts, penalty histories included, in one op; a first one is admitted whatever its size."""
    verify: Verify = Verify.OFF
    verify_interval: int = 64
    """With `sample`: every how many ops."""

    def __post_init__(self) -> None:
        for key in ("page_size", "num_pages", "max_rows", "max_pages_per_row", "vocab_size", "token_budget", "chunk_size"):
            self._require(key, 1, 2**31 - 1)
        self._require("verify_interval", 1, 2**31 - 1)
        for key in ("max_context", "max_waiting", "max_lease_bytes"):
            self._require(key, 0, 2**31 - 1)
        for key in ("mixed", "prefix_cache", "greedy_only"):
            if not isinstance(getattr(self, key), bool):
                raise ConfigError(key, getattr(self, key), "True or False")
        if not isinstance(self.refresh_policy, RefreshPolicy):
            raise ConfigError("refresh_policy", self.refresh_policy, "a RefreshPolicy")
        if not isinstance(self.verify, Verify):
            raise ConfigError("verify", self.verify, "a Verify")
        self._require("overlap_depth", 0, MAX_OVERLAP_DEPTH)
        if self.num_pages * self.page_size > 2**40:
            raise ConfigError("num_pages", self.num_pages, f"at most {2**40 // self.page_size} with page_size {self.page_size}")

    def _require(self, key: str, low: int, high: int) -> None:
        value = getattr(self, key)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(key, value, f"an integer from {low} to {high}")

    @property
    def effective_chunk_size(self) -> int:
        """chunk_size, cut to token_budget."""
        return min(self.chunk_size, self.token_budget)

    @property
    def room(self) -> int:
        """Positions the longest possible row holds, in tokens."""
        return min(self.max_pages_per_row, self.num_pages) * self.page_size
