"""Make docs/metrics.md, which describes every metric for Prometheus, from manager/reporting/metrics.py.

    .venv/bin/python -m rrl.docs.make_metrics

The calls that make metrics are read from the source, because many metrics exist only in some states of a run. A test
(tests/project/test_generated_pages.py) compares the page with the code.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rrl.manager.reporting import metrics

PAGE = Path(__file__).parent / "metrics.md"
_TYPES = {"_gauge": "gauge", "_labelled": "gauge", "_counter": "counter", "_counted": "counter"}
"""Functions of the module that make a metric → type of the metric."""
_INTRODUCTION = """\
# Metrics for Prometheus

Made from `manager/reporting/metrics.py` by `.venv/bin/python -m rrl.docs.make_metrics`; do not edit.

The manager serves these metrics if `[health] metrics` names an address ([job.md](job.md#health)).
[health-history.md](health-history.md#metrics) says how they are scraped, and which of them matter to an administrator.
Counters begin at 0 with each manager. Metrics without a value are left out. Trackers and `rrl metrics` get the metrics
of each training step instead ([glossary.md](glossary.md#metrics-of-a-step)).

| metric | type | labels | meaning |
|---|---|---|---|
"""


class MetricCall(NamedTuple):
    """A metric, as a call in the source describes it."""

    name: str
    """The name that Prometheus shows; for a counter it ends with ``_total``."""
    type: str
    labels: tuple[str, ...]
    meaning: str


def metric_calls() -> list[MetricCall]:
    """Return the metrics in the order of the source."""
    tree = ast.parse(inspect.getsource(metrics))
    return sorted(_calls(tree), key=lambda call: call.name)


def page() -> str:
    """Return the page."""
    rows = [
        f"| `{one.name}` | {one.type} | {', '.join(f'`{label}`' for label in one.labels)} | {one.meaning} |"
        for one in metric_calls()
    ]
    return _INTRODUCTION + "\n".join(rows) + "\n"


def _calls(tree: ast.AST) -> Iterator[MetricCall]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=function), args=[ast.Constant(value=str(name)), help_text, *more]) if (
                function in _TYPES
            ):
                kind = _TYPES[function]
                labels = ast.literal_eval(more[0]) if function in ("_labelled", "_counted") else ()
                suffix = "_total" if kind == "counter" else ""
                yield MetricCall(f"{name}{suffix}", kind, tuple(labels), ast.literal_eval(help_text))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
