"""``rrl health check``: judge whether this node is fit now.

A prolog and Slurm's HealthCheckProgram run it too. So it needs no run, no home directory and no shared file system, and
an error of the tool itself never looks like a failed node.

The exit codes are those of Nagios: 0 OK, 1 WARN, 2 FAIL, 3 UNKNOWN or an error of the check itself. With ``--prolog``
or ``--epilog``: 2 for FAIL, else 0.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ...config.health_rules_file import load_rules
from ...core.types import Finding, NodeName, UsageError, Verdict
from ...core.units import seconds
from ...health.check_memory import (
    CheckMemory,
    after_check,
    boot_time,
    memory_path,
    read_memory,
    take_if_fresh,
    update_memory,
)
from ...health.checks.evaluate import CHECKS, unknown_checks
from ...health.checks.node_state import NodeState
from ...health.node_check import EXIT_CODES, check_node, overall
from .check_outputs import history_folder, metrics_file, record, write_prometheus

_MAX_TIMEOUT_S = 3600.0
"""Maximum time limit (s) that a check may be given; a prolog may take some minutes."""
_MAX_AGE_S = 86400.0
"""Maximum age (s) of a check that ``--fresh`` may accept."""


class CheckOptions(Struct, frozen=True):
    """The options of ``rrl health check``."""

    time_limit: str = "20s"
    config: Path | None = None
    only: str | None = None
    mounts: Sequence[str] = ()
    rates: bool = False
    json: bool = False
    prolog: bool = False
    epilog: bool = False
    remember: bool = False
    fresh: str | None = None
    record: bool = False
    history: Path | None = None
    prometheus: Path | None = None

    @property
    def of_job(self) -> bool:
        """Return whether a job's prolog or epilog runs the check."""
        return self.prolog or self.epilog

    @property
    def uses_memory(self) -> bool:
        """Return whether the check reads and changes the records of earlier checks that this node keeps."""
        return self.remember or self.record or self.fresh is not None


def check(options: CheckOptions) -> int:
    """Check this node; print one line with the verdict, then the findings, the most severe first.

    Returns the exit code. Raises UsageError for a wrong option, or a mistake in the site's rules.
    """
    rules, names = site_rules(options.config), _names(options.only)
    limit = _limit("--within", options.time_limit, _MAX_TIMEOUT_S)
    history = history_folder(options.history) if options.record else None
    prometheus = metrics_file(options.prometheus) if options.prometheus is not None else None
    node, gpus = this_node(), _job_gpus(os.environ.get("SLURM_JOB_GPUS", ""))
    if options.fresh is not None and _is_fresh(node, gpus, _limit("--fresh", options.fresh, _MAX_AGE_S)):
        return 0
    expected_free = (gpus or ()) if options.of_job else _gpus_to_be_freed(node) if options.uses_memory else ()
    state, began, booted_s = NodeState(rules.xid.burst), time.monotonic(), boot_time()
    findings = check_node(
        rules,
        limit,
        node=node,
        mounts=options.mounts,
        expected_free=expected_free,
        only=names,
        rates=options.rates,
        state=state,
    )
    verdict, duration_s = overall(findings), time.monotonic() - began
    problems = []
    if options.uses_memory:
        passed = verdict in (Verdict.OK, Verdict.WARN)
        problems.append(
            _remember(
                node,
                partial(
                    after_check, passed=passed, full=not names, at=booted_s, freed=options.epilog, gpus=expected_free
                ),
            )
        )
    _printed(lambda: _print_result(node, verdict, findings, options.json))  # before the writes below, which may hang
    if prometheus is not None:
        xids = tuple(state.xids.recent(rules.xid.day, time.monotonic()))
        problems.append(write_prometheus(prometheus, node, verdict, findings, xids, duration_s))
    if history is not None:
        problems.append(record(history, node, _dated(findings)))
    _printed(lambda: _print_problems([problem for problem in problems if problem], options.json))
    return 0 if options.of_job and verdict is not Verdict.FAIL else EXIT_CODES[verdict]


def _gpus_to_be_freed(node: NodeName) -> tuple[str, ...]:
    """Return the GPUs that must be free before the hooks take back their drain of the node.

    Empty if the hooks have not drained the node, or if the node's memory (:mod:`rrl.health.check_memory`) cannot be
    read.
    """
    try:
        return read_memory(memory_path(node)).gpus_to_be_freed
    except OSError:
        return ()


def _is_fresh(node: NodeName, gpus: tuple[str, ...] | None, max_age_s: float) -> bool:
    """Return whether a job with these GPUs needs no new check, because a full one passed at most ``max_age_s`` ago.

    If so, print a line that says this. Unknown GPUs (None) always need a new check.
    """
    if gpus is None:
        return False
    try:
        age_s = take_if_fresh(memory_path(node), gpus, max_age_s)
    except OSError:  # the full check runs, and reports this error when it stores its result
        return False
    if age_s is None:
        return False
    _printed(lambda: print(f"{Verdict.OK.value} passed a full check {age_s:.0f} s ago", flush=True))
    return True


def _remember(node: NodeName, change: Callable[[CheckMemory], CheckMemory]) -> str:
    """Change the check memory of the node; return why this failed, or an empty string."""
    try:
        update_memory(memory_path(node), change)
    except OSError as error:
        return f"not remembered: {error.strerror or error}"
    return ""


def _limit(option: str, text: str, most: float) -> float:
    try:
        limit = seconds(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    if not 0 < limit <= most:
        raise UsageError(f"{option}: {text} is not between 0 and {most:g}s")
    return limit


def this_node() -> NodeName:
    """Return the name by which Slurm knows this machine."""
    return NodeName(os.environ.get("SLURMD_NODENAME") or platform.node().partition(".")[0])


def _printed(write: Callable[[], None]) -> None:
    """Call ``write``, which writes to stdout, and flush stdout. An error of stdout is ignored.

    After an error, stdout is redirected to /dev/null. Otherwise Python's flush at exit would fail too, and change the
    exit code.
    """
    if sys.stdout is None:  # closed
        return
    try:
        write()
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _print_result(node: NodeName, verdict: Verdict, findings: Sequence[Finding], json: bool) -> None:
    from ..common.output import print_json, show
    from ..views.checks import headline, health_check_view

    if json:
        print_json(_result(node, verdict, findings))
    else:
        print(headline(verdict, findings), flush=True)
        show(health_check_view(findings))


def _print_problems(problems: Sequence[str], json: bool) -> None:
    """Print what could not be written; with ``json`` to stderr, because stdout is one document."""
    from ..common.output import print_line

    for problem in problems:
        print_line(f"rrl: {problem}" if json else problem, to_stderr=json)


def site_rules(config: Path | None) -> Any:
    """Load the site's rules. Raises UsageError for a mistake in them."""
    rules = load_rules(config)
    if wrong := unknown_checks(rules):
        raise UsageError(f"{config or 'health.toml'}: checks.{wrong[0]}: {_no_check(wrong[0])}")
    return rules


def _names(only: str | None) -> tuple[str, ...]:
    names = tuple(name.strip() for name in only.split(",") if name.strip()) if only is not None else ()
    if only is not None and not names:
        raise UsageError("--checks: name at least one check")
    known = {check.name for check in CHECKS}
    if wrong := [name for name in names if name not in known]:
        raise UsageError(f"--checks: {wrong[0]}: {_no_check(wrong[0])}")
    return names


def _no_check(name: str) -> str:
    from difflib import get_close_matches

    known = [check.name for check in CHECKS]
    near = get_close_matches(name, known, 1)
    return f'no such check; did you mean "{near[0]}"?' if near else f"no such check; the checks are {', '.join(known)}"


def _job_gpus(text: str) -> tuple[str, ...] | None:
    """Return the indices of a job's GPUs from the text in which slurmd passes them to the prolog, such as ``0,2-3``.

    The result is empty if the job has no GPUs, and None if the notation of the text is unknown. With None, it is not
    checked whether GPUs are in use, because other jobs may rightly use them.
    """
    found: list[str] = []
    for item in filter(None, text.split(",")):
        if match := re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", item.strip()):
            found += map(str, range(int(match[1]), int(match[2] or match[1]) + 1))
        else:
            return None
    return tuple(found)


class HealthCheckResult(Struct, frozen=True):
    """The output of ``rrl health check --json``.

    Times are s since 1970, because a node's monotonic clock has no meaning on other machines.
    """

    node: NodeName
    verdict: Verdict
    code: int
    """Exit code of the command without ``--prolog``."""
    checked_at: float
    findings: list[Finding]


def _result(node: NodeName, verdict: Verdict, findings: Sequence[Finding]) -> HealthCheckResult:
    return HealthCheckResult(node, verdict, EXIT_CODES[verdict], time.time(), _dated(findings))


def _dated(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings with times in s since 1970, since a monotonic clock has no meaning on other machines."""
    offset, replace = time.time() - time.monotonic(), msgspec.structs.replace
    return [
        replace(
            finding,
            since=finding.since + offset,
            evidence=tuple(replace(one, at=one.at + offset) for one in finding.evidence),
        )
        for finding in findings
    ]
