"""Write the request state machine of scheduler_service/core/states.py into docs/state-machine.md, or check that it is there.

The page is ours except for the part between the two markers: a Mermaid diagram and a table, both made from TRANSITIONS.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scheduler_service.core.states import TRANSITIONS, RowEffect, State

PAGE = Path(__file__).resolve().parent.parent / "docs" / "state-machine.md"
BEGIN = "<!-- begin of the generated part: tools/generate_state_diagram.py -->"
END = "<!-- end of the generated part -->"

# Transitions with these effects end a lease or concern no row: no op carries them.
NO_OP = {RowEffect.RELEASE, RowEffect.DROP, RowEffect.NONE}


def title(state: State) -> str:
    """`prefill_done` → `PrefillDone`, as the prose spells it."""
    return "".join(word.capitalize() for word in state.value.split("_"))


def diagram() -> list[str]:
    """The lines of a Mermaid `stateDiagram-v2`; bold edges do not exist there, so the bit is written out."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {title(State.SUBMITTED)}"]
    for (state, event), transition in TRANSITIONS.items():
        bit = "<br/>full_refresh" if transition.full_refresh else ""
        lines += [f"    {title(state)} --> {title(target)} : {event.value}{bit}" for target in transition.targets]
    return [*lines, f"    {title(State.FINISHED)} --> [*]", "```"]


def table() -> list[str]:
    """The same entries as a Markdown table."""
    lines = ["| from | event | to | row effect | `full_refresh` |", "|---|---|---|---|---|"]
    for (state, event), transition in TRANSITIONS.items():
        targets = " or ".join(title(target) for target in transition.targets)
        bit = "no op" if transition.row_effect in NO_OP else "**true**" if transition.full_refresh else "false"
        lines.append(f"| {title(state)} | {event.value} | {targets} | {transition.row_effect.value} | {bit} |")
    return lines


def render(page: str) -> str:
    """`page` with the generated part put between its markers.

    Raises:
        ValueError: a marker is missing, or they stand in the wrong order.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} lacks its markers {BEGIN!r} and {END!r}, in this order")
    body = "\n".join([*diagram(), "", *table()])
    return f"{head}{BEGIN}\n{body}\n{END}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the page is stale")
    check = parser.parse_args().check
    page = PAGE.read_text(encoding="utf-8")
    fresh = render(page)
    if not check:
        PAGE.write_text(fresh, encoding="utf-8")
        print(f"wrote docs/{PAGE.name}")
    elif fresh != page:
        raise SystemExit(f"docs/{PAGE.name} is stale, run tools/generate_state_diagram.py")
    else:
        print("the state diagram is up to date")


if __name__ == "__main__":
    main()
