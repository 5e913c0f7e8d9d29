"""``rrl report``: how the time and the GPUs of a run were used, or how two runs compare: tables, JSON or a page."""

from __future__ import annotations

import gc
from pathlib import Path

from msgspec import Struct

from ...api.accounts import account_of, compare_runs
from ...api.runs import find_run
from ...core.run_dir import RunDir, errors_about, write_atomically
from ...core.types import OperationFailed, UsageError
from ...manager.reporting.accounting.comparison import Comparison
from ...manager.reporting.accounting.run_report import Account, RunReport
from ..common.output import print_json, print_line, show
from ..views.report.tables import report_view
from ..views.sampled_answers import PageSamples

PAGE_MODE = 0o600
"""Mode of the HTML file: only its owner may read it, since it contains output of roles and names from the job."""


class ReportDocument(Struct, frozen=True):
    """The output of ``rrl report --json``."""

    runs: list[RunReport]
    """The report of each run, in the order of the command line."""
    comparison: Comparison | None = None
    """The comparison of two runs; null for one run."""


def report(run: str | None, other: str | None, html: Path | None, *, json: bool) -> int:
    """Print the reports, or write them into an HTML file; returns exit code 0.

    Args:
        run: The run.
        other: A second run, with which it is compared.
        html: File to write; None prints a table, or JSON.
        json: Whether to print JSON.

    Raises:
        UsageError: There is no such run, its journal is damaged, both runs are the same, or both ``html`` and ``json``
            are given.
        OperationFailed: A journal cannot be read, or the file cannot be written.
    """
    if json and html is not None:
        raise UsageError("--json and --html exclude each other; write one of them")
    gc.disable()  # a long journal makes millions of objects that stay in use: garbage collection would free nothing
    accounts: tuple[Account, ...]
    comparison: Comparison | None
    runs = [find_run(run), *([find_run(other)] if other is not None else [])]
    if other is None:
        accounts, comparison = (account_of(runs[0]),), None
    else:
        accounts, comparison = compare_runs(*runs)
    reports = [one.report() for one in accounts]
    if html is not None:
        _write_page(runs, reports, comparison, html)
        print_line(f"{html}: the report of {' and '.join(one.run for one in reports)}")
    elif json:
        print_json(ReportDocument(reports, comparison))
    else:
        show(report_view(reports, comparison))
    return 0


def _write_page(runs: list[RunDir], reports: list[RunReport], comparison: Comparison | None, path: Path) -> None:
    from ..views.report.page import page

    samples = [_samples_of(run) for run in runs]
    with errors_about(path):
        write_atomically(path, page(reports, samples, comparison).encode(), PAGE_MODE)


def _samples_of(run: RunDir) -> PageSamples:
    """Return the samples of a run for the page, which is complete without them."""
    from .step_samples import page_samples

    try:
        return page_samples(run)
    except OperationFailed as error:
        return PageSamples(missing=str(error))
