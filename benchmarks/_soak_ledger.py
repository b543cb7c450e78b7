"""Accounts of the soak test: every Generate call from its beginning to its one end, and whether that end was justified."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MARGIN_S = 10.0
"""Between a fault and what a client makes of it: it may be slow, and so may be the news."""
STEP_FAILS = "runtime_step_fails"
_DELIBERATE = ("abort", "retract", "vanish", "slow", "bad_request")

FAILS_ALONE = 3
"""Faults of the runtime, a failed step among them, after which a request that was in all of them ends with INTERNAL."""
BREAKS_ALONE = 5
"""The same where each of them broke the stream, or may have."""

Key = tuple[int, int, int]  # client, life, call


@dataclass
class Ledger:
    """What the client processes said, put together."""

    outcomes: Counter[str] = field(default_factory=Counter)
    deliberate: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_DELIBERATE, 0)))
    """Calls by what their client did on purpose."""
    retractions: int = 0
    cached_tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    _open: dict[Key, float] = field(default_factory=dict)
    _unavailable: list[tuple[Key, float, float, str]] = field(default_factory=list)
    _internal: list[tuple[Key, float, float, str]] = field(default_factory=list)
    _ended: set[Key] = field(default_factory=set)

    @property
    def num_calls(self) -> int:
        return len(self._ended) + len(self._open)

    @property
    def num_requests(self) -> int:
        """Requests that came to the end that their client wanted."""
        return self.outcomes["finished"] + self.outcomes["aborted"]

    def take(self, record: dict[str, Any]) -> None:
        """One line of a client process."""
        if "crashed" in record:
            self.lost.append(f"client {record['client']} broke: {record['crashed']}")
            return
        key = (record["client"], record["life"], record["call"])
        if "begin" in record:
            self._open[key] = record["begin"]
            return
        if key in self._ended:
            self.wrong.append(f"call {key} ended twice")
            return
        self._ended.add(key)
        begin = self._open.pop(key)
        outcome, detail = record["outcome"], record["detail"]
        self.outcomes[outcome] += 1
        self.retractions += record["retractions"]
        self.cached_tokens += record["cached"]
        if record["kind"] in _DELIBERATE:
            self.deliberate[record["kind"]] += 1
        if outcome == "wrong":
            self.wrong.append(detail)
        elif outcome in {"failed", "overdue"}:
            self.lost.append(f"call {key}, {record['kind']}: {detail}")
        elif outcome == "unavailable":
            self._unavailable.append((key, begin, record["end"], detail))
        elif outcome == "internal":
            self._internal.append((key, begin, record["end"], detail))

    def note_killed(self, client: int) -> None:
        """The process is dead: its open call ended with it."""
        for key in [key for key in self._open if key[0] == client]:
            del self._open[key]
            self._ended.add(key)
            self.outcomes["abandoned"] += 1

    def close(
        self,
        outages: list[tuple[float, float]],
        cuts: list[tuple[int, float, float]],
        runtime_faults: list[tuple[str, float, float]],
    ) -> None:
        """No more lines come: what is open is lost, and so is what ended with an error though nothing had happened to it.

        `outages`: when there was no scheduler. `cuts`: client, and when its connection was cut. `runtime_faults`: what was done
        to a runtime or to the line to it, and when.
        """
        self.lost += [f"call {key} has no end" for key in self._open]
        for key, begin, end, detail in self._unavailable:
            own = [(since, until) for client, since, until in cuts if client == key[0]]
            if not any(_meets(begin, end, *when) for when in [*outages, *own]):
                self.lost.append(f"call {key} was told UNAVAILABLE for no reason: {detail}")
        for key, begin, end, detail in self._internal:
            met = [name for name, *when in runtime_faults if _meets(begin, end, *when)]
            if len(met) < (FAILS_ALONE if STEP_FAILS in met else BREAKS_ALONE):
                self.lost.append(f"call {key} was told INTERNAL after {met or 'nothing'}: {detail}")


def _meets(begin: float, end: float, since: float, until: float) -> bool:
    """Whether a call of this time may have suffered from what happened in that."""
    return since - MARGIN_S <= end and begin <= until + MARGIN_S
