"""Make the last section of docs/detection.md: the bounds of examples, as ``rrl check --detection`` prints them.

    .venv/bin/python -m rrl.docs.make_detection

A test (tests/project/test_generated_pages.py) compares the page with the code.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rrl.config.job.document import JobDocument, parse_setting
from rrl.config.job.load import job_from
from rrl.config.job.resolve import resolve
from rrl.core.text import span
from rrl.health.detection.bounds import Bound, bounds

PAGE = Path(__file__).parent / "detection.md"
_EXAMPLES = Path(__file__).parent.parent / "examples"
_SECTION = "## The bounds of examples\n"
_INTRODUCTION = """
Made from the detectors by `.venv/bin/python -m rrl.docs.make_detection`; do not edit. `rrl check --detection job.toml`
prints the same for a job. *First* is the first pass of an incarnation if no pass of the role is known, *later* any
other pass while none has taken long; longer passes extend it by the rules above.
"""
_SHOWN: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("quickstart.toml", (), ("trainer", "rollout", "reward", "trajectories")),
    ("agents.toml", ("roles.endpoint.replicas=1",), ("agents", "endpoint")),
    ("any_command.toml", (), ("counter", "plain")),
)
"""Examples, settings that are added to them, and the roles that are shown."""


def page() -> str:
    """Return the page with the section as the code has it."""
    before = PAGE.read_text().partition(_SECTION)[0]
    return before + _SECTION + _INTRODUCTION + "\n".join(_tables())


def _tables() -> Iterator[str]:
    for name, settings, roles in _SHOWN:
        document = JobDocument([_EXAMPLES / name], [parse_setting(one) for one in settings])
        shown = [bound for bound in bounds(resolve(job_from(document), "python3")) if bound.role in roles]
        yield f"\n`examples/{name}`{f' with `{settings[0]}`' if settings else ''}:\n"
        yield "| role | phase | loads | first | later | because |\n|---|---|---|---|---|---|"
        yield "\n".join(map(_row, shown)) + "\n"


def _row(bound: Bound) -> str:
    times = ("never" if seconds is None else span(seconds) for seconds in (bound.first_s, bound.later_s))
    return f"| {bound.role} | {bound.phase} | {bound.condition} | {' | '.join(times)} | {bound.rule} |"


if __name__ == "__main__":
    PAGE.write_text(page())
