"""Make docs/events.md, the records of a run's journal, from manager/model/events.py.

    .venv/bin/python -m rrl.docs.make_events

A test (tests/project/test_generated_pages.py) compares the page with the code.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from rrl.docs.struct_tables import Tables
from rrl.manager.model import events as ev

PAGE = Path(__file__).parent / "events.md"
_INTRODUCTION = """\
# Events

Made from `manager/model/events.py` by `.venv/bin/python -m rrl.docs.make_events`; do not edit.

The journal of a run is a list of events, each a fact that has occurred. All that rrl shows of a run is computed from
them: `rrl status`, `rrl explain`, `rrl metrics`, `summary.json`. [architecture.md](architecture.md) describes how they
come about. New fields have defaults, and readers ignore fields that they do not know. A program should read the outputs
in [json.md](json.md) rather than the journal, whose files have a format of their own
(`manager/storage/journal.py`).
"""


def page() -> str:
    """Return the page."""
    events = get_args(ev.Event)
    tables = Tables([ev.Stamped, *events])
    parts = [_INTRODUCTION, "## Every record", "", tables.table(ev.Stamped), "## The events", ""]
    parts += map(tables.table, events)
    parts += ["## Values in events", "", *map(tables.table, tables.inside)]
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
