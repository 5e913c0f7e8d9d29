"""The report of one run or two as one self-contained HTML page. The functions are pure.

The shapes are computed in ``drawing``; the template (cli/views/report/report.html.j2) escapes its input. The only
script is the one that filters samples, whose digest is in the policy of the page: the browser runs no other.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from ....core.sample_texts import DecodedSample, shortened_lines
from ....core.text import escaped, plural, span
from ....manager.reporting.accounting.comparison import Comparison
from ....manager.reporting.accounting.lost_time import ALL_STAGES, OTHER
from ....manager.reporting.accounting.run_report import RunReport
from ..formatting import stage
from ..sampled_answers import PageSamples, scores_of
from .comparison_tables import SIDES, comparison_tables
from .drawing import CURVE_HEIGHT, LANE_HEIGHT, WIDTH, Axis, curve, lanes, marks
from .tables import POOL_COLUMNS, amount, figures, percent, pool_cells

MAX_ROWS = 500
"""Maximum number of rows of a table of interruptions or decisions; the JSON has all."""


def _safe(value: Any) -> Any:
    """Return text without control and directional characters, and any other value unchanged."""
    return escaped(value) if type(value) is str else value


_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    undefined=jinja2.StrictUndefined,
    finalize=_safe,
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_SCRIPT = (Path(__file__).parent / "filter_samples.js.j2").read_text(encoding="utf-8")
"""Shows only the samples that contain the text of the box above them."""


def page(
    reports: Sequence[RunReport], samples: Sequence[PageSamples] = (), comparison: Comparison | None = None
) -> str:
    """Return the HTML text of one report, or of two side by side with their comparison, with samples of each run."""
    of_runs = [figures(report) for report in reports]
    rows = [(name, [values[row][1] for values in of_runs]) for row, (name, _) in enumerate(of_runs[0])]
    return _TEMPLATES.get_template("report.html.j2").render(
        runs=[
            _run(report, of_run)
            for report, of_run in zip(reports, samples or [PageSamples()] * len(reports), strict=True)
        ],
        script=Markup(_SCRIPT) if any(one.samples for one in samples) else "",
        script_digest=b64encode(sha256(_SCRIPT.encode()).digest()).decode(),
        rows=[row for row in rows if any(value != "–" for value in row[1])],
        title=" and ".join(report.run for report in reports),
        comparison=[] if comparison is None else [one._asdict() for one in comparison_tables(comparison)],
        comparison_notes=[] if comparison is None else comparison.missing,
        sides=SIDES,
        width=WIDTH,
        lane_height=LANE_HEIGHT,
        curve_height=CURVE_HEIGHT,
        stages=(*ALL_STAGES, OTHER),
        pool_columns=POOL_COLUMNS,
    )


def _run(report: RunReport, samples: PageSamples) -> dict[str, Any]:
    axis = Axis(report.began, report.until)
    return {
        "run": report.run,
        "outcome": report.outcome,
        "why": report.why if report.outcome not in ("completed", "running") else "",
        "period": f"{_clock(report.began)} to {_clock(report.until)} UTC",
        "headline": _headline(report),
        "lost": _lost(report),
        "lanes": lanes(report, axis),
        "marks": marks(report, axis),
        "ticks": axis.ticks,
        "pools": [(one.pool, pool_cells(one)) for one in report.pools],
        "curves": [one for one in _curves(report, axis) if one is not None],
        "interruptions": [_interruption(report, one) for one in report.interruptions[:MAX_ROWS]],
        "decisions": [
            {
                "at": span(one.at - report.began),
                "what": one.what,
                "about": one.about,
                "rung": one.rung,
                "evidence": one.evidence,
                "fault": one.is_fault,
            }
            for one in report.decisions[:MAX_ROWS]
        ],
        "decisions_left_out": report.decisions_left_out + max(0, len(report.decisions) - MAX_ROWS),
        "interruptions_left_out": max(0, len(report.interruptions) - MAX_ROWS),
        "samples": [_sample(step, one) for step, one in samples.samples],
        "samples_text": _samples_text(report.run, samples),
        "notes": report.missing,
    }


def _sample(step: int, sample: DecodedSample) -> dict[str, Any]:
    scores = " · ".join(f"{name} {value}" for name, value in [("step", str(step)), *scores_of(sample)])
    texts = [("prompt", sample.prompt), ("answer", sample.answer)]
    return {"scores": scores, "texts": [(name, Markup(escape(shortened_lines(text)))) for name, text in texts]}


def _samples_text(run: str, samples: PageSamples) -> str:
    if samples.missing or not samples.samples:
        return samples.missing
    steps = len({step for step, _ in samples.samples})
    return f"{len(samples.samples)} samples of {steps} of {plural(samples.kept, 'step')}; more: rrl samples {run} STEP"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))


def _headline(report: RunReport) -> list[tuple[str, str, str]]:
    """Return the most important figures as (name, value, explanation)."""
    hours = report.gpu_hours
    unit = "GPU-hours" if hours.unit == "gpu" else "node-hours"
    return [
        ("ETTR", percent(report.ettr), "of first train to last commit"),
        ("time lost", span(sum(one.seconds for one in report.lost)), f"of {span(report.wall_s)}"),
        (unit, amount(hours.useful), f"useful of {amount(hours.reserved)} reserved"),
    ]


def _lost(report: RunReport) -> list[dict[str, Any]]:
    largest = max((one.seconds for one in report.lost), default=0.0) or 1.0
    rows = []
    for one in report.lost:
        x = 0.0
        bars = []
        for name, seconds in one.stages.items():
            width = WIDTH * seconds / largest
            bars.append(
                {"stage": name, "x": round(x, 1), "width": round(width, 1), "title": f"{name} {stage(seconds)}"}
            )
            x += width
        cells = [stage(one.stages[name]) if name in one.stages else "" for name in (*ALL_STAGES, OTHER)]
        share = percent(one.seconds / report.wall_s)
        rows.append({"cause": one.cause, "seconds": stage(one.seconds), "share": share, "bars": bars, "cells": cells})
    return rows


def _interruption(report: RunReport, one: Any) -> dict[str, Any]:
    moved = one.node_after and one.node_after != one.node
    return {
        "at": span(one.at - report.began),
        "replica": f"{one.replica}#{one.number}",
        "cause": one.cause,
        "injected": one.injected,
        "rung": one.rung,
        "seconds": stage(one.seconds),
        "open": one.until is None,
        "node": f"{one.node} → {one.node_after}" if moved else one.node,
        "cells": [stage(one.stages[name]) if name in one.stages else "" for name in ALL_STAGES[:-1]],
        "evidence": one.evidence,
    }


def _curves(report: RunReport, axis: Axis) -> list[dict[str, Any] | None]:
    curves = report.curves
    return [
        curve("reward", [("mean reward", curves.reward)], axis),
        curve("throughput", [("trained tokens", curves.tokens_per_second)], axis, "tokens/s"),
        curve(
            "weight versions",
            [("trainer", curves.trainer_version), ("oldest rollout", curves.oldest_version)],
            axis,
            "step",
        ),
    ]
