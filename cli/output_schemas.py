"""JSON Schemas of what the commands print with ``--json``, and of the records of a journal (``rrl schema``)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct
from msgspec.structs import fields

from ..api.sampled_steps import SamplesDocument
from ..api.watching.run_state import RunState
from ..config.job.json_schema import field_docstrings, plain
from ..core.types import UsageError
from ..manager.model.events import FaultInjected, Stamped
from ..manager.model.state import State
from ..manager.reporting.step_metrics import StepRow
from ..manager.reporting.summary import Summary
from ..roles.trainer.checkpoint_export import Exported
from .agents.endpoint import EndpointAccess
from .common.output import JSON_SCHEMA
from .doctor.command import DoctorReport
from .health.check import HealthCheckResult
from .health.drain_requests import DrainResult, OpenDrainRequest
from .health.report import Document
from .job.check import CheckReport
from .logs.failed import FailureRecord
from .logs.printer import LogRecord
from .results.reports import ReportDocument
from .run.json_documents import RequestedFault, StartedRun, StatusFigures, UnstartedRun
from .views.episode_trees import Episode
from .views.explanation import DecisionRecord

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


class Form(StrEnum):
    """How many objects an output has."""

    DOCUMENT = "one object"
    LIST = "a list of objects"
    LINES = "one object a line"


class Output(NamedTuple):
    """What some commands print."""

    commands: tuple[str, ...]
    form: Form
    structs: tuple[type[Struct], ...]
    """The printed objects: one object with the keys of all."""
    counted: tuple[str, ...] = ()
    """Lists of the struct of which only the number is printed."""


OUTPUTS = {
    "started": Output(("rrl submit --json", "rrl resume --json"), Form.DOCUMENT, (StartedRun,)),
    "summary": Output(("rrl submit --wait --json", "rrl resume --wait --json"), Form.DOCUMENT, (Summary,)),
    "unstarted": Output(("rrl status --json",), Form.DOCUMENT, (UnstartedRun,)),
    "status": Output(("rrl status --json",), Form.DOCUMENT, (State, StatusFigures)),
    "list": Output(("rrl list --json",), Form.LIST, (RunState,)),
    "check": Output(("rrl check --json",), Form.DOCUMENT, (CheckReport,)),
    "logs": Output(("rrl logs --json",), Form.LINES, (LogRecord,)),
    "failures": Output(("rrl logs --failed --json",), Form.LINES, (FailureRecord,)),
    "explain": Output(("rrl explain --json",), Form.LIST, (DecisionRecord,)),
    "samples": Output(("rrl samples --json",), Form.DOCUMENT, (SamplesDocument,)),
    "metrics": Output(("rrl metrics",), Form.LINES, (StepRow,)),
    "report": Output(("rrl report --json",), Form.DOCUMENT, (ReportDocument,)),
    "export": Output(("rrl export --json",), Form.DOCUMENT, (Exported,)),
    "requested-fault": Output(("rrl inject --json",), Form.DOCUMENT, (RequestedFault,)),
    "injected-fault": Output(("rrl inject --wait --json",), Form.DOCUMENT, (FaultInjected,)),
    "episodes": Output(("rrl episodes --json",), Form.LIST, (Episode,), counted=("turns",)),
    "episode": Output(("rrl episodes RUN EPISODE --json",), Form.DOCUMENT, (Episode,)),
    "endpoint": Output(("rrl endpoint --json",), Form.DOCUMENT, (EndpointAccess,)),
    "doctor": Output(("rrl doctor --json",), Form.DOCUMENT, (DoctorReport,)),
    "health-check": Output(("rrl health check --json",), Form.DOCUMENT, (HealthCheckResult,)),
    "health-report": Output(("rrl health report --format json",), Form.DOCUMENT, (Document,)),
    "drain-requests": Output(("rrl health drain-requests --json",), Form.LIST, (OpenDrainRequest,)),
    "drains": Output(("rrl health drain-requests --apply --json",), Form.LIST, (DrainResult,)),
}
"""The outputs, by the name that ``rrl schema`` takes."""
EVENTS = "events"
"""The name of the records of a journal, which no command prints."""


def output_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of one printed object of an output, or of one record of a journal."""
    if name == EVENTS:
        (record,), definitions = _described((Stamped,))
        return {"$schema": _DRAFT, **record, "$defs": definitions}
    if name not in OUTPUTS:
        raise UsageError(f"no schema is called {name!r}; there are: {', '.join(('job', EVENTS, *OUTPUTS))}")
    output = OUTPUTS[name]
    roots, definitions = _described(output.structs)
    tables = [definitions.pop(root["$ref"].rpartition("/")[2]) for root in roots]
    properties = {key: value for table in tables for key, value in table["properties"].items()}
    properties |= {key: {"type": "integer", "description": f"Number of {key}."} for key in output.counted}
    return {
        "$schema": _DRAFT,
        "description": f"{', '.join(output.commands)} ({output.form}): {tables[0].get('description', '')}",
        "type": "object",
        "properties": {"schema": {"const": JSON_SCHEMA}, **properties},
        "$defs": definitions,
    }


def _described(structs: tuple[type[Struct], ...]) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """Return references to some structs, and definitions of all structs in them, with the docstrings of keys."""
    roots, definitions = msgspec.json.schema_components(structs)
    for struct in _structs_in(structs):
        found = definitions.get(f"{struct.__module__}.{struct.__name__}") or definitions[struct.__name__]
        found["description"] = plain(found.get("description", ""))
        bases = [base for base in reversed(struct.__mro__) if base is not Struct and issubclass(base, Struct)]
        texts = {name: text for base in bases for name, text in field_docstrings(base).items()}
        for field in fields(struct):
            if field.name in texts and "properties" in found:  # not in one that is written as a list
                found["properties"][field.encode_name]["description"] = plain(texts[field.name])
    return roots, definitions


def _structs_in(annotations: Iterable[Any]) -> set[type[Struct]]:
    """Return the structs in some annotations, and in the fields of these, at every depth."""
    found: set[type[Struct]] = set()
    waiting = list(annotations)
    while waiting:
        annotation = waiting.pop()
        waiting += get_args(annotation)
        if inspect.isclass(annotation) and get_origin(annotation) is None and issubclass(annotation, Struct):
            if annotation not in found:
                hints = get_type_hints(annotation)
                waiting += [hints[field.name] for field in fields(annotation)]
            found.add(annotation)
    return found
