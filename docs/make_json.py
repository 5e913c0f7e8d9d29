"""Make docs/json.md, which lists what the commands print with ``--json``.

    .venv/bin/python -m rrl.docs.make_json

A test (tests/project/test_generated_pages.py) compares the page with the code.
"""

from __future__ import annotations

from pathlib import Path

from rrl.cli.common.output import JSON_SCHEMA
from rrl.cli.output_schemas import OUTPUTS

PAGE = Path(__file__).parent / "json.md"
_INTRODUCTION = f"""\
# JSON outputs

Made from the code by `.venv/bin/python -m rrl.docs.make_json`; do not edit.

`rrl schema NAME` prints the JSON Schema of an output: its keys, their types and meanings. Each object that a command
prints has the key `schema`, the version of the form of all these outputs: now {JSON_SCHEMA}. It is increased when a key
is removed or changes its meaning. New keys may come at any time, so a program should ignore keys that it does not know.
The state of a run and the facts of `rrl doctor` are internal values: their keys may change without an increase. Exit
codes are the same as without `--json`, and errors are one line on stderr. Times are seconds since 1970 unless their
description says otherwise.

`rrl schema events` describes the records of a run's journal, of which all that rrl shows of a run is computed. A
program should read the outputs rather than the journal, whose files have a format of their own
(`manager/storage/journal.py`). An `unstarted` run has no journal yet. A `summary` is also the content of
`summary.json`.

| command | prints | `rrl schema` |
|---|---|---|
"""


def page() -> str:
    """Return the page."""
    return _INTRODUCTION + "".join(
        f"| {', '.join(f'`{one}`' for one in output.commands)} | {output.form} | `{name}` |\n"
        for name, output in OUTPUTS.items()
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
