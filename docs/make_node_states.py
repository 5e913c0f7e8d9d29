"""Write the table of Slurm's node states into docs/sites.md, from ``cluster/slurm/node_states.py``."""

from __future__ import annotations

import re
from pathlib import Path

from rrl.cluster.base import NodeState
from rrl.cluster.slurm.node_states import MARKS, Mark

PAGE = Path(__file__).parent / "sites.md"
_BEGIN, _END = "<!-- node states -->\n", "<!-- end of node states -->\n"
_ROLES = {
    NodeState.UP: ("works on", "yes"),
    NodeState.UNKNOWN: ("its own messages decide", "yes"),
    NodeState.LEAVING: ("works on; starts on another node next time, if one is free", "no"),
    NodeState.DRAINING: ("works on; starts on another node next time", "no"),
    NodeState.DOWN: ("is lost; starts on another node", "no"),
    None: ("says nothing about it", "-"),
}


def _row(mark: Mark) -> str:
    name, *others = (f"`{name}`" for name in mark.names)
    sinfo = ", ".join([*(other.lower() for other in others), *([f"suffix `{mark.suffix}`"] if mark.suffix else [])])
    running, new = _ROLES[mark.state]
    if mark.while_used is not None:
        used, new_used = _ROLES[mark.while_used]
        running = f"{running}; while jobs run: {used}"
        new = new if new == new_used else f"{new}; while jobs run: {new_used}"
    check = "counts" if mark.takes_jobs else "does not count"
    return f"| {name} | {sinfo or '-'} | {running} | {new} | {check} | {mark.note or '-'} |"


def with_table(page: str) -> str:
    """Return the page with the table as the code has it."""
    head = "| scontrol | also in sinfo | a role that runs there | a new role | `rrl check` | the node |\n"
    table = f"{head}|---|---|---|---|---|---|\n" + "".join(f"{_row(mark)}\n" for mark in MARKS)
    return re.sub(f"(?<={_BEGIN}).*(?={_END})", lambda _: table, page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
