"""The quickstart's job as the benchmarks run it: without its planned fault, and with settings of their own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart.toml"


def quickstart_with(changes: Iterable[tuple[str, str]]) -> str:
    """Return the job.toml with each text of ``changes`` replaced by another one.

    Raises AssertionError if the example lacks one of these texts, because the benchmark would measure another job.
    """
    toml = QUICKSTART.read_text().partition("[[faults.planned]]")[0]
    for old, new in changes:
        assert old in toml, f"the quickstart does not contain {old!r}"
        toml = toml.replace(old, new)
    return toml
