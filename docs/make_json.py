"""Make docs/json.md, which describes what the commands print with ``--json``, from the structs that they print.

    .venv/bin/python -m rrl.docs.make_json

A test (tests/project/test_generated_pages.py) compares the page with the code.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from rrl.api.watching.run_state import RunState
from rrl.cli.agents.endpoint import EndpointAccess
from rrl.cli.common.output import JSON_SCHEMA
from rrl.cli.doctor.command import DoctorReport
from rrl.cli.health.check import HealthCheckResult
from rrl.cli.health.drain_requests import DrainResult, OpenDrainRequest
from rrl.cli.health.report import Document
from rrl.cli.job.check import CheckReport
from rrl.cli.logs.failed import FailureRecord
from rrl.cli.logs.printer import LogRecord
from rrl.cli.results.reports import ReportDocument
from rrl.cli.run.json_documents import RequestedFault, StartedRun, StatusFigures, UnstartedRun
from rrl.cli.views.episode_trees import Episode
from rrl.cli.views.explanation import DecisionRecord
from rrl.docs.struct_tables import Tables
from rrl.manager.model.events import FaultInjected
from rrl.manager.model.state import State
from rrl.manager.reporting.step_metrics import StepRow
from rrl.manager.reporting.summary import Summary
from rrl.roles.trainer.checkpoint_export import Exported

PAGE = Path(__file__).parent / "json.md"
DOCUMENT, LIST, LINES = "one object", "a list of objects", "one object a line"


class Output(NamedTuple):
    """The output of a command."""

    command: str
    form: str
    structs: tuple[type[Struct], ...]
    """The printed objects. Several structs are one object with the keys of all, unless ``note`` says otherwise."""
    note: str = ""


OUTPUTS = (
    Output("rrl submit --json", DOCUMENT, (StartedRun,)),
    Output(
        "rrl submit --wait --json",
        DOCUMENT,
        (Summary,),
        "the content of `summary.json`; an `UnstartedRun` if the run never begins. `rrl resume` prints the same",
    ),
    Output("rrl resume --json", DOCUMENT, (StartedRun,)),
    Output(
        "rrl status --json",
        DOCUMENT,
        (State, StatusFigures),
        "the keys of both; an `UnstartedRun` while the run has no journal",
    ),
    Output("rrl list --json", LIST, (RunState,)),
    Output("rrl check --json", DOCUMENT, (CheckReport,)),
    Output("rrl logs --json", LINES, (LogRecord,)),
    Output("rrl logs --failed --json", LINES, (FailureRecord,)),
    Output("rrl explain --json", LIST, (DecisionRecord,)),
    Output("rrl metrics", LINES, (StepRow,)),
    Output("rrl report --json", DOCUMENT, (ReportDocument,)),
    Output("rrl export --json", DOCUMENT, (Exported,)),
    Output("rrl inject --json", DOCUMENT, (RequestedFault,), "keys with their default are left out"),
    Output("rrl inject --wait --json", DOCUMENT, (FaultInjected,)),
    Output("rrl episodes --json", LIST, (Episode,), "`turns` is their number"),
    Output("rrl episodes RUN EPISODE --json", DOCUMENT, (Episode,)),
    Output("rrl endpoint --json", DOCUMENT, (EndpointAccess,), "contains a secret"),
    Output("rrl doctor --json", DOCUMENT, (DoctorReport,)),
    Output("rrl health check --json", DOCUMENT, (HealthCheckResult,)),
    Output("rrl health report --format json", DOCUMENT, (Document,)),
    Output("rrl health drain-requests --json", LIST, (OpenDrainRequest,)),
    Output("rrl health drain-requests --apply --json", LIST, (DrainResult,)),
)
ALSO = (UnstartedRun,)
"""Objects that are named only in a ``note``."""
_INTRODUCTION = f"""\
# JSON outputs

Made from the code by `.venv/bin/python -m rrl.docs.make_json`; do not edit.

Each object that a command prints has the key `schema`, the version of the form of all these outputs: now
{JSON_SCHEMA}. It is increased when a key is removed or changes its meaning. New keys may come at any time, so a program
should ignore keys that it does not know. The state of a run and the facts of `rrl doctor` are internal values: their
keys may change without an increase. Exit codes are the same as without `--json`, and errors are one line on stderr.
Times are seconds since 1970 unless their meaning says otherwise. "None" in a meaning is `null`.

| command | prints | object |
|---|---|---|
"""


def page() -> str:
    """Return the page."""
    named: list[type[Struct]] = [*(struct for output in OUTPUTS for struct in output.structs), *ALSO]
    structs = list(dict.fromkeys(named))
    tables = Tables(structs)
    rows = [_row(output, tables) for output in OUTPUTS]
    parts = [_INTRODUCTION + "\n".join(rows), "", "## The objects", "", *map(tables.table, structs)]
    parts += ["## Values in objects", "", *map(tables.table, tables.inside)]
    return "\n".join(parts).rstrip() + "\n"


def _row(output: Output, tables: Tables) -> str:
    named = " and ".join(map(tables.link, output.structs))
    return f"| `{output.command}` | {output.form} | {named}{f' ({output.note})' if output.note else ''} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
